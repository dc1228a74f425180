"""Panels of one quantity over seq_len, one panel a sp_size, or a dot a series where there are few lengths."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullFormatter

from sp_bench.report.cells import Cell
from sp_bench.report.figures.legends import (
    LINE,
    OUT_OF_MEMORY,
    columns_within,
    legend,
    out_of_memory,
    series_handles,
    wide_enough,
)
from sp_bench.report.figures.styles import Style
from sp_bench.report.formats import whole

PANELS_PER_LINE = 3
LABEL_WIDTH = 0.22  # of a panel's width: room for one length
OOM_STEP = 0.045  # of a panel's height: room for one cross
LOG_RATIO = 12  # a wider range of values gets a logarithmic axis
APART = 0.05  # of a panel's width: over which the series of one length are spread
FEW_SERIES = 4  # more of them at two lengths would hide each other
CLOSE_RATIO = 2  # dots of a narrower range get an axis that begins above zero


@dataclass(frozen=True)
class Quantity:
    """What a panel shows of a cell: one value a replicate, and the summary with its interval."""

    label: str
    points: Callable[[Cell], Sequence[float]]
    middle: Callable[[Cell], float | None]
    interval: Callable[[Cell], tuple[float, float] | None]


def draw_panels(cells: Sequence[Cell], style: Mapping[str, Style], quantity: Quantity) -> Figure:
    """One panel a sp_size: lines over seq_len, or a dot a series (see `is_dots`)."""
    if is_dots(cells):
        return _dots(cells, style, quantity)
    by_size = {n: [c for c in cells if c.asked["sp_size"] == n] for n in sorted({c.asked["sp_size"] for c in cells})}
    lengths = sorted({c.asked["seq_len"] for c in cells})
    apart = min(0.3 * min(log2(b / a) for a, b in pairwise(lengths)), APART * log2(lengths[-1] / lengths[0]))
    columns = 2 if len(by_size) == 4 else min(len(by_size), PANELS_PER_LINE)
    lines = -(-len(by_size) // columns)
    names = list(dict.fromkeys(sorted((c.series for c in cells), key=lambda s: style[s].order)))
    any_oom = any("oom" in c.statuses for c in cells)
    handles, labels = series_handles(names, style), names
    if any_oom:
        handles, labels = [*handles, out_of_memory()], [*names, OUT_OF_MEMORY]
    legend_columns, width = columns_within(labels, max(3.3 * columns + 0.4, 5.2), 3 if columns > 1 else 2)
    height = 2.9 * lines + LINE * -(-len(labels) // legend_columns) + 0.3
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.05))
    axes = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    strip = _oom_strip(cells, style)
    for panel, (sp_size, group) in zip(axes, by_size.items(), strict=False):
        panel.set_title(f"sp_size {sp_size}")
        _lines(panel, group, style, quantity, apart)
        if strip:  # over the grid, under the marks
            panel.add_patch(
                Rectangle((0, 1 - strip), 1, strip, transform=panel.transAxes, color="#eeeeee", lw=0, zorder=0.7)
            )
    for panel in axes[len(by_size) :]:
        panel.set_visible(False)
    _scale_values(axes[0], "y", [p for c in cells for p in quantity.points(c)], strip)
    _scale_lengths(axes[0], lengths)
    for place, panel in enumerate(axes[: len(by_size)]):
        if place % columns == 0:
            panel.set_ylabel(quantity.label)
        if place + columns >= len(by_size):  # nothing below it
            panel.tick_params(labelbottom=True)
            panel.set_xlabel("seq_len (tokens)")
    legend(figure, handles, labels, legend_columns)
    return figure


def is_dots(cells: Sequence[Cell]) -> bool:
    """Whether each length has a panel with a line for each series, and no lines over lengths are drawn."""
    lengths, names = {c.asked["seq_len"] for c in cells}, {c.series for c in cells}
    return len(lengths) == 1 or (len(lengths) == 2 and len(names) > FEW_SERIES)


def _lines(panel: Axes, cells: Sequence[Cell], style: Mapping[str, Style], quantity: Quantity, apart: float) -> None:
    """`apart`: octaves over which the series of one length are spread, so that equal values do not hide each other."""
    num_oom: dict[int, dict[str, int]] = {}
    names = sorted({c.series for c in cells}, key=lambda s: style[s].order)
    for place, name in enumerate(names):
        look, shift = style[name], 2 ** (apart * ((place + 0.5) / len(names) - 0.5))
        line = sorted((c for c in cells if c.series == name), key=lambda c: c.asked["seq_len"])
        measured = [c for c in line if quantity.middle(c) is not None]
        middles = [quantity.middle(c) or 0.0 for c in measured]
        panel.plot([c.asked["seq_len"] * shift for c in measured], middles, lw=1.2, **look.line)
        _mark(panel, {c.asked["seq_len"] * shift: c for c in measured}, look, quantity, across=False)
        for length in (c.asked["seq_len"] for c in line if "oom" in c.statuses):
            methods = num_oom.setdefault(length, {})
            place = methods.setdefault(look.colour, len(methods) + 1)  # the series of one method share a line
            _cross(panel, length * shift, 1 - OOM_STEP * place, look)


def _oom_strip(cells: Sequence[Cell], style: Mapping[str, Style]) -> float:
    """Fraction of a panel, at its top, that is kept free of values for the marks of cells that were out of memory."""
    failed = {(c.asked["sp_size"], c.asked["seq_len"], style[c.series].colour) for c in cells if "oom" in c.statuses}
    stacks = Counter(place[:2] for place in failed)
    return OOM_STEP * (max(stacks.values()) + 1) if stacks else 0.0


def _cross(panel: Axes, length: float, height: float, look: Style) -> None:
    """Out of memory at a length; `height` is a fraction of the axes, for there is no value."""
    along = panel.get_xaxis_transform()
    panel.plot(
        [length], [height], transform=along, marker="x", mew=1.8, ms=6, color=look.colour, ls="", in_layout=False
    )


def _mark(panel: Axes, placed: Mapping[float, Cell], look: Style, quantity: Quantity, *, across: bool) -> None:
    """Replicates, medians and intervals of one series; the keys are places on the other axis than the values'."""

    def plot(pairs: Sequence[tuple[float, float]], **how: Any) -> None:
        places, values = [place for place, _ in pairs], [value for _, value in pairs]
        # The axes fix the limits, so the layout need not measure every mark.
        panel.plot(*((values, places) if across else (places, values)), ls="", in_layout=False, **how)

    several = {place: cell for place, cell in placed.items() if len(quantity.points(cell)) > 1}
    dots = [(place, value) for place, cell in several.items() for value in quantity.points(cell)]
    plot(dots, marker=".", ms=4, mew=0, alpha=0.5, color=look.colour)
    intervals = {place: bounds for place, cell in placed.items() if (bounds := quantity.interval(cell))}
    draw_bars = panel.hlines if across else panel.vlines
    if intervals:
        draw_bars([*intervals], *zip(*intervals.values(), strict=True), lw=1.6, color=look.colour).set_in_layout(False)
        ends = [(place, bound) for place, bounds in intervals.items() for bound in bounds]
        plot(ends, marker="|" if across else "_", ms=5, color=look.colour)
    for hollow in (False, True):
        alike = [(p, quantity.middle(c)) for p, c in placed.items() if (len(quantity.points(c)) == 1) == hollow]
        plot([(place, middle) for place, middle in alike if middle is not None], **look.marker(hollow=hollow))


def _dots(cells: Sequence[Cell], style: Mapping[str, Style], quantity: Quantity) -> Figure:
    """Panels below each other, a line of its own for each series: nothing is joined, nothing overlaps."""
    places: dict[tuple[int, int], list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: (c.asked["sp_size"], c.asked["seq_len"])):
        places.setdefault((cell.asked["sp_size"], cell.asked["seq_len"]), []).append(cell)
    names = [sorted({c.series for c in group}, key=lambda s: style[s].order) for group in places.values()]
    heights = [len(each) + 0.6 for each in names]
    width = max(7.2, wide_enough([name for each in names for name in each]))
    figure = Figure(figsize=(width, 0.24 * sum(heights) + 0.34 * len(heights) + 0.9), layout="constrained")
    axes = figure.subplots(len(places), 1, sharex=True, squeeze=False, height_ratios=heights).flat
    for panel, ((sp_size, seq_len), group), each in zip(axes, places.items(), names, strict=True):
        rows = {name: place for place, name in enumerate(reversed(each))}
        for cell in group:
            look = style[cell.series]
            _mark(panel, {rows[cell.series]: cell}, look, quantity, across=True)
            if "oom" in cell.statuses:
                panel.text(
                    0.99, rows[cell.series], "out of memory", transform=panel.get_yaxis_transform(), ha="right",
                    va="center", color=look.colour, fontsize="small",
                )  # fmt: skip
        panel.set_yticks(list(rows.values()), list(rows))
        panel.set_ylim(-0.7, len(rows) - 0.3)
        panel.set_title(f"sp_size {sp_size}, seq_len {whole(seq_len)} tokens", loc="left")
    _scale_values(figure.axes[0], "x", [p for c in cells for p in quantity.points(c)], 0.0)
    figure.axes[-1].set_xlabel(quantity.label.replace("\n", " "))
    return figure


def is_close(values: Sequence[float]) -> bool:
    """Whether the axis of dots with these values begins above zero."""
    positive = [v for v in values if v > 0]
    return bool(positive) and max(positive) < CLOSE_RATIO * min(positive)


def _scale_values(panel: Axes, axis: str, values: Sequence[float], strip: float) -> None:
    """From zero, or logarithmic where values span more than LOG_RATIO; all of them below the uppermost `strip`.

    Dots, along x, say their value by place and not by length: close ones get an axis that begins above zero."""
    positive = [v for v in values if v > 0]
    if not positive:
        return
    along: Any = panel.yaxis if axis == "y" else panel.xaxis
    set_scale, set_limits = (panel.set_yscale, panel.set_ylim) if axis == "y" else (panel.set_xscale, panel.set_xlim)
    low, high, room = min(positive), max(positive), 1 - strip
    if high > LOG_RATIO * low:
        bottom, top = low / 1.5, 1.5 * high
        set_scale("log")
        set_limits(bottom, bottom * (top / bottom) ** (1 / room))
    elif axis == "x" and is_close(positive):
        margin = 0.15 * max(high - low, 0.1 * high)
        top = high + margin
        set_limits(low - margin, top)
    else:
        top = high * 1.12
        set_limits(0, top / room)
    along.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}" if value <= top else ""))
    along.set_minor_formatter(NullFormatter())


def _scale_lengths(panel: Axes, lengths: Sequence[int]) -> None:
    """Logarithmic to base 2, a tick at each length that was run, labelled from the longest down where there is room."""
    low, high = lengths[0] / 2**0.35, lengths[-1] * 2**0.35
    panel.set_xscale("log", base=2)
    panel.set_xlim(low, high)
    labelled: list[int] = []
    for length in reversed(lengths):
        if not labelled or log2(labelled[-1] / length) > LABEL_WIDTH * log2(high / low):
            labelled.append(length)
    panel.xaxis.set_major_locator(FixedLocator(labelled))
    panel.xaxis.set_major_formatter(FixedFormatter([whole(n) for n in labelled]))
    panel.xaxis.set_minor_locator(FixedLocator(lengths))
    panel.xaxis.set_minor_formatter(NullFormatter())
