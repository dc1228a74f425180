"""The figure of speed-up and efficiency over sp_size against the ideal: strong scaling, and weak where it was run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from sp_bench.report.cells import Cell
from sp_bench.report.figures.axes import scale_lengths
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import legend, series_handles
from sp_bench.report.figures.marks import JOINED_PT, Mark, draw_marks, fullest, replicate_ids, side_by_side
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import panels_abreast, width_in
from sp_bench.report.formats import number, whole
from sp_bench.report.speed_ups import Scaling, SpeedUp, scalings

MAX_PANELS = 3
IDEAL: dict[str, Any] = {"color": "0.55", "lw": 1.0, "ls": (0, (4, 3)), "zorder": 1.5}
CAPTION = (
    "Scaling over sp_size; the dashed line is ideal. Strong scaling: one seq_len on more ranks. {weak}Efficiency is "
    "speed-up / ideal; its axis need not begin at zero, and its marks are set slightly apart. {baselines} {marks}"
)
WEAK = (
    "Weak scaling: fixed tokens a rank; the work of a rank grows with seq_len, so rates of model FLOPs are compared, "
    "not times. "
)


def draw_scaling(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """A pair of panels for each seq_len or number of tokens a rank. None where nothing ran on two sp_sizes."""
    panels, left_out = _chosen(cells)
    if not panels:
        return None
    names, unnamed = fullest((s.cell.series for panel in panels for s in panel.speed_ups), style)
    drawn = [(panel, s) for panel in panels for s in panel.speed_ups if s.cell.series in names]
    caption = CAPTION.format(
        weak=WEAK if any(panel.kind == "weak" for panel in panels) else "",
        baselines=_baselines(panels),
        marks=_marks([s for _, s in drawn]),
    )
    data = pd.DataFrame([line for panel, s in drawn for line in _data(panel, s)])
    sources = {c.cell_id: c for _, s in drawn for c in (s.cell, s.start)}
    return Plot(_figure(panels, names, style), caption + unnamed + left_out, data, tuple(sources.values()))


def _chosen(cells: Sequence[Cell]) -> tuple[list[Scaling], str]:
    """At most MAX_PANELS, one of them weak where there is any; and a sentence on the others."""
    strong, weak = scalings(cells, "strong"), scalings(cells, "weak")
    num_strong = min(len(strong), MAX_PANELS - min(len(weak), 1))
    num_weak = MAX_PANELS - num_strong
    words = [f"seq_len {whole(s.tokens)}" for s in strong[num_strong:]]
    words += [f"{whole(s.tokens)} tokens a rank" for s in weak[num_weak:]]
    left_out = f" Not drawn, on fewer sp_sizes, of fewer series or shorter: {', '.join(words)}." if words else ""
    shown = [strong[:num_strong], weak[:num_weak]]
    return [s for each in shown for s in sorted(each, key=lambda s: s.tokens)], left_out


def _figure(panels: Sequence[Scaling], names: Sequence[str], style: Mapping[str, Style]) -> Figure:
    columns = min(len(panels), panels_abreast())
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(width_in(), 3.5 * lines + 0.4), layout="constrained")
    grid = figure.add_gridspec(lines, columns)
    limits = _efficiency_limits([s for panel in panels for s in panel.speed_ups if s.cell.series in names])
    for place, panel in enumerate(panels):
        pair = grid[divmod(place, columns)].subgridspec(2, 1, height_ratios=[1.35, 1])
        upper, lower = figure.add_subplot(pair[0]), figure.add_subplot(pair[1])
        upper.set_title(_title(panel), loc="left")
        _speed_ups(upper, panel, names, style)
        room_in = width_in() / columns - 0.6
        _efficiencies(lower, panel, names, style, room_in)
        lower.set_ylim(*limits)
        for axes in (upper, lower):
            scale_lengths(axes, panel.sizes, room_in)
        upper.tick_params(labelbottom=False)
        lower.set_xlabel("sp_size (ranks)")
        if place % columns == 0:
            upper.set_ylabel("speed-up")
            lower.set_ylabel("efficiency (%)")
    legend(figure, [*series_handles(names, style), Line2D([], [], **IDEAL)], [*names, "ideal"], 3)
    return figure


def _title(panel: Scaling) -> str:
    fixed = f"seq_len {whole(panel.tokens)}" if panel.kind == "strong" else f"{whole(panel.tokens)} tokens a rank"
    over = "single on 1 rank" if panel.over_single else f"own step at sp_size {panel.start_size}"
    return f"{panel.kind} scaling,\n{fixed},\nover {over}"


def _speed_ups(axes: Axes, panel: Scaling, names: Sequence[str], style: Mapping[str, Style]) -> None:
    ideals = [size / panel.start_size for size in panel.sizes]
    axes.plot(panel.sizes, ideals, **IDEAL)
    shown = [s for s in panel.speed_ups if s.cell.series in names]
    for name in names:
        marks = [_mark(s, s.cell.asked["sp_size"], 1.0) for s in shown if s.cell.series == name]
        draw_marks(axes, marks, style[name], joined=True)
    values = [*ideals, *(v for s in shown for v in (s.value, *s.replicates.values()))]
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(values) / 1.15, max(values) * 1.15)
    axes.yaxis.set_major_locator(FixedLocator([*ideals, *_octaves_beyond(max(ideals), max(values))]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _octaves_beyond(ideal: float, largest: float) -> list[float]:
    """Ticks above the ideal, up to the largest value."""
    return [ideal * 2**i for i in range(1, 1 + max(0, int(math.log2(largest / ideal))))]


def _efficiencies(axes: Axes, panel: Scaling, names: Sequence[str], style: Mapping[str, Style], room_in: float) -> None:
    axes.axhline(100, **IDEAL)
    found = {(s.cell.series, s.cell.asked["sp_size"]) for s in panel.speed_ups}
    places = side_by_side(found, names, room_in, JOINED_PT)
    for name in names:
        of_name = [s for s in panel.speed_ups if s.cell.series == name]
        marks = [_mark(s, places[name, s.cell.asked["sp_size"]], 100 / s.ideal) for s in of_name]
        draw_marks(axes, marks, style[name], joined=True)


def _efficiency_limits(shown: Sequence[SpeedUp]) -> tuple[float, float]:
    """The same in every panel: equal slopes are equal losses."""
    values = [100.0, *(100 / s.ideal * v for s in shown for v in (s.value, *s.replicates.values()))]
    margin = 0.12 * max(max(values) - min(values), 5.0)
    return min(values) - margin, max(values) + margin


def _mark(s: SpeedUp, place: float, scale: float) -> Mark:
    bounds = (scale * s.interval.low, scale * s.interval.high) if s.interval else None
    values = [scale * v for v in s.replicates.values()]
    return Mark(place, scale * s.value, bounds, values, s.single, s.cell.asked["sp_size"])


def _baselines(panels: Sequence[Scaling]) -> str:
    words = []
    if singles := {c.cell_id: c for panel in panels if panel.over_single for c in panel.starts}.values():
        steps = ", ".join(f"{number(c.median_step_ms)} ms at {whole(c.asked['seq_len'])} tokens" for c in singles)
        words.append(f"{', '.join(sorted({c.series for c in singles}))} on 1 rank ({steps})")
    if any(not panel.over_single for panel in panels):
        words.append("each method's own step on the fewest ranks it ran on, where single did not run")
    return f"Baseline: {'; '.join(words)}."


def _marks(shown: Sequence[SpeedUp]) -> str:
    words = ["Speed-ups are of median step times"]
    if any(s.interval for s in shown):
        words.append("from 6 pairs on the median of the paired ratios, with bars for its order-statistic interval")
    if any(s.cell.asked["optimizer_offload"] for s in shown):
        words.append("a step waits once for the optimizer in host memory, so that longer ones gain without parallelism")
    if any(len(s.replicates) > 1 for s in shown):
        words.append("small dots are replicates")
    if any(s.single for s in shown):
        words.append("hollow markers are single replicates")
    return "; ".join(words) + "."


def _data(panel: Scaling, s: SpeedUp) -> list[dict[str, Any]]:
    """The marker, then its replicates where they are drawn."""
    ids = replicate_ids(s.cell)
    baseline = {"series": s.start.series, "sp_size": s.start.asked["sp_size"], "step_ms": s.start.median_step_ms}
    leading = about(s.cell) | {
        "scaling": panel.kind,
        "tokens_per_rank": s.cell.asked["seq_len"] / s.cell.asked["sp_size"],
        "step_ms": s.cell.median_step_ms,
        **{f"baseline_{name}": value for name, value in baseline.items()},
        "ideal_speed_up": s.ideal,
    }

    def line(mark: str, value: float, low: float | None, high: float | None) -> dict[str, Any]:
        values = {"": value, "interval_low_": low, "interval_high_": high}
        speed_ups = {f"{name}speed_up": v for name, v in values.items()}
        shares = {f"{name}efficiency": v and v / s.ideal for name, v in values.items()}
        return leading | {"mark": mark} | speed_ups | shares | {"num_replicates": len(s.replicates) or len(ids)}

    bounds = (s.interval.low, s.interval.high) if s.interval else (None, None)
    own = {"baseline_trial_ids": trial_ids(s.start), "trial_ids": trial_ids(s.cell)}
    lines = [line("median", s.value, *bounds) | {"replicate": None} | own]
    for key, value in s.replicates.items() if len(s.replicates) > 1 else ():
        of_both = {"baseline_trial_ids": replicate_ids(s.start)[key], "trial_ids": ids[key]}
        lines.append(line("replicate", value, None, None) | {"replicate": key} | of_both)
    return lines
