"""What holds the memory of a step at its peak: from the history of torch's allocator.

Source of the history's form: torch.cuda.memory._snapshot, `device_traces`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

SHARDS, MOMENTS = "parameter_shards", "moments"  # what the optimizer updates, and its state
PARTS = (
    *(SHARDS, "gathered_parameters", "gradients", MOMENTS),
    *("checkpoints", "attention", "tiles", "messages", "layers", "other"),
)


class Owner(NamedTuple):
    """What is allocated by code in these files."""

    part: str
    places: tuple[str, ...]
    keeps: bool = True  # what of it is there as the backward begins is a checkpoint


# The first of them that has a frame of an allocation says what it is of.
OWNERS = (
    Owner("checkpoints", ("training/offload.py",)),  # on their way back from host memory
    Owner("messages", ("fsdp/_fully_shard/_fsdp_collectives.py", "deepspeed/runtime/comm/"), keeps=False),
    Owner("gathered_parameters", ("fsdp/_fully_shard/", "deepspeed/runtime/zero/partition"), keeps=False),
    Owner("gradients", ("deepspeed/runtime/zero/",), keeps=False),
    Owner(MOMENTS, ("torch/optim/", "deepspeed/ops/adam/"), keeps=False),
    Owner("messages", ("sp_bench/attention/exchange.py", "sp_bench/attention/copy_engines.py")),
    Owner("attention", ("sp_bench/attention/", "sp_bench/kernels/", "sp_bench/methods/", "flash_attn/")),
    Owner("tiles", ("training/cross_entropy.py", "transformers/loss/"), keeps=False),  # of the loss
    Owner("tiles", ("training/tiled_mlp.py",)),
    Owner(
        "layers", ("training/model.py", "training/model_code.py", "torch/_inductor/", "torchinductor", "transformers/")
    ),
)
OTHER = Owner("other", ())
RECOMPUTES = "torch/utils/checkpoint.py"  # whoever asked for what a layer computes again does not own it
AUTOGRAD = "torch/autograd/__init__.py"


class _Block:
    """One allocation: what it is of, and whether it was there as a backward began."""

    def __init__(self, size: int, owner: Owner) -> None:
        self.size, self.owner, self.part = size, owner, owner.part


def at_peak(events: Sequence[Mapping[str, Any]], held_before: int, of_update: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each of PARTS at the moment at which most was allocated.

    events: the allocator's, in order. held_before: bytes that were allocated when they began. of_update: those of them
    that are SHARDS and MOMENTS.
    """
    blocks = _classified(events)
    live: dict[int, _Block] = {}
    held = Counter(of_update)
    held[OTHER.part] = held_before - held.total()
    total = most = held_before
    peak = dict(held)
    for event, block in zip(events, blocks, strict=True):
        if block is not None:
            live[event["addr"]] = block
            held[block.part] += block.size
            total += block.size
            if total > most:
                most, peak = total, dict(held)
        elif event["action"] == "free_requested":
            gone = live.pop(event["addr"], None) or _Block(event["size"], OTHER)
            held[gone.part] -= gone.size
            total -= gone.size
    return {part: peak.get(part, 0) for part in PARTS}


def _classified(events: Iterable[Mapping[str, Any]]) -> list[_Block | None]:
    """The block of each allocating event, with the part that it belongs to, which later events decide."""
    blocks: list[_Block | None] = []
    live: dict[int, _Block] = {}
    is_backward = reduces = False  # reduces: FSDP has the input of a reduction, and its output comes next
    for event in events:
        block = None
        if event["action"] == "alloc":
            frames = event.get("frames", ())
            if _begins_backward(frames):
                is_backward = True
                for kept in live.values():
                    kept.part = "checkpoints" if kept.owner.keeps else kept.part
            block = live[event["addr"]] = _Block(event["size"], _owner(frames))
            if is_backward and block.owner is OTHER:
                block.part = "layers"  # its products and sums run without a line of Python around them
            elif not frames:
                block.part = "tiles"  # as do those for the gradients of the loss's tiles, in the forward
            if {"allocate", "foreach_reduce"} <= {frame["name"] for frame in frames}:
                block.part = "gradients" if reduces else "messages"
                reduces = not reduces
        elif event["action"] == "free_requested" and (gone := live.pop(event["addr"], None)) and reduces:
            gone.part = "gradients"  # whole ones, which FSDP frees as it has copied them to its message
        blocks.append(block)
    return blocks


def _begins_backward(frames: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it allocates the gradient of a loss. `torch.autograd.grad`, which tiles call, does the same."""
    return [frame["name"] for frame in frames if AUTOGRAD in frame["filename"]][:2] == ["_make_grads", "backward"]


def _owner(frames: Sequence[Mapping[str, Any]]) -> Owner:
    """frames: from the innermost outwards."""
    files = list(takewhile(lambda name: RECOMPUTES not in name, (frame["filename"] for frame in frames)))
    owned = (owner for owner in OWNERS if any(place in name for name in files for place in owner.places))
    return next(owned, OTHER)
