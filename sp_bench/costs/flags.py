"""Flags: doubts about the times or the training of an ok row, computed from its columns.

They are computed when a row is written, and when a report reads an old row that lacks them.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from sp_bench.config.shape import ELEMENT_BYTES

MAX_UNSETTLED_SHARE = 0.03  # how far the second half's median may be from the median of all timed steps, relative to it
MAX_WINDOW_SHARE = 0.02  # how far a step's median or mean time may be from the window's share of a step, relative to it
MAX_TRANSIENT_SHARE = (
    0.05  # how far a step may be from its neighbours' median, relative to it, or a trend over the window
)
NEIGHBOURS = 2  # timed steps on each side
MAX_TRANSIENTS = 0.05  # of the timed steps; at least one makes a window of 20 or fewer transient
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
MIN_MODE_STEPS = 4  # fewer steps are no mode, but noise
MIN_MODES_APART = 0.05  # of the slower mode's median above the faster one's, relative to that
MAX_MODE_SPREAD = 1 / 3  # of the deviations from the two modes' medians, to those from the median of all
# Steps that differ by less, relative to the shortest, have no flag but the window's. A trend over the window is at most
# twice as large as what its halves differ by.
QUIET_SHARE = min(MAX_UNSETTLED_SHARE, MAX_TRANSIENT_SHARE / 2, MIN_MODES_APART)


def budget_of_timed(budget: float, dtype: str, timed_len: int, reduced_len: int) -> float:
    """What attention may be off at the timed length, where `budget` is that at the reduced one. Sums over more keys are
    off by more, by up to the root of their number; in half precision the rounding of each element is larger than that.
    """
    return budget if ELEMENT_BYTES[dtype] == 2 else budget * max(timed_len / reduced_len, 1.0) ** 0.5


def flags_of_times(
    step_ms: Sequence[float], window_ms: Sequence[float], stage_ends: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Any of "unsettled", "transient", "bimodal" and "window_disagrees" that apply.

    step_ms: of each timed step, the max over ranks. window_ms: of each rank, around all timed steps. stage_ends: the
    column, of a stream. A stage is judged for itself, without the step that changes the length, and nothing is said of
    a mean of steps of several lengths.
    """
    if len(stage_ends):
        numbers = [each["num_steps"] for each in stage_ends]
        ends = [*accumulate(numbers)]
        of_stages = (step_ms[end - number + 1 : end] for end, number in zip(ends, numbers, strict=True))
        found = {flag for each in of_stages for flag in flags_of_times(each, [sum(each)])} - {"window_disagrees"}
        return sorted(found)
    found = {}
    if len(step_ms) and not _are_quiet(min(step_ms), max(step_ms)):
        found = {
            "unsettled": is_unsettled(step_ms),
            "transient": is_transient(step_ms),
            "bimodal": is_bimodal(step_ms),
        }
    found["window_disagrees"] = window_disagrees(step_ms, window_ms)
    return [flag for flag, applies in found.items() if applies]


def may_have_flags(step_ms: Any, window_ms: Any) -> Any:
    """Of many rows at once: False where `flags_of_times` finds none. step_ms: array [rows, steps]; window_ms: array
    [rows], the longest window."""
    fits = _fits_window(step_ms, (window_ms / step_ms.shape[1])[:, None]).all(axis=1)
    return ~(_are_quiet(step_ms.min(axis=1), step_ms.max(axis=1)) & fits)


def _are_quiet(shortest_ms: Any, longest_ms: Any) -> Any:
    """Of numbers, or of arrays over rows."""
    return longest_ms - shortest_ms <= QUIET_SHARE * shortest_ms


def _fits_window(ms: Any, a_step: Any) -> Any:
    """Whether a time is the window's share of a step: of numbers, or of arrays."""
    return abs(ms - a_step) <= MAX_WINDOW_SHARE * a_step


def is_unsettled(step_ms: Sequence[float]) -> bool:
    """Whether the steps became shorter or longer while they were timed.

    A device at its power limit slows down about a second after its load begins.
    """
    if len(step_ms) < 2:
        return False
    settled, median = statistics.median(step_ms[-(len(step_ms) // 2) :]), statistics.median(step_ms)
    return abs(settled - median) > MAX_UNSETTLED_SHARE * median


def is_transient(step_ms: Sequence[float]) -> bool:
    """Whether single steps are over 5% slower or faster than their neighbours, the two before and the two after, or
    whether they grow or shrink by over 5% over the window, by the medians of its halves. Of more than 20 steps fewer
    than one in 20 may be off: the median does not notice."""
    num = len(step_ms)
    if num < 3:
        return False
    off, shortest = 0, min(step_ms)
    if max(step_ms) - shortest > MAX_TRANSIENT_SHARE * shortest:  # else no step is off
        for i, ms in enumerate(step_ms):
            near = statistics.median([*step_ms[max(0, i - NEIGHBOURS) : i], *step_ms[i + 1 : i + 1 + NEIGHBOURS]])
            off += abs(ms - near) > MAX_TRANSIENT_SHARE * near
            if off and off >= MAX_TRANSIENTS * num:
                return True
    halves = step_ms[: num // 2], step_ms[-(num // 2) :]
    # the middles of the halves are num - num // 2 steps apart
    a_step = (statistics.median(halves[1]) - statistics.median(halves[0])) / (num - num // 2)
    trend = a_step * (num - 1)
    return abs(trend) > MAX_TRANSIENT_SHARE * statistics.median(step_ms)


def is_bimodal(step_ms: Sequence[float]) -> bool:
    """Whether the steps fall into a fast and a slow group, so that their median is the time of hardly any step.

    The steps are split in two where the groups are tightest: where the absolute deviations from the two groups' medians
    add up to least. Each group has a quarter of the steps or more, and MIN_MODE_STEPS.
    """
    ordered, num = sorted(step_ms), len(step_ms)
    smallest = max(MIN_MODE_STEPS, -(-num // 4))
    if num < 2 * smallest:
        return False
    total = [0.0, *accumulate(ordered)]

    def deviation(first: int, end: int) -> float:
        """The summed deviation of steps first to end - 1 from their median: the upper half minus the lower half."""
        half = (end - first) // 2
        return total[end] - total[end - half] - total[first + half] + total[first]

    spread, at = min((deviation(0, i) + deviation(i, num), i) for i in range(smallest, num - smallest + 1))
    fast, slow = statistics.median(ordered[:at]), statistics.median(ordered[at:])
    return slow - fast > MIN_MODES_APART * fast and spread < MAX_MODE_SPREAD * deviation(0, num)


def window_disagrees(step_ms: Sequence[float], window_ms: Sequence[float]) -> bool:
    """Whether the median or the mean step lasts longer or shorter than the longest window divided by its steps.

    The mean does where ranks are late in turn, because each step counts as its slowest rank. The median does where some
    steps are much slower than the others.
    """
    if not len(step_ms) or not len(window_ms):
        return False
    a_step = max(window_ms) / len(step_ms)
    return not all(_fits_window(ms, a_step) for ms in (statistics.median(step_ms), statistics.fmean(step_ms)))


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
    flags = ["thermal_slowdown"] if any("thermal" in reason for each in reasons for reason in each) else []
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
