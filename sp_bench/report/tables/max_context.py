"""The largest length that ran and the smallest that was out of memory, by method and number of ranks."""

from collections.abc import Sequence

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING, whole
from sp_bench.report.limits import limits
from sp_bench.report.provenance import words
from sp_bench.report.tables.grid import Family, families
from sp_bench.report.tables.parts import Column, Entry, PaperTable, legend, measured

CAPTION = (
    "Of the lengths that were tried: the limit lies between the two, or beyond the first where none was out of memory. "
    "Other failures say nothing of memory and count as neither."
)


def tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """One a family of settings in which anything was out of memory: elsewhere no limit was found."""
    found = [(family, limits(family.cells)) for family in families(cells)]
    return [_table(family) for family, each in found if any(limit.smallest_oom for limit in each)]


def _table(family: Family) -> PaperTable:
    found = {(limit.setting, limit.series, limit.sp_size): limit for limit in limits(family.cells)}
    sizes = sorted({sp_size for _, _, sp_size in found})
    lines = []
    for begin, cells in family.lines([c for limit in found.values() for c in limit.cells]):
        first, shown = cells[0], []
        for sp_size in sizes:
            limit = found.get((first.setting, first.series, sp_size))
            ok, oom = (limit.largest_ok, limit.smallest_oom) if limit else (None, None)
            shown.append(measured(ok, whole(ok.asked["seq_len"])) if ok else Entry("none" if limit else MISSING))
            shown.append(_failed(oom) if oom else Entry("none" if limit else MISSING))
        lines.append((*begin, *shown))
    made = tuple(lines)
    columns = [
        Column(f"sp_size {size}, {what}", "tokens", is_number=True, group=f"sp_size {size}", short=what)
        for size in sizes
        for what in ("largest that ran", "smallest OOM")
    ]
    return PaperTable(
        "max_context", family.setting, f"max_context-{family.what}", "Longest sequence, tokens",
        CAPTION + legend(made), (*family.beginning, *columns), made, words(family.cells), family.values,
    )  # fmt: skip


def _failed(cell: Cell) -> Entry:
    return Entry(cells=(cell,), number=whole(cell.asked["seq_len"]))
