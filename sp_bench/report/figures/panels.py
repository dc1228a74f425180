"""Panels of one quantity over seq_len, one panel a sp_size; where lines would say little, dots: see `dots`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle

from sp_bench.report.cells import Cell
from sp_bench.report.figures.axes import SEQ_LEN, scale_lengths, scale_values
from sp_bench.report.figures.drawings import about, joined_ids, trial_ids
from sp_bench.report.figures.legends import legend, oom_handles, oom_look, oom_site, series_handles
from sp_bench.report.figures.marks import JOINED_PT, Mark, draw_marks, side_by_side
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import panels_abreast, width_in

PANEL_HEIGHT_IN = 2.35
MAX_LINES_OF_PANELS, MOST_COLUMNS = 3, 3
OOM_STEP = 0.055  # of a panel's height: room for one mark
BESIDE_IN = 0.5  # of a panel's width: its ticks and margins


@dataclass(frozen=True)
class Quantity:
    """What a panel shows of a cell: one value a replicate, and their median with its interval."""

    column: str  # of the data, its unit at the end
    label: str
    points: Callable[[Cell], Mapping[str, float]]  # by replicate, as in Cell.step_ms
    middle: Callable[[Cell], float | None]
    interval: Callable[[Cell], tuple[float, float] | None]


def draw_panels(cells: Sequence[Cell], style: Mapping[str, Style], quantity: Quantity) -> tuple[Figure, list[Cell]]:
    """Lines over seq_len, and the cells that they show: those of the largest sp_sizes that fit."""
    sizes = sorted({c.asked["sp_size"] for c in cells})
    columns = 2 if len(sizes) == 4 else max(1, min(len(sizes), MOST_COLUMNS, panels_abreast()))
    sizes = sizes[-columns * MAX_LINES_OF_PANELS :]
    shown = [c for c in cells if c.asked["sp_size"] in sizes]
    lines = -(-len(sizes) // columns)
    figure = Figure(figsize=(width_in(), PANEL_HEIGHT_IN * lines + 0.3), layout=ConstrainedLayoutEngine(wspace=0.05))
    axes = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    strip, lengths = _oom_strip(shown, style), sorted({c.asked["seq_len"] for c in shown})
    room_in = width_in() / columns - BESIDE_IN
    for panel, sp_size in zip(axes, sizes, strict=False):
        panel.set_title(f"sp_size {sp_size}")
        _lines(panel, [c for c in shown if c.asked["sp_size"] == sp_size], style, quantity, (lengths, room_in))
        if strip:  # over the grid, under the marks
            place = {"transform": panel.transAxes, "zorder": 0.7}
            panel.add_patch(Rectangle((0, 1 - strip), 1, strip, color="#eeeeee", lw=0, **place))
    for panel in axes[len(sizes) :]:
        panel.set_visible(False)
    scale_values(axes[0], "y", [p for c in shown for p in quantity.points(c).values()], strip)
    for place, panel in enumerate(axes[: len(sizes)]):
        scale_lengths(panel, lengths, room_in)
        if place % columns == 0:
            panel.set_ylabel(quantity.label)
        if place + columns >= len(sizes):  # nothing below it
            panel.tick_params(labelbottom=True)
            panel.set_xlabel(SEQ_LEN)
    names = sorted({c.series for c in shown}, key=lambda s: style[s].order)
    handles, labels = oom_handles(shown)
    legend(figure, [*series_handles(names, style), *handles], [*names, *labels], 3)
    return figure, shown


def _lines(
    panel: Axes,
    cells: Sequence[Cell],
    style: Mapping[str, Style],
    quantity: Quantity,
    along: tuple[Sequence[int], float],
) -> None:
    """`along`: the lengths on the axis of all panels, and its inches."""
    lengths, room_in = along
    stacks: dict[int, list[str]] = {}
    names = sorted({c.series for c in cells}, key=lambda s: style[s].order)
    places = side_by_side({(c.series, c.asked["seq_len"]) for c in cells}, names, room_in, JOINED_PT, lengths)
    for name in names:
        look, line = style[name], [c for c in cells if c.series == name]
        of_line = [m for c in line for m in marks(c, quantity, places[name, c.asked["seq_len"]])]
        draw_marks(panel, of_line, look, joined=True)
        for cell in (c for c in line if "oom" in c.statuses):
            stack = stacks.setdefault(cell.asked["seq_len"], [])
            if look.colour not in stack:  # the series of one method share a line
                stack.append(look.colour)
            height = 1 - OOM_STEP * (stack.index(look.colour) + 1)
            where = {"transform": panel.get_xaxis_transform(), "in_layout": False, "color": look.colour}
            how: dict[str, Any] = oom_look(oom_site(cell)) | where
            panel.plot([places[name, cell.asked["seq_len"]]], [height], **how)


def marks(cell: Cell, quantity: Quantity, place: float) -> list[Mark]:
    """The mark of a cell, none where it has no value."""
    middle, replicates = quantity.middle(cell), list(quantity.points(cell).values())
    if middle is None:
        return []
    return [Mark(place, middle, quantity.interval(cell), replicates, len(replicates) == 1, cell.asked["seq_len"])]


def _oom_strip(cells: Sequence[Cell], style: Mapping[str, Style]) -> float:
    """Fraction of a panel, at its top, that is kept free of values for the marks of cells that were out of memory."""
    failed = {(c.asked["sp_size"], c.asked["seq_len"], style[c.series].colour) for c in cells if "oom" in c.statuses}
    stacks = Counter(place[:2] for place in failed)
    return OOM_STEP * (max(stacks.values()) + 1) if stacks else 0.0


def data(cells: Sequence[Cell], quantity: Quantity) -> pd.DataFrame:
    """A line a mark: the median, its replicates where there are several, and out of memory, which has no value."""
    return pd.DataFrame([line for cell in cells for line in _data(cell, quantity)])


def _data(cell: Cell, quantity: Quantity) -> list[dict[str, Any]]:
    column, middle, points, launches = quantity.column, quantity.middle(cell), quantity.points(cell), cell.launches
    low, high = quantity.interval(cell) or (None, None)
    failed = [row for row in cell.rows if row["status"] == "oom"]
    made: list[dict[str, Any]] = []

    def add(mark: str, ids: str, **values: Any) -> None:
        known = {column: None, f"interval_low_{column}": None, f"interval_high_{column}": None}
        others = {"num_replicates": len(points), "replicate": None, "oom_site": None}
        made.append(about(cell) | {"mark": mark} | known | others | values | {"trial_ids": ids})

    if middle is not None:
        bounds = {f"interval_low_{column}": low, f"interval_high_{column}": high}
        add("median", trial_ids(cell), **{column: middle}, **bounds)
    for replicate, value in points.items() if len(points) > 1 else ():
        add("replicate", joined_ids([launches[replicate]]), **{column: value}, replicate=replicate)
    if failed:
        add("out of memory", joined_ids(failed), oom_site=oom_site(cell))
    return made
