"""The figure of what launching costs: a bar a series, the device's time and what the host's launches add to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sp_bench.report.cells import Cell
from sp_bench.report.figures.attribution import BAR, NAMES_SHARE, PANEL_IN, SPARE_IN, WHISKER, bar_panels
from sp_bench.report.figures.axes import fitted_names, fitting, name_rows
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import legend
from sp_bench.report.figures.styles import SKY, VERMILLION, Style
from sp_bench.report.formats import counted, number, whole
from sp_bench.report.launches import Pair
from sp_bench.report.series import REPLAYED

CAPTION = (
    "Median step time of the same step replayed as a CUDA graph and, to the bar's end, launched call by call. On the "
    "right: the ratio of the two, and the step launched call by call. Each panel has its own scale. Lines across a "
    "part's end: order-statistic intervals of the median, from 6 replicates on."
)
PARTS = {SKY: REPLAYED, VERMILLION: "more when launched call by call"}


def draw_launches(found: Sequence[Pair], style: Mapping[str, Style]) -> Plot | None:
    """One panel a (sp_size, seq_len), a line a series; `found` is of one setting."""
    places = sorted({_place(pair) for pair in found}, reverse=True)  # the shortest are kept: there the host counts most
    if not places:
        return None
    every = {place: [pair for pair in found if _place(pair) == place] for place in places}
    texts, row_in = fitted_names([pair.eager.series for pair in found], NAMES_SHARE)
    rows = {turn: len(every[place]) for turn, place in enumerate(places)}
    kept = sorted(places[turn] for turn in fitting(rows, row_in, PANEL_IN + 0.6 * row_in, SPARE_IN))
    panels = [sorted(every[place], key=lambda pair: style[pair.eager.series].order) for place in kept]
    caption = CAPTION
    if len(kept) < len(places):
        caption += f" {counted(len(places) - len(kept), 'place')} more (sp_size, seq_len): in the tables only."
    shown = [pair for each in panels for pair in each]
    data = pd.DataFrame([_data(cell) for pair in shown for cell in pair.cells])
    return Plot(_figure(panels, texts, row_in), caption, data, tuple(c for pair in shown for c in pair.cells))


def _place(pair: Pair) -> tuple[int, int]:
    return pair.eager.asked["sp_size"], pair.eager.asked["seq_len"]


def _figure(panels: Sequence[Sequence[Pair]], texts: Mapping[str, str], row_in: float) -> Figure:
    figure, axes = bar_panels([len(each) for each in panels], row_in)
    for panel, each in zip(axes, panels, strict=True):
        _panel(panel, each, texts)
    figure.axes[-1].set_xlabel("step time (ms)")
    handles = [Patch(color=colour, label=label) for colour, label in PARTS.items()]
    legend(figure, handles, list(PARTS.values()), len(handles))
    return figure


def _panel(panel: Axes, lines: Sequence[Pair], texts: Mapping[str, str]) -> None:
    rows = name_rows(panel, texts, [pair.eager.series for pair in lines])
    ends = []
    for pair in lines:
        row = rows[pair.eager.series]
        eager_ms, replayed_ms = (cell.median_step_ms or 0.0 for cell in pair.cells)
        more_ms = max(0.0, eager_ms - replayed_ms)
        for colour, left, width in ((SKY, 0.0, replayed_ms), (VERMILLION, replayed_ms, more_ms)):
            panel.barh(row, width, BAR, left=left, color=colour, edgecolor="white", linewidth=0.5)
        ends += [eager_ms, replayed_ms]
        for cell, above in zip(pair.cells, (-BAR / 4, BAR / 4), strict=True):
            if span := cell.interval_ms:
                panel.plot([span.low, span.high], [row + above] * 2, **WHISKER)
                ends.append(span.high)
    panel.set_xlim(0, 1.04 * max(ends))
    beside = panel.secondary_yaxis("right")
    beside.set_yticks(
        [rows[pair.eager.series] for pair in lines],
        [f"{pair.ratio:.2f}x   {number(pair.eager.median_step_ms)} ms" for pair in lines],
    )
    beside.tick_params(length=0)
    beside.spines["right"].set_visible(False)
    sp_size, seq_len = _place(lines[0])
    panel.set_title("ratio, call by call", loc="right", color="0.35")
    panel.set_title(f"sp_size {sp_size}, seq_len {whole(seq_len)} tokens", loc="left")


def _data(cell: Cell) -> dict[str, Any]:
    bounds = {f"interval_{end}_ms": getattr(cell.interval_ms, end, None) for end in ("low", "high")}
    known = {"launch": cell.options["workload.launch"], "median_ms": cell.median_step_ms}
    return about(cell) | known | bounds | {"trial_ids": trial_ids(cell)}
