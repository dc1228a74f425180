"""The figure of the largest length that ran and the smallest that was out of memory, of each series and sp_size."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sp_bench.report.cells import Cell
from sp_bench.report.figures.axes import SEQ_LEN, fitted_names, name_rows, scale_lengths
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import legend, oom_look, oom_site, oom_words
from sp_bench.report.figures.marks import stacked
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import width_in
from sp_bench.report.limits import Limit, limits

ROWS_IN = 6.5  # of all panels
BARS = 0.6  # of a figure's width, beside names
NEAR = 0.18  # octaves from a length to the mark beside it
UNKNOWN: dict[str, Any] = {"facecolor": "#e6e6e6", "edgecolor": "0.6", "hatch": "////", "linewidth": 0}
RAN: dict[str, Any] = {"marker": "o", "ms": 5.5, "ls": ""}
NOT_TRIED: dict[str, Any] = {"marker": ">", "ms": 4, "mfc": "white", "mec": "0.4", "ls": ""}
CAPTION = (
    "Largest seq_len that ran and smallest that was out of memory, by sp_size; the limit lies in the hatched range "
    "between them. Only lengths that were tried can be marked."
)


def draw_max_context(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """A line a series in a panel a sp_size. None where nothing was out of memory: no limit was met then."""
    found = limits(cells)
    if not any(limit.smallest_oom for limit in found):
        return None
    tried = sorted({c.asked["seq_len"] for limit in found for c in limit.cells})
    shown, left_out = _chosen(found)
    sizes = sorted({limit.sp_size for limit in shown})
    panels = {size: [limit for limit in shown if limit.sp_size == size] for size in sizes}
    data = pd.DataFrame([line for group in panels.values() for limit in group for line in _data(limit)])
    sources = tuple(cell for group in panels.values() for limit in group for cell in limit.cells)
    return Plot(_figure(panels, tried, style), CAPTION + left_out, data, sources)


def _chosen(found: Sequence[Limit]) -> tuple[list[Limit], str]:
    """As many as fit a page: those that were out of memory first, then those on the most ranks; and a sentence on the
    others."""
    ranked = sorted(found, key=lambda limit: (limit.smallest_oom is None, -limit.sp_size, limit.series))
    likely = ranked[: int(ROWS_IN / fitted_names([])[1])]
    most = int(ROWS_IN / fitted_names([limit.series for limit in likely])[1])
    others = len(ranked) - most
    words = f" {others:,} more of series and sp_size are in the tables only." if others > 0 else ""
    return ranked[:most], words


def _figure(panels: Mapping[int, Sequence[Limit]], lengths: Sequence[int], style: Mapping[str, Style]) -> Figure:
    figure, axes, texts = stacked([[limit.series for limit in group] for group in panels.values()])
    scale_lengths(axes[0], lengths, BARS * width_in())
    for panel, (sp_size, group) in zip(axes, panels.items(), strict=True):
        panel.set_title(f"sp_size {sp_size}", loc="left")
        rows = name_rows(panel, texts, sorted((limit.series for limit in group), key=lambda name: style[name].order))
        for limit in group:
            _row(panel, limit, rows[limit.series], style[limit.series])
    axes[-1].set_xlabel(SEQ_LEN)
    legend(figure, *_key([limit for group in panels.values() for limit in group]), 4)
    return figure


def _key(shown: Sequence[Limit]) -> tuple[list[Artist], list[str]]:
    """Marks that are drawn, and what they say."""
    failed = [limit.smallest_oom for limit in shown if limit.smallest_oom]
    handles: dict[str, Artist] = {}
    if any(limit.largest_ok for limit in shown):
        handles["largest that ran"] = Line2D([], [], color="0.3", **RAN)
    for site in sorted({oom_site(cell) for cell in failed}, key=lambda s: (s is None, s or "")):
        handles[f"smallest {oom_words(site)}"] = Line2D([], [], color="0.3", **oom_look(site))  # pyright: ignore[reportArgumentType]
    if failed:
        handles["the limit lies here: not tried"] = Patch(**UNKNOWN)
    if any(limit.smallest_oom is None for limit in shown):
        handles["nothing longer was tried"] = Line2D([], [], **NOT_TRIED)
    return list(handles.values()), list(handles)


def _row(panel: Axes, limit: Limit, place: float, look: Style) -> None:
    left, right = panel.get_xlim()
    ran = limit.largest_ok and limit.largest_ok.asked["seq_len"]
    if limit.smallest_oom:
        failed = limit.smallest_oom.asked["seq_len"]
        if (low := ran or left) < failed:
            panel.barh(place, failed - low, 0.46, left=low, zorder=1.2, **UNKNOWN)
        how: Any = oom_look(oom_site(limit.smallest_oom))
        panel.plot([failed], [place], color=look.colour, in_layout=False, **how)
    if ran:
        panel.plot([ran], [place], color=look.colour, in_layout=False, **RAN)
        if not limit.smallest_oom:
            panel.plot([ran * 2**NEAR], [place], in_layout=False, **NOT_TRIED)
    panel.set_xlim(left, right)


def _data(limit: Limit) -> list[dict[str, Any]]:
    marks = (("largest that ran", limit.largest_ok), ("smallest out of memory", limit.smallest_oom))
    return [about(cell) | {"mark": mark, "trial_ids": trial_ids(cell)} for mark, cell in marks if cell is not None]
