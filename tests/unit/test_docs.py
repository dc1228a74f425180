"""Documents are templates over rows: what is committed is what the rows give now, and short enough to be read."""

import re
import subprocess
from pathlib import Path

import pytest

from sp_bench.cli.documents import HELPERS
from sp_bench.config.parsing import ConfigError
from sp_bench.report import templates

from .rows import commit, row

ROOT = Path(__file__).parents[2]
COMMITTED = [Path(name) for name in subprocess.run(
    ["git", "ls-files", "*.md", "*.md.jinja"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()]  # fmt: skip
TEMPLATES = [name for name in COMMITTED if name.suffix == ".jinja"]
LINK = re.compile(r"\]\(([^)#:\s]+\.md)(?:#[^)\s]*)?\)")
LINKED = re.compile(r'\]\([^)\s]+(?: "[^"]*")?\)')  # where a link goes, and its title, which nobody reads on the page
COMMAND = "sp-bench report results/* --render . --render docs"


@pytest.fixture(scope="module")
def rows() -> templates.Rows:
    """Campaigns but for those that the README's commands make, which git ignores."""
    folders = (path for path in (ROOT / "results").iterdir() if path.is_dir())
    return templates.Rows(sorted(path for path in folders if path.name not in ("smoke", "default")), more=HELPERS)


@pytest.mark.parametrize("template", TEMPLATES, ids=str)
def test_a_document_is_what_the_rows_give(template: Path, rows: templates.Rows) -> None:
    text = templates.rendered(ROOT / template, rows)
    target = template.with_suffix("")
    if target in COMMITTED:
        assert (ROOT / target).read_text("utf-8") == text, f"{target} is behind: {COMMAND}"
    else:
        assert target.name in ("RESULTS.md", "CAMPAIGNS.md")
        assert len(text.split()) > 1000


def test_no_committed_page_links_to_one_that_is_not_committed() -> None:
    pages = [name for name in COMMITTED if name.suffix == ".md" and not name.name.startswith("CHANGELOG")]
    links = [
        (page, (ROOT / page.parent / link).resolve())
        for page in pages
        for link in LINK.findall((ROOT / page).read_text())
    ]
    known = {(ROOT / name).resolve() for name in COMMITTED}
    assert [(page, link.name) for page, link in links if link not in known] == []


def test_the_readme_has_at_most_700_words_and_begins_with_the_grid_and_one_figure() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(LINKED.sub("]", text).split()) <= 700
    assert text.index("| GPUs, tokens |") < text.index("<img ") < text.index("## Try it")
    assert text.count("<img ") == 1
    assert COMMAND in text


def test_an_answer_has_at_most_25_words() -> None:
    sections = (ROOT / "docs/ANSWERS.md").read_text().split("\n### ")[1:]
    answers = {each.splitlines()[0]: each.splitlines()[1] for each in sections}
    assert len(answers) > 15
    assert {name: answer for name, answer in answers.items() if len(answer.split()) > 25} == {}


def test_no_bold_sentence_is_below_grade_a() -> None:
    """The grade of what is bold comes first; what follows a semicolon is not bold."""
    bold = [each for each in (ROOT / "docs/ANSWERS.md").read_text().splitlines() if each.startswith("**")]
    assert len(bold) > 10
    assert [each for each in bold if re.search(r"[( ](B|C|one_rank)[\N{MIDDLE DOT})]", each.partition(";")[0])] == []


def test_a_template_names_its_cells_and_refuses_what_is_no_longer_so(tmp_path: Path) -> None:
    rows = [row(method="ulysses", median_ms=10.0), row(method="ring", median_ms=12.0)]
    folder = commit(rows, tmp_path / "results" / "mine")
    template = tmp_path / "page.md.jinja"

    def page(text: str) -> str:
        template.write_text(text)
        (written,) = templates.render([tmp_path], [folder])
        return written.read_text()

    assert page('{{ pair("mine", "ring", "ulysses") }}, {{ ms(cell("mine", "ring")) }} ms') == "1.20x, 12 ms"
    assert page('{{ require(pair("mine", "ring", "ulysses").ratio > 1, "the ring is slower") }}') == ""
    for text, reason in (
        ('\n{{ require(false, "the ring is faster") }}', "line 2: no longer so: the ring is faster"),
        ('{{ cell("mine", "usp") }}', "line 1: mine has 0 cells of usp"),
        ('{{ cell("yours", "usp") }}', "campaign yours is not among the folders"),
        ('{{ cell("mine", "ring", color=1) }}', "color: no column and no option"),
        ("{{ unknown }}", "line 1: 'unknown' is undefined"),
        ("{% if %}", "line 1: "),
        ("{{ ms.__globals__ }}", "line 1: "),
    ):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            page(text)
    with pytest.raises(ConfigError, match="no template"):
        templates.render([tmp_path / "none"], [folder])
