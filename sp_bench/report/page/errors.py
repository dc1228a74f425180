"""The section on error and speed: what the dtypes of travelling dK/dV and of merges cost, and what they buy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from sp_bench.report.cells import Cell
from sp_bench.report.figures import MAX_SETTINGS
from sp_bench.report.figures.drawings import Drawing, finish
from sp_bench.report.figures.legends import LINE, columns_within, legend, series_handles
from sp_bench.report.figures.styles import Style
from sp_bench.report.formats import MISSING, number, whole
from sp_bench.report.page.parts import Line, Section, Table
from sp_bench.report.series import config_leaves

GRADIENTS = ("dq", "dk", "dv")
FIGURE_CAPTION = (
    "Gradient error over speed: the largest relative L2 error of dq, dk and dv over the replicates, measured at the "
    "reduced length ({proven}), and attention FLOP/s a device at {seq_len} tokens, from the median step time (causal "
    "pairs, forward 1 and backward 2.5). Lower right is better. "
)
HEAD = (
    *("method", "sp_size", "seq_len (tokens)", "dK/dV travel in", "merged in", "step (ms)", "TFLOP/s a device"),
    *("largest gradient error", "of", "its budget", "error / budget"),
)
CAPTION = (
    "Input is the dtype of the trial. Errors are relative L2 against the reference at the reduced length, the largest "
    "over the replicates; budgets are the rows' own."
)


@dataclass(frozen=True)
class Point:
    """A cell and its gradient that is most wrong, relative L2."""

    cell: Cell
    gradient: str
    error: float
    budget: float | None

    @property
    def tflops_per_s(self) -> float:
        """Attention TFLOP/s of one device, from the median step time."""
        return self.cell.attention_tflops(self.cell.median_step_ms or math.inf) or 0.0


def section(cells: Sequence[Cell], style: Mapping[str, Style]) -> Section | None:
    by_setting: dict[str, list[Point]] = {}
    for setting, group in groupby(cells, key=lambda c: c.setting):
        if shown := compared(list(group)):
            by_setting[setting] = shown
    if not by_setting:
        return None
    taken: set[str] = set()
    drawn = sorted(sorted(by_setting, key=lambda s: -len(by_setting[s]))[:MAX_SETTINGS])
    return Section(
        anchor="errors",
        title="Error and speed",
        drawings=tuple(_drawing(by_setting[s], style, taken) for s in drawn),
        tables=tuple(Table(s, CAPTION, HEAD, tuple(map(_line, by_setting[s])), (0, 3, 4, 8)) for s in by_setting),
    )


def options(cell: Cell) -> tuple[str | None, str | None]:
    """(what dK/dV travel in, what partial outputs are merged in); None: the method has no such option."""
    merge = config_leaves(cell.asked["config"]).get("method.merge_dtype")
    return cell.asked["dkv_dtype"], None if merge is None else str(merge)


def _point(cell: Cell) -> Point | None:
    known = [(name, *cell.errors[name]) for name in GRADIENTS if name in cell.errors]
    if not known or not cell.attention_flops_per_step or (cell.asked["sp_size"] or 1) < 2:
        return None
    worst = max(known, key=lambda e: e[1])
    return Point(cell, *worst) if worst[1] > 0 else None  # an error of zero has no place on a logarithmic axis


def compared(cells: Sequence[Cell]) -> list[Point]:
    """Cells of the length, of several the longest, at which some method ran with two options or more; none if none."""
    points = [point for cell in cells if (point := _point(cell)) is not None]
    choices: dict[tuple[int, int, str], set[tuple[str | None, str | None]]] = {}
    for asked, chosen in ((p.cell.asked, options(p.cell)) for p in points):
        choices.setdefault((asked["seq_len"], asked["sp_size"], str(asked["method"])), set()).add(chosen)
    seq_len = max((where[0] for where, each in choices.items() if len(each) > 1), default=None)
    return [p for p in points if p.cell.asked["seq_len"] == seq_len]


def _line(point: Point) -> Line:
    cell, (travelling, merged) = point.cell, options(point.cell)
    texts = (
        *(cell.series, whole(cell.asked["sp_size"]), whole(cell.asked["seq_len"]), travelling or MISSING),
        *(merged or MISSING, number(cell.median_step_ms), number(point.tflops_per_s), number(point.error)),
        *(point.gradient, number(point.budget), f"{point.error / point.budget:.3f}" if point.budget else MISSING),
    )
    return Line(texts, cell.files)


def _drawing(points: Sequence[Point], style: Mapping[str, Style], taken: set[str]) -> Drawing:
    first = points[0].cell
    lengths = {row["correctness_seq_len"] for p in points for row in p.cell.measured if row["correctness_seq_len"]}
    proven = f"{', '.join(map(whole, sorted(lengths)))} tokens" if lengths else "not known"
    caption = FIGURE_CAPTION.format(proven=proven, seq_len=whole(first.asked["seq_len"])) + _budget_words(points)
    return finish("errors", first.setting, first, (_figure(points, style), caption), taken)


def _budget(points: Sequence[Point]) -> float | None:
    return min((p.budget for p in points if p.budget), default=None)


def _budget_is_near(points: Sequence[Point]) -> bool:
    budget = _budget(points)
    return budget is not None and budget < NEAR * max(p.error for p in points)


def _budget_words(points: Sequence[Point]) -> str:
    if (budget := _budget(points)) is None:
        return "Budgets are not known."
    if _budget_is_near(points):
        return "The grey line is the smallest budget of these cells."
    times = budget / max(p.error for p in points)
    return f"The smallest budget of these cells, {number(budget)}, is above the axis: {times:.1f}x the largest error."


def _figure(points: Sequence[Point], style: Mapping[str, Style]) -> Figure:
    """One panel a sp_size on common axes: speed a device and error both compare over sp_size."""
    sizes = sorted({p.cell.asked["sp_size"] for p in points})
    names = sorted({p.cell.series for p in points}, key=lambda s: style[s].order)
    budget = _budget(points) if _budget_is_near(points) else None
    labels = [*names, "budget"] if budget else names
    columns, width = columns_within(labels, max(2.7 * len(sizes) + 0.6, 7.0), 2)
    figure = Figure(figsize=(width, 3.4 + LINE * -(-len(labels) // columns)), layout="constrained")
    axes = figure.subplots(1, len(sizes), sharex=True, sharey=True, squeeze=False).flat
    for panel, sp_size in zip(axes, sizes, strict=True):
        panel.set_title(f"sp_size {sp_size}")
        for p in sorted(points, key=lambda p: style[p.cell.series].order):
            if p.cell.asked["sp_size"] == sp_size:
                look = style[p.cell.series].marker(hollow=len(p.cell.step_ms) == 1)
                panel.plot([p.tflops_per_s], [p.error], ls="", **look)
        if budget:
            panel.axhline(budget, color=BUDGET, lw=1.4)
        panel.set_xlabel("attention TFLOP/s a device")
    figure.axes[0].set_ylabel("largest gradient error (relative L2)")
    _scale(figure.axes[0], [*(p.error for p in points), *([budget] if budget else [])])
    more = [Line2D([], [], color=BUDGET, lw=1.4)] if budget else []
    legend(figure, [*series_handles(names, style, joined=False), *more], labels, columns)
    return figure


BUDGET = "0.55"
MAX_TICKS = 8
NEAR = 3  # a budget that is further above the errors is named in the caption: on the axis it would press them together


def _scale(panel: Axes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    room = 10 ** (0.08 * math.log10(high / low) + 0.03)
    panel.set_yscale("log")
    panel.set_ylim(low / room, high * room)
    ticks = [mantissa * 10.0**power for power in range(-20, 2) for mantissa in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)]
    shown = [t for t in ticks if low / room <= t <= high * room]
    panel.set_yticks(shown if len(shown) <= MAX_TICKS else shown[:: -(-len(shown) // MAX_TICKS)])
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.margins(x=0.15)
    panel.locator_params(axis="x", nbins=5)
