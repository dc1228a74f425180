"""Tables as LaTeX: any text stays text, and all compile in one stock document."""

import json
import os
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench.analysis.settings import settings as settings_of
from sp_bench.report import packed_gate
from sp_bench.report.latex_text import escape
from sp_bench.report.setting_tables import tables
from sp_bench.report.table import Table, latex, markdown

from .rows import cells_of, row, smoke

HOSTILE = (
    r"\input{/etc/passwd} \end{table} \\[2em] 100% of $x_1^2$ & #1 ~tilde {brace}",
    "[bracket] *star* -- --- ``quotes'' \"straight\" ?` !` <script>alert(1)</script> a|b",
    "8 × 4 µs ≠ 5 μs … – — ± ≤ ≥ → ‘single’ “double” α β Ω 10² 90° † ‡ § ¶ © • ∞",  # noqa: RUF001
    "naïve Ångström Łódź œuvre groß İstanbul 日本 😀 \x1b[31mred\x1b[0m \x00\x07 line\nbreak\ttab \\verb|x|",
)


def made_tables() -> list:
    """With intervals, failures and names that LaTeX would take for commands."""
    rows = [*smoke(replicates=6)]
    for name in HOSTILE:
        rows += [row(method=name, fabric=name, kernel=name, median_ms=7.0, replicate=r) for r in range(6)]
        rows += [row(fabric=name, kernel=name), row(layout=name, seq_len=4096, status="oom", reason=name)]
    return tables(settings_of(cells_of({(r["trial_id"], r["status"]): r for r in rows}.values())))


def made_gates() -> list[Table[Any]]:
    """Who computes packed documents right, with reasons that LaTeX would take for commands."""
    config = json.dumps({"workload": {"name": "attention", "packing": "fixed"}})
    rows = [
        row(method=f"m{n}", packing="fixed", config=config, status=status, reason=reason)
        for n, (status, reason) in enumerate(product(("incorrect", "unsupported"), HOSTILE))
    ]
    return packed_gate.gates(cells_of(rows))


@pytest.mark.parametrize("columns", ["onecolumn", "twocolumn"])
def test_all_tables_compile_in_one_stock_document_and_fit_its_pages(tmp_path: Path, columns: str) -> None:
    pdflatex, find = shutil.which("pdflatex"), shutil.which("kpsewhich")
    if pdflatex is None or find is None:
        pytest.skip("pdflatex is not installed (Debian: texlive-latex-recommended)")
    if subprocess.run([find, "booktabs.sty"], capture_output=True, check=False).returncode:
        pytest.skip("booktabs.sty is not installed (Debian: texlive-latex-recommended)")
    words = [f"\\noindent {escape(text)}" for text in (*HOSTILE, "".join(map(chr, range(32, 0x250))))]
    start = f"\\documentclass[{columns}]{{article}}\n\\usepackage{{booktabs,graphicx,longtable}}\n"
    start += "\\setlength{\\textwidth}{6.75in}\n"
    made = latex([*made_tables(), *made_gates()])
    text = start + "\\begin{document}\n" + made + "\n\n".join(words) + "\n\\end{document}\n"
    (tmp_path / "all.tex").write_text(text, "utf-8")
    command = [pdflatex, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "all.tex"]
    unbroken = {**os.environ, "max_print_line": "10000"}
    run = subprocess.run(command, cwd=tmp_path, env=unbroken, capture_output=True, check=False)
    log = run.stdout.decode("latin-1")
    assert run.returncode == 0, log[-3000:]
    wide = [float(found) for found in re.findall(r"Overfull \\hbox \((\S+)pt too wide\) in alignment", log)]
    assert not [each for each in wide if each > 10], wide
    for trouble in ("Missing character", "multiply defined", ".pk>"):  # the last: a bitmap font
        assert trouble not in log


def test_a_name_breaks_no_cell_of_markdown() -> None:
    for table in markdown(made_tables()).split("**.")[1:]:
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, lines


_COMMAND = re.compile(
    r"\\(?:textbackslash|textasciitilde|textasciicircum|textless|textgreater|textbar|textquoteleft|ldots|ss|AE|ae|OE|oe"
    r"|O|o|AA|aa|L|l|i|allowbreak)\{\}|\\texttt\{\\char34\}|\\[{}$&#%_]|\$\^?\{?(?:\\[A-Za-z]+|[-23])\}?\$"
    r"|\\[`'^~\"=vc.]\{[A-Za-z]\}|\{[][*]\}|\{\}"
)


@settings(max_examples=300)
@given(st.one_of(st.text(), st.text(st.sampled_from("ab \\{}$&#%_~^[]*-`'\"<>|\n\té≠µ")), st.sampled_from(HOSTILE)))
def test_any_text_stays_text_in_latex(text: str) -> None:
    escaped = escape(text)
    assert escaped.isascii()
    assert escaped.isprintable()
    rest = _COMMAND.sub("", escaped).replace("~", "")  # a tie: what a no-break space is
    assert not set(rest) & set('\\{}$&#%_^"<>|[]*')
    assert not re.search(r"--(?!-?\{\})|``(?!\{\})|''(?!\{\})", escaped.replace("--{}", "").replace("---{}", ""))


@settings(max_examples=200)
@given(st.text(st.characters(codec="ascii", categories=["L", "N"])), st.text(max_size=5))
def test_letters_and_digits_are_left_as_they_are_and_lines_become_one(plain: str, odd: str) -> None:
    assert escape(plain) == plain
    assert escape(f"{plain}\n\n{plain}").split() == [plain] * (2 if plain else 0)
    assert "\n" not in escape(odd)


def test_escaped_text_says_what_it_cannot_print() -> None:
    assert escape("\N{GRINNING FACE}") == "{[}U+1F600{]}"
    assert escape("8 \N{MULTIPLICATION SIGN} 3 µs") == r"8 $\times$ 3 $\mu$s"
    assert escape(r"\input{x}") == r"\textbackslash{}input\{x\}"
