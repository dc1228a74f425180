from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sp_bench.report.tables import paper_tables
from sp_bench.report.tables.markdown import escape, markdown, paragraph

from .rows import cells_of, smoke

_PARSER = MarkdownIt("gfm-like", {"linkify": False}).enable("table")
_LINE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=40)
_HOSTILE = st.text(st.sampled_from("ab1 \\`*_{}[]()<>#+-.!|~&;:/$^@='\""), max_size=30)


def printed(inline: Any) -> str:
    assert {child.type for child in inline.children} <= {"text", "text_special", "softbreak"}
    return "".join(child.content for child in inline.children)


@settings(max_examples=300)
@given(st.one_of(_LINE, _HOSTILE))
def test_any_text_stays_text_in_markdown(text: str) -> None:
    plain = " ".join(text.split())
    tokens = _PARSER.parse(paragraph(text))
    if not plain:
        assert tokens == []
        return
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert printed(tokens[1]) == plain


@settings(max_examples=300)
@given(st.one_of(_LINE, _HOSTILE))
def test_any_text_stays_in_its_cell_of_a_markdown_table(text: str) -> None:
    tokens = _PARSER.parse(f"| a | b |\n|---|---|\n| {escape(text)} | c |\n")
    cells = [token for token in tokens if token.type == "inline"]
    assert [printed(token) for token in cells] == ["a", "b", " ".join(text.split()), "c"]


def test_markdown_is_one_table_with_the_provenance_below() -> None:
    for table in paper_tables(cells_of(smoke())):
        tokens = _PARSER.parse(markdown(table))
        assert [t.type for t in tokens].count("tr_open") == 1 + len(table.lines)
        inline = [token for token in tokens if token.type == "inline"]
        assert printed(inline[-1]) == table.provenance
        assert "made_up" in table.provenance
