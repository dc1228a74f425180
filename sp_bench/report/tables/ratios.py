"""Ratios of step times: methods against the kernel alone, other libraries against ours."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sp_bench.report import rivals
from sp_bench.report.cells import Cell
from sp_bench.report.provenance import words
from sp_bench.report.ratios import MIN_REPLICATES, rounded_ratio
from sp_bench.report.tables.grid import Family, Place, at_place, families, grid, place
from sp_bench.report.tables.parts import Column, Entry, PaperTable, legend, measured, words_of
from sp_bench.report.time_parts import kernel_alone

Compared = dict[tuple[str, str, str], dict[Place, Entry]]

INTERVALS = (
    f" In brackets the order-statistic interval of the paired ratio, from {MIN_REPLICATES} replicates on one machine."
)
SHARES = (
    "Step time of the kernel alone, on one device with the whole sequence and 1/P of the heads, over that of the "
    "method: 1 is what no method can beat. seq_len in tokens." + INTERVALS
)
RIVALS = (
    "Step time of a library over that of our method of the same kind, layout and degrees: above 1, ours is faster. Of "
    "several of ours the one with the smallest median. seq_len in tokens." + INTERVALS
)


def tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """Of each family of settings those for which it has cells on both sides."""
    singles = [cell for cell in cells if cell.asked["method"] == "single"]
    made = []
    for family in families(cells):
        if alone := _alone(family.cells, singles):
            made.append(_shares(family, alone))
        if compared := _compared(family):
            made.append(_rivals(family, compared))
    return made


def _alone(cells: Sequence[Cell], singles: Sequence[Cell]) -> dict[str, Cell]:
    """The kernel alone by the cell_id of what ran on several ranks, where there is one."""
    found = {cell.cell_id: kernel_alone(cell, singles) for cell in cells if cell.ok and cell.asked["sp_size"] > 1}
    return {cell_id: single for cell_id, single in found.items() if single is not None}


def _shares(family: Family, alone: Mapping[str, Cell]) -> PaperTable:
    def entry(cell: Cell) -> Entry:
        single = alone.get(cell.cell_id)
        return words_of(cell) if single is None else _ratio(single, cell, cell)

    table = grid("share", f"share-{family.what}", family, "Share of the kernel alone", "", SHARES, entry)
    singles = {single.cell_id: single for single in alone.values()}
    return replace(table, provenance=words([*family.cells, *singles.values()]))


def _compared(family: Family) -> Compared:
    """(setting, library, which of ours) -> the ratio at each place."""
    found: Compared = {}
    for their in rivals.libraries(family.cells):
        for what, our in rivals.counterparts(their, family.cells):
            if what != rivals.ANY:
                key = (their.setting, their.series, what)
                found.setdefault(key, {})[place(their)] = _ratio(their, our, their, our)
    return found


def _rivals(family: Family, found: Compared) -> PaperTable:
    places = sorted({p for at in found.values() for p in at})
    lines = []
    for (setting, library, what), at in sorted(found.items()):
        fabric = (Entry(family.fabrics[setting]),) if family.several else ()
        lines.append((*fabric, Entry(library), Entry(what), *(at.get(p) or words_of(None) for p in places)))
    columns = (*family.beginning[:-1], Column("library"), Column("ours, with"), *(at_place(*p, "") for p in places))
    title, shown = "Libraries' step time over ours", tuple(lines)
    caption = RIVALS + legend(shown)
    cells = {cell.cell_id: cell for line in lines for entry in line for cell in entry.cells}
    stem = f"rivals-{family.what}"
    provenance = words([*cells.values()])
    return PaperTable("rivals", family.setting, stem, title, caption, columns, shown, provenance, family.values)


def _ratio(over: Cell, under: Cell, of: Cell, *more: Cell) -> Entry:
    value, interval = rounded_ratio(over, under)
    entry = measured(of, value, interval=interval, mark_few=True)
    return replace(entry, cells=(*entry.cells, *more))
