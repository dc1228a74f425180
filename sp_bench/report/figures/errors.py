"""The figure of the most wrong gradient: over sp_size by method, and over speed."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from sp_bench.report.cells import Cell
from sp_bench.report.figures.axes import scale_lengths
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import legend, series_handles
from sp_bench.report.figures.marks import LOOSE_PT, Mark, draw_marks, fullest, side_by_side
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import panels_abreast, width_in
from sp_bench.report.formats import number, whole
from sp_bench.report.gradient_errors import Point, compared, point

CAPTION = (
    "Largest relative L2 error of dq, dk and dv against the reference, over the replicates, measured at the reduced "
    "length ({proven}). {sizes}{speed}{budget}{hollow}"
)
SIZES = "Over sp_size: of the cells of a series the most wrong; series of one sp_size are set slightly apart. "
SPEED = "Over speed: at {seq_len} tokens, from the median step time; lower right is better. "
BUDGET: dict[str, Any] = {"color": "0.55", "lw": 1.4}
MAX_TICKS = 8
DECADES_RATIO = 50
NEAR = 3  # a budget that is further above the errors is named in the caption: on the axis it would press them together


def draw_errors(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """None where no gradient's error is known, or nothing is beside it."""
    points = [p for c in cells if c.ok and (p := point(c)) is not None]
    names, unnamed = fullest((p.cell.series for p in points), style)
    points = [p for p in points if p.cell.series in names]
    speeds = _speeds(cells, points)
    several_sizes = len({p.cell.asked["sp_size"] for p in points}) > 1
    worst = _worst(points) if several_sizes or not speeds else []
    shown = [*worst, *speeds]
    if len(shown) < 2:
        return None
    proven = sorted(
        {row["correctness_seq_len"] for p in shown for row in p.cell.measured if row["correctness_seq_len"]}
    )
    caption = CAPTION.format(
        proven=f"{', '.join(map(whole, proven))} tokens" if proven else "not known",
        sizes=SIZES if worst else "",
        speed=SPEED.format(seq_len=whole(speeds[0].cell.asked["seq_len"])) if speeds else "",
        budget=_budget_words(shown),
        hollow=" Hollow markers are single replicates." if any(len(p.cell.step_ms) == 1 for p in shown) else "",
    )
    lines = [_data("error over sp_size", p) for p in worst] + [_data("error over speed", p) for p in speeds]
    sources = {p.cell.cell_id: p.cell for p in shown}
    figure = _figure(worst, speeds, names, style)
    return Plot(figure, caption + unnamed, pd.DataFrame(lines), tuple(sources.values()))


def _worst(points: Sequence[Point]) -> list[Point]:
    """Of each series and sp_size, in that order; of equal errors the longest seq_len's."""
    found: dict[tuple[str, int], Point] = {}
    for p in sorted(points, key=lambda p: (p.error, p.cell.asked["seq_len"])):
        found[p.cell.series, p.cell.asked["sp_size"]] = p
    return [found[key] for key in sorted(found)]


def _speed(p: Point) -> float | None:
    """Attention TFLOP/s of a device, or where there is more than attention tokens/s."""
    return p.tflops_per_s or (p.cell.median_step_ms and p.cell.rate(p.cell.median_step_ms, per_rank=True))


def _speeds(cells: Sequence[Cell], points: Sequence[Point]) -> list[Point]:
    """At the length at which options of a method are compared, else at that with the most cells on several ranks. None
    where no speed is known, or a single one is."""
    several = [p for p in points if _speed(p) and p.cell.asked["sp_size"] > 1]
    of_length = Counter(p.cell.asked["seq_len"] for p in compared(cells) or several)
    seq_len = max(of_length, key=lambda n: (of_length[n], n), default=None)
    found = [p for p in several if p.cell.asked["seq_len"] == seq_len]
    sizes = sorted({p.cell.asked["sp_size"] for p in found})[-panels_abreast() :]
    return [p for p in found if p.cell.asked["sp_size"] in sizes] if len(found) > 1 else []


def _figure(
    worst: Sequence[Point], speeds: Sequence[Point], names: Sequence[str], style: Mapping[str, Style]
) -> Figure:
    sizes = sorted({p.cell.asked["sp_size"] for p in speeds})
    budget = _near_budget([*worst, *speeds])
    num_rows = bool(worst) + bool(sizes)
    figure = Figure(figsize=(width_in(), 0.4 + 2.3 * num_rows), layout="constrained")
    grid = figure.add_gridspec(num_rows, max(len(sizes), 1))
    panels: list[Axes] = []
    if worst:
        panels.append(figure.add_subplot(grid[0, :]))
        _over_sizes(panels[0], worst, names, style)
    for column, size in enumerate(sizes):
        shared = {"sharex": panels[-1] if column else None, "sharey": panels[0] if panels else None}
        panel = figure.add_subplot(grid[num_rows - 1, column], **shared)
        _over_speed(panel, [p for p in speeds if p.cell.asked["sp_size"] == size], style)
        panel.tick_params(labelleft=column == 0)
        panels.append(panel)
    for panel in panels:
        if budget:
            panel.axhline(budget, **BUDGET)
    for panel in panels[:num_rows]:  # the first of each row
        panel.set_ylabel("largest gradient error\n(relative L2)")
    _scale(panels[0], [*(p.error for p in (*worst, *speeds)), *([budget] if budget else [])])
    handles = [*series_handles(names, style, joined=False), *([Line2D([], [], **BUDGET)] if budget else [])]
    legend(figure, handles, [*names, *(["budget"] if budget else [])], 3)
    return figure


def _over_sizes(panel: Axes, worst: Sequence[Point], names: Sequence[str], style: Mapping[str, Style]) -> None:
    sizes = sorted({p.cell.asked["sp_size"] for p in worst})
    room_in = width_in() - 0.8
    of_mark = {(p.cell.series, p.cell.asked["sp_size"]): p for p in worst}
    for mark, place in side_by_side(of_mark, names, room_in, LOOSE_PT).items():
        draw_marks(panel, [_mark(of_mark[mark], place)], style[mark[0]])
    scale_lengths(panel, sizes, room_in)
    panel.set_xlabel("sp_size (ranks)")


def _over_speed(panel: Axes, points: Sequence[Point], style: Mapping[str, Style]) -> None:
    for p in sorted(points, key=lambda p: style[p.cell.series].order):
        draw_marks(panel, [_mark(p, _speed(p) or 0.0)], style[p.cell.series])
    cell = points[0].cell
    what = "attention TFLOP/s" if points[0].tflops_per_s else "tokens/s"
    panel.set_title(f"sp_size {cell.asked['sp_size']}, seq_len {whole(cell.asked['seq_len'])}")
    panel.set_xlabel(f"{what}/{cell.processor}")
    panel.margins(x=0.15)
    panel.locator_params(axis="x", nbins=5)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _mark(p: Point, place: float) -> Mark:
    return Mark(place, p.error, None, (), len(p.cell.step_ms) == 1)


def _budget(points: Sequence[Point]) -> float | None:
    return min((p.budget for p in points if p.budget), default=None)


def _near_budget(points: Sequence[Point]) -> float | None:
    budget = _budget(points)
    return budget if budget is not None and budget < NEAR * max(p.error for p in points) else None


def _budget_words(points: Sequence[Point]) -> str:
    if (budget := _budget(points)) is None:
        return "Budgets are not known."
    if _near_budget(points):
        return "The grey line is the smallest budget of these cells."
    times = budget / max(p.error for p in points)
    return f"The smallest budget of these cells, {number(budget)}, is above the axis: {times:.1f}x the largest error."


def _scale(panel: Axes, values: Sequence[float]) -> None:
    """Logarithmic, with at most MAX_TICKS labels of one or two digits; of a wide range whole decades only, of a very
    narrow one as many digits as tell its labels apart."""
    low, high = min(values), max(values)
    room = 10 ** (0.08 * math.log10(high / low) + 0.03)
    panel.set_yscale("log")
    panel.set_ylim(low / room, high * room)
    steps = (1,) if high > DECADES_RATIO * low else (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
    ticks = [step * 10.0**power for power in range(-20, 2) for step in steps]
    shown = [t for t in ticks if low / room <= t <= high * room]
    if len(shown) < 2:
        shown = [t for t in MaxNLocator(5).tick_values(low / room, high * room) if low / room <= t <= high * room]
    panel.set_yticks(shown if len(shown) <= MAX_TICKS else shown[:: -(-len(shown) // MAX_TICKS)])
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def _data(panel: str, p: Point) -> dict[str, Any]:
    return about(p.cell) | {
        "panel": panel,
        "gradient": p.gradient,
        "rel_error": p.error,
        "error_budget": p.budget,
        "attention_tflops_per_s_per_gpu": p.tflops_per_s,
        "tokens_per_s_per_gpu": p.cell.rate(p.cell.median_step_ms, per_rank=True) if p.cell.median_step_ms else None,
        "num_replicates": len(p.cell.step_ms),
        "trial_ids": trial_ids(p.cell),
    }
