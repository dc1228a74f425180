"""The grid in Markdown, for documents; the page has its own."""

from sp_bench.analysis.grid import Entry, Grid
from sp_bench.formats import escape_markdown

LEGEND = (
    "Bold: decided by an interval without a doubt. Grades: A, an interval and no doubt; B, 2 to 5 pairs; C, weak: one "
    "pair, a doubtful one or older code. More: other runs of the place, or other packs."
)


def markdown(grid: Grid) -> str:
    """A table; what is weak is in `<sub>`, which GitHub and the site show small."""
    lines = [f"| GPUs, tokens | {' | '.join(grid.columns)} |", f"|{'---|' * (len(grid.columns) + 1)}"]
    lines += [
        f"| {' | '.join([line.head, *('<br>'.join(map(_entry, each)) for each in line.entries)])} |"
        for line in grid.lines
    ]
    return "\n".join(lines) + "\n"


def _entry(entry: Entry) -> str:
    found = entry.difference
    verdict = escape_markdown(entry.verdict)
    if entry.is_decided:
        verdict = f"**{verdict}**"
    more = f" ({entry.more})" if entry.more else ""
    text = f"{escape_markdown(entry.label)}: {verdict} {found.grade.mark}{more}"
    return f"<sub>{text}</sub>" if found.grade.is_weak else text
