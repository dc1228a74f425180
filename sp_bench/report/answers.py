"""The grid in Markdown, for documents; the page has its own."""

from sp_bench.analysis import grades
from sp_bench.analysis.grid import Entry, Grid
from sp_bench.formats import escape_markdown

BRIEF = (
    "Empty: not measured. Bold: decided. Tie: under {smallest}; undecided: perhaps over; within {smallest}: too few "
    "runs. A: 6 pairs, no doubt; B: 2 to 5, or few flagged; C: once, half flagged or aged (older code). Letters link "
    "to campaigns."
)
LEGEND = (
    "Bold: decided by an interval without a doubt. Tie: the interval is within {smallest}; undecided: it is on both "
    "sides of that, or there is none and runs of one method differ more than the methods; within {smallest}: too few "
    "runs for an interval. Grades: {grades}. A letter's title names its campaign. More: other "
    "runs of the place, or other packs; below 1 the other one leads."
)
ONE_RANK = " \N{WHITE CIRCLE}: modelled by one rank."


def legend(grid: Grid, brief: bool = False) -> str:
    """What the marks in the grid mean."""
    entries = [entry for line in grid.lines for of in line.entries for entry in of]
    smallest = " or ".join(sorted({f"{entry.difference.smallest:.0%}" for entry in entries}))
    text = (BRIEF if brief else LEGEND).format(smallest=smallest, grades=grades.legend())
    return text + (ONE_RANK if any(entry.is_of_one_rank for entry in entries) else "")


def markdown(grid: Grid, results: str, brief: bool = False) -> str:
    """A table; what is weak is in `<sub>`, which GitHub and the site show small. What one rank says has a circle.

    results: the folder of campaigns, from the page. A grade links to its campaign, and its title says what it rests on.
    brief: without other runs. Each cell has its first two answers and those that are decided; a line with a single
    measured answer, which is weak, is left out.
    """
    lines = [f"| GPUs, tokens | {' | '.join(grid.columns)} |", f"|{'---|' * (len(grid.columns) + 1)}"]
    for line in grid.lines:
        answers = [entry for entries in line.entries for entry in entries]
        if brief and len(answers) == 1 and answers[0].difference.grade.is_weak and not answers[0].is_of_one_rank:
            continue
        shown = [[e for e in entries if not brief or e.is_decided or e in entries[:2]] for entries in line.entries]
        texts = ["<br>".join(_entry(entry, results, brief) for entry in entries) for entries in shown]
        lines.append(f"| {' | '.join([line.head, *texts])} |")
    return "\n".join(lines) + "\n"


def _entry(entry: Entry, results: str, brief: bool) -> str:
    found = entry.difference
    verdict = escape_markdown(entry.verdict)
    if entry.is_decided:
        verdict = f"**{verdict}**"
    more = f" ({entry.more})" if entry.more and not brief else ""
    title = escape_markdown(entry.where).replace('"', "")
    link = f'({results}/{entry.campaign}/_campaign.yaml "{title}")'
    if entry.is_of_one_rank:
        return f"[\N{WHITE CIRCLE}]{link} {escape_markdown(entry.label)}: {verdict}{more}"
    text = f"{escape_markdown(entry.label)}: {verdict} [{found.grade.words}]{link}{more}"
    return f"<sub>{text}</sub>" if found.grade.is_weak else text
