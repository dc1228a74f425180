"""The page: one self-contained HTML file of cards, caveats, figures and tables, with an appendix that is folded at
first. Jinja escapes every value."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.grades import legend as grades_legend
from sp_bench.analysis.grid import Grid
from sp_bench.analysis.selection import Selection
from sp_bench.formats import without_escapes
from sp_bench.report.answers import legend as grid_legend
from sp_bench.report.cards import Card
from sp_bench.report.figures.style import Drawing
from sp_bench.report.packed_gate import LEGEND
from sp_bench.report.page.appendix import Numbers, appendix, environment, left_out
from sp_bench.report.setting_tables import CAPTION
from sp_bench.report.table import Table

OPEN_LINES = 60  # lines of tables on the page; the rest is in the appendix
OPEN_CARDS = 9


@dataclass(frozen=True)
class Content:
    """The contents of a page."""

    selection: Selection
    cells: Sequence[Cell]
    cards: Sequence[Card]
    caveats: Sequence[str]
    drawings: Sequence[Drawing]
    tables: Sequence[Table[Any]]
    gates: Sequence[Table[Any]] = ()  # which methods compute packed documents right
    notes: Sequence[tuple[str, str]] = ()  # (what, text) of each campaign's file
    answers: Grid | None = None  # of several campaigns


def render(content: Content) -> str:
    source = files("sp_bench.report.page").joinpath("page.html.jinja").read_text("utf-8")
    html = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_finalize
    )
    html.filters["base64"] = lambda data: Markup(base64.b64encode(data).decode())
    style, script = _inlined("page.css"), _inlined("page.js")
    numbers = Numbers(content.cells)
    opened, closed = _opened(content.tables)
    names = sorted(set(map(str, content.selection.rows["folder"])))
    return html.from_string(source).render(
        title=f"sp-bench: {', '.join(names) if len(names) < 5 else f'{len(names)} campaigns'}"
        if names
        else "sp-bench: no rows",
        style=style,
        script=script,
        policy=_policy(style, script),
        cards=content.cards[:OPEN_CARDS],
        more_cards=content.cards[OPEN_CARDS:],
        caveats=content.caveats,
        drawings=content.drawings,
        caption=CAPTION,
        tables=opened,
        more_tables=closed,
        answers=content.answers,
        answers_legend=content.answers and grid_legend(content.answers),
        gates=content.gates,
        legend=LEGEND,
        grades=grades_legend(),
        numbers=numbers,
        sections=appendix(content.cells, numbers),
        left_out=left_out(content.selection),
        problems=content.selection.problems,
        facts=[*environment(content.selection), *content.notes],
    )


def _opened(tables: Sequence[Table[Any]]) -> tuple[list[Table[Any]], list[Table[Any]]]:
    """The first tables that have OPEN_LINES lines in all; at least one."""
    opened: list[Table[Any]] = []
    for table in tables:
        if opened and sum(len(t.lines) for t in opened) + len(table.lines) > OPEN_LINES:
            break
        opened.append(table)
    return opened, list(tables[len(opened) :])


# Also what turns the direction of the text after it: a name must not rewrite its sentence.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def _finalize(value: Any) -> Any:
    """Remove control characters from a value; our own markup passes unchanged."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", without_escapes(value)) if type(value) is str else value


def _inlined(name: str) -> Markup:
    """One of our own files, the only text that is not escaped."""
    return Markup(files("sp_bench.report.page").joinpath(name).read_text("utf-8"))


def _policy(style: str, script: str) -> str:
    """A content security policy: nothing is loaded, and only these two texts may run or style."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; img-src data:; style-src {digest(style)}; script-src {digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
