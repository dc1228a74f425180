"""A table as GitHub-flavoured Markdown: title and caption, the table, where it comes from."""

import re

import pandas as pd

from sp_bench.report.formats import without_escapes
from sp_bench.report.tables.parts import Entry, PaperTable

# Whatever begins emphasis, code, links, HTML, entities, strikethrough, mathematics or a new cell.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$#^@])")
_ADDRESS = re.compile(r"(:)(?=//)|(?i:(?<=www)(\.))")  # GitHub makes bare addresses links
_BLOCK = re.compile(r"^(\d{1,9})?([-+.)=:])")  # what begins a list, a rule or a heading


def escape(text: str) -> str:
    """Text that stays this text inside a paragraph or a cell; on one line."""
    plain = " ".join(without_escapes(text).replace("\0", "\N{REPLACEMENT CHARACTER}").split())
    return _ADDRESS.sub(r"\\\g<0>", _SPECIAL.sub(r"\\\1", plain))


def paragraph(text: str) -> str:
    """The same, where nothing stands before it."""
    return _BLOCK.sub(r"\1\\\2", escape(text))


def markdown(table: PaperTable) -> str:
    """Bold is the best of its column. Intervals and marks stand behind their number."""
    data = [[_entry(entry) for entry in line] for line in table.lines]
    frame = pd.DataFrame(data, columns=[escape(head) for head in table.heads])
    align = ["right" if column.is_number else "left" for column in table.columns]
    text = frame.to_markdown(index=False, colalign=align, disable_numparse=True)
    title = f"{table.title}: {table.setting}" if table.setting else table.title
    parts = [f"**{escape(title)}.** {escape(table.caption)}", text, paragraph(table.provenance)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _entry(entry: Entry) -> str:
    if not entry.best:
        return escape(entry.text)
    beside = f" {escape(entry.interval)}" if entry.interval else ""
    return f"**{escape(entry.number or entry.text)}**{escape(entry.mark)}{beside}"
