"""The figure of step time over measured bandwidth: marks were measured, lines are predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, groupby
from math import log2
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sp_bench.report.fabric_model import Place, Point, fastest_of
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import legend, printable, series_handles, text_inches
from sp_bench.report.figures.marks import beside
from sp_bench.report.figures.styles import DENSE, UNEVEN, Style
from sp_bench.report.figures.venues import width_in
from sp_bench.report.formats import GIB

PANEL_HEIGHT_IN = 2.4
DASHES = ("-", "--", "-.", ":", UNEVEN, DENSE)  # a line of its own for each series: most layouts are zigzag here
MAX_PANELS = 3  # of a page
BESIDE_IN = 0.75  # of a panel's width: its ticks and label
APART_PT = 4.0  # between marks of one bandwidth: those of methods that share a primitive
CAPTION = (
    "Median step time over the bandwidth that was measured for the largest message of the method's own primitive on "
    "the same fabric and ranks (of a hybrid the slower of its two). Marks are measured, the fastest of each fabric "
    "ringed and named; those of one bandwidth are set slightly apart, and the faster lies over the slower. Thin lines "
    "are predicted from bytes, bandwidth, compute and what the method's schedule hides, and where compute comes from a "
    "step they pass through that step. Vertical bars are order-statistic intervals of the median, from 6 replicates on."
)


def by_figure(found: Sequence[Place]) -> dict[str, list[Place]]:
    """Name of the setting -> its places, the longest first. Places of one pass, mask, dtype, device and isolation share
    a figure; lengths, heads and ranks have panels."""
    groups = groupby(sorted(found, key=_setting), key=_setting)
    return {name: sorted(group, key=lambda p: (-p.seq_len, p.sp_size, p.title)) for name, group in groups}


def _setting(place: Place) -> str:
    asked = place.points[0].cell.asked
    words = [f"{asked['workload']} {asked['pass_kind']} over fabrics: heads of {asked['head_dim']}"]
    words += ["causal" if asked["causal"] else "not causal", str(asked["dtype"]), f"batch {asked['batch_size']}"]
    words.append(str(asked["hardware"]))
    if asked["isolation"] == "group":
        words.append("warm process group")
    return ", ".join(filter(None, (*words, place.points[0].cell.launch_note)))


def draw_fabrics(every: Sequence[Place], style: Mapping[str, Style]) -> Plot | None:
    """One panel a place, below each other: all have the same bandwidths."""
    places = every[:MAX_PANELS]
    if not places:
        return None
    names = sorted({p.cell.series for place in places for p in place.points}, key=lambda s: style[s].order)
    style = {name: replace(style[name], line_style=dashes) for name, dashes in zip(names, cycle(DASHES), strict=False)}
    figure = Figure(figsize=(width_in(), PANEL_HEIGHT_IN * len(places) + 0.5), layout="constrained")
    axes = figure.subplots(len(places), 1, sharex=True, squeeze=False).flat
    panels = dict(zip(axes, places, strict=True))
    spots = _spots(places, names)
    for panel, place in panels.items():
        _panel(panel, place, style, spots)
    figure.axes[0].margins(x=0.05)
    for panel, place in panels.items():  # when the limits of the shared axis are known
        _name_fabrics(panel, place, spots)
    figure.axes[-1].set_xlabel("measured bandwidth of the method's own primitive (GiB/s)")
    more = [Line2D([], [], color="0.4", lw=0.9), Line2D([], [], **WINNER)]
    labels = [*names, "predicted, not measured", "fastest on the named fabric"]
    legend(figure, [*series_handles(names, style), *more], labels, 3)
    caption = CAPTION
    if others := [place.title for place in every[MAX_PANELS:]]:
        caption += f" In the tables only: {'; '.join(others)}."
    data = pd.DataFrame([line for place in places for point in place.points for line in [_data(place, point)]])
    return Plot(figure, caption, data, tuple(p.cell for place in places for p in place.points))


def _data(place: Place, point: Point) -> dict[str, Any]:
    interval = point.cell.interval_ms
    return about(point.cell) | {
        "num_heads": point.cell.asked["num_heads"],
        "num_kv_heads": point.cell.asked["num_kv_heads"],
        "fabric": point.fabric,
        "primitive": point.primitive,
        "bandwidth_gib_per_s": point.bandwidth.bytes_per_s / GIB,
        "step_ms": point.measured_ms,
        "interval_low_step_ms": interval and interval.low,
        "interval_high_step_ms": interval and interval.high,
        "num_replicates": len(point.cell.step_ms),
        "predicted_step_ms": point.predicted_ms,
        "calibrates_the_prediction": point.calibrates,
        "fastest_on_its_fabric": point is fastest_of(place.on(point.fabric)),
        "trial_ids": trial_ids(point.cell),
    }


WINNER: dict[str, Any] = {"marker": "o", "ms": 13, "mfc": "none", "mec": "0.2", "mew": 0.9, "ls": ""}


def _spots(places: Sequence[Place], names: Sequence[str]) -> dict[str, float]:
    """cell_id -> its mark's x in GiB/s; those of one bandwidth beside each other in the order of `names`."""
    speeds = [p.bandwidth.bytes_per_s for place in places for p in place.points]
    octaves = APART_PT / 72 * log2(max(speeds) / min(speeds)) / (width_in() - BESIDE_IN)
    spots = {}
    for place in places:
        for speed in {p.bandwidth.bytes_per_s for p in place.points}:
            alike = [p for p in place.points if p.bandwidth.bytes_per_s == speed]
            alike.sort(key=lambda p: names.index(p.cell.series))
            spots |= {p.cell.cell_id: beside(speed / GIB, k, len(alike), octaves) for k, p in enumerate(alike)}
    return spots


def _panel(panel: Axes, place: Place, style: Mapping[str, Style], spots: Mapping[str, float]) -> None:
    panel.set_title(place.title)
    panel.set_xscale("log")
    panel.set_yscale("log")
    for name in sorted({p.cell.series for p in place.points}, key=lambda s: style[s].order):
        _prediction(panel, [p for p in place.points if p.cell.series == name], style[name])
    for point in sorted(place.points, key=lambda p: (-p.measured_ms, p.cell.series)):  # what is drawn last is seen
        x, look, interval = spots[point.cell.cell_id], style[point.cell.series], point.cell.interval_ms
        if interval is not None:
            panel.vlines(x, interval.low, interval.high, lw=1.6, color=look.colour)
        panel.plot([x], [point.measured_ms], ls="", **look.marker(hollow=len(point.cell.step_ms) == 1))
    panel.set_ylabel("median step time (ms)")
    _limits(panel, place)


def _name_fabrics(panel: Axes, place: Place, spots: Mapping[str, float]) -> None:
    """Ring the fastest of each fabric; its name stands at the foot of the panel, aside where names would meet."""
    winners = [(fastest_of(place.on(fabric)), fabric) for fabric in place.fabrics]
    winners.sort(key=lambda w: (spots[w[0].cell.cell_id], w[1]))
    low, high = np.log(panel.get_xlim())
    right, places = 0.0, []
    for winner, name in winners:
        half = (text_inches(printable(name)) + 0.12) / (width_in() - BESIDE_IN) / 2
        wanted = float((np.log(spots[winner.cell.cell_id]) - low) / (high - low))
        places.append(max(wanted, right + half))
        right = places[-1] + half
    shift = max(0.0, right - 1.0)  # what would run out on the right moves all of them
    for (winner, name), x in zip(winners, places, strict=True):
        spot = (spots[winner.cell.cell_id], winner.measured_ms)
        panel.plot([spot[0]], [spot[1]], **WINNER)
        leader = {"arrowstyle": "-", "color": "0.6", "lw": 0.7, "shrinkB": 7, "shrinkA": 0}
        foot: dict[str, Any] = {"textcoords": "axes fraction", "ha": "center", "va": "bottom", "arrowprops": leader}
        panel.annotate(printable(name), spot, (x - shift, 0.03), **foot)


def _prediction(panel: Axes, points: Sequence[Point], look: Style) -> None:
    """Straight between fabrics would be wrong for a maximum, so the line follows bandwidth: a hybrid's other primitive
    is taken at a fixed ratio to its slowest between two fabrics."""
    known = sorted(points, key=lambda p: p.bandwidth.bytes_per_s)
    xs = [p.bandwidth.bytes_per_s / GIB for p in known]
    if len(set(xs)) < 2:
        return
    fine = np.geomspace(xs[0], xs[-1], 120)

    def over(values: Sequence[float]) -> np.ndarray:
        return np.interp(np.log(fine), np.log(xs), np.multiply(values, xs)) / fine

    times = {key: over([p.times[key] for p in known]) for key in known[0].times}
    at_each = (dict(zip(times, map(float, each), strict=True)) for each in zip(*times.values(), strict=True))
    panel.plot(fine, [replace(known[0], times=t).predicted_ms for t in at_each], lw=0.9, alpha=0.8, **look.line)


def _limits(panel: Axes, place: Place) -> None:
    """Room for names under the lowest marks; labels at 1, 2, 3 and 5 of each decade."""
    times = [p.measured_ms for p in place.points]
    panel.set_ylim(min(times) / (max(times) / min(times)) ** 0.25 / 1.03, max(times) * 1.2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 3, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
