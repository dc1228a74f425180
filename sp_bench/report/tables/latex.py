"""A table as LaTeX for \\input, needing \\usepackage{booktabs,siunitx} alone. Numbers stand in S columns.

What is too wide or too long for a page continues in further tables of the same file.
"""

import re
from collections.abc import Sequence
from textwrap import fill

import pandas as pd

from sp_bench.report.tables.latex_layout import Sheet, natural_width, sheets
from sp_bench.report.tables.latex_text import escape
from sp_bench.report.tables.parts import Entry, PaperTable

_NUMBER = re.compile(r"(-?)(\d[\d,]*)(?:\.(\d+))?")
_OPTIONS = "group-digits=integer,group-separator={,},group-minimum-digits=4,detect-weight=true,mode=text"
_MARKED = r"table-space-text-post={$^{\dagger}$},table-align-text-after=false"


def latex(table: PaperTable) -> str:
    """One or more `table` floats; `table*`, which spans both columns of a page that has two, where it is wide."""
    floats = [_float(table, sheet, number) for number, sheet in enumerate(sheets(table), 1)]
    about = (
        f"% Needs \\usepackage{{booktabs,siunitx}}. Made from rows; {table.stem}.csv has the trials of each entry.\n"
    )
    return about + "\n".join(floats)


def _float(table: PaperTable, sheet: Sheet, number: int) -> str:
    environment = "table" if sheet.is_narrow else "table*"
    title = f"{table.title}: {table.setting}" if table.setting else table.title
    caption = f"{title} (continued)." if number > 1 else f"{title}. {table.caption}"
    label = table.stem if number == 1 else f"{table.stem}-part-{number}"
    note = fill(escape(table.provenance), 120, break_long_words=False, break_on_hyphens=False)
    body = [
        rf"\begin{{{environment}}}[tbp]",
        r"\centering",
        rf"\caption{{{escape(caption)}}}",
        rf"\label{{tab:{label}}}",
        r"\smallskip\footnotesize",
        r"\setlength{\tabcolsep}{4pt}",
        _tabular(table, sheet).rstrip(),
        *([rf"\par\smallskip\parbox{{\linewidth}}{{\scriptsize {note}}}"] if note else []),
        rf"\end{{{environment}}}",
    ]
    return "\n".join(body) + "\n"


def _tabular(table: PaperTable, sheet: Sheet) -> str:
    groups = [_group(table, i) for i in sheet.columns]
    heads = [_heading(table, i) for i in sheet.columns]
    labels = pd.MultiIndex.from_arrays([groups, heads]) if any(groups) else pd.Index(heads)
    formats = "".join(_column_format(table, i, sheet.widths[i]) for i in sheet.columns)
    data = pd.DataFrame(_rows(table, sheet), columns=labels)
    text = data.style.hide(axis="index").to_latex(
        hrules=True, siunitx=True, column_format=formats, multicol_align="c"
    )  # fmt: skip
    if not any(groups):
        return text
    start, head, rest = re.split(r"(?<=\\toprule\n)(.*\n)", text, maxsplit=1)
    return f"{start}{head}{_rules(groups)}\n{rest}"


def _unit(table: PaperTable, column: int) -> str:
    """In parentheses; empty where the table's title says it for all numbers."""
    unit = table.columns[column].unit
    return f" ({unit})" if unit and table.units_differ else ""


def _group(table: PaperTable, column: int) -> str:
    group = table.columns[column].group
    return escape(f"{group}{_unit(table, column)}") if group else ""


def _heading(table: PaperTable, column: int) -> str:
    """With its unit, which else stands beside the group above."""
    described = table.columns[column]
    return escape(described.heading if described.group else f"{described.heading}{_unit(table, column)}")


def _rules(groups: Sequence[str]) -> str:
    """A thin rule under each group of columns."""
    rules, start = [], 0
    for i in range(1, len(groups) + 1):
        if i == len(groups) or groups[i] != groups[start]:
            if groups[start]:
                rules.append(rf"\cmidrule(lr){{{start + 1}-{i}}}")
            start = i
    return " ".join(rules)


def _rows(table: PaperTable, sheet: Sheet) -> list[list[str]]:
    """Leading words that repeat the line above are left out; where the first of them changes there is a gap."""
    is_number = [table.columns[i].is_number for i in sheet.columns]
    leading = max(0, is_number.index(True) - 1) if True in is_number else 0
    rows: list[list[str]] = []
    before: list[Entry] = []
    for line in sheet.lines:
        shown = [line[i] for i in sheet.columns]
        changed = [k for k in range(leading) if not before or shown[k].text != before[k].text]
        same = changed[0] if changed else leading
        texts = ["" if k < same else _entry(entry, is_number[k]) for k, entry in enumerate(shown)]
        if before and leading and not same:
            texts[0] = rf"\addlinespace {texts[0]}"
        rows.append(texts)
        if any(entry.interval for entry in shown):
            rows.append([rf"{{\scriptsize {escape(e.interval)}}}" if e.interval else "" for e in shown])
        before = shown
    return rows


def _entry(entry: Entry, is_number: bool) -> str:
    bold = r"\bfseries " if entry.best else ""
    if not is_number:
        return f"{{{bold}{escape(entry.text)}}}" if bold else escape(entry.text)
    if not _NUMBER.fullmatch(entry.number):
        return f"{{{bold}{escape(entry.text)}}}"
    mark = f" {{{escape(entry.mark)}}}" if entry.mark else ""
    return f"{bold}{entry.number.replace(',', '')}{mark}"


def _column_format(table: PaperTable, column: int, width: int) -> str:
    if not table.columns[column].is_number:
        if width >= natural_width(table, column):
            return "l"
        return rf">{{\raggedright\arraybackslash}}p{{{0.5 * width:.1f}em}}"
    entries = [line[column] for line in table.lines]
    parts = [match.groups() for entry in entries if (match := _NUMBER.fullmatch(entry.number))]
    sign = "-" if any(minus for minus, _, _ in parts) else ""
    digits = max((len(integer.replace(",", "")) for _, integer, _ in parts), default=1)
    decimals = max((len(fraction or "") for _, _, fraction in parts), default=0)
    marked = f",{_MARKED}" if any(entry.mark for entry in entries) else ""
    return f"S[table-format={sign}{digits}.{decimals},{_OPTIONS}{marked}]"
