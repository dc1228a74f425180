"""What holds a step's memory at its peak, from a history of the allocator."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sp_bench.measure.memory_parts import PARTS, at_peak
from sp_bench.rows.schema import SCHEMA

FRAMES = {
    "attention": ["torch/functional.py", "/home/a/sp_bench/attention/ring.py", "/home/a/sp_bench/training/model.py"],
    "parameters": ["torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "/home/a/sp_bench/training/model.py"],
    "optimizer": ["torch/optim/adamw.py"],
    "loss": ["/home/a/sp_bench/training/cross_entropy.py", "/home/a/sp_bench/training/model.py"],
    "layers": ["torch/nn/functional.py", "/home/a/sp_bench/training/model.py"],
    "other": ["somewhere.py"],
}


def alloc(addr: int, size: int, owner: str) -> dict[str, Any]:
    frames = [{"filename": name, "line": 1, "name": "f"} for name in FRAMES[owner]]
    return {"action": "alloc", "addr": addr, "size": size, "frames": frames}


def free(addr: int, size: int) -> dict[str, Any]:
    return {"action": "free_requested", "addr": addr, "size": size}


def test_the_peak_is_split_by_who_allocated_it() -> None:
    events = [
        alloc(1, 40, "layers"),
        alloc(2, 30, "attention"),
        free(2, 30),
        {"action": "free_completed", "addr": 2, "size": 30},
        alloc(2, 20, "parameters"),  # at an address that was another's
        free(9, 10),  # what was there before the step
        alloc(3, 25, "loss"),
        free(1, 40),
        alloc(4, 5, "other"),
    ]
    assert at_peak(events, 100) == dict.fromkeys(PARTS, 0) | {"before": 90, "layers": 40, "parameters": 20, "loss": 25}


def test_what_the_backward_allocates_without_a_line_of_ours_is_of_the_layers() -> None:
    frame = {"filename": "torch/autograd/graph.py", "line": 1, "name": "backward"}
    backward = {"action": "alloc", "addr": 1, "size": 7, "frames": [frame]}
    assert at_peak([backward], 0)["layers"] == 7


@given(st.lists(st.tuples(st.sampled_from(list(FRAMES)), st.integers(1, 100), st.booleans())), st.integers(0, 1000))
def test_the_parts_add_up_to_the_peak(drawn: list[tuple[str, int, bool]], before: int) -> None:
    events, total, most = [], before, before
    for addr, (owner, size, stays) in enumerate(drawn):
        events.append(alloc(addr, size, owner))
        most = max(most, total + size)
        if stays:
            total += size
        else:
            events.append(free(addr, size))
    assert sum(at_peak(events, before).values()) == most


def test_the_schema_has_the_same_parts() -> None:
    assert [field.name for field in SCHEMA.field("peak_parts_bytes").type.value_type] == list(PARTS)
