"""Flags: doubts about the times of an ok row. Each rule is computed of many rows at once: of arrays [..., steps]."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_UNSETTLED_SHARE = 0.03  # how far the second half's median may be from the median of all timed steps, relative to it
MAX_WINDOW_SHARE = 0.02  # how far a step's median or mean time may be from the window's share of a step, relative to it
MAX_TRANSIENT_SHARE = (
    0.05  # how far a step may be from its neighbours' median, relative to it, or a trend over the window
)
NEIGHBOURS = 2  # timed steps on each side
MAX_TRANSIENTS = 0.05  # of the timed steps; at least one makes a window of 20 or fewer transient
MIN_MODE_STEPS = 4  # fewer steps are no mode, but noise
MIN_MODES_APART = 0.05  # of the slower mode's median above the faster one's, relative to that
MAX_MODE_SPREAD = 1 / 3  # of the deviations from the two modes' medians, to those from the median of all
Floats = NDArray[np.float64]
Truths = NDArray[np.bool_]
Places = NDArray[np.int64]


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
    if not len(step_ms):
        return []
    return [flag for flag, applies in doubts_of_times(step_ms, max(window_ms, default=math.nan)).items() if applies]


def doubts_of_times(step_ms: ArrayLike, window_ms: ArrayLike) -> dict[str, Truths]:
    """To which rows each flag applies. step_ms: [..., steps], at least one; window_ms: [...], the longest."""
    of_steps = {flag: applies(step_ms) for flag, applies in _OF_STEPS.items()}
    return {**of_steps, "window_disagrees": window_disagrees(step_ms, window_ms)}


def is_unsettled(step_ms: ArrayLike) -> Truths:
    """Whether the steps became shorter or longer while they were timed. [..., steps] -> [...]

    A device at its power limit slows down about a second after its load begins.
    """
    steps = np.asarray(step_ms, float)
    if (num := steps.shape[-1]) < 2:
        return np.zeros(steps.shape[:-1], bool)
    settled, median = np.median(steps[..., -(num // 2) :], -1), np.median(steps, -1)
    return np.abs(settled - median) > MAX_UNSETTLED_SHARE * median


def is_transient(step_ms: ArrayLike) -> Truths:
    """Whether single steps are over 5% slower or faster than their neighbours, the two before and the two after, or
    whether they grow or shrink by over 5% over the window, by the medians of its halves. Of more than 20 steps fewer
    than one in 20 may be off: the median does not notice. [..., steps] -> [...]"""
    steps = np.asarray(step_ms, float)
    if (num := steps.shape[-1]) < 3:
        return np.zeros(steps.shape[:-1], bool)
    places = np.arange(num)[:, None] + [each for each in range(-NEIGHBOURS, NEIGHBOURS + 1) if each]
    inside = (places >= 0) & (places < num)  # [steps, neighbours]
    near = np.sort(np.where(inside, steps[..., places.clip(0, num - 1)], np.inf), -1)  # [..., steps, neighbours]
    usual = _median_of_sorted(near, 0, inside.sum(-1))
    off = (np.abs(steps - usual) > MAX_TRANSIENT_SHARE * usual).sum(-1)
    early, late = np.median(steps[..., : num // 2], -1), np.median(steps[..., -(num // 2) :], -1)
    # the middles of the halves are num - num // 2 steps apart
    trend = (late - early) / (num - num // 2) * (num - 1)
    grows = np.abs(trend) > MAX_TRANSIENT_SHARE * np.median(steps, -1)
    return (off > 0) & (off >= MAX_TRANSIENTS * num) | grows


def is_bimodal(step_ms: ArrayLike) -> Truths:
    """Whether the steps fall into a fast and a slow group, so that their median is the time of hardly any step.
    [..., steps] -> [...]

    The steps are split in two where the groups are tightest: where the absolute deviations from the two groups' medians
    add up to least. Each group has a quarter of the steps or more, and MIN_MODE_STEPS.
    """
    ordered = np.sort(np.asarray(step_ms, float), -1)
    num = ordered.shape[-1]
    smallest = max(MIN_MODE_STEPS, -(-num // 4))
    if num < 2 * smallest:
        return np.zeros(ordered.shape[:-1], bool)
    total = np.concatenate([np.zeros((*ordered.shape[:-1], 1)), np.cumsum(ordered, -1)], -1)

    def deviation(first: Places, end: Places) -> Floats:
        """The summed deviation of steps first to end - 1 from their median: the upper half minus the lower half."""
        half = (end - first) // 2
        return total[..., end] - total[..., end - half] - total[..., first + half] + total[..., first]

    cuts = np.arange(smallest, num - smallest + 1)
    none, every = np.zeros_like(cuts), np.full_like(cuts, num)
    spread = deviation(none, cuts) + deviation(cuts, every)  # [..., cuts]
    at = cuts[spread.argmin(-1)]
    fast, slow = _median_of_sorted(ordered, 0, at), _median_of_sorted(ordered, at, num)
    tight = spread.min(-1) < MAX_MODE_SPREAD * deviation(none[:1], every[:1])[..., 0]
    return tight & (slow - fast > MIN_MODES_APART * fast)


def _median_of_sorted(ordered: Floats, first: Places | int, end: Places) -> Floats:
    """The median of the entries first to end - 1, for each list. ordered: [..., entries]; first, end: [...]."""
    low, high = np.asarray((first + end - 1) // 2), np.asarray((first + end) // 2)
    low, high = (
        np.take_along_axis(ordered, np.broadcast_to(each, ordered.shape[:-1])[..., None], -1)[..., 0]
        for each in (low, high)
    )
    return (low + high) / 2


def window_disagrees(step_ms: ArrayLike, window_ms: ArrayLike) -> Truths:
    """Whether the median or the mean step lasts longer or shorter than the longest window divided by its steps.
    step_ms: [..., steps]; window_ms: [...], the longest

    The mean does where ranks are late in turn, because each step counts as its slowest rank. The median does where some
    steps are much slower than the others.
    """
    steps = np.asarray(step_ms, float)
    a_step = np.asarray(window_ms, float) / steps.shape[-1]
    usual = np.stack([np.median(steps, -1), steps.mean(-1)])
    return (np.abs(usual - a_step) > MAX_WINDOW_SHARE * a_step).any(0)


_OF_STEPS = {"unsettled": is_unsettled, "transient": is_transient, "bimodal": is_bimodal}
OF_TIMES = (*_OF_STEPS, "window_disagrees")
