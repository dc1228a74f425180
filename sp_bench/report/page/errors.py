"""The section on error and speed: what the dtypes of travelling dK/dV and of merges cost, and what they buy."""

from collections.abc import Sequence
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING, number, whole
from sp_bench.report.gradient_errors import Point, compared, options
from sp_bench.report.page.parts import Line, Section, Table

BASIS = (
    "seq_len is fixed; from one sp_size to another it is strong scaling. The baseline of an error is the reference at "
    "the reduced length, that of a share the row's own budget."
)
HEAD = (
    *("method", "sp_size", "seq_len (tokens)", "dK/dV travel in", "merged in", "step (ms)", "TFLOP/s a device"),
    *("largest gradient error", "of", "its budget", "error / budget"),
)
CAPTION = (
    "Input is the dtype of the trial. Errors are relative L2 against the reference at the reduced length, the largest "
    "over the replicates; budgets are the rows' own."
)


def section(cells: Sequence[Cell]) -> Section | None:
    found = {setting: compared(list(group)) for setting, group in groupby(cells, key=lambda c: c.setting)}
    tables = [Table(s, CAPTION, HEAD, tuple(map(_line, points)), (0, 3, 4, 8)) for s, points in found.items() if points]
    return Section("errors", "Error and speed", BASIS, tables=tuple(tables)) if tables else None


def _line(point: Point) -> Line:
    cell, (travelling, merged) = point.cell, options(point.cell)
    texts = (
        *(cell.series, whole(cell.asked["sp_size"]), whole(cell.asked["seq_len"]), travelling or MISSING),
        *(merged or MISSING, number(cell.median_step_ms), number(point.tflops_per_s), number(point.error)),
        *(point.gradient, number(point.budget), f"{point.error / point.budget:.3f}" if point.budget else MISSING),
    )
    return Line(texts, (cell,))
