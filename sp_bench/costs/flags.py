"""Flags: doubts about the training, the memory or the devices of an ok row, computed from its columns. Those about its
times are in step_flags.py.

They are computed when a row is written, and when a report reads an old row that lacks them.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sp_bench.config.shape import ELEMENT_BYTES

MAX_LEFTOVER_SHARE = 0.02  # of the peak: the smallest difference between methods that matters
MAX_UNEVEN = 1.1  # of the slowest device's kernels alone to the median device's; on most machines it is below 1.04
MIN_LIMIT_MS = 50.0
OF_DEVICES = {  # what a run says at once and a report says too; every step waits for such a device
    "thermal_slowdown": "a GPU that NVML reports in thermal slowdown",
    "uneven_devices": "a GPU whose kernels alone take over 10% longer than the others'",
}
# Libraries keep workspaces for the life of the process, in a trial alone too: cuBLAS 32 MiB for each stream (Hopper).
WORKSPACE_BYTES = 128 * 2**20
MAX_FALL_BUDGET = 1e-2  # relative; above it the gradient changes too much along the move to tell whether it is right


def budget_of_timed(budget: float, dtype: str, timed_len: int, reduced_len: int) -> float:
    """What attention may be off at the timed length, where `budget` is that at the reduced one. Sums over more keys are
    off by more, by up to the root of their number; in half precision the rounding of each element is larger than that.
    """
    return budget if ELEMENT_BYTES[dtype] == 2 else budget * max(timed_len / reduced_len, 1.0) ** 0.5


def flags_of_loss(loss: Sequence[float], stage_ends: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """["loss_not_falling"] if the loss of the last timed step is not below that of the first, otherwise [].

    All steps train on one text. Where its loss does not fall, a real fault would look the same. stage_ends: the column,
    of a stream, whose steps train on texts of several lengths.
    """
    return ["loss_not_falling"] if len(loss) > 1 and not len(stage_ends) and not loss[-1] < loss[0] else []


def flags_of_full_depth(row: Mapping[str, Any]) -> list[str]:
    """["full_depth_unproven"] if the fall of the loss, or an update of all layers, is off by more than its budget in an
    older row, which it could not fail, or if the fall's budget is too wide to tell. Otherwise []."""
    fall = {"error": row.get("fall_error"), "budget": row.get("fall_budget")}
    found = [fall, row.get("full_update_error"), row.get("last_update_error")]
    over = [each["error"] > each["budget"] for each in found if each and each["error"] is not None]
    wide = fall["budget"] is not None and fall["budget"] > MAX_FALL_BUDGET
    return ["full_depth_unproven"] if wide or any(over) else []


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


def flags_of_devices(
    device_state: Iterable[Mapping[str, Any] | None] | None, limit_ms: Sequence[float | None] | None
) -> list[str]:
    """Any of "thermal_slowdown" and "uneven_devices" that apply: every step waits for the slowest device.

    Both have a value for each rank of a GPU, or None where it is not known. A power limit is no flag: GPUs work at it.
    Kernels of less than MIN_LIMIT_MS are too short to tell devices apart.
    """
    states = [state for state in (device_state if device_state is not None else ()) if state is not None]
    reasons = [state["throttle_reasons"] for state in states if state["throttle_reasons"] is not None]
    flags = ["thermal_slowdown"] if any("thermal" in str(reason) for each in reasons for reason in each) else []
    limits = [ms for ms in (limit_ms if limit_ms is not None else ()) if ms is not None]
    usual = statistics.median_low(limits) if limits else 0.0
    if usual >= MIN_LIMIT_MS and max(limits) > MAX_UNEVEN * usual:
        flags.append("uneven_devices")
    return flags


def flags_of_leftover(leftover_bytes: Sequence[float] | None, peak_bytes: Sequence[float] | None) -> list[str]:
    """["leftover_memory"] if a rank's peak has in it what earlier trials or the proof left in memory, otherwise [].

    Both have a value for each rank; None if unknown, as on a CPU and in rows from before it was measured.
    """
    if leftover_bytes is None or peak_bytes is None:
        return []
    ranks = zip(leftover_bytes, peak_bytes, strict=True)
    found = any(left > max(WORKSPACE_BYTES, MAX_LEFTOVER_SHARE * peak) for left, peak in ranks)
    return ["leftover_memory"] if found else []
