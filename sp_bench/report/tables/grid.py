"""The usual shape of a paper's table: a line a method, a column a number of ranks and length.

Settings that differ in their fabric alone share a table, whose first column says which.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sp_bench.report.cells import Cell
from sp_bench.report.formats import whole
from sp_bench.report.provenance import words
from sp_bench.report.series import option_words, shared_values
from sp_bench.report.tables.parts import Column, Entry, PaperTable, legend, words_of
from sp_bench.rows.names import Values

Place = tuple[int, int]  # sp_size, seq_len


@dataclass(frozen=True)
class Family:
    """Cells of settings that are equal but for their fabric: `fabrics` maps a setting to what tells it apart."""

    setting: str
    fabrics: Mapping[str, str]
    cells: tuple[Cell, ...]

    @property
    def values(self) -> Values:
        """The options that all its settings share."""
        return shared_values([cell.name.values for cell in self.cells])

    @property
    def several(self) -> bool:
        return len(self.fabrics) > 1

    @property
    def what(self) -> str:
        asked = self.cells[0].asked
        return f"{asked['workload']}-{asked['pass_kind']}"

    @property
    def processor(self) -> str:
        return self.cells[0].processor

    def lines(self, cells: Sequence[Cell]) -> list[tuple[tuple[Entry, ...], list[Cell]]]:
        """(the words a line begins with, its cells) for each fabric and series; the fastest fabric first."""
        grouped: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            grouped.setdefault((cell.setting, cell.series), []).append(cell)
        order = list(self.fabrics)
        return [
            (self._begin(setting, series), group)
            for (setting, series), group in sorted(grouped.items(), key=lambda g: (order.index(g[0][0]), g[0][1]))
        ]

    def _begin(self, setting: str, series: str) -> tuple[Entry, ...]:
        return (*((Entry(self.fabrics[setting]),) if self.several else ()), Entry(series))

    @property
    def beginning(self) -> tuple[Column, ...]:
        """The columns that `lines` begin with."""
        return (*((Column("fabric"),) if self.several else ()), Column("method"))


def families(cells: Sequence[Cell]) -> list[Family]:
    """Of the cells that have a length and a number of ranks; in the order of `cells`."""
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        if None not in place(cell) and cell.is_of_a_length:
            grouped.setdefault(cell.over_fabrics, []).append(cell)
    return [_family(name, group) for name, group in sorted(grouped.items())]


def _family(name: str, cells: Sequence[Cell]) -> Family:
    fastest: dict[str, float] = {}
    for cell in cells:
        ms = float("inf") if cell.median_step_ms is None else cell.median_step_ms
        fastest[cell.setting] = min(ms, fastest.get(cell.setting, ms))
    settings = sorted(fastest, key=lambda s: (fastest[s], s))
    values = {cell.setting: cell.name.values for cell in cells}
    shown = {setting: _fabric_words(values[setting], list(values.values())) for setting in settings}
    return Family(settings[0] if len(settings) == 1 else name, shown, tuple(cells))


def _fabric_words(setting: Values, settings: Sequence[Values]) -> str:
    """The fabric, and of settings that share it the variables of it in which they differ."""
    shared = shared_values([each for each in settings if each["fabric.name"] == setting["fabric.name"]])
    apart = (option_words(name, value) for name, value in setting.items() if name not in shared)
    return ", ".join((str(setting["fabric.name"]), *apart))


def place(cell: Cell) -> Place:
    return cell.asked["sp_size"], cell.asked["seq_len"]


def at_place(sp_size: int, seq_len: int, unit: str) -> Column:
    group = f"sp_size {sp_size}, seq_len"
    return Column(f"{group} {whole(seq_len)}", unit, is_number=True, group=group, short=whole(seq_len))


def grid(
    kind: str, stem: str, family: Family, title: str, unit: str, caption: str, entry: Callable[[Cell], Entry]
) -> PaperTable:
    """`entry` is asked for every cell that ran; the others give their statuses. seq_len is in tokens."""
    places = sorted({place(cell) for cell in family.cells})
    lines = []
    for begin, cells in family.lines(family.cells):
        at = {place(cell): cell for cell in cells}
        shown = [entry(at[p]) if p in at and at[p].ok else words_of(at.get(p)) for p in places]
        lines.append((*begin, *shown))
    made = tuple(lines)
    columns = (*family.beginning, *(at_place(*p, unit) for p in places))
    provenance = words(family.cells)
    return PaperTable(
        kind, family.setting, stem, title, caption + legend(made), columns, made, provenance, family.values
    )
