"""The figure of where the time of a step goes: on one line a series, its kernel alone, its compute only, its step."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sp_bench.report.compare import ratio_of_medians
from sp_bench.report.formats import whole
from sp_bench.report.styles import BLACK, GREEN, ORANGE, Style
from sp_bench.report.time_parts import Attribution, largest

CAPTION = (
    "Where the time of a step goes, at the longest seq_len of each sp_size; each panel has its own scale. From the bar "
    "of the kernel alone to compute only: uneven ranks, smaller blocks, merges and copies; from there to the step: "
    "exposed communication. The figure on the right is kernel alone / step. What was not measured has no mark."
)
MARKS = {  # (marker, colour, filled), from what cannot be beaten to what was measured
    "kernel alone": ("|", BLACK, True),
    "compute only": ("o", GREEN, True),
    "step": ("D", BLACK, True),
    "comm only": ("o", ORANGE, False),
}


def draw_time_parts(group: Sequence[Attribution], style: Mapping[str, Style]) -> Figure:
    """One panel a sp_size, at its longest seq_len, one line a series."""
    by_size = {size: [a for a in group if a.cell.asked["sp_size"] == size] for size in _sizes(group)}
    panels = [largest(each) for each in by_size.values()]
    heights = [len(each) + 0.6 for each in panels]
    figure = Figure(figsize=(7.6, 0.25 * sum(heights) + 0.62 * len(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flat
    for panel, each in zip(axes, panels, strict=True):
        _panel(panel, sorted(each, key=lambda a: -style[a.cell.series].order))
    figure.axes[-1].set_xlabel("ms a step")
    present = {name for each in panels for a in each for name, value in _values(a).items() if value is not None}
    handles = [Line2D([], [], label=name, **_look(name)) for name in MARKS if name in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _sizes(group: Sequence[Attribution]) -> list[int]:
    return sorted({a.cell.asked["sp_size"] for a in group})


def _values(a: Attribution) -> dict[str, float | None]:
    values = (a.alone_ms, a.compute_only_ms, a.cell.median_step_ms, a.comm_only_ms)
    return dict(zip(MARKS, values, strict=True))


def _panel(panel: Axes, lines: Sequence[Attribution]) -> None:
    for place, a in enumerate(lines):
        values = _values(a)
        from_ms = a.alone_ms if a.alone_ms is not None else a.compute_only_ms
        panel.hlines(place, from_ms or 0.0, a.cell.median_step_ms or 0.0, color="0.6", lw=3, zorder=1.5)
        for name, value in values.items():
            if value is not None:
                panel.plot([value], [place], **_look(name), in_layout=False)
        if a.alone is not None:
            share = f"{ratio_of_medians(a.alone, a.cell):.3f}"
            panel.text(1.01, place, share, transform=panel.get_yaxis_transform(), va="center")
    largest = max(value for a in lines for value in _values(a).values() if value is not None)
    panel.set_xlim(0, largest * 1.05)
    panel.set_yticks(range(len(lines)), [a.cell.series for a in lines])
    panel.set_ylim(-0.7, len(lines) - 0.3)
    asked = lines[0].cell.asked
    panel.set_title(f"sp_size {asked['sp_size']}, seq_len {whole(asked['seq_len'])} tokens", loc="left")
    panel.grid(axis="y", visible=False)


def _look(name: str) -> dict[str, Any]:
    shape, colour, filled = MARKS[name]
    size = {"|": 13, "D": 4.5}.get(shape, 5.5)
    face = colour if filled else "white"
    return {"marker": shape, "ms": size, "mec": colour, "mfc": face, "mew": 2 if shape == "|" else 1.1, "ls": ""}
