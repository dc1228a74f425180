"""What holds the memory of a step at its peak, by who allocated it: from the history of torch's allocator.

Source of the history's form: torch.cuda.memory._snapshot, `device_traces`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The first of a block's frames, from the innermost outwards, that one of these is in says who allocated it.
OWNERS = (
    ("attention", ("sp_bench/attention/", "sp_bench/kernels/", "sp_bench/methods/", "flash_attn/", "ring_flash_attn/")),
    ("parameters", ("fsdp/_fully_shard/", "fsdp/_fsdp", "deepspeed/runtime/zero/")),  # gathered, and whole gradients
    ("optimizer", ("torch/optim/", "deepspeed/ops/adam/")),
    ("loss", ("training/cross_entropy.py",)),
    ("layers", ("training/model.py", "training/model_code.py", "torch/_inductor/", "torchinductor", "transformers/")),
)
BEFORE, OTHER = "before", "other"  # held when the step began: parameters and moments; and what no frame tells
PARTS = (BEFORE, *(owner for owner, _ in OWNERS), OTHER)


def at_peak(events: Iterable[Mapping[str, Any]], held_before: int) -> dict[str, int]:
    """Bytes of each of PARTS at the moment at which most was allocated.

    events: the allocator's, in order. held_before: bytes that were allocated when they began.
    """
    live: dict[int, tuple[int, str]] = {}
    held = Counter({BEFORE: held_before})
    total = most = held_before
    peak = dict(held)
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"], (owner := _owner(event.get("frames", ())))
            held[owner] += event["size"]
            total += event["size"]
            if total > most:
                most, peak = total, dict(held)
        elif event["action"] == "free_requested":
            size, owner = live.pop(event["addr"], (event["size"], BEFORE))
            held[owner] -= size
            total -= size
    return {part: peak.get(part, 0) for part in PARTS}


def _owner(frames: Sequence[Mapping[str, Any]]) -> str:
    """What runs in the backward without a line of Python around it, such as a matrix product's, is of the layers."""
    for frame in frames:
        for owner, places in OWNERS:
            if any(place in frame["filename"] for place in places):
                return owner
    return "layers" if any(frame["name"] == "backward" for frame in frames) else OTHER
