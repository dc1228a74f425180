"""A trace of the untimed step, if it is asked for: what ran when, for chrome://tracing or Perfetto; and on CUDA what
torch's allocator held meanwhile, with the lines of Python that asked for it. Both as compressed JSON, a file a rank."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

MAX_ENTRIES = 200_000  # allocations that torch remembers


@contextmanager
def profiled(device: torch.device, place: Path | None) -> Iterator[profile | None]:
    """Profiles what runs inside, on CUDA always. With `place`, the host too and the allocator, and their files are
    written there at the end."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] * cuda + [ProfilerActivity.CPU] * (place is not None)
    if not activities:
        yield None
        return
    if cuda and place is not None:
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_ENTRIES)
    with profile(activities=activities) as profiler:
        yield profiler
    if place is None:
        return
    place.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(place / f"rank{dist.get_rank()}.trace.json.gz"))
    if cuda:
        snapshot = torch.cuda.memory._snapshot(device)
        torch.cuda.memory._record_memory_history(None)
        with gzip.open(place / f"rank{dist.get_rank()}.memory.json.gz", "wt") as file:
            json.dump(snapshot, file, default=str)


def files(place: Path | None) -> list[str]:
    """What this rank wrote to `place`, as paths from the campaign's folder, which is two above."""
    if place is None:
        return []
    mine = sorted(place.glob(f"rank{dist.get_rank()}.*.json.gz"))
    return [path.relative_to(place.parents[2]).as_posix() for path in mine]
