"""Tables for a paper: cells in, tables out, which latex.py, markdown.py and sheet.py write."""

from collections.abc import Sequence
from dataclasses import replace

from sp_bench.report.cells import Cell
from sp_bench.report.tables import communication, max_context, memory, published, ratios, throughput
from sp_bench.report.tables.parts import PaperTable


def paper_tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """All tables, each with a file name of its own, kind by kind. Of cells of which nothing ran there may be none."""
    kinds = (throughput, ratios, memory, max_context, communication, published)
    made = [table for kind in kinds for table in kind.tables(cells)]
    taken: set[str] = set()
    return [replace(table, stem=_stem(table.stem, taken)) for table in made]


def _stem(words: str, taken: set[str]) -> str:
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in words)
    stem = next(s for s in (plain, *(f"{plain}-{i}" for i in range(2, len(taken) + 3))) if s not in taken)
    taken.add(stem)
    return stem
