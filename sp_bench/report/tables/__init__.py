"""Tables for a paper: cells in, tables out, which latex.py, markdown.py and sheet.py write."""

from collections.abc import Sequence
from dataclasses import replace

from sp_bench.report.cells import Cell
from sp_bench.report.file_names import stems
from sp_bench.report.tables import communication, max_context, memory, published, ratios, throughput
from sp_bench.report.tables.parts import PaperTable


def paper_tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """All tables, each with a file name of its own, kind by kind. Of cells of which nothing ran there may be none."""
    kinds = (throughput, ratios, memory, max_context, communication, published)
    made = [table for kind in kinds for table in kind.tables(cells)]
    names = stems([(table.stem, table.values) for table in made])
    return [replace(table, stem=name) for table, name in zip(made, names, strict=True)]
