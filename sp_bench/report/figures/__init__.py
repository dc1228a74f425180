"""The figures of a report. To add one, write a file and add a line to FIGURES. Use matplotlib's canvases, not
pyplot."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from matplotlib import rc_context, rcdefaults, rcParams

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.chosen import Lines
from sp_bench.analysis.settings import Setting
from sp_bench.report.figures import (
    fabrics,
    forest,
    lines,
    memory,
    over_ranks,
    plans,
    states,
    steps,
    throughput,
    traffic,
    windows,
)
from sp_bench.report.figures.style import VENUES as VENUES
from sp_bench.report.figures.style import Drawing, Look, Plot, finish

Draw = Callable[[Sequence[Setting], Sequence[Cell], Look], list[Plot]]
FIGURES: Mapping[str, Draw] = {  # in the order of the page
    "throughput": lambda settings, cells, look: throughput.draw(settings, look),
    "ratios": lambda settings, cells, look: forest.draw(settings, look),
    "steps": lambda settings, cells, look: steps.draw(settings, look),
    "memory": lambda settings, cells, look: memory.draw(settings, look),
    "bytes": lambda settings, cells, look: traffic.draw(settings, look),
    "fabrics": lambda settings, cells, look: fabrics.draw(cells, look),
    "ranks": lambda settings, cells, look: over_ranks.draw(cells, look),
    "windows": lambda settings, cells, look: windows.draw(cells, look),
    "states": lambda settings, cells, look: states.draw(cells, look),
    "plans": lambda settings, cells, look: plans.draw(cells, look),
}
NAMES = tuple(FIGURES)


def draw(
    settings: Sequence[Setting], cells: Sequence[Cell], look: Look | None = None, only: Sequence[str] = NAMES
) -> list[Drawing]:
    """Draw the named figures. One for which the cells have no data is left out."""
    look = look or Look()
    with _settings_of(look):
        plots = [plot for name, made in FIGURES.items() if name in only for plot in made(settings, cells, look)]
        return [finish(plot, "-".join(filter(None, (plot.name, plot.part))), look) for plot in plots]


def draw_lines(chosen: Lines, look: Look, stem: str = "lines") -> Drawing:
    """Draw an author's figure."""
    with _settings_of(look):
        return finish(lines.draw(chosen, look), stem, look)


@contextmanager
def _settings_of(look: Look) -> Iterator[None]:
    """Whatever matplotlibrc the reader has: equal rows give equal figures."""
    with rc_context():
        rcdefaults()
        rcParams.update(look.rc)
        yield
