"""Pieces of text as HTML, escaped, with links to the rows of the cells that are behind them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING
from sp_bench.report.page.appendix import Anchors
from sp_bench.report.page.parts import Line, Ref, Words, printable


@dataclass(frozen=True)
class Links:
    """`every_number`: in tables each number is a link; else, on pages of thousands of cells, only what a line begins
    with and what is of other cells than its line."""

    anchors: Anchors
    every_number: bool

    @property
    def functions(self) -> Mapping[str, Callable[..., Markup]]:
        """What templates call."""
        return {"said": self.said, "first_entry": self.first_entry, "entry": self.entry}

    def said(self, words: Words) -> Markup:
        return Markup("").join(self._text(p) if isinstance(p, str) else self._ref(p, p.cells) for p in words)

    def first_entry(self, line: Line) -> Markup:
        text = line.texts[0]
        return (
            self._ref(text, text.cells or line.cells) if isinstance(text, Ref) else self._ref(Ref(text, ()), line.cells)
        )

    def entry(self, line: Line, place: int, is_number: bool) -> Markup:
        """Words link where they refer to cells themselves, numbers to those of their line too."""
        text = line.texts[place]
        if isinstance(text, Ref):
            return self._ref(text, text.cells or line.cells)
        if is_number and self.every_number:
            return self._ref(Ref(text, ()), line.cells)
        return self._text(text)

    def _ref(self, ref: Ref, cells: Sequence[Cell]) -> Markup:
        text = self._text(ref.text)
        if ref.strong:
            text = Markup(f"<b>{text}</b>")
        if not cells or ref.text in ("", MISSING):
            return text
        return Markup(f'<a href="#{self.anchors(cells)}">{text}</a>')

    @staticmethod
    def _text(text: str) -> Markup:
        return escape(printable(text))
