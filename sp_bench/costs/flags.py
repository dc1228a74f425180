"""Flags: doubts about the times of an ok row, computed from its columns.

They are computed when a row is written, and when a report reads an old row that has no flags yet.
"""

import statistics
from collections.abc import Sequence

MAX_UNSETTLED_SHARE = 0.03  # how far the second half's median may be from the median of all timed steps, relative to it


def flags_of_steps(step_ms: Sequence[float]) -> list[str]:
    """["unsettled"] if the steps became shorter or longer while they were timed, otherwise [].

    A device at its power limit slows down about a second after its load begins.
    """
    if len(step_ms) < 2:
        return []
    settled, median = statistics.median(step_ms[-(len(step_ms) // 2) :]), statistics.median(step_ms)
    return ["unsettled"] if abs(settled - median) > MAX_UNSETTLED_SHARE * median else []


def flags_of_memory(
    device_memory_gib: float | None,
    device_used_bytes: Sequence[float | None] | None,
    allocator_retries: Sequence[float | None] | None,
) -> list[str]:
    """Any of "allocator_retried" and "above_device_memory" that apply.

    Both sequences have a value for each rank. A value, or a whole sequence, is None where it is not known.
    """
    flags = []
    if any(allocator_retries if allocator_retries is not None else ()):
        flags.append("allocator_retried")
    used = max((size or 0 for size in device_used_bytes), default=0) if device_used_bytes is not None else 0
    if device_memory_gib is not None and used > device_memory_gib * 2**30:
        flags.append("above_device_memory")
    return flags
