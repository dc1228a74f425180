"""The page: verdict, figures, tables and rows into one self-contained HTML file. Jinja escapes every value."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from sp_bench.report.cells import Cell
from sp_bench.report.figures.drawings import Drawing
from sp_bench.report.formats import MISSING, counted
from sp_bench.report.page.appendix import Anchors, appendix
from sp_bench.report.page.cell_tables import cell_tables
from sp_bench.report.page.environment import environment
from sp_bench.report.page.failures import failures
from sp_bench.report.page.links import Links
from sp_bench.report.page.parts import Line, Ref, Section, Table, printable
from sp_bench.report.page.verdict import Verdict
from sp_bench.report.selection import Selection
from sp_bench.report.tables.parts import PaperTable

TEMPLATES = ("page.html.jinja", "pieces.html.jinja")
SUFFIXES = ("png", "pdf", "svg", "csv")
TABLE_SUFFIXES = ("tex", "md", "csv")
MAX_DETAILED = 1000  # cells; a page of more has one link a line of a table, and rows without bytes and errors
OPEN_TABLES = 12  # paper tables after these are opened by the reader


def render(
    selection: Selection,
    cells: Sequence[Cell],
    verdict: Verdict,
    drawings: Sequence[Drawing],
    undrawn: Sequence[str],
    sections: Sequence[Section],
    paper_tables: Sequence[PaperTable],
) -> str:
    """The whole page. `verdict`, `sections` and `paper_tables` refer to members of `cells`; a drawing whose kind is the
    anchor of a section is shown there, any other under Figures."""
    sources = {name: files("sp_bench.report.page").joinpath(name).read_text("utf-8") for name in TEMPLATES}
    html = jinja2.Environment(
        loader=jinja2.DictLoader(sources),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    html.filters["base64"] = lambda content: Markup(base64.b64encode(content).decode())
    anchors = Anchors(cells)
    detailed = len(cells) <= MAX_DETAILED
    links = Links(anchors, every_number=detailed)
    html.globals |= links.functions
    anchored = {section.anchor for section in sections}
    style, script = _inlined("page.css"), _inlined("page.js")
    return html.get_template(TEMPLATES[0]).render(
        title=f"sp-bench: {', '.join(sorted(set(selection.rows['folder']))) or 'no rows'}",
        style=style,
        script=script,
        policy=_policy(style, script),
        verdict=verdict,
        measured=any(cell.ok for cell in cells),
        drawings=[drawing for drawing in drawings if drawing.kind not in anchored],
        figures_of={anchor: [drawing for drawing in drawings if drawing.kind == anchor] for anchor in anchored},
        undrawn=undrawn,
        sections=sections,
        paper_tables=[_paper(place, table) for place, table in enumerate(paper_tables)],
        cell_tables=cell_tables(cells),
        left_out=_left_out(selection),
        failures=failures(cells),
        problems=selection.problems,
        facts=environment(selection),
        rows=appendix(cells, detailed=detailed),
        anchors=anchors,
        detailed=detailed,
        suffixes=SUFFIXES,
        table_suffixes=TABLE_SUFFIXES,
        missing=MISSING,
    )


def _finalize(value: Any) -> Any:
    """No control character of a row reaches the page; markup of our own is passed as it is."""
    return printable(value) if type(value) is str else value


def _inlined(name: str) -> Markup:
    """A file of ours: the only text that is not escaped."""
    return Markup(files("sp_bench.report.page").joinpath(name).read_text("utf-8"))


def _policy(style: str, script: str) -> str:
    """Nothing is loaded from anywhere, and nothing runs or styles but these very texts."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; img-src data:; style-src {digest(style)}; script-src {digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _paper(place: int, table: PaperTable) -> Table:
    """A paper's table among the page's own: best entries strong, each entry with its own cells."""
    words = tuple(i for i, column in enumerate(table.columns) if not column.is_number)
    lines = tuple(Line(tuple(Ref(e.text, e.cells, e.best) for e in line), ()) for line in table.lines)
    head, folded = tuple(table.heads), place >= OPEN_TABLES
    origin = {"setting": table.setting, "provenance": table.provenance, "stem": table.stem}
    return Table(table.title, table.caption, head, lines, words, folded, **origin)


def _left_out(selection: Selection) -> list[str]:
    lines = [
        f"{counted(rows, 'row')} of core_id {core_id}: their cells were measured again later, with other code, "
        "libraries or devices"
        for core_id, rows in selection.left_out.items()
    ]
    if selection.num_superseded:
        lines.append(f"{counted(selection.num_superseded, 'earlier attempt')} of trials whose last attempt counts")
    return lines
