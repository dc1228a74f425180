"""Peak memory of the rank that needs most, by method, number of ranks and length."""

from collections.abc import Sequence
from math import floor, log10

from sp_bench.report.cells import Cell
from sp_bench.report.formats import GIB
from sp_bench.report.tables.grid import Family, families, grid
from sp_bench.report.tables.parts import Entry, PaperTable, measured, words_of

WHAT = {"max_peak_allocated_bytes": "device memory (allocated)", "max_peak_host_bytes": "host memory (resident set)"}
CAPTION = "seq_len in tokens. Median over the replicates."


def tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """One a family of settings and kind of memory."""
    made = []
    for family in families(cells):
        made += [_table(family, column) for column in WHAT if any(c.memory_column == column for c in family.cells)]
    return made


def _table(family: Family, column: str) -> PaperTable:
    known = [value for cell in family.cells if cell.memory_column == column for value in cell.memory_bytes]
    smallest = min((value for value in known if value > 0), default=GIB)
    decimals = max(2, 1 - floor(log10(smallest / GIB)))  # the same in all entries; the smallest keeps two digits

    def entry(cell: Cell) -> Entry:
        if cell.memory_column != column or cell.median_memory_bytes is None:
            return words_of(cell)
        return measured(cell, f"{cell.median_memory_bytes / GIB:,.{decimals}f}")

    title = f"Peak {WHAT[column]} of the largest rank, GiB"
    return grid("memory", f"memory-{family.what}", family, title, "GiB", CAPTION, entry)
