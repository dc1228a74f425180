"""What a paper's table is made of, whatever it is about and however it is written: columns, entries, words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor, log10
from typing import Any

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING
from sp_bench.report.ratios import WITHOUT_INTERVAL

STATUS_WORDS = {"oom": "OOM"}  # other statuses are words already
FEW, PARTLY = "†", "‡"
LEGEND = {
    FEW: f"{FEW}: {WITHOUT_INTERVAL}, so no interval",
    PARTLY: f"{PARTLY}: not every replicate ran",
    MISSING: f"{MISSING}: not part of the campaign, or not known",
}


@dataclass(frozen=True)
class Column:
    """`name` is complete. Neighbours may share a `group`, a heading above theirs; `short` is the name under it."""

    name: str
    unit: str = ""
    is_number: bool = False
    group: str = ""
    short: str = ""

    @property
    def heading(self) -> str:
        return self.short or self.name


@dataclass(frozen=True)
class Entry:
    """Either words, or a number with a mark and an interval in brackets where it has them."""

    words: str = ""
    best: bool = False
    cells: tuple[Cell, ...] = ()
    number: str = ""
    mark: str = ""
    interval: str = ""

    @property
    def text(self) -> str:
        return self.words or " ".join(filter(None, (f"{self.number}{self.mark}", self.interval)))


@dataclass(frozen=True)
class PaperTable:
    """Leading columns that hold words repeat themselves from line to line: each line is whole by itself."""

    kind: str  # step_time | throughput | share | rivals | memory | max_context | communication | published
    setting: str
    stem: str  # what the file is called, without suffix
    title: str
    caption: str
    columns: tuple[Column, ...]
    lines: tuple[tuple[Entry, ...], ...]
    provenance: str
    values: Mapping[str, Any] = field(default_factory=dict)  # of the setting, for the name of the file

    @property
    def units_differ(self) -> bool:
        """Else the title says the one unit."""
        return len({column.unit for column in self.columns if column.unit}) > 1

    @property
    def heads(self) -> list[str]:
        """The columns' names, each with its unit where they differ."""
        return [f"{c.name} ({c.unit})" if c.unit and self.units_differ else c.name for c in self.columns]


def significant(value: float, digits: int = 4) -> str:
    """Rounded, without an exponent between 10^-6 and 10^12: 523.4, 4,560, 160,600."""
    if value == 0:
        return "0"
    if not 1e-6 <= abs(value) < 1e12:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - floor(log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def measured(cell: Cell, number: str, *, interval: str = "", mark_few: bool = False, best: bool = False) -> Entry:
    """A figure of a cell that ran, with what must be said beside it."""
    partly = PARTLY if len(cell.step_ms) < len(cell.rows) else ""
    mark = (FEW if mark_few and not interval else "") + partly
    return Entry(best=best, cells=(cell,), number=number, mark=mark, interval=interval)


def words_of(cell: Cell | None) -> Entry:
    """For a cell without the figure: why, in words; never a number, never blank."""
    if cell is None:
        return Entry(MISSING)
    if cell.ok:
        return Entry("not known", cells=(cell,))
    failed = [STATUS_WORDS.get(status, status) for status in cell.statuses if status != "ok"]
    return Entry(", ".join(failed) or "no time", cells=(cell,))


def legend(lines: tuple[tuple[Entry, ...], ...]) -> str:
    """What the marks of these entries mean; empty without any."""
    entries = [entry for line in lines for entry in line]
    present = {MISSING for entry in entries if entry.text == MISSING}
    present |= {symbol for entry in entries for symbol in entry.mark}
    said = [meaning for symbol, meaning in LEGEND.items() if symbol in present]
    return f" {'; '.join(said)}." if said else ""
