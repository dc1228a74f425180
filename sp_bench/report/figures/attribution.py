"""The figure of where the time of a step goes beyond the kernel alone: a bar a series, split where it was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sp_bench.report.figures.axes import fitted_names, fitting, name_rows
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import legend
from sp_bench.report.figures.styles import BLACK, SKY, VERMILLION, Style
from sp_bench.report.figures.venues import width_in
from sp_bench.report.formats import number, whole
from sp_bench.report.time_parts import Attribution, Part, largest

CAPTION = (
    "Step time beyond the kernel alone, at the longest seq_len of each sp_size; each panel has its own scale. "
    "Compute beyond the kernel: uneven ranks, smaller blocks, merges and copies. The ring marks compute only + "
    "communication only, in which packing and merging count twice: without overlap the step would end before it; "
    "inside the bar, communication slows the step by more than it takes alone. On the right: kernel alone / step, and "
    "the step. Bars of steps without a measured kernel alone begin at compute only. Medians over replicates, of each "
    "part its own: they need not add up. Lines across a bar's end: order-statistic intervals of its part, from 6 "
    "replicates on."
)
COMPUTE, EXPOSED, UNSPLIT = SKY, VERMILLION, "0.7"
LABELS = {
    COMPUTE: "compute beyond the kernel",
    EXPOSED: "exposed communication",
    UNSPLIT: "not split: no compute-only step",
}
WHISKER: dict[str, Any] = {"color": BLACK, "lw": 0.9, "marker": "|", "ms": 5, "solid_capstyle": "butt"}
RING: dict[str, Any] = {"marker": "o", "ms": 6, "mfc": "none", "mec": BLACK, "mew": 1.2, "ls": ""}
BAR = 0.5
NAMES_SHARE = 0.3  # of the figure's width: numbers stand on the right
PANEL_IN, SPARE_IN = 0.62, 0.4


def draw_time_parts(group: Sequence[Attribution], style: Mapping[str, Style]) -> Plot | None:
    """One panel a sp_size, at its longest seq_len, one line a series; `group` is of one setting."""
    sizes = sorted({a.cell.asked["sp_size"] for a in group})
    every = {size: largest([a for a in group if a.cell.asked["sp_size"] == size]) for size in sizes}
    if not every:
        return None
    texts, row_in = fitted_names([a.cell.series for each in every.values() for a in each], NAMES_SHARE)
    kept = fitting({size: len(each) for size, each in every.items()}, row_in, PANEL_IN + 0.6 * row_in, SPARE_IN)
    panels = [sorted(every[size], key=lambda a: style[a.cell.series].order) for size in kept]
    shown = [a for each in panels for a in each]
    caption = CAPTION
    if others := [str(n) for n in sizes if n not in kept]:
        caption += f" sp_size {', '.join(others)} is in the tables only."
    sources = {c.cell_id: c for a in shown for c in (a.cell, a.alone) if c is not None}
    data = pd.DataFrame([line for a in shown for line in _data(a)])
    return Plot(_figure(panels, texts, row_in), caption, data, tuple(sources.values()))


def bar_panels(rows: Sequence[int], row_in: float) -> tuple[Figure, list[Axes]]:
    """Panels below each other, each with its own scale and so many rows of bars."""
    heights = [number + 0.6 for number in rows]
    height = row_in * sum(heights) + PANEL_IN * len(heights) + SPARE_IN
    figure = Figure(figsize=(width_in(), height), layout="constrained")
    return figure, list(figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights).flat)


def _figure(panels: Sequence[Sequence[Attribution]], texts: Mapping[str, str], row_in: float) -> Figure:
    figure, axes = bar_panels([len(each) for each in panels], row_in)
    for panel, each in zip(axes, panels, strict=True):
        _panel(panel, each, texts)
    shown = [a for each in panels for a in each]
    start = "compute only" if all(a.alone is None for a in shown) else "the kernel alone"
    figure.axes[-1].set_xlabel(f"ms of a step beyond {start}")
    used = {colour for a in shown for colour, _, _ in _bars(a)}
    handles: list[Patch | Line2D] = [Patch(color=c, label=label) for c, label in LABELS.items() if c in used]
    if any(_unhidden(a) is not None for a in shown):
        handles.append(Line2D([], [], **RING, label="compute only + communication only"))
    legend(figure, handles, [str(handle.get_label()) for handle in handles], len(handles))
    return figure


def _bars(a: Attribution) -> list[tuple[str, float, float]]:
    """(colour, from, to) in ms beyond the kernel alone, or beyond compute only where the kernel alone is not known."""
    if a.alone_ms is None:
        return [(EXPOSED, 0.0, _ms(a.exposed))]
    if a.beyond_kernel is None:
        return [(UNSPLIT, 0.0, (a.cell.median_step_ms or 0.0) - a.alone_ms)]
    beyond = a.beyond_kernel.ms
    return [(COMPUTE, 0.0, beyond), (EXPOSED, beyond, beyond + _ms(a.exposed))]


def _ms(part: Part | None) -> float:
    return part.ms if part else 0.0


def _whiskers(a: Attribution) -> list[tuple[list[float], float]]:
    """(ends of a part's interval, counted from where the part begins in its bar; place above the bar's middle)."""
    parts = ((a.beyond_kernel, 0.0, BAR / 4), (a.exposed, _ms(a.beyond_kernel), -BAR / 4))
    found = [(part.interval, start, above) for part, start, above in parts if part and part.interval]
    return [([start + span.low, start + span.high], above) for span, start, above in found]


def _unhidden(a: Attribution) -> float | None:
    if a.comm_only_ms is None or a.compute_only_ms is None:
        return None
    return a.comm_only_ms + _ms(a.beyond_kernel)


def _panel(panel: Axes, lines: Sequence[Attribution], texts: Mapping[str, str]) -> None:
    rows = name_rows(panel, texts, [a.cell.series for a in lines])
    ends = [0.0]
    for a in lines:
        row = rows[a.cell.series]
        for colour, low, high in _bars(a):
            panel.barh(row, high - low, BAR, left=low, color=colour, edgecolor="white", linewidth=0.5)
            ends += [low, high]
        for bounds, above in _whiskers(a):
            panel.plot(bounds, [row + above, row + above], **WHISKER)
            ends += bounds
        if (unhidden := _unhidden(a)) is not None:
            panel.plot([unhidden], [row], **RING, in_layout=False)
            ends.append(unhidden)
    panel.axvline(0, color="black", lw=0.8)
    reach = max(ends) - min(ends) or 1.0
    panel.set_xlim(min(ends) - (0.04 * reach if min(ends) < 0 else 0), max(ends) + 0.04 * reach)
    beside = panel.secondary_yaxis("right")
    known = any(a.alone is not None for a in lines)
    steps = [f"{a.fraction[0]}   {_step(a)}" if known else _step(a) for a in lines]
    beside.set_yticks([rows[a.cell.series] for a in lines], steps)
    beside.tick_params(length=0)
    beside.spines["right"].set_visible(False)
    panel.set_title("alone / step, step" if known else "step", loc="right", color="0.35")
    asked = lines[0].cell.asked
    panel.set_title(f"sp_size {asked['sp_size']}, seq_len {whole(asked['seq_len'])} tokens", loc="left")


def _step(a: Attribution) -> str:
    return f"{number(a.cell.median_step_ms)} ms"


def _data(a: Attribution) -> list[dict[str, Any]]:
    """The parts that are known; differences are medians of the replicates' differences."""
    known = {
        "step": a.cell.median_step_ms,
        "kernel alone": a.alone_ms,
        "compute only": a.compute_only_ms,
        "communication only": a.comm_only_ms,
    }
    parts = {name: Part(ms, None) for name, ms in known.items() if ms is not None}
    differences = {"compute beyond the kernel": a.beyond_kernel, "exposed communication": a.exposed}
    parts |= {name: part for name, part in differences.items() if part is not None}
    ids = {"kernel alone": trial_ids(a.alone) if a.alone else ""}
    return [
        about(a.cell)
        | {"part": name, "median_ms": part.ms}
        | {f"interval_{end}_ms": getattr(part.interval, end, None) for end in ("low", "high")}
        | {"trial_ids": ids.get(name, trial_ids(a.cell))}
        for name, part in parts.items()
    ]
