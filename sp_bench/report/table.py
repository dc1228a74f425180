"""A table: a tuple of declared columns, and lines of any type. There is one renderer each for the page, CSV, JSON,
Markdown and LaTeX."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from tabulate import tabulate

from sp_bench.formats import MISSING, csv_value, escape_markdown
from sp_bench.report.latex_text import escape

L = TypeVar("L")  # a line, which columns read
WIDEST_NAME = 70  # characters of a first column, beyond which its lines are broken
PAGE_LINES = 45  # of a table of numbers; a longer one becomes several
PAGE_SHARE = 0.9  # share of LaTeX's line that columns of words fill


@dataclass(frozen=True)
class Column(Generic[L]):
    head: str
    read: Callable[[L], Any]  # the value; None if unknown
    shown: Callable[[Any], str] = str  # a known value as text
    name: str = ""  # in CSV and JSON
    optional: bool = False  # left out if no line has a value
    absent: Callable[[L], str] = lambda line: MISSING  # the text of an unknown value
    strong: Callable[[L], str] = lambda line: ""  # the beginning of the text that is printed bold
    width: float | None = None  # share of a page, for a column of words; None: what others leave

    def text(self, line: L) -> str:
        value = self.read(line)
        return self.absent(line) if value is None else self.shown(value)


@dataclass(frozen=True)
class Group(Generic[L]):
    title: str  # empty: the only one
    lines: tuple[L, ...]


@dataclass(frozen=True)
class Table(Generic[L]):
    title: str
    about: str
    columns: tuple[Column[L], ...]
    groups: tuple[Group[L], ...]
    style: str = "plain"  # of the page
    prose: bool = False  # columns are of words, not of numbers
    links: bool = False  # the first text of a line links to the rows of its `cell`
    anchor: Callable[[L], str] = lambda line: ""  # the line's id in the page
    bold: Callable[[L], bool] = lambda line: False  # the first two texts of the line
    doubts: Callable[[L], str] = lambda line: ""
    subject: str = ""  # begins the caption where the table stands alone
    legend: str = ""  # ends it
    notes: tuple[str, ...] = ()  # by number, from 1

    @property
    def lines(self) -> list[L]:
        return [line for group in self.groups for line in group.lines]

    @cached_property
    def shown(self) -> tuple[Column[L], ...]:
        return tuple(
            c for c in self.columns if not c.optional or any(c.text(x) not in ("", MISSING) for x in self.lines)
        )

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(column.head for column in self.shown)

    def texts(self, line: L) -> tuple[str, ...]:
        return tuple(column.text(line) for column in self.shown)

    def marked(self, line: L, escaped: Callable[[str], str], strong: str) -> list[str]:
        """The texts, escaped. strong: the format of bold text, such as **{}**."""
        marked = []
        for i, column in enumerate(self.shown):
            text = column.text(line)
            head = text if self.bold(line) and i < 2 else column.strong(line)
            marked.append((strong.format(escaped(head)) if head else "") + escaped(text.removeprefix(head)))
        return marked


def plain(title: str, about: str, columns: Iterable[Column[L]], lines: Iterable[L], **how: Any) -> Table[L]:
    """A table in one group."""
    return Table(title, about, tuple(columns), (Group("", tuple(lines)),), **how)


def records(columns: Sequence[Column[L]], lines: Iterable[L]) -> list[dict[str, Any]]:
    """Each line as values, by the columns' names."""
    return [{column.name: column.read(line) for column in columns} for line in lines]


def as_csv(columns: Sequence[Column[L]], lines: Iterable[L]) -> str:
    """Lines as CSV; an unknown value is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_value(value) for name, value in each.items()} for each in records(columns, lines))
    return text.getvalue()


def as_json(columns: Sequence[Column[L]], lines: Iterable[L]) -> str:
    return json.dumps(records(columns, lines), indent=1, allow_nan=False) + "\n"


def markdown(tables: Sequence[Table[Any]]) -> str:
    """Tables in Markdown, padded so that they read well as plain text."""
    return "\n".join(map(_markdown, tables))


def _markdown(table: Table[Any]) -> str:
    lines = []
    for group in table.groups:
        lines.append([f"*{escape_markdown(group.title)}*", *[""] * (len(table.heads) - 1)])
        lines += [table.marked(line, escape_markdown, "**{}**") for line in group.lines]
    how: dict[str, Any] = {"tablefmt": "github"}
    if not table.prose:
        how = {"tablefmt": "pipe", "colalign": ("left", *["right"] * (len(table.heads) - 1))}
    grid = tabulate(lines, table.heads, disable_numparse=True, **how)
    notes = "".join(f"{number}. {escape_markdown(note)}\n" for number, note in enumerate(table.notes, 1))
    return f"**{escape_markdown(table.title)}.** {table.about}\n\n{grid}\n" + (f"\n{notes}" if notes else "")


def section(table: Table[Any]) -> str:
    """A table as a Markdown section, without padding; empty without lines."""
    if not table.lines:
        return ""
    about = [f"{table.about}\n"] if table.about else []
    return "\n".join([f"## {escape_markdown(table.title)}\n", *about, unpadded(table.shown, table.lines)]) + "\n"


def unpadded(columns: Sequence[Column[L]], lines: Iterable[L]) -> str:
    """Lines as a Markdown table without padding, columns of numbers to the right."""
    texts = [[escape_markdown(column.text(line)) for column in columns] for line in lines]
    numbers = (all(text == MISSING or text[:1].isdigit() for text in of) for of in zip(*texts, strict=True))
    rule = "".join("--:|" if each else "---|" for each in numbers)
    grid = [f"| {' | '.join(each)} |" for each in ([column.head for column in columns], *texts)]
    return "\n".join([grid[0], f"|{rule}", *grid[1:]])


PREAMBLE = r"""% Needs \usepackage{booktabs,graphicx,longtable}.
% A table that is wider than its place shrinks to it; a longtable gets pages of one column.
\makeatletter
\providecommand{\spbenchfit}[1]{\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{#1}}
\providecommand{\spbenchlong}[1]{\if@twocolumn\onecolumn{#1}\twocolumn\else{#1}\fi}
\makeatother
"""


def latex(tables: Sequence[Table[Any]], environment: str = "table*") -> str:
    """Tables in LaTeX, for pages of one column or two. A table of words is a longtable, which LaTeX can break; one of
    numbers that is longer than a page becomes several."""
    return PREAMBLE + "\n".join(_latex(table, environment) for table in tables)


def _latex(table: Table[Any], environment: str) -> str:
    columns = rf"{{@{{}}{_widths(table) if table.prose else _numbers(table)}@{{}}}}"
    head = rf"\toprule {_latex_line(map(escape, table.heads), prose=table.prose)} \midrule"
    caption = escape(f"{table.subject}{table.title}. {table.about} {table.legend}".strip())
    lines = _latex_lines(table)
    if table.prose:
        notes = "".join(rf" ({number}) {escape(note)}." for number, note in enumerate(table.notes, 1))
        long = [r"\spbenchlong{\scriptsize\setlength{\tabcolsep}{2pt}", rf"\begin{{longtable}}{columns}"]
        long += [rf"\caption{{{caption}}}\\", rf"{head} \endfirsthead", rf"{head} \endhead", r"\bottomrule \endfoot"]
        long += [*lines, r"\end{longtable}", *([rf"\noindent{notes}\par"] if notes else []), "}"]
        return "\n".join(long) + "\n"
    made = []
    for begin in range(0, len(lines), PAGE_LINES):
        made += [rf"\begin{{{environment}}}", r"\footnotesize\setlength{\tabcolsep}{3pt}"]
        made += [rf"\caption{{{caption if begin == 0 else 'Continued: ' + escape(table.title)}}}"]
        made += [rf"\centering\spbenchfit{{\begin{{tabular}}{columns}", head, *lines[begin : begin + PAGE_LINES]]
        made += [r"\bottomrule", r"\end{tabular}}", rf"\end{{{environment}}}"]
    return "\n".join(made) + "\n"


def _latex_lines(table: Table[Any]) -> list[str]:
    """The lines of all groups, under their titles."""
    lines = []
    for k, group in enumerate(table.groups):
        gap = r"\addlinespace " if k else ""
        lines.append(rf"{gap}\multicolumn{{{len(table.heads)}}}{{@{{}}l}}{{\emph{{{escape(group.title)}}}}} \\")
        for line in group.lines:
            lines.append(_latex_line(table.marked(line, escape, r"\textbf{{{}}}"), prose=table.prose))
    return lines


def _latex_line(texts: Iterable[str], *, prose: bool) -> str:
    """A line of LaTeX. prose: texts may break between words."""
    if prose:
        return " & ".join(rf"\raggedright {text}" for text in texts) + r" \tabularnewline"
    return " & ".join(texts) + r" \\"


def _numbers(table: Table[Any]) -> str:
    """Column types: a name, which breaks if it is long, then numbers."""
    longest = max((len(table.shown[0].text(line)) for line in table.lines), default=0)
    return (r"p{0.42\textwidth}" if longest > WIDEST_NAME else "l") + "r" * (len(table.heads) - 1)


def _widths(table: Table[Any]) -> str:
    known = [column.width for column in table.shown if column.width is not None]
    rest = (PAGE_SHARE - sum(known)) / max(1, len(table.shown) - len(known))
    return "".join(rf"p{{{rest if c.width is None else c.width:.3f}\linewidth}}" for c in table.shown)
