"""The figures of a report. Each is of one setting; matplotlib's canvases are used directly, pyplot is never touched."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from matplotlib import rc_context

from sp_bench.report.cells import Cell
from sp_bench.report.fabric_model import Place, foremost, places
from sp_bench.report.figures.attribution import draw_time_parts
from sp_bench.report.figures.communication import draw_communication
from sp_bench.report.figures.drawings import Drawing, Plot, finish, named
from sp_bench.report.figures.errors import draw_errors
from sp_bench.report.figures.fabrics import by_figure, draw_fabrics
from sp_bench.report.figures.launches import draw_launches
from sp_bench.report.figures.max_context import draw_max_context
from sp_bench.report.figures.quantities import draw_memory, draw_step_time, draw_throughput
from sp_bench.report.figures.reduction import reduced
from sp_bench.report.figures.scaling import draw_scaling
from sp_bench.report.figures.styles import Style, styles
from sp_bench.report.figures.utilization import draw_utilization
from sp_bench.report.figures.venues import rc
from sp_bench.report.figures.winners import draw_winners
from sp_bench.report.formats import counted
from sp_bench.report.launches import Pair, pairs
from sp_bench.report.series import shared_values
from sp_bench.report.time_parts import Attribution, attributions
from sp_bench.rows.names import Values

Draw = Callable[[Sequence[Cell], Mapping[str, Style]], Plot | None]
MAX_SETTINGS = 4  # figures of more settings would swamp the page; its tables hold them all
OF_SETTINGS: Mapping[str, Draw] = {  # in the order of the page
    "throughput": draw_throughput,
    "step_time": draw_step_time,
    "scaling": draw_scaling,
    "utilization": draw_utilization,
    "memory": draw_memory,
    "max_context": draw_max_context,
    "communication": draw_communication,
    "winners": draw_winners,
    "errors": draw_errors,
}
OF_ALL_SERIES = ("winners", "max_context")  # reduce themselves: the fastest, or the longest, may be any
KINDS = (*OF_SETTINGS, "launches", "attribution", "fabrics")  # a figure's file name begins so


def plotted(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of a length on some ranks that were measured or were out of memory."""
    sized = [c for c in cells if None not in (c.asked["sp_size"], c.asked["seq_len"])]
    return [c for c in sized if c.is_of_a_length and (c.ok or "oom" in c.statuses)]


def draw(
    cells: Sequence[Cell],
    venue: str | None = None,
    executor: Executor | None = None,
    kinds: Sequence[str] = KINDS,
) -> tuple[list[Drawing], list[str]]:
    """Figures of these kinds, at the width of a venue, by default of the page; and sentences on what they leave out:
    slower fabrics, which have a figure of their own, the settings with the fewest cells, series of crowded settings.

    `executor`: processes that share the work. Raises:
        ValueError: no such venue.
    """
    return begin(cells, venue, executor, kinds)()


def begin(
    cells: Sequence[Cell],
    venue: str | None = None,
    executor: Executor | None = None,
    kinds: Sequence[str] = KINDS,
) -> Callable[[], tuple[list[Drawing], list[str]]]:
    """As `draw`, whose results the returned function waits for: the processes of `executor` draw until then."""
    every, found = plotted(cells), places(cells)
    shown = foremost(every, found)
    settings = {setting: list(group) for setting, group in groupby(shown, key=lambda c: c.setting)}
    kept = _largest({name: group for name, group in settings.items() if len(group) > 1} or settings)
    style = styles(every, {c.series for setting in kept for c in reduced(settings[setting])[0]})
    parts = {name: list(group) for name, group in groupby(attributions(cells), key=lambda a: a.cell.setting)}
    launched = {name: list(group) for name, group in groupby(pairs(every), key=lambda pair: pair.eager.setting)}
    fabrics = by_figure(found)
    jobs = [job for setting in kept for job in _of_setting(setting, settings[setting], style)]
    jobs += [_of_launches(name, launched[name], style) for name in _largest(launched)]
    jobs += [_of_parts(name, parts[name], style) for name in _largest(parts)]
    jobs += [_of_fabrics(name, fabrics[name], style) for name in _largest(fabrics)]
    jobs = [job for job in jobs if job.kind in kinds]
    made = (map if executor is None else executor.map)(partial(_drawn, venue), jobs)
    crowded = sorted({job.left_out for job in jobs if job.left_out})
    undrawn = [*_slower_fabrics(every, shown), *_undrawn(len(settings) - len(kept)), *crowded]
    return lambda: (named([drawing for drawing in made if drawing is not None]), undrawn)


@dataclass(frozen=True)
class _Job:
    """One figure, to be drawn in any process."""

    kind: str
    setting: str
    values: Values
    draw: Callable[[], Plot | None]
    left_out: str = ""  # a sentence on series


def _drawn(venue: str | None, job: _Job) -> Drawing | None:
    with rc_context(rc(venue)):
        plot = job.draw()
        if plot is None:
            return None
        caption = f"{plot.caption} {job.left_out}".strip()
        return finish(job.kind, job.setting, job.values, Plot(plot.figure, caption, plot.data, plot.cells))


def _largest(groups: Mapping[str, Sequence[object]]) -> list[str]:
    return sorted(sorted(groups, key=lambda name: -len(groups[name]))[:MAX_SETTINGS])


def _of_setting(setting: str, cells: Sequence[Cell], style: Mapping[str, Style]) -> list[_Job]:
    (few, words), values = reduced(cells), cells[0].name.values
    return [
        _Job(kind, setting, values, partial(draw_kind, cells, style))
        if kind in OF_ALL_SERIES
        else _Job(kind, setting, values, partial(draw_kind, few, style), words)
        for kind, draw_kind in OF_SETTINGS.items()
    ]


def _of_parts(setting: str, group: Sequence[Attribution], style: Mapping[str, Style]) -> _Job:
    few, words = reduced([a.cell for a in group])
    kept = {c.cell_id for c in few}
    shown = [a for a in group if a.cell.cell_id in kept]
    return _Job("attribution", setting, group[0].cell.name.values, partial(draw_time_parts, shown, style), words)


def _of_launches(setting: str, group: Sequence[Pair], style: Mapping[str, Style]) -> _Job:
    few, words = reduced([pair.eager for pair in group])
    kept = {c.cell_id for c in few}
    shown = [pair for pair in group if pair.eager.cell_id in kept]
    return _Job("launches", setting, group[0].eager.name.values, partial(draw_launches, shown, style), words)


def _of_fabrics(setting: str, found: Sequence[Place], style: Mapping[str, Style]) -> _Job:
    values = shared_values([point.cell.name.values for place in found for point in place.points])
    return _Job("fabrics", setting, values, partial(draw_fabrics, found, style))


def _slower_fabrics(every: Sequence[Cell], shown: Sequence[Cell]) -> list[str]:
    kept = {c.cell_id for c in shown}
    names = sorted({str(c.asked["fabric"]) for c in every if c.cell_id not in kept})
    if not names:
        return []
    return [
        f"Of settings on several fabrics the fastest is drawn; {', '.join(names)} are under Fabrics and in the tables."
    ]


def _undrawn(num_settings: int) -> list[str]:
    if not num_settings:
        return []
    verb = "is" if num_settings == 1 else "are"
    words = (
        f"Figures are drawn for at most {MAX_SETTINGS} settings, those with the most cells, and not for a single cell"
    )
    return [f"{words}; {counted(num_settings, 'setting')} more {verb} in the tables only."]
