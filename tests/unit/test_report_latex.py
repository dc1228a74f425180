import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench.report.cells import Cell
from sp_bench.report.tables import paper_tables
from sp_bench.report.tables.latex import latex
from sp_bench.report.tables.latex_layout import LINES_A_PAGE, WIDE, sheets
from sp_bench.report.tables.latex_text import escape
from sp_bench.report.tables.parts import Column, Entry, PaperTable

from .rows import cells_of, row, smoke

HOSTILE = (
    r"\input{/etc/passwd} \end{table} \\[2em] 100% of $x_1^2$ & #1 ~tilde {brace}",
    "[bracket] *star* -- --- ``quotes'' \"straight\" ?` !` <script>alert(1)</script> a|b",
    "8 × 4 µs ≠ 5 μs … – — ± ≤ ≥ → ‘single’ “double” α β Ω 10² 90° † ‡ § ¶ © • ∞",  # noqa: RUF001
    "naïve Ångström Łódź œuvre groß İstanbul 日本 😀 \x1b[31mred\x1b[0m \x00\x07 line\nbreak\ttab \\verb|x|",
)


@pytest.fixture(scope="module")
def tables() -> list[PaperTable]:
    """Of every kind, with intervals, marks, several fabrics, failures and names that LaTeX would take for commands."""
    measured = {"attention_flops_per_s": 3e12, "comm_wire_bytes": 2.1e7, "max_peak_allocated_bytes": 3 * 2**30}
    rows = [*smoke(), *smoke(replicates=6)]
    for name in HOSTILE:
        rows += [
            row(method="ring", layout=name, fabric=fabric, median_ms=ms, replicate=r, **measured)
            for fabric, ms in (("nvlink", 7.0), (name, 9.0))
            for r in range(6)
        ]
        rows.append(row(layout=name, seq_len=4096, status="oom", reason=name))
        rows.append(row(method="single", kernel=name, sp_size=1, ring_degree=1, num_heads=4, num_kv_heads=2))
        library = {"method": "ring_flash_attn", "implementation": name, "layout": "zigzag"}
        rows += [row(**library, kernel=name), row(layout="zigzag", kernel=name)]
    gpus = {"sp_size": 4, "ulysses_degree": 4, "ring_degree": 1, "method": "ulysses", "num_layers": 36}
    qwen = gpus | {"workload": "train_step", "pass_kind": "step", "model": "qwen3_4b", "kernel": HOSTILE[0]}
    rows += [row(seq_len=32768, **qwen), row(seq_len=131072, status="oom", **qwen)]
    made = cells_of({(r["trial_id"], r["status"]): r for r in rows}.values())
    return paper_tables([_said(cell) for cell in made])


def _said(cell: Cell) -> Cell:
    """A status of a newer schema instead of unsupported."""
    rows = tuple({**r, "status": HOSTILE[1] if r["status"] == "unsupported" else r["status"]} for r in cell.rows)
    return replace(cell, rows=rows)


def document(bodies: list[str]) -> str:
    """A document that loads what the tables say they need, and nothing else; as wide as most venues' text."""
    start = (
        "\\documentclass{article}\n\\usepackage{booktabs,siunitx}\n\\setlength{\\textwidth}{5.5in}\n\\begin{document}\n"
    )
    return start + "\n\\clearpage\n".join(bodies) + "\n\\end{document}\n"


def test_all_kinds_of_tables_compile_in_one_stock_document(tables: list[PaperTable], tmp_path: Path) -> None:
    pdflatex, find = shutil.which("pdflatex"), shutil.which("kpsewhich")
    if pdflatex is None or find is None:
        pytest.skip("pdflatex is not installed (Debian: texlive-latex-recommended texlive-science)")
    for package in ("booktabs.sty", "siunitx.sty"):
        if subprocess.run([find, package], capture_output=True, check=False).returncode:
            pytest.skip(f"{package} is not installed (Debian: texlive-latex-recommended texlive-science)")
    kinds = {table.kind for table in tables}
    assert kinds == {
        *("throughput", "step_time", "share", "rivals", "memory", "max_context", "communication", "published")
    }
    for table in tables:
        (tmp_path / f"{table.stem}.tex").write_text(latex(table), "utf-8")
    inputs = [f"\\input{{{table.stem}}}" for table in tables]
    words = [f"\\noindent {escape(text)}" for text in (*HOSTILE, "".join(map(chr, range(32, 0x250))))]
    (tmp_path / "all.tex").write_text(document([*inputs, "\n\n".join(words)]), "utf-8")
    command = [pdflatex, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "all.tex"]
    unbroken = {**os.environ, "max_print_line": "10000"}
    run = subprocess.run(command, cwd=tmp_path, env=unbroken, capture_output=True, check=False)
    log = run.stdout.decode("latin-1")
    assert run.returncode == 0, log[-3000:]
    assert (tmp_path / "all.pdf").stat().st_size > 10_000
    for trouble in ("Missing character", "Float too large", "multiply defined", ".pk>"):  # the last: a bitmap font
        assert trouble not in log


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


def table_of(lines: list[tuple[Entry, ...]], *columns: Column) -> PaperTable:
    return PaperTable("throughput", "a setting", "table-x", "A title", "A caption.", columns, tuple(lines), "rows")


def numbered(number: str, mark: str = "", interval: str = "", *, best: bool = False) -> Entry:
    return Entry(best=best, number=number, mark=mark, interval=interval)


def test_numbers_stand_in_columns_whose_format_fits_and_words_in_braces() -> None:
    lines = [
        (Entry("a_b"), numbered("12,345.6", interval="[1, 2]", best=True)),
        (Entry("c"), numbered("7", "†")),
        (Entry("d"), Entry("OOM")),
    ]
    text = latex(table_of(lines, Column("method"), Column("4 ranks", is_number=True)))
    assert "S[table-format=5.1," in text
    assert r"\bfseries 12345.6 \\" in text
    assert r"{\scriptsize {[}1, 2{]}} \\" in text
    assert r"7 {$^{\dagger}$} \\" in text
    assert r"d & {OOM} \\" in text
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == text.count(r"\begin{table}") == 1
    assert text.index(r"\caption{") < text.index(r"\begin{tabular}") < text.index(r"\scriptsize rows")


def test_groups_of_columns_have_a_heading_and_repeated_words_are_left_out() -> None:
    columns = (
        *(Column("fabric"), Column("method")),
        *(Column(f"sp_size 2, seq_len {n}", is_number=True, group="sp_size 2, seq_len", short=str(n)) for n in (8, 16)),
    )
    names = (("nvlink", "a"), ("nvlink", "b"), ("shm", "a"))
    text = latex(table_of([(Entry(f), Entry(m), numbered("1"), numbered("2")) for f, m in names], *columns))
    assert r"\multicolumn{2}{c}{sp\_\allowbreak{}size 2, seq\_\allowbreak{}len} \\" in text
    assert r"\cmidrule(lr){3-4}" in text
    assert r"{fabric} & {method} & {8} & {16} \\" in text
    assert text.count("nvlink") == 1
    assert " & b & 1 & 2 " in text
    assert r"\addlinespace shm & a & 1 & 2 " in text


@pytest.mark.parametrize(("num_lines", "num_columns"), [(1, 1), (100, 3), (3, 40), (100, 40)])
def test_what_no_page_holds_continues_and_nothing_is_lost(num_lines: int, num_columns: int) -> None:
    columns = [Column(f"seq_len {i}", is_number=True) for i in range(num_columns)]
    lines = [
        (Entry(f"method {i} with a rather long name"), *(numbered(f"{i}.{j:03}") for j in range(num_columns)))
        for i in range(num_lines)
    ]
    table = table_of(lines, Column("method"), *columns)
    shown = [line[i].text for sheet in sheets(table) for line in sheet.lines for i in sheet.columns if i]
    assert sorted(shown) == sorted(entry.text for line in lines for entry in line[1:])
    for sheet in sheets(table):
        assert len(sheet.lines) <= LINES_A_PAGE
        assert sum(sheet.widths.values()) <= WIDE
    labels = re.findall(r"\\label\{(.*?)\}", latex(table))
    assert len(labels) == len(set(labels)) == len(sheets(table))


def test_what_does_not_fit_is_cut_into_even_parts_and_leaves_no_last_line_alone() -> None:
    columns = [Column(f"seq_len {i}", is_number=True) for i in range(10)]
    lines = [(Entry(f"method {i}"), *(numbered("1.5") for _ in columns)) for i in range(LINES_A_PAGE + 1)]
    made = sheets(table_of(lines, Column("method"), *columns))
    assert [(len(sheet.columns) - 1, len(sheet.lines)) for sheet in made] == [(7, 21), (7, 20), (3, 21), (3, 20)]


def test_columns_are_in_even_parts_where_names_would_be_wrapped() -> None:
    columns = [Column(f"seq_len {i}", is_number=True) for i in range(10)]
    line = (Entry("a library with a layout (package 0.1.8)"), *(numbered("1.5") for _ in columns))
    made = sheets(table_of([line], Column("method"), *columns))
    assert [(len(sheet.columns) - 1, sheet.widths[0]) for sheet in made] == [(5, 37)] * 2


def test_a_long_word_among_the_numbers_narrows_the_names_of_its_own_page_alone() -> None:
    names = [f"a_library_{i} with a layout and (its package 0.1.8) and_an_option=4" for i in range(30)]
    fine, failed = (tuple(map(entry, ("384.0",) * 5)) for entry in (numbered, lambda _: Entry("unsupported")))
    lines = [(Entry(name), *(failed if i == 29 else fine)) for i, name in enumerate(names)]
    table = table_of(lines, Column("method"), *(Column(f"phase {i}", is_number=True) for i in range(5)))
    first, *_, last = (sheet.widths[0] for sheet in sheets(table))
    assert first > last
    assert all(sum(sheet.widths.values()) <= WIDE for sheet in sheets(table))
