"""A report's page made of rows in memory, without figures, and what a browser would find in it."""

from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

from sp_bench.analysis.cells import cells, of_equal_steps
from sp_bench.analysis.selection import Selection
from sp_bench.analysis.settings import settings
from sp_bench.report.cards import card
from sp_bench.report.caveats import caveats, statuses
from sp_bench.report.figures.style import Drawing
from sp_bench.report.page import Content, render
from sp_bench.report.setting_tables import tables

from .rows import selection_of


class Page(HTMLParser):
    """Text, tags, ids and addresses of a page, without its style and script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.text, self.tags = html, "", set[str]()
        self.ids, self.links, self.sources = list[str](), list[tuple[str, str]](), list[str]()  # links: (address, text)
        self._hidden = False
        self._link: str | None = None
        self.feed(html)

    @property
    def before_the_appendix(self) -> str:
        return self.text.partition("Appendix: rows")[0]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._hidden = tag in ("style", "script")
        known = {name: value or "" for name, value in attrs}
        self.ids += [known["id"]] if "id" in known else []
        self.sources += [known[name] for name in ("src", "href") if name in known]
        if tag == "a":
            self._link = known.get("href", "")
            self.links.append((self._link, ""))

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False
        self._link = None if tag == "a" else self._link

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data
            if self._link is not None:
                self.links[-1] = (self._link, self.links[-1][1] + data)


def page_of(rows: Iterable[Mapping[str, Any]], drawings: Sequence[Drawing] = ()) -> Page:
    return rendered(selection_of(rows), drawings)


def rendered(selection: Selection, drawings: Sequence[Drawing] = ()) -> Page:
    """All that `build` puts on the page but figures, unless given."""
    found = cells(of_equal_steps(selection.rows))
    made = settings(found)
    told = caveats(found, made, [statuses(found)])
    return Page(render(Content(selection, found, [card(s) for s in made], told, drawings, tables(made))))
