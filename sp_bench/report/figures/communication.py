"""The figure of predicted and counted bytes, stacked by phase, at the longest length of each sp_size."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sp_bench.report.cells import Cell
from sp_bench.report.figures.legends import columns_within, legend, wide_enough
from sp_bench.report.figures.styles import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, Style
from sp_bench.report.formats import byte_unit, whole

PHASES = {
    "forward": BLUE,
    "recompute": SKY,
    "backward": VERMILLION,
    "parameters": GREEN,
    "gradients": ORANGE,
    "optimizer": PURPLE,
    "loss": BLACK,
}  # in the order they are stacked
OTHER, UNKNOWN = "#999999", "#F0E442"
BAR = 0.36


def draw_communication(cells: Sequence[Cell], style: Mapping[str, Style]) -> tuple[Figure, str] | None:
    """Bytes that the rank that sends most sends off-rank in one step. None where no cell knows any."""
    sizes: dict[int, list[Cell]] = {}
    for cell in cells:
        if cell.communication.phases:
            sizes.setdefault(cell.asked["sp_size"], []).append(cell)
    longest = {n: max(c.asked["seq_len"] for c in group) for n, group in sizes.items()}
    panels = {n: [c for c in sizes[n] if c.asked["seq_len"] == longest[n]] for n in sorted(sizes)}
    if not panels:
        return None
    shown = [c for group in panels.values() for c in group]
    figure = Figure(figsize=(max(7.6, wide_enough([c.series for c in shown])), _height(panels)), layout="constrained")
    heights = [len(group) + 0.5 for group in panels.values()]
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights).flat
    largest = max(max(_total(c, 0), _total(c, 1), _other(c)) for c in shown)
    scale, unit = byte_unit(largest)
    for panel, (sp_size, group) in zip(axes, panels.items(), strict=True):
        ordered = sorted(group, key=lambda c: -style[c.series].order)
        for place, cell in enumerate(ordered):
            _bars(panel, place, cell, scale, largest / scale or 1.0)
        panel.set_yticks(range(len(ordered)), [c.series for c in ordered])
        panel.set_ylim(-0.75, len(ordered) - 0.25)
        panel.set_title(f"sp_size {sp_size}, seq_len {whole(longest[sp_size])} tokens", loc="left")
        panel.grid(axis="y", visible=False)
    figure.axes[0].set_xlim(0, largest / scale * 1.08 or 1.0)
    figure.axes[-1].set_xlabel(f"bytes sent off-rank a step by the rank that sends most ({unit})")
    _legend(figure, shown)
    caption = (
        "Communication at the longest seq_len of each sp_size, by phase: plain bars are the closed form, hatched ones "
        "were counted from the collectives of one untimed step; = and ≠ compare the two exactly. Phase other is "
        "outside that comparison and has its own thin bar."
    )
    return figure, caption


def _height(panels: Mapping[int, Sequence[Cell]]) -> float:
    return 0.27 * sum(len(group) + 0.5 for group in panels.values()) + 0.34 * len(panels) + 1.0


def _total(cell: Cell, side: int) -> float:
    """Stacked bytes of a side: 0 predicted, 1 counted."""
    return sum(sides[side] or 0.0 for phase, sides in cell.communication.phases.items() if phase != "other")


def _other(cell: Cell) -> float:
    return cell.communication.phases.get("other", (None, None))[1] or 0.0


def _bars(panel: Axes, place: int, cell: Cell, scale: float, width: float) -> None:
    known = [p for p in PHASES if p in cell.communication.phases]
    phases = [*known, *sorted(set(cell.communication.phases) - {*PHASES, "other"})]
    for side, offset in ((0, BAR / 2), (1, -BAR / 2)):
        left = 0.0
        for phase in phases:
            size = (cell.communication.phases[phase][side] or 0.0) / scale
            panel.barh(
                place + offset, size, BAR, left=left, color=PHASES.get(phase, UNKNOWN), edgecolor="white",
                linewidth=0.5, hatch="////" if side else None, in_layout=False,
            )  # fmt: skip
            left += size
    sign = {True: "=", False: "≠", None: ""}[cell.communication.equal]
    end = max(_total(cell, 0), _total(cell, 1)) / scale
    panel.text(end + 0.012 * width, place, sign, va="center", weight="bold", color="black")
    if other := _other(cell):
        panel.barh(place - BAR * 1.2, other / scale, BAR * 0.3, color=OTHER, linewidth=0)


def _legend(figure: Figure, cells: Sequence[Cell]) -> None:
    present = {phase for c in cells for phase in c.communication.phases}
    handles = [Patch(color=colour, label=phase) for phase, colour in PHASES.items() if phase in present]
    if present - {*PHASES, "other"}:
        handles.append(Patch(color=UNKNOWN, label="unknown phase"))
    if any(_other(c) for c in cells):
        handles.append(Patch(color=OTHER, label="other (counted only)"))
    handles.append(Patch(facecolor="0.75", edgecolor="white", label="predicted"))
    handles.append(Patch(facecolor="0.75", edgecolor="white", hatch="////", label="counted"))
    labels = [str(handle.get_label()) for handle in handles]
    legend(figure, handles, labels, columns_within(labels, figure.get_figwidth(), 5)[0])
