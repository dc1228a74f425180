"""Where a training step's time goes: its phases; and its kernels by class, messages that nothing hides, and waiting."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, listed
from sp_bench.analysis.identifiers import RECOMPUTED
from sp_bench.analysis.ladder import chosen, each_adds_one, of_place
from sp_bench.analysis.ratios import by_speed
from sp_bench.analysis.settings import Setting
from sp_bench.report.figures.panels import ROW_IN
from sp_bench.report.figures.style import BLACK, Look, Plot, bar, explained, is_modelled, trial_ids, wrapped

Parts = Mapping[str, tuple[str, str, str]]  # part -> label, colour, and a hatch that tells it apart in greyscale
# Paul Tol's bright scheme and greys, 2021
KERNELS: Parts = {
    "attention": ("attention", "#4477AA", ""),
    "matmul": ("matrix products", "#66CCEE", "////"),
    "other": ("other kernels", "#CCBB44", "...."),
    "exposed_messages": ("messages that nothing hides", "#EE6677", "xxxxxx"),
    "exposed_host_copies": ("copies from or to the host that nothing hides", "#AA3377", "----"),
    "idle": ("nothing runs", "#DDDDDD", ""),
}
HOST: Parts = {"optimizer_ms": ("AdamW on the host, after the last kernel", "#228833", "++++")}  # of the timed steps
PHASES: Parts = {
    "forward": ("forward", "#4477AA", ""),
    "recompute": ("recomputation", "#EE6677", "xxxxxx"),
    "backward": ("backward", "#66CCEE", "////"),
    "optimizer": ("optimizer", "#AA3377", "...."),
}
MARKS = tuple(
    {"marker": m, "color": BLACK, "mec": "white", "ms": 4.5, "mew": 0.6, "ls": "none"} for m in (">", "<", "o")
)
LINE = {"marker": "|", "color": BLACK, "ms": 9, "mew": 1.2, "ls": "none"}  # in the legend
LEAST_SEEN = 0.002  # of the longest bar: about a pixel; what is nowhere wider is not in the legend
MOST_BARS = 24  # of one figure: the longest sequences go first
TIMED, LIMITED = "the timed step", "share_of_limit"
SLOWED = "The profiler slows the host, so where the host is late, messages wait longer"
PROFILED = (
    f"The mark is the timed step, which had no profiler. {SLOWED}, and the part in which nothing runs is longer, than "
    "in the timed step."
)
CLIMBS = "The plainest step is at the top; each other has all options of one above it, and one more."
OF_LIMIT = "limit: attention and products alone"  # in the legend
LIMIT = (
    "The black line is the limit: what attention and matrix products would take of the timed step, each alone and "
    "computed once."
)


def draw(settings: Sequence[Setting], look: Look) -> list[Plot]:
    kernels = _plot(settings, "", "kernel_ms", KERNELS, look)
    phases = _plot(settings, "phases", "part_ms", PHASES, look)
    return [plot for plot in (kernels, phases) if plot]


def _plot(settings: Sequence[Setting], name: str, column: str, shown: Parts, look: Look) -> Plot | None:
    """A bar for each step of which `column` is known: the fastest first, and rungs with the fewest options first."""
    cells = [(setting, cell) for setting in settings for cell in setting.cells if _is_step(cell)]
    found = [(setting, cell, parts) for setting, cell in cells if (parts := part_ms(cell, column, [*shown]))]
    found.sort(key=lambda each: (-(each[1].asked["seq_len"] or 0), by_speed(each[1])))
    found = found[:MOST_BARS]
    if not found:
        return None
    in_ms = len({of_place(cell) for _, cell, _ in found}) == 1  # the same work on as many GPUs: times can be compared
    rungs = in_ms and each_adds_one([cell for _, cell, _ in found])
    if rungs:
        found.sort(key=lambda each: len(chosen(each[1])))
    kernels = column == "kernel_ms"
    if kernels and any(cell.middle("optimizer_ms") for _, cell, _ in found):
        shown = {**shown, **HOST}
        found = [(s, cell, {**parts, "optimizer_ms": cell.middle("optimizer_ms") or 0.0}) for s, cell, parts in found]
    bars = [_bar(*each, in_ms=in_ms, with_limit=kernels) for each in found]
    figure, shared, data = stacked(bars, shown, "ms" if in_ms else "share of the step", OF_LIMIT, look)
    figure.axes[0].set_xlim(0, None if in_ms else 1)
    what = "by the kernels that ran" if kernels else "or the one step that was timed, by its phases"
    said = f"{'One' if in_ms else 'Shares of one'} untimed step, {what}"
    if kernels and not in_ms:
        said = f"Shares of the timed step, {what} in an untimed one"
    sentences = [shared, f"{said}."]
    sentences += [CLIMBS] if rungs else []
    if not kernels:
        return Plot("steps", name, figure, " ".join(sentences), data.drop(columns="line"))
    sentences += ["AdamW's time on the host is of the timed steps."] if shown.keys() > KERNELS.keys() else []
    sentences += [PROFILED if in_ms else f"{SLOWED} than in the timed step.", LIMIT]
    return Plot(
        "steps", name, figure, " ".join(sentences), data.rename(columns={"line": "limit_ms" if in_ms else LIMITED})
    )


class Bar(NamedTuple):
    setting: Setting
    cell: Cell
    parts: Mapping[str, float]
    line: float | None  # position of a black line
    marks: Mapping[str, float] = MappingProxyType({})  # label -> position of a mark; all bars have the same labels


def _bar(setting: Setting, cell: Cell, parts: Mapping[str, float], *, in_ms: bool, with_limit: bool) -> Bar:
    """A bar from parts in ms. In ms it shows the untimed step, and its limit and mark are those of the timed step. Else
    it shows shares of the step; of the timed one with its limit: the profiler makes the host, and what waits, late."""
    share, step_ms = cell.middle(LIMITED) if with_limit else None, cell.median_step_ms or 0
    if in_ms:
        return Bar(setting, cell, parts, share and share * step_ms, {TIMED: step_ms} if with_limit else {})
    busy = sum(size for part, size in parts.items() if part != "idle")
    total = max(step_ms, busy) if with_limit else sum(parts.values())
    shares = {part: size / total for part, size in parts.items()}
    if with_limit:
        shares["idle"] = 1 - busy / total
    return Bar(setting, cell, shares, share)


def stacked(
    bars: Sequence[Bar], shown: Parts, label: str, of_line: str, look: Look
) -> tuple[Figure, str, pd.DataFrame]:
    """Draw stacked bars, the first at the top. Returns the figure, the options that all bars share, and the data.

    label: of the axis. of_line: what the legend calls the black lines.

    Hatches are white; of one real rank, coloured on white."""
    settings = list({bar.setting.title: bar.setting for bar in bars}.values())
    wide = look.width_in > 5
    width, abreast = (60, 3) if wide else (28, 1)
    longest = max(sum(bar.parts.values()) for bar in bars)
    handles: list[Artist] = [
        Patch(facecolor=ink, edgecolor="white", hatch=hatch, lw=0, label=name)
        for part, (name, ink, hatch) in shown.items()
        if any(bar.parts.get(part, 0) > LEAST_SEEN * longest for bar in bars)
    ]
    marked = next((bar.marks for bar in bars if bar.marks), {})
    handles += [
        Line2D([], [], label=label_of_mark, **shape) for label_of_mark, shape in zip(marked, MARKS, strict=False)
    ]
    if any(bar.line is not None for bar in bars):
        handles.append(Line2D([], [], label=of_line, **LINE))
    around_in = (0.5 if wide else 0.6) + 0.15 * math.ceil(len(handles) / abreast)  # the axis, and the legend's lines
    kernels = {bar.cell.asked["kernel"] for bar in bars}
    names = [wrapped(_name(bar, settings, len(kernels) > 1), width) for bar in reversed(bars)]
    tallest = max(name.count("\n") for name in names)
    figure = look.figure((ROW_IN + 0.03 + 0.1 * tallest) * len(bars) + around_in)
    axis = figure.subplots()
    data = []
    for place, (_, cell, parts, line, marks) in enumerate(reversed(bars)):
        left = 0.0
        for part, size in parts.items():
            _, ink, hatch = shown[part]
            edge = {"lw": 1.0} if is_modelled(cell) else {"edgecolor": "white", "lw": 0}
            axis.barh(place, size, left=left, height=0.7, hatch=hatch, **{**bar(cell, ink), **edge})
            left += size
        if line is not None:
            axis.plot([line, line], [place - 0.42, place + 0.42], color=BLACK, lw=1.2)
        for at, shape in zip(marks.values(), MARKS, strict=False):
            axis.plot([at], [place], **shape)
        data.append({"method": words.method(cell), "seq_len": cell.asked["seq_len"], "step_ms": cell.median_step_ms,
                     "evidence": cell.asked["evidence"],
                     **parts, **marks, "line": line, "trial_ids": trial_ids(cell)})  # fmt: skip
    axis.set_yticks(range(len(bars)), names, fontsize=6.5)
    axis.set_ylim(-0.7, len(bars) - 0.3)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(label)
    figure.legend(handles=handles, loc="outside lower center", ncols=abreast)
    shared = [part for part in settings[0].parts if all(part in setting.parts for setting in settings)]
    return (
        figure,
        f"{', '.join(shared)}.{explained((bar.cell for bar in bars), 'library', 'in parts')}",
        pd.DataFrame(data[::-1]),
    )


def _is_step(cell: Cell) -> bool:
    """Whether it is a training step on GPUs. CPU times show only that the path works."""
    return cell.ok and cell.asked["workload"] == "train_step" and cell.processor == "GPU"


def part_ms(cell: Cell, column: str, parts: Sequence[str]) -> dict[str, float]:
    """Milliseconds of each part of one step: mean over ranks, median over replicates. Empty if unknown."""
    known = [ranks for row in cell.measured if (ranks := listed(row[column]))]
    if column == "part_ms" and cell.options.get(RECOMPUTED) not in (None, "none"):
        known = [
            ranks for ranks in known if any(rank["recompute"] for rank in ranks)
        ]  # old rows have 0: recomputation counted as backward
    complete = [ranks for ranks in known if all(rank[part] is not None for rank in ranks for part in parts)]
    if not complete:
        return {}
    return {part: median(mean(rank[part] for rank in ranks) for ranks in complete) for part in parts}


def _name(bar: Bar, settings: Sequence[Setting], several_kernels: bool) -> str:
    kernel = words.kernel(bar.cell) if several_kernels else ""
    method = words.method(bar.cell) if bar.cell.asked["world_size"] > 1 else ""  # the place says that it is one GPU
    return ", ".join(filter(None, [method, kernel, words.place(bar.cell), *bar.setting.apart(settings)]))
