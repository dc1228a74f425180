"""The figure of where the time of a step goes beyond the kernel alone: a bar a series, split where it was measured."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sp_bench.report.figures.legends import columns_within, legend, wide_enough
from sp_bench.report.figures.styles import BLACK, SKY, VERMILLION, Style
from sp_bench.report.formats import MISSING, number, whole
from sp_bench.report.ratios import ratio_of_medians
from sp_bench.report.time_parts import Attribution, largest

CAPTION = (
    "Step time beyond the kernel alone, at the longest seq_len of each sp_size; each panel has its own scale. Compute "
    "beyond the kernel: uneven ranks, smaller blocks, merges and copies. The ring marks where the step would end if "
    "all of its communication were exposed; inside the bar, communication slows the step by more than it takes alone. "
    "On the right: kernel alone / step, and the step. Bars of steps without a "
    "measured kernel alone begin at compute only."
)
COMPUTE, EXPOSED, UNSPLIT = SKY, VERMILLION, "0.7"
LABELS = {
    COMPUTE: "compute beyond the kernel",
    EXPOSED: "exposed communication",
    UNSPLIT: "not split: no compute-only step",
}
BAR = 0.5
BESIDE_NAMES = 5.0  # inches of the bars and of the numbers on their right


def draw_time_parts(group: Sequence[Attribution], style: Mapping[str, Style]) -> Figure:
    """One panel a sp_size, at its longest seq_len, one line a series."""
    sizes = sorted({a.cell.asked["sp_size"] for a in group})
    panels = [largest([a for a in group if a.cell.asked["sp_size"] == size]) for size in sizes]
    heights = [len(each) + 0.6 for each in panels]
    width = max(7.6, wide_enough([a.cell.series for a in group], BESIDE_NAMES))
    figure = Figure(figsize=(width, 0.26 * sum(heights) + 0.66 * len(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flat
    for panel, each in zip(axes, panels, strict=True):
        _panel(panel, sorted(each, key=lambda a: -style[a.cell.series].order))
    shown = [a for each in panels for a in each]
    start = "compute only" if all(a.alone is None for a in shown) else "the kernel alone"
    figure.axes[-1].set_xlabel(f"ms of a step beyond {start}")
    used = {colour for a in shown for colour, _, _ in _bars(a)}
    handles: list[Patch | Line2D] = [Patch(color=c, label=label) for c, label in LABELS.items() if c in used]
    if any(_unhidden(a) is not None for a in shown):
        handles.append(Line2D([], [], **RING, label="without any overlap"))
    labels = [str(handle.get_label()) for handle in handles]
    legend(figure, handles, labels, columns_within(labels, width, len(handles))[0])
    return figure


RING = {"marker": "o", "ms": 6, "mfc": "none", "mec": BLACK, "mew": 1.2, "ls": ""}


def _bars(a: Attribution) -> list[tuple[str, float, float]]:
    """(colour, from, to) in ms beyond the kernel alone, or beyond compute only where the kernel alone is not known."""
    if a.alone_ms is None:
        return [(EXPOSED, 0.0, a.exposed_ms or 0.0)]
    beyond, end = a.beyond_kernel_ms, (a.cell.median_step_ms or 0.0) - a.alone_ms
    return [(UNSPLIT, 0.0, end)] if beyond is None else [(COMPUTE, 0.0, beyond), (EXPOSED, beyond, end)]


def _unhidden(a: Attribution) -> float | None:
    if a.comm_only_ms is None or a.compute_only_ms is None:
        return None
    return a.comm_only_ms + (a.beyond_kernel_ms or 0.0)


def _share(a: Attribution) -> str:
    return MISSING if a.alone is None else f"{ratio_of_medians(a.alone, a.cell):.3f}"


def _panel(panel: Axes, lines: Sequence[Attribution]) -> None:
    ends = [0.0]
    for place, a in enumerate(lines):
        for colour, low, high in _bars(a):
            panel.barh(place, high - low, BAR, left=low, color=colour, edgecolor="white", linewidth=0.5)
            ends += [low, high]
        if (unhidden := _unhidden(a)) is not None:
            panel.plot([unhidden], [place], **RING, in_layout=False)
            ends.append(unhidden)
    panel.axvline(0, color="black", lw=0.8)
    reach = max(ends) - min(ends) or 1.0
    panel.set_xlim(min(ends) - (0.04 * reach if min(ends) < 0 else 0), max(ends) + 0.04 * reach)
    panel.set_yticks(range(len(lines)), [a.cell.series for a in lines])
    panel.set_ylim(-0.7, len(lines) - 0.3)
    beside = panel.secondary_yaxis("right")
    known = any(a.alone is not None for a in lines)
    shares = [f"{_share(a)}    " if known else "" for a in lines]
    steps = [f"{number(a.cell.median_step_ms)} ms" for a in lines]
    beside.set_yticks(range(len(lines)), [share + step for share, step in zip(shares, steps, strict=True)])
    beside.tick_params(length=0)
    beside.spines["right"].set_visible(False)
    panel.set_title("alone / step, step" if known else "step", loc="right", color="0.35")
    asked = lines[0].cell.asked
    panel.set_title(f"sp_size {asked['sp_size']}, seq_len {whole(asked['seq_len'])} tokens", loc="left")
    panel.grid(axis="y", visible=False)
