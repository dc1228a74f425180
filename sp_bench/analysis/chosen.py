"""Lines of a figure that an author chooses: each has a name, and its cells by words as those of `only.`, such as
method=ring kernel=cudnn or campaign=NAME. A line has one cell at each length, or at each number of GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.settings import is_baseline
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.formats import whole

AXES = {"seq_len": "tokens", "sp_size": "GPUs"}  # option -> its unit; what lines can be over
CAMPAIGN = "campaign"
Words = Mapping[str, Sequence[Any]]  # option, or CAMPAIGN -> the values that a cell may have


@dataclass(frozen=True)
class Line:
    name: str
    cells: Mapping[int, Cell]  # by the axis, in its order; those without a time ran out of memory


@dataclass(frozen=True)
class Lines:
    over: str  # of AXES
    lines: tuple[Line, ...]

    @property
    def cells(self) -> list[Cell]:
        return [cell for line in self.lines for cell in line.cells.values()]

    @property
    def places(self) -> list[int]:
        return sorted({place for line in self.lines for place in line.cells})


def chosen(cells: Sequence[Cell], asked: Sequence[tuple[str, Words]]) -> Lines:
    """The named lines, in their order.

    Raises:
        ConfigError: an option or value that no cell has, a line without cells or with several at one place, or lines
            over lengths and numbers of GPUs at once.
    """
    known = [cell for cell in cells if (cell.ok or cell.out_of_memory) and not is_baseline(cell)]
    found = [(name, matching(known, words, f"--line {shown(name)}: ")) for name, words in asked]
    axes = [axis for axis in AXES if len({cell.asked[axis] for _, of in found for cell in of}) > 1]
    if len(axes) > 1:
        raise ConfigError(f"the lines are over {' and '.join(axes)}; name one value of either, such as sp_size=4")
    over = axes[0] if axes else "seq_len"
    return Lines(over, tuple(Line(name, _by_place(name, of, over)) for name, of in found))


def as_shown(words: Words, campaigns: Mapping[str, str]) -> Words:
    """The words with the names that campaigns have on an anonymous page. campaigns: name -> name on the page."""
    return {
        key: [campaigns.get(str(value), value) for value in values] if key == CAMPAIGN else values
        for key, values in words.items()
    }


def matching(cells: Sequence[Cell], words: Words, before: str) -> list[Cell]:
    """The cells that have one of the values of each option. before: the beginning of the error.

    Raises:
        ConfigError: there are none.
    """
    found = list(cells)
    for key, values in words.items():
        there = sorted({str(value) for cell in found for value in _values(cell, key)})
        found = [cell for cell in found if any(value in values for value in _values(cell, key))]
        if not found:
            known = f"is {', '.join(there)} in these rows" if there else "is no option of these rows"
            raise ConfigError(f"{before}{key} {shown(known)}, never {shown(', '.join(map(str, values)))}")
    return found


def _values(cell: Cell, key: str) -> list[Any]:
    """What a cell has of an option, or of a group such as `method`; the campaigns of its rows."""
    if key == CAMPAIGN:
        return sorted({str(row["folder"]) for row in cell.rows})
    return [cell.options[path] for path in (key, f"{key}.name") if path in cell.options]


def _by_place(name: str, cells: Sequence[Cell], over: str) -> dict[int, Cell]:
    by_place: dict[int, list[Cell]] = {}
    for cell in cells:
        by_place.setdefault(cell.asked[over], []).append(cell)
    for place, several in by_place.items():
        if len(several) > 1:
            differing = _differing(several)
            apart = ", ".join(f"{key} ({', '.join(values)})" for key, values in differing.items())
            key, values = min(differing.items(), key=lambda each: "None" in each[1])
            raise ConfigError(
                f"--line {shown(name)}: {len(several)} cells at {whole(place)} {AXES[over]}, which differ in "
                f"{shown(apart, 300)}; name one, such as {shown(key)}={shown(values[0])}"
            )
    return {place: by_place[place][0] for place in sorted(by_place)}


def _differing(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Option -> its values; by campaign where all options are equal."""
    options = [dict(cell.but()) for cell in cells]
    values = {path.removesuffix(".name"): [str(each.get(path)) for each in options] for path in options[0]}
    differing = {path: sorted(set(of)) for path, of in values.items() if len(set(of)) > 1}
    return differing or {CAMPAIGN: sorted({name for cell in cells for name in _values(cell, CAMPAIGN)})}
