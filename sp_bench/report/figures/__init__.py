"""The six figures of a report. matplotlib's canvases are used directly, pyplot is never touched."""

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib import rc_context

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.settings import Setting
from sp_bench.report.figures import fabrics, forest, memory, steps, throughput, traffic
from sp_bench.report.figures.style import VENUES as VENUES
from sp_bench.report.figures.style import Drawing, Look, Plot, finish

NAMES = ("throughput", "ratios", "steps", "memory", "bytes", "fabrics")  # in the order of the page


def draw(
    settings: Sequence[Setting], cells: Sequence[Cell], look: Look | None = None, only: Sequence[str] = NAMES
) -> list[Drawing]:
    """Those of the named figures of which the cells have something to show."""
    look = look or Look()
    made: dict[str, Callable[[], list[Plot]]] = {
        "throughput": partial(throughput.draw, settings, look),
        "ratios": partial(forest.draw, settings, look),
        "steps": partial(steps.draw, settings, look),
        "memory": partial(memory.draw, settings, look),
        "bytes": partial(traffic.draw, settings, look),
        "fabrics": partial(fabrics.draw, cells, look),
    }
    with rc_context(look.rc):
        plots = [plot for name in NAMES if name in only for plot in made[name]()]
        return [finish(plot, "-".join(filter(None, (plot.name, plot.part))), look) for plot in plots]
