"""The sections of the page beside verdict, figures and tables, each there only if its rows are."""

from collections.abc import Sequence
from dataclasses import replace

from sp_bench.report.cells import Cell
from sp_bench.report.page import attribution, device, errors, fabrics, interconnect, launches, offload, parity, rivals
from sp_bench.report.page.parts import Section, Table
from sp_bench.report.provenance import words

MAX_LINES = 1000  # of the tables of one section: thousands of cells would make a page that nobody opens
TOPICS = (
    rivals,
    offload,
    launches,
    attribution,
    fabrics,
    interconnect,
    errors,
    parity,
    device,
)  # in the order of the page


def sections(cells: Sequence[Cell]) -> list[Section]:
    """Words and tables; figures of the kind that a section's anchor names are shown in it."""
    made = [topic.section(cells) for topic in TOPICS]
    return [_shortened(_with_provenance(section)) for section in made if section is not None]


def _with_provenance(section: Section) -> Section:
    return replace(section, tables=tuple(replace(t, provenance=t.provenance or _of_lines(t)) for t in section.tables))


def _of_lines(table: Table) -> str:
    cells = {cell.cell_id: cell for line in table.lines for cell in line.cells}
    return words(list(cells.values()))


def _shortened(section: Section) -> Section:
    most = max(1, MAX_LINES // max(1, len(section.tables)))
    if (
        all(len(table.lines) <= most for table in section.tables)
        or sum(len(t.lines) for t in section.tables) <= MAX_LINES
    ):
        return section
    return replace(section, tables=tuple(_cut(table, most) for table in section.tables))


def _cut(table: Table, most: int) -> Table:
    """The last lines, which are those of the largest sp_size and seq_len."""
    if len(table.lines) <= most:
        return table
    words = f"The last {most:,} of {len(table.lines):,} lines; the rows hold the others."
    return replace(table, lines=table.lines[-most:], caption=f"{table.caption} {words}".strip())
