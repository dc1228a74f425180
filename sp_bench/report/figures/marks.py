"""Marks of series side by side: replicates as dots, their median as a marker, its interval as a bar."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sp_bench.report.cells import Cell
from sp_bench.report.figures.axes import MARGIN, fitted_names
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import width_in

APART = 0.45  # of the least distance between two places: most that the series of one place are spread over
LOOSE_PT, JOINED_PT = 6.0, 2.5  # from a mark to the next: clear of it, and where lines already tell series apart
MAX_SERIES = 16  # more of them could not be told apart; tables hold them all


@dataclass(frozen=True)
class Mark:
    place: float
    value: float
    interval: tuple[float, float] | None
    replicates: Sequence[float]
    hollow: bool  # of one launch
    joint: float | None = None  # where its line passes, if not at `place`: on a steep line beside is above or below


def draw_marks(panel: Axes, marks: Sequence[Mark], look: Style, *, joined: bool = False, across: bool = False) -> None:
    """One series; `across`: values along x. The axes fix their limits, so the layout need not measure every mark."""

    def plot(pairs: Sequence[tuple[float, float]], **how: Any) -> None:
        if pairs:
            places, values = zip(*pairs, strict=True)
            panel.plot(*((values, places) if across else (places, values)), in_layout=False, **how)

    if joined:
        joints = sorted((m.place if m.joint is None else m.joint, m.value) for m in marks)
        plot(joints, lw=1.0, alpha=0.8, **look.line)
    dots = [(m.place, value) for m in marks if len(m.replicates) > 1 for value in m.replicates]
    bars = [(m.place, *m.interval) for m in marks if m.interval is not None]
    if bars:
        draw_bars = panel.hlines if across else panel.vlines
        draw_bars(*zip(*bars, strict=True), lw=1.6, color=look.colour).set_in_layout(False)
        ends = [(place, bound) for place, *bounds in bars for bound in bounds]
        plot(ends, ls="", marker="|" if across else "_", ms=5, color=look.colour)
    plot(dots, ls="", marker=".", ms=6.4, mew=0.5, mec="white", mfc=look.colour)  # edged: dots lie on the bar
    for hollow in (False, True):
        plot([(m.place, m.value) for m in marks if m.hollow == hollow], ls="", **look.marker(hollow=hollow))


def stacked(panels: Sequence[Sequence[str]]) -> tuple[Figure, list[Axes], dict[str, str]]:
    """Panels below each other on one x axis, with a row for each of their names; and the names as they fit beside."""
    texts, row_in = fitted_names([name for names in panels for name in names])
    heights = [len(names) + 0.6 for names in panels]
    height = row_in * sum(heights) + 0.34 * len(panels) + 0.7
    figure = Figure(figsize=(width_in(), height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    return figure, list(axes.flat), texts


def side_by_side(
    marks: Collection[tuple[str, int]],
    names: Sequence[str],
    room_in: float,
    apart_pt: float,
    axis: Collection[int] = (),
) -> dict[tuple[str, int], float]:
    """(series, place) -> where it is drawn on the axis of `scale_lengths`: series of one place `apart_pt` from each
    other, in the order of `names`; one that is alone there on the place itself. `axis`: places that other panels have
    on the same axis."""
    places = sorted({*axis, *(place for name, place in marks if name in names)})
    octaves = (log2(places[-1] / places[0]) if places else 0.0) + 2 * MARGIN
    nearest = min((log2(b / a) for a, b in pairwise(places)), default=2.0)
    drawn = {}
    for place in places:
        here = [name for name in names if (name, place) in marks]
        step = min(apart_pt / 72 * octaves / room_in, min(2 * MARGIN - 0.1, APART * nearest) / max(len(here), 1))
        drawn |= {(name, place): beside(place, turn, len(here), step) for turn, name in enumerate(here)}
    return drawn


def beside(place: float, turn: int, turns: int, octaves: float) -> float:
    """Place of number `turn` of `turns` that share it, each these octaves from the next."""
    return place * 2 ** (octaves * (turn - (turns - 1) / 2))


def replicate_ids(cell: Cell) -> dict[str, str]:
    """trial_id by replicate, named as in `Cell.step_ms`."""
    return {key: str(row["trial_id"]) for key, row in cell.launches.items()}


def fullest(series: Iterable[str], style: Mapping[str, Style]) -> tuple[list[str], str]:
    """The names with the most marks, at most MAX_SERIES, in the order of legends, and a sentence on the others;
    `series` holds the name of each mark."""
    number = Counter(series)
    kept = sorted(number, key=lambda name: (-number[name], style[name].order))[:MAX_SERIES]
    others = len(number) - len(kept)
    words = f" {others:,} series with no more marks than these are in the tables only." if others else ""
    return sorted(kept, key=lambda name: style[name].order), words
