"""A trace of the untimed step, if it is asked for: what ran when, for chrome://tracing or Perfetto; and on CUDA what
torch's allocator held meanwhile, with the lines of Python that asked for it. Both as compressed JSON, a file a rank."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

MAX_ENTRIES = 200_000  # allocations that torch remembers


@dataclass
class Traced:
    profiler: profile
    # Of the allocator, on CUDA with a place; None: not known, or there were more than it remembers
    events: Sequence[Mapping[str, Any]] | None = None
    held_before: int = 0  # bytes that were allocated when they began


@contextmanager
def profiled(device: torch.device, place: Path | None) -> Iterator[Traced | None]:
    """Profiles what runs inside, on CUDA always. With `place`, the host too and the allocator, and their files are
    written there at the end. Yields None where there is nothing to profile."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] * cuda + [ProfilerActivity.CPU] * (place is not None)
    if not activities:
        yield None
        return
    traced = Traced(profile(activities=activities))
    if cuda and place is not None:
        traced.held_before = torch.cuda.memory_allocated(device)
        # Lines of Python of allocations alone. To look them up where something is freed fails as an exception passes,
        # and torch's checkpoint stops a layer's second run by one.
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_ENTRIES)
    with traced.profiler:
        yield traced
    if place is None:
        return
    place.mkdir(parents=True, exist_ok=True)
    traced.profiler.export_chrome_trace(str(place / f"rank{dist.get_rank()}.trace.json.gz"))
    if cuda:
        snapshot = torch.cuda.memory._snapshot(device)
        torch.cuda.memory._record_memory_history(None)
        events = snapshot.get("device_traces", [[]])[torch.cuda.current_device()]
        if len(events) < MAX_ENTRIES:  # otherwise the first are lost
            traced.events = events
        with gzip.open(place / f"rank{dist.get_rank()}.memory.json.gz", "wt") as file:
            json.dump(snapshot, file, default=str)


def files(place: Path | None) -> list[str]:
    """What this rank wrote to `place`, as paths from the campaign's folder, which is two above."""
    if place is None:
        return []
    mine = sorted(place.glob(f"rank{dist.get_rank()}.*.json.gz"))
    return [path.relative_to(place.parents[2]).as_posix() for path in mine]
