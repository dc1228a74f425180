"""Ratios of step times: methods against the kernel alone, other libraries against ours."""

from collections.abc import Sequence
from dataclasses import replace

from sp_bench.report import rivals
from sp_bench.report.cells import Cell
from sp_bench.report.provenance import words
from sp_bench.report.ratios import MIN_REPLICATES, paired_ratio, ratio_of_medians
from sp_bench.report.tables.grid import Family, Place, at_place, families, grid, place
from sp_bench.report.tables.parts import Column, Entry, PaperTable, legend, measured, words_of
from sp_bench.report.time_parts import kernel_alone

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
    made = []
    for family in families(cells):
        made += [_shares(family, cells)] if any(_alone(cell, cells) for cell in family.cells) else []
        made += [_rivals(family)] if _compared(family) else []
    return made


def _shares(family: Family, every: Sequence[Cell]) -> PaperTable:
    alone = {cell.cell_id: _alone(cell, every) for cell in family.cells}

    def entry(cell: Cell) -> Entry:
        single = alone[cell.cell_id]
        return words_of(cell) if single is None else _ratio(single, cell, cell)

    table = grid("share", f"share-{family.what}", family, "Share of the kernel alone", "", SHARES, entry)
    singles = {single.cell_id: single for single in alone.values() if single is not None}
    return replace(table, provenance=words([*family.cells, *singles.values()]))


def _alone(cell: Cell, every: Sequence[Cell]) -> Cell | None:
    return kernel_alone(cell, every) if cell.ok and cell.asked["sp_size"] > 1 else None


def _compared(family: Family) -> dict[tuple[str, str, str], dict[Place, Entry]]:
    """(setting, library, which of ours) -> the ratio at each place."""
    found: dict[tuple[str, str, str], dict[Place, Entry]] = {}
    for their in rivals.libraries(family.cells):
        for what, our in rivals.counterparts(their, family.cells):
            if what != rivals.ANY:
                key = (their.setting, their.series, what)
                found.setdefault(key, {})[place(their)] = _ratio(their, our, their, our)
    return found


def _rivals(family: Family) -> PaperTable:
    found = _compared(family)
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
    return PaperTable("rivals", family.setting, stem, title, caption, columns, shown, words([*cells.values()]))


def _ratio(over: Cell, under: Cell, of: Cell, *more: Cell) -> Entry:
    paired = paired_ratio(over, under)
    value, interval = (f"{ratio_of_medians(over, under):.3f}", "") if paired is None else paired.rounded(3)
    entry = measured(of, value, interval=interval, mark_few=True)
    return Entry(entry.text, entry.best, (*entry.cells, *more), entry.number)
