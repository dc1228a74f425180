"""The sections of the page beside verdict, figures and tables, each there only if its rows are."""

from collections.abc import Sequence

from matplotlib import rc_context

from sp_bench.report.cells import Cell
from sp_bench.report.figures import plotted
from sp_bench.report.figures.styles import RC, styles
from sp_bench.report.page import attribution, device, errors, fabrics, interconnect, rivals
from sp_bench.report.page.parts import Section


def sections(cells: Sequence[Cell]) -> list[Section]:
    """In the order of the page."""
    style = styles(plotted(cells))
    with rc_context(RC):
        made = [
            rivals.section(cells),
            attribution.section(cells, style),
            fabrics.section(cells, style),
            interconnect.section(cells, style),
            errors.section(cells, style),
            device.section(cells),
        ]
    return [section for section in made if section is not None]
