"""What a section of the page is made of, whatever it is about: words, figures and tables as text."""

from dataclasses import dataclass

from sp_bench.report.figures.drawings import Drawing


@dataclass(frozen=True)
class Line:
    """One line of a table; its first text opens to `rows`, the files and values that the line comes from."""

    texts: tuple[str, ...]
    rows: tuple[str, ...]
    note: str = ""  # under the first text, as a warning


@dataclass(frozen=True)
class Table:
    name: str  # heading of its own; empty: none
    caption: str
    head: tuple[str, ...]
    lines: tuple[Line, ...]
    left: tuple[int, ...] = (0,)  # columns of words; the others are numbers
    folded: bool = False  # opened by the reader


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    words: tuple[str, ...] = ()  # paragraphs
    points: tuple[str, ...] = ()  # a list of findings
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[Table, ...] = ()
