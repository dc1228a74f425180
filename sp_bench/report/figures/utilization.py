"""The figure of MFU and HFU: the share of the devices' peak that the model's FLOPs, and all that ran, reach."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sp_bench.hardware import peak_flops
from sp_bench.report.cells import Cell, listed
from sp_bench.report.figures.axes import SEQ_LEN, name_rows, scale_lengths
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import legend, series_handles
from sp_bench.report.figures.marks import JOINED_PT, Mark, draw_marks, fullest, replicate_ids, side_by_side, stacked
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import panels_abreast, width_in
from sp_bench.report.formats import number, whole

Share = Callable[[Cell], float | None]
SHARES: Mapping[str, Share] = {"MFU": lambda c: c.mfu, "HFU": lambda c: c.hfu}
MAX_PLACES = 4
SHAPES = {"MFU": "o", "HFU": "D"}  # where lines name the series
ASIDE = {"MFU": 0.2, "HFU": -0.2}  # of a line: the two are equal where no backward ran
CAPTION = (
    "{names}, in % of the peak of all devices, from median step times: model FLOPs (MFU: attention backward 2 x "
    "forward, no recompute) and FLOPs that ran (HFU: attention backward 2.5 x, with recompute). {peak} "
    "{apart}{marks}"
)


def draw_utilization(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """Lines over seq_len or sp_size, whichever has three values; else a line a series at each place. None: no cell
    has a known peak."""
    known = [c for c in cells if c.ok and c.mfu is not None and c.asked["sp_size"] and c.asked["seq_len"]]
    if not known:
        return None
    over = next((axis for axis in ("seq_len", "sp_size") if len({c.asked[axis] for c in known}) > 2), None)
    most = MAX_PLACES if over is None else panels_abreast()
    panels, left_out = _panels(known, over, most)
    names, unnamed = fullest((c.series for group in panels.values() for c in group), style)
    panels = {title: [c for c in group if c.series in names] for title, group in panels.items()}
    shown = [c for group in panels.values() for c in group]
    shares = {name: share for name, share in SHARES.items() if any(share(c) is not None for c in shown)}
    figure = _beside(panels, shares, style) if over is None else _lines(panels, over, shares, names, style)
    data = pd.DataFrame([line for c in shown for name, share in shares.items() for line in _data(c, name, share)])
    apart = f"Series of one {over} are set slightly apart. " if over else "A line's upper mark is MFU, the lower HFU. "
    caption = CAPTION.format(names=" and ".join(shares), peak=_peak(shown), apart=apart, marks=_marks(shown))
    return Plot(figure, caption + unnamed + left_out, data, tuple(shown))


def _panels(cells: Sequence[Cell], over: str | None, most: int) -> tuple[dict[str, list[Cell]], str]:
    """The panels with the most cells by their title, and a sentence on the others."""
    grouped: dict[tuple[int, ...], list[Cell]] = {}
    split = [axis for axis in ("sp_size", "seq_len") if axis != over]
    for cell in cells:
        grouped.setdefault(tuple(cell.asked[axis] for axis in split), []).append(cell)
    titles = {key: ", ".join(f"{axis} {whole(n)}" for axis, n in zip(split, key, strict=True)) for key in grouped}
    ranked = sorted(grouped, key=lambda key: (len(grouped[key]), key), reverse=True)
    others = [titles[key] for key in sorted(ranked[most:])]
    words = f" In the tables only, with fewer cells: {'; '.join(others)}." if others else ""
    return {titles[key]: grouped[key] for key in sorted(ranked[:most])}, words


def _lines(
    panels: Mapping[str, Sequence[Cell]],
    over: str,
    shares: Mapping[str, Share],
    names: Sequence[str],
    style: Mapping[str, Style],
) -> Figure:
    """A line of panels for each share."""
    figure = Figure(figsize=(width_in(), 1.9 * len(shares) + 0.8), layout="constrained")
    axes = figure.subplots(len(shares), len(panels), sharex="col", sharey=True, squeeze=False)
    for column, (title, group) in enumerate(panels.items()):
        axes[0, column].set_title(title)
        for line, share in enumerate(shares.values()):
            room_in = width_in() / len(panels) - 0.5
            _panel(axes[line, column], group, (over, room_in), share, names, style)
            scale_lengths(axes[line, column], [c.asked[over] for c in group], room_in)
        axes[-1, column].set_xlabel(SEQ_LEN if over == "seq_len" else "sp_size (ranks)")
    for line, name in enumerate(shares):
        axes[line, 0].set_ylabel(f"{name} (% of peak)")
    axes[0, 0].set_ylim(0, _top(panels, shares))
    legend(figure, series_handles(names, style), names, 3)
    return figure


def _panel(
    panel: Axes,
    cells: Sequence[Cell],
    along: tuple[str, float],
    share: Share,
    names: Sequence[str],
    style: Mapping[str, Style],
) -> None:
    """`along`: what x is, and its inches."""
    over, room_in = along
    known = [c for c in cells if share(c) is not None]
    places = side_by_side({(c.series, c.asked[over]) for c in known}, names, room_in, JOINED_PT)
    for name in names:
        line = [c for c in known if c.series == name]
        marks = [replace(_mark(c, places[name, c.asked[over]], share), joint=c.asked[over]) for c in line]
        draw_marks(panel, marks, style[name], joined=True)


def _beside(panels: Mapping[str, Sequence[Cell]], shares: Mapping[str, Share], style: Mapping[str, Style]) -> Figure:
    """A line a series: nothing is joined but the two shares of a cell."""
    figure, axes, texts = stacked([[c.series for c in group] for group in panels.values()])
    for panel, (title, group) in zip(axes, panels.items(), strict=True):
        panel.set_title(title, loc="left")
        rows = name_rows(panel, texts, sorted((c.series for c in group), key=lambda name: style[name].order))
        for cell in group:
            look, row = style[cell.series], rows[cell.series]
            marks = {name: _mark(cell, row + ASIDE[name], s) for name, s in shares.items() if s(cell) is not None}
            ends = [(mark.value, mark.place) for mark in marks.values()]
            panel.plot(*zip(*ends, strict=True), lw=0.8, color=look.colour, alpha=0.6)
            for name, mark in marks.items():
                draw_marks(panel, [mark], replace(look, shape=SHAPES[name]), across=True)
    figure.axes[-1].set_xlim(0, _top(panels, shares))
    figure.axes[-1].set_xlabel("% of peak")
    handles = [Line2D([], [], marker=SHAPES[name], ms=5, color="0.3", ls="") for name in shares]
    legend(figure, handles, [*shares], len(shares))
    return figure


def _top(panels: Mapping[str, Sequence[Cell]], shares: Mapping[str, Share]) -> float:
    """Above the largest value, even one that claims more than the peak: that is shown, not cut off."""
    values = [
        _at(c, s, ms)
        for group in panels.values()
        for c in group
        for s in shares.values()
        for ms in [*c.step_ms.values()]
    ]
    return 1.08 * max(values)


def _at(cell: Cell, share: Share, step_ms: float) -> float:
    """The share at another step time than the median, in %."""
    return 100 * (share(cell) or 0.0) * (cell.median_step_ms or 0.0) / step_ms


def _mark(cell: Cell, place: float, share: Share) -> Mark:
    at = [_at(cell, share, ms) for ms in cell.step_ms.values()]
    bounds = cell.interval_ms
    interval = (_at(cell, share, bounds.high), _at(cell, share, bounds.low)) if bounds else None
    return Mark(place, 100 * (share(cell) or 0.0), interval, at, len(at) == 1)


def _peak(cells: Sequence[Cell]) -> str:
    """The peak of each device model and dtype, as sp_bench.hardware has it."""
    rows = [(row, row["environment"] or {}) for c in cells for row in c.measured]
    devices = {(str(name), str(row["dtype"])) for row, env in rows for name in listed(env.get("device_names"))}
    peaks = {(name, dtype): peak_flops(name, dtype) for name, dtype in sorted(devices)}
    words = [f"{number(peak / 1e12)} TFLOP/s of {name} in {dtype}" for (name, dtype), peak in peaks.items() if peak]
    if not words:
        return "The peak is the one that the rows were measured against; they do not name the device."
    return f"Peak: {', '.join(words)}, dense, by the datasheet that sp_bench.hardware names."


def _marks(cells: Sequence[Cell]) -> str:
    words = ["A marker is a cell"]
    if any(len(c.step_ms) > 1 for c in cells):
        words = ["Small dots are replicates, the marker their median"]
    if any(len(c.step_ms) == 1 for c in cells):
        words.append("hollow markers are single replicates")
    if any(c.interval_ms for c in cells):
        words.append("bars are order-statistic intervals of the median, from 6 replicates on")
    return "; ".join(words) + "."


def _data(cell: Cell, name: str, share: Share) -> list[dict[str, Any]]:
    """The marker, then its replicates where they are drawn."""
    if share(cell) is None:
        return []
    mark, ids = _mark(cell, 0.0, share), replicate_ids(cell)

    def line(what: str, percent: float, low: float | None, high: float | None) -> dict[str, Any]:
        values = {"quantity": name, "percent_of_peak": percent}
        bounds = {"interval_low_percent_of_peak": low, "interval_high_percent_of_peak": high}
        return about(cell) | {"mark": what} | values | bounds | {"num_replicates": len(ids)}

    lines = [line("median", mark.value, *(mark.interval or (None, None))) | {"replicate": None}]
    lines[0] |= {"trial_ids": trial_ids(cell)}
    for key, ms in cell.step_ms.items() if len(ids) > 1 else ():
        lines.append(line("replicate", _at(cell, share, ms), None, None) | {"replicate": key, "trial_ids": ids[key]})
    return lines
