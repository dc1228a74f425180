"""How a table is laid out on paper: which columns and lines share a float, and how wide columns of words are."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sp_bench.report.formats import MISSING
from sp_bench.report.tables.latex_text import length
from sp_bench.report.tables.parts import Entry, PaperTable

# Characters of \footnotesize in a text width of 5.5 inches, which most venues have at least; a narrow table fits a
# column of a page that has two.
WIDE, NARROW = 94, 48
BETWEEN = 2  # characters between columns
MOST_WORDS, LEAST_WORDS = 40, 12  # characters of a column of words: wider ones are wrapped, never below the least
SMALL = 0.85  # of the width of a number: that of an interval below it
LINES_A_PAGE = 40
_BREAKS = re.compile(r"[\s_-]")


@dataclass(frozen=True)
class Sheet:
    """One float: columns by their place in the table, each with its width in characters, and lines."""

    columns: tuple[int, ...]
    widths: Mapping[int, int]
    lines: tuple[tuple[Entry, ...], ...]

    @property
    def is_narrow(self) -> bool:
        return sum(self.widths.values()) + BETWEEN * len(self.columns) <= NARROW


def sheets(table: PaperTable) -> list[Sheet]:
    """All words and as many of the numbers as fit beside them, page by page; at least one float."""
    return [
        Sheet(tuple(columns), _fitted(table, columns, lines), tuple(lines))
        for columns in _columns(table)
        for lines in _pages(table, _fitted(table, columns, table.lines))
    ]


def _known(table: PaperTable, columns: Sequence[int]) -> list[tuple[Entry, ...]]:
    """Without the lines of which these columns know nothing, as far as others do."""
    numbers = [i for i in columns if table.columns[i].is_number]
    known = [line for line in table.lines if any(line[i].text != MISSING for i in numbers)]
    return known or list(table.lines)


def natural_width(table: PaperTable, column: int) -> int:
    """Characters of the widest text of a column, its heading included."""
    texts = [round(SMALL * len(e.interval)) if e.interval else length(e.text) for e in _entries(table, column)]
    return max([len(table.columns[column].heading), *texts, *(len(e.number) for e in _entries(table, column))])


def _entries(table: PaperTable, column: int) -> list[Entry]:
    return [line[column] for line in table.lines]


def _least(table: PaperTable, column: int) -> int:
    """Characters below which a column of words would cut through a word."""
    texts = [table.columns[column].heading, *(e.text for e in _entries(table, column))]
    longest = max(length(word) for text in texts for word in _BREAKS.split(text))
    return min(max(longest + 1, LEAST_WORDS), natural_width(table, column))


def _columns(table: PaperTable) -> list[list[int]]:
    """As many numbers as fit, float by float; where that would wrap the words, in even parts, which leave them more."""
    words = [i for i, column in enumerate(table.columns) if not column.is_number]
    numbers = [i for i, column in enumerate(table.columns) if column.is_number]
    room = max(1, WIDE - sum(_least(table, i) + BETWEEN for i in words))
    sizes = [natural_width(table, i) + BETWEEN for i in numbers]

    def joined(parts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [sorted([*words, *(numbers[place] for place in part)]) for part in parts]

    filled = joined(_filled(sizes, room))
    wide = {i: min(natural_width(table, i), MOST_WORDS) for i in words}
    are_wide = all(_fitted(table, columns, table.lines)[i] >= wide[i] for columns in filled for i in words)
    return filled if are_wide else joined(_balanced(sizes, room))


def _balanced(sizes: Sequence[int], room: int) -> list[list[int]]:
    """The places of `sizes` in as few parts as `room` allows, one at least; of these the largest as small as can be,
    so that no last part holds a rest."""
    fewest = len(_filled(sizes, room))
    least = bisect_left(range(1, room + 1), -fewest, key=lambda size: -len(_filled(sizes, size))) + 1
    return _filled(sizes, least)


def _filled(sizes: Sequence[int], room: int) -> list[list[int]]:
    """In order, a new part where the next no longer fits; what is larger than `room` stands alone."""
    parts: list[list[int]] = [[]]
    left = room
    for place, size in enumerate(sizes):
        if size > left and parts[-1]:
            parts.append([])
            left = room
        parts[-1].append(place)
        left -= size
    return parts


def _fitted(table: PaperTable, columns: Sequence[int], lines: Sequence[tuple[Entry, ...]]) -> dict[int, int]:
    """Words are wrapped at the widest common measure that leaves room for the numbers of these lines: a failure's long
    word among them narrows the words of its own page alone."""
    part = replace(table, lines=tuple(lines))
    natural = {i: natural_width(part if table.columns[i].is_number else table, i) for i in columns}
    least = {i: _least(table, i) for i in columns if not table.columns[i].is_number}
    room = WIDE - BETWEEN * len(columns) - sum(natural[i] for i in columns if i not in least)

    def wrapped(measure: int) -> dict[int, int]:
        return {i: min(natural[i], max(measure, least[i])) for i in least}

    measures = range(MOST_WORDS, LEAST_WORDS, -1)
    return natural | wrapped(next((m for m in measures if sum(wrapped(m).values()) <= room), LEAST_WORDS))


def _pages(table: PaperTable, widths: Mapping[int, int]) -> list[list[tuple[Entry, ...]]]:
    lines = _known(table, list(widths))
    parts = _balanced([_height(table, line, widths) for line in lines], LINES_A_PAGE)
    return [[lines[place] for place in part] for part in parts]


def _height(table: PaperTable, line: Sequence[Entry], widths: Mapping[int, int]) -> int:
    """Printed lines: those of the words that are wrapped most, and one for intervals."""
    words = [-(-length(line[i].text) // width) for i, width in widths.items() if not table.columns[i].is_number]
    return max([1, *words]) + any(line[i].interval for i in widths)
