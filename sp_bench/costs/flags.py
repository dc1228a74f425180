"""Doubts about the times of an ok row that its columns tell: for the row that is written, and for the reader of rows of
before there were these flags."""

import statistics
from collections.abc import Sequence

MAX_UNSETTLED_SHARE = 0.03  # of the median: what the second half of the timed steps may be off it


def flags_of_steps(step_ms: Sequence[float]) -> list[str]:
    """Flags: did the steps become shorter, or longer, while they were timed? A device at its power limit slows down a
    second after its load begins."""
    if len(step_ms) < 2:
        return []
    settled, median = statistics.median(step_ms[-(len(step_ms) // 2) :]), statistics.median(step_ms)
    return ["unsettled"] if abs(settled - median) > MAX_UNSETTLED_SHARE * median else []


def flags_of_memory(
    device_memory_gib: float | None,
    device_used_bytes: Sequence[float | None] | None,
    allocator_retries: Sequence[float | None] | None,
) -> list[str]:
    """Flags; both sequences have a value for each rank, and are None where it is not known."""
    flags = []
    if any(allocator_retries if allocator_retries is not None else ()):
        flags.append("allocator_retried")
    used = max((size or 0 for size in device_used_bytes), default=0) if device_used_bytes is not None else 0
    if device_memory_gib is not None and used > device_memory_gib * 2**30:
        flags.append("above_device_memory")
    return flags
