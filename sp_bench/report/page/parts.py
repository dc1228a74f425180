"""What the page is made of, whatever it is about: words whose numbers know the cells behind them, figures and tables.

A sentence is a tuple of fragments: text, and `Ref`s, which the page makes links to the rows of their cells.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sp_bench.report.cells import Cell
from sp_bench.report.formats import counted, number, without_escapes


@dataclass(frozen=True)
class Ref:
    """A piece of text that links to the rows of the cells it comes from."""

    text: str
    cells: tuple[Cell, ...]
    strong: bool = False


Words = tuple[str | Ref, ...]


@dataclass(frozen=True)
class Line:
    """One line of a table. Numbers that are no Refs of their own link to the rows of `cells`."""

    texts: tuple[str | Ref, ...]
    cells: tuple[Cell, ...]
    note: str = ""  # under the first text, as a warning


@dataclass(frozen=True)
class Table:
    name: str  # heading of its own; empty: none
    caption: str
    head: tuple[str, ...]
    lines: tuple[Line, ...]
    left: tuple[int, ...] = (0,)  # columns of words; the others are numbers
    folded: bool = False  # opened by the reader
    setting: str = ""  # under the heading; empty: the name says it
    provenance: str = ""  # empty: not said
    stem: str = ""  # of the files beside the page that hold the same; empty: none do


@dataclass(frozen=True)
class Section:
    anchor: str  # also the kind of the figures that it shows
    title: str
    basis: str  # strong, weak or no scaling, and the baseline of its ratios
    words: tuple[Words, ...] = ()  # paragraphs
    points: tuple[Words, ...] = ()  # a list of findings
    tables: tuple[Table, ...] = ()


def say(*parts: str | Ref | Words) -> Words:
    """One sentence of text, references and pieces of sentences."""
    return tuple(piece for part in parts for piece in (part if isinstance(part, tuple) else (part,)))


def plain(words: Words) -> str:
    """A sentence without its links."""
    return "".join(part if isinstance(part, str) else part.text for part in words)


def listing(words: Sequence[Words], between: str = ", ") -> Words:
    return say(*(piece for i, each in enumerate(words) for piece in ((between, each) if i else (each,))))


def ref(text: str, cells: Cell | Iterable[Cell]) -> Ref:
    return Ref(text, (cells,) if isinstance(cells, Cell) else tuple(cells))


def in_ms(value: float | None, *cells: Cell) -> Ref:
    return ref(f"{number(value)} ms", cells)


def median_ms(cell: Cell) -> Ref:
    return in_ms(cell.median_step_ms, cell)


def processors(cell: Cell) -> str:
    """4 GPUs; what its ranks run on."""
    return counted(cell.asked["sp_size"], cell.processor)


def with_kernel(cell: Cell) -> str:
    """Its series, and the kernel unless the series says it."""
    return cell.series if cell.name.says_kernel else f"{cell.series} with {cell.asked['kernel']}"


# Also what turns the direction of the text after it: a name must not rewrite its sentence.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Without terminal escapes and control characters, which HTML does not allow or a reader would not see."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", without_escapes(text))
