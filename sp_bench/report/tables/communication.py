"""Bytes that the rank that sends most sends off-rank in one step: predicted, counted by phase, on the wire."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sp_bench.report.cells import PHASES, Cell
from sp_bench.report.formats import MISSING, byte_unit, whole
from sp_bench.report.pattern_bytes import pattern_bytes
from sp_bench.report.provenance import words
from sp_bench.report.tables.grid import Family, families, place
from sp_bench.report.tables.parts import Column, Entry, PaperTable, legend, measured, words_of

MAX_PHASES = 5  # more do not fit beside the totals: the smallest become one
NEGLIGIBLE = 1e-3  # of the total: a phase that is smaller everywhere has no column
OTHER, REST = "other", "rest"
NAMES = {"parameters": "params", "gradients": "grads"}
EACH = "At the longest seq_len (tokens) of each sp_size."
CAPTION = (
    "Predicted is the closed form, counted what the collectives of one "
    "untimed step held; exact: they are equal, in total and for each phase and op, in every replicate."
)
WIRE = "Wire is what NVLink's counters say of a timed step."
NO_WIRE = "Nothing is known of the wire."
OF_PATTERN = (
    "Of pattern: attention bytes counted over those that our method of the same kind sends by default; what libraries "
    "send otherwise is in docs/METHODS.md."
)


def tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """One a family of settings in which any cell on several ranks knows its bytes."""
    made = []
    for family in families(cells):
        sized = [cell for cell in _longest(family.cells) if cell.asked["sp_size"] > 1]
        if any(cell.communication.phases for cell in sized):
            made.append(_table(family, sized))
    return made


def _longest(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of the longest length of their setting and sp_size at which any cell knows its bytes."""
    longest: dict[tuple[str, int], int] = {}
    for cell in cells:
        if cell.communication.phases:
            where = (cell.setting, cell.asked["sp_size"])
            longest[where] = max(cell.asked["seq_len"], longest.get(where, 0))
    return [c for c in cells if longest.get((c.setting, c.asked["sp_size"])) == c.asked["seq_len"]]


@dataclass(frozen=True)
class Form:
    """What the columns of bytes are and how they are written."""

    groups: Mapping[str, tuple[str, ...]]  # column of counted bytes -> its phases
    scale: float  # bytes of a unit
    unit: str
    decimals: int
    with_wire: bool
    with_pattern: bool  # libraries need not send what their pattern does

    @property
    def with_share(self) -> bool:
        """Beside many phases there is no room for what the wire is of counted."""
        return self.with_wire and len(self.groups) < MAX_PHASES - 1

    @property
    def columns(self) -> tuple[Column, ...]:
        names = (*(NAMES.get(name, name) for name in self.groups), "total")
        return (
            *(Column(f"counted, {name}", self.unit, is_number=True, group="counted", short=name) for name in names),
            *(Column("predicted", self.unit, is_number=True), Column("exact")),
            *((Column("of pattern", is_number=True),) if self.with_pattern else ()),
            *((Column("wire", self.unit, is_number=True),) if self.with_wire else ()),
            *((Column("of counted", is_number=True),) if self.with_share else ()),
        )


def _form(cells: Sequence[Cell]) -> Form:
    """The largest unit that leaves every total at 1 or more."""
    totals = [total for cell in cells if (total := cell.communication.counted_bytes)]
    scale, unit = byte_unit(min(totals, default=0.0))
    decimals = 0 if scale == 1 else 1 if max(totals) >= 100 * scale else 3
    with_wire = any(cell.middle("comm_wire_bytes") is not None for cell in cells)
    with_pattern = any(cell.is_library and pattern_bytes(cell) is not None for cell in cells)
    return Form(_phase_groups(cells), scale, unit, decimals, with_wire, with_pattern)


def _table(family: Family, cells: Sequence[Cell]) -> PaperTable:
    form, places = _form(cells), sorted({place(cell) for cell in cells})
    several = len(places) > 1
    lines = []
    for sp_size, seq_len in places:
        where = (Entry(str(sp_size)), Entry(whole(seq_len))) if several else ()
        for begin, here in family.lines([cell for cell in cells if place(cell) == (sp_size, seq_len)]):
            lines += [(*where, *begin, *_line(cell, form)) for cell in here]
    made = tuple(lines)
    columns = (*((Column("sp_size"), Column("seq_len")) if several else ()), *family.beginning, *form.columns)
    at = EACH if several else f"At sp_size {places[0][0]}, {whole(places[0][1])} tokens."
    wire = WIRE if form.with_wire else NO_WIRE
    pattern = f" {OF_PATTERN}" if form.with_pattern else ""
    caption = f"{at} {CAPTION}{pattern} {wire}{_left_out(cells, form.groups)}{legend(made)}"
    title = f"Communication, {form.unit} sent off-rank a step"
    stem = f"communication-{family.what}"
    return PaperTable("communication", family.setting, stem, title, caption, columns, made, words(cells), family.values)


def _shares(cells: Sequence[Cell]) -> dict[str, float]:
    """The largest share of the counted total that each phase has in any cell."""
    largest: dict[str, float] = {}
    for comm in (cell.communication for cell in cells):
        for phase, (_, counted) in comm.phases.items():
            if phase != OTHER:
                largest[phase] = max(largest.get(phase, 0.0), (counted or 0.0) / (comm.counted_bytes or math.inf))
    return largest


def _phase_groups(cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """Column -> its phases: the largest have their own, of too many the remaining ones share the last."""
    shares = {phase: share for phase, share in _shares(cells).items() if share >= NEGLIGIBLE}
    ranked = sorted(shares, key=lambda p: (-shares[p], p))
    kept = ranked if len(ranked) <= MAX_PHASES else ranked[: MAX_PHASES - 1]
    groups = {p: (p,) for p in sorted(kept, key=lambda p: ([*PHASES, p].index(p), p))}
    rest = tuple(sorted(set(ranked) - set(kept)))
    return groups | {REST: rest} if rest else groups


def _left_out(cells: Sequence[Cell], groups: Mapping[str, Sequence[str]]) -> str:
    said = f" {REST.capitalize()}: {', '.join(groups[REST])}." if REST in groups else ""
    small = sorted(phase for phase, share in _shares(cells).items() if 0 < share < NEGLIGIBLE)
    if small:
        said += f" In the total alone, below {NEGLIGIBLE:.1%} of it: {', '.join(small)}."
    if any(OTHER in cell.communication.phases for cell in cells):
        said += f" Phase {OTHER} (gradient clipping) is in no column."
    return said


def _counted(cell: Cell, phases: Sequence[str]) -> float | None:
    known = [count for p in phases if (count := cell.communication.phases.get(p, (None, None))[1]) is not None]
    return sum(known) if known else None


def _line(cell: Cell, form: Form) -> tuple[Entry, ...]:
    if not cell.ok:
        return tuple(words_of(cell) for _ in form.columns)

    def size(value: float | None) -> Entry:
        known = value is not None
        return measured(cell, f"{value / form.scale:,.{form.decimals}f}") if known else Entry(MISSING)

    comm, wire = cell.communication, cell.middle("comm_wire_bytes")
    share = wire / comm.counted_bytes if wire is not None and comm.counted_bytes else None
    pattern = pattern_bytes(cell)
    return (
        *(size(_counted(cell, phases)) for phases in form.groups.values()),
        *(size(comm.counted_bytes), size(comm.predicted_bytes), _exact(cell)),
        *((_share(cell, pattern and pattern.ratio),) if form.with_pattern else ()),
        *((size(wire),) if form.with_wire else ()),
        *((_share(cell, share),) if form.with_share else ()),
    )


def _share(cell: Cell, ratio: float | None) -> Entry:
    return Entry(MISSING) if ratio is None else measured(cell, f"{ratio:.4f}")


def _exact(cell: Cell) -> Entry:
    comm = cell.communication
    if comm.equal is None:
        return Entry(MISSING)
    if comm.equal:
        return Entry("yes", cells=(cell,))
    predicted, counted = comm.predicted_bytes, comm.counted_bytes
    off = f" ({counted / predicted - 1:+.2%})" if predicted and counted is not None else ""
    return Entry(f"no{off}", cells=(cell,))
