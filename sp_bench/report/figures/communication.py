"""The figure of predicted, counted and wire bytes at the longest length of each sp_size, stacked by phase."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sp_bench.report.cells import PHASES, Cell
from sp_bench.report.figures.axes import fitted_names, fitting, name_rows
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import legend
from sp_bench.report.figures.styles import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, Style
from sp_bench.report.figures.venues import width_in
from sp_bench.report.formats import byte_unit, whole

_INKS = (BLUE, SKY, VERMILLION, GREEN, ORANGE, PURPLE, BLACK)
COLOURS: Mapping[str, str] = dict(zip(PHASES, _INKS, strict=True))  # in the order they are stacked
OTHER, UNKNOWN = "#999999", "#F0E442"
WIRE: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.25", "linewidth": 0.9}
SIDES = ("predicted", "counted")
ROW_IN = 0.3  # least height of a row: two bars, or three
PANEL_IN, SPARE_IN = 0.34, 0.9
CAPTION = (
    "Communication at the longest seq_len of each sp_size, by phase in the order of the legend: plain bars are the "
    "closed form, hatched ones were counted from the collectives of one untimed step; = and ≠ compare the two exactly. "
    "A phase without a closed form has no plain part."
)
OTHER_WORDS = " Phase other is outside that comparison and has its own thin bar."
WIRE_WORDS = (
    " White bars are what the NVLink counters saw, of all phases at once, protocol and phase other included; a method "
    "without one sent another way or the counters were not read."
)


def draw_communication(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """Bytes that the rank that sends most sends off-rank in one step. None where no cell knows any."""
    sizes: dict[int, list[Cell]] = {}
    for cell in cells:
        if cell.communication.phases:
            sizes.setdefault(cell.asked["sp_size"], []).append(cell)
    longest = {n: max(c.asked["seq_len"] for c in group) for n, group in sizes.items()}
    every = {n: [c for c in sizes[n] if c.asked["seq_len"] == longest[n]] for n in sorted(sizes)}
    if not every:
        return None
    texts, row_in = fitted_names([c.series for group in every.values() for c in group])
    row_in = max(row_in, ROW_IN)
    kept = fitting({n: len(group) for n, group in every.items()}, row_in, PANEL_IN, SPARE_IN)
    panels = {n: sorted(every[n], key=lambda c: style[c.series].order) for n in kept}
    shown = [c for group in panels.values() for c in group]
    caption = CAPTION
    caption += OTHER_WORDS if any(_other(c) for c in shown) else ""
    caption += WIRE_WORDS if any(c.middle("comm_wire_bytes") is not None for c in shown) else ""
    if others := [str(n) for n in every if n not in panels]:
        caption += f" sp_size {', '.join(others)} is in the tables only."
    data = pd.DataFrame([line for cell in shown for line in _data(cell)])
    return Plot(_figure(panels, texts, row_in), caption, data, tuple(shown))


def _figure(panels: Mapping[int, Sequence[Cell]], texts: Mapping[str, str], row_in: float) -> Figure:
    shown = [c for group in panels.values() for c in group]
    heights = [len(group) + 0.5 for group in panels.values()]
    height = row_in * sum(heights) + PANEL_IN * len(heights) + SPARE_IN
    figure = Figure(figsize=(width_in(), height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights).flat
    largest = max(max(_total(c, 0), _total(c, 1), _other(c), c.middle("comm_wire_bytes") or 0.0) for c in shown)
    scale, unit = byte_unit(largest)
    for panel, (sp_size, group) in zip(axes, panels.items(), strict=True):
        rows = name_rows(panel, texts, [c.series for c in group])
        for cell in group:
            _bars(panel, rows[cell.series], cell, scale)
            end = max(_total(cell, 0), _total(cell, 1), cell.middle("comm_wire_bytes") or 0.0) / scale
            sign = {True: "=", False: "≠", None: ""}[cell.communication.equal]
            panel.text(end + 0.012 * largest / scale, rows[cell.series], sign, va="center")
        panel.set_title(f"sp_size {sp_size}, seq_len {whole(group[0].asked['seq_len'])} tokens", loc="left")
    figure.axes[0].set_xlim(0, largest / scale * 1.08 or 1.0)
    figure.axes[-1].set_xlabel(f"bytes sent off-rank a step by the rank that sends most ({unit})")
    handles = _handles(shown)
    legend(figure, handles, [str(handle.get_label()) for handle in handles], 4)
    return figure


def _total(cell: Cell, side: int) -> float:
    """Stacked bytes of a side: 0 predicted, 1 counted."""
    return sum(sides[side] or 0.0 for phase, sides in cell.communication.phases.items() if phase != "other")


def _other(cell: Cell) -> float:
    return cell.communication.phases.get("other", (None, None))[1] or 0.0


def _stacked(cell: Cell) -> list[str]:
    """Phases in the order of their bars; those that are not known come last, by name."""
    known = [p for p in PHASES if p in cell.communication.phases]
    return [*known, *sorted(set(cell.communication.phases) - {*PHASES, "other"})]


def _bars(panel: Axes, row: int, cell: Cell, scale: float) -> None:
    """From the top: predicted, counted, wire, other."""
    wire = cell.middle("comm_wire_bytes")
    bar = 0.72 / (2 if wire is None else 3)
    top = row + 0.36 - bar / 2
    for side in (0, 1):
        left = 0.0
        for phase in _stacked(cell):
            size = (cell.communication.phases[phase][side] or 0.0) / scale
            panel.barh(
                top - side * bar, size, bar, left=left, color=COLOURS.get(phase, UNKNOWN), edgecolor="white",
                linewidth=0.5, hatch="////" if side else None, in_layout=False,
            )  # fmt: skip
            left += size
    if wire is not None:
        panel.barh(top - 2 * bar, wire / scale, bar * 0.9, in_layout=False, **WIRE)
    if other := _other(cell):
        panel.barh(row - 0.43, other / scale, 0.1, color=OTHER, linewidth=0, in_layout=False)


def _handles(cells: Sequence[Cell]) -> list[Patch]:
    present = {phase for c in cells for phase in c.communication.phases}
    handles = [Patch(color=colour, label=phase) for phase, colour in COLOURS.items() if phase in present]
    if unknown := sorted(present - {*PHASES, "other"}):
        handles.append(Patch(color=UNKNOWN, label=f"unknown phase: {', '.join(unknown)}"))
    if any(_other(c) for c in cells):
        handles.append(Patch(color=OTHER, label="other (counted only)"))
    handles.append(Patch(facecolor="0.75", edgecolor="white", label="predicted"))
    handles.append(Patch(facecolor="0.75", edgecolor="white", hatch="////", label="counted"))
    if any(c.middle("comm_wire_bytes") is not None for c in cells):
        handles.append(Patch(**WIRE, label="wire (NVLink counters)"))
    return handles


def _data(cell: Cell) -> list[dict[str, Any]]:
    """A line a segment of a bar, then the wire's."""
    made = []
    phases = [*_stacked(cell), *(["other"] if "other" in cell.communication.phases else [])]
    for side, name in enumerate(SIDES):
        for phase in phases:
            made.append({"side": name, "phase": phase, "bytes_per_step": cell.communication.phases[phase][side]})
    if (wire := cell.middle("comm_wire_bytes")) is not None:
        made.append({"side": "wire", "phase": "all", "bytes_per_step": wire})
    equal = {"predicted_equals_counted": cell.communication.equal}
    return [about(cell) | line | equal | {"trial_ids": trial_ids(cell)} for line in made]
