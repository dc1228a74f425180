"""What holds a step's memory at its peak, from a history of the allocator."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sp_bench.measure.memory_parts import PARTS, at_peak
from sp_bench.rows.schema import SCHEMA

FSDP = "/torch/distributed/fsdp/_fully_shard/"
DECODER = ["/a/sp_bench/training/model.py", "/a/sp_bench/engines/fsdp2.py"]
FRAMES = {
    "attention": ["/torch/functional.py", "/a/sp_bench/attention/ring.py", *DECODER],
    "messages": ["/a/sp_bench/attention/exchange.py", "/a/sp_bench/attention/ring.py", *DECODER],
    "gathered_parameters": [FSDP + "_fsdp_param.py", FSDP + "_fsdp_state.py", *DECODER],
    "moments": ["/torch/optim/adamw.py"],
    "tiles": ["/a/sp_bench/training/model_code.py", "/a/sp_bench/training/tiled_mlp.py", *DECODER],
    "layers": ["/torch/nn/functional.py", *DECODER],
    "checkpoints": ["/a/sp_bench/training/offload.py", "/torch/utils/checkpoint.py"],
    "other": ["/somewhere.py"],
}
Event = dict[str, Any]


def alloc(addr: int, size: int, owner: str, names: tuple[str, ...] = ()) -> Event:
    files = FRAMES.get(owner, [owner])
    calls = [*names, *["f"] * len(files)]
    frames = [{"filename": name, "line": 1, "name": call} for name, call in zip(files, calls, strict=False)]
    return {"action": "alloc", "addr": addr, "size": size, "frames": frames}


def free(addr: int, size: int) -> Event:
    return {"action": "free_requested", "addr": addr, "size": size}


def loss_gradient(call: str) -> Event:
    """backward | grad"""
    names = [("_make_grads", "/torch/autograd/__init__.py"), (call, "/torch/autograd/__init__.py")]
    frames = [{"filename": file, "line": 1, "name": name} for name, file in names]
    return {"action": "alloc", "addr": 999, "size": 1, "frames": frames}


def parts(events: list[Event], held_before: int = 0, **of_update: int) -> dict[str, int]:
    """Those that hold something."""
    return {part: size for part, size in at_peak(events, held_before, of_update).items() if size}


def test_the_peak_is_split_by_what_it_is_of() -> None:
    events = [
        alloc(1, 40, "layers"),
        alloc(2, 30, "attention"),
        free(2, 30),
        {"action": "free_completed", "addr": 2, "size": 30},
        alloc(2, 20, "gathered_parameters"),  # at an address that was another's
        free(9, 10),  # what was there before the step
        alloc(3, 25, "tiles"),
        alloc(5, 3, "messages"),
        free(1, 40),
        alloc(4, 5, "other"),
    ]
    before = {"parameter_shards": 20, "moments": 40}
    peak = {"layers": 40, "gathered_parameters": 20, "tiles": 25, "messages": 3, "other": 30}
    assert parts(events, 100, **before) == {**before, **peak}


def test_what_is_there_as_the_backward_begins_is_a_checkpoint() -> None:
    """Whole parameters of the root and the loss's gradients are there too, and are none."""
    forward = [
        alloc(1, 10, "layers"),
        alloc(2, 20, "attention"),
        alloc(3, 5, "attention"),
        free(3, 5),
        alloc(4, 7, "gathered_parameters"),
        alloc(5, 9, "/a/sp_bench/training/cross_entropy.py"),
    ]
    held = {"gathered_parameters": 7, "tiles": 9}
    assert parts([*forward, loss_gradient("grad")]) == {**held, "layers": 10, "attention": 20, "other": 1}
    told = {**held, "checkpoints": 30, "layers": 1 + 3}
    assert parts([*forward, loss_gradient("backward"), alloc(6, 3, "other")]) == told


def test_gradients_of_tiles_of_the_loss_are_of_tiles_though_no_line_of_python_asks_for_them() -> None:
    of_autograd = {"action": "alloc", "addr": 2, "size": 8, "frames": []}
    events = [alloc(1, 9, "/a/sp_bench/training/cross_entropy.py"), of_autograd, alloc(3, 5, "other")]
    assert parts(events) == {"tiles": 9 + 8, "other": 5}
    assert parts([loss_gradient("backward"), of_autograd]) == {"layers": 8 + 1}


def test_a_layer_that_is_computed_again_is_not_of_what_asked_for_it() -> None:
    inside = ["/torch/functional.py", "/torch/utils/checkpoint.py", *FRAMES["tiles"]]
    frames = [{"filename": name, "line": 1, "name": "f"} for name in inside]
    again = {"action": "alloc", "addr": 1, "size": 7, "frames": frames}
    assert parts([loss_gradient("backward"), again]) == {"layers": 7 + 1}


def test_a_reduction_of_fsdp_has_whole_gradients_a_message_and_a_shard() -> None:
    place = (FSDP + "_fsdp_collectives.py",) * 2
    frames = [{"filename": f, "line": 1, "name": n} for f, n in zip(place, ("allocate", "foreach_reduce"), strict=True)]
    events = [
        loss_gradient("backward"),
        alloc(1, 8, "other"),  # the whole gradient, by a product without a line of Python
        alloc(2, 30, "layers"),
        {"action": "alloc", "addr": 3, "size": 16, "frames": frames},
        free(1, 8),
        {"action": "alloc", "addr": 4, "size": 4, "frames": frames},
        free(2, 30),
    ]
    assert parts(events) == {"layers": 1 + 30, "gradients": 8, "messages": 16}
    later = [*events, free(3, 16), alloc(5, 60, "attention")]
    assert parts(later) == {"layers": 1, "gradients": 4, "attention": 60}


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
    assert sum(at_peak(events, before, {"moments": before // 2}).values()) == most


def test_the_schema_has_the_same_parts() -> None:
    assert [field.name for field in SCHEMA.field("peak_parts_bytes").type.value_type] == list(PARTS)
