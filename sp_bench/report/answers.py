"""The grid in Markdown, for documents; the page has its own."""

from collections.abc import Sequence

from sp_bench.analysis import grades
from sp_bench.analysis.grid import Entry, Grid
from sp_bench.analysis.words import is_packed
from sp_bench.formats import escape_markdown

EN_DASH = "\N{EN DASH}"

BRIEF = (
    "[a, b]: interval, of one machine; (a-b): other runs. **Bold**: decided. Tie: under {smallest}; undecided: perhaps "
    "over; within: too few runs. A: 6 pairs, no doubt; B: 2 to 5, few flagged, imitated; C: once, half flagged, old "
    "code. Undivided: without chunks. [All](docs/ANSWERS.md)."
)
LEGEND = (
    '"All-gather 1.02x": over the next best. Bold: an A that decides, who leads or that they tie. Tie: the interval is '
    "within {smallest}; undecided: it is on both sides of that, or there is none and runs of one method differ more "
    "than the methods; within: too few runs for an interval. Alike: not told apart from who leads. Grades: {grades}. "
    "A letter's title names its campaign. An interval is of one machine. More: other runs of the place, or other "
    "packs; below 1 the other one leads. Undivided: chunks of heads, Ulysses' best way there, were not tried."
)
ONE_RANK = " \N{WHITE CIRCLE}: modelled by one rank, once."


def legend(grid: Grid, brief: bool = False) -> str:
    """What the marks in the grid mean."""
    entries = [entry for line in grid.lines for of in line.entries for entry in of]
    smallest, *modelled = (f"{each:.0%}" for each in sorted({entry.difference.smallest for entry in entries}))
    smallest += "".join(f" (modelled {each})" for each in modelled)
    text = (BRIEF if brief else LEGEND).format(smallest=smallest, grades=grades.legend())
    return text + (ONE_RANK if any(entry.is_of_one_rank for entry in entries) else "")


def markdown(grid: Grid, results: str, brief: bool = False) -> str:
    """A table; what is weak is in `<sub>`, which GitHub and the site show small. What one rank says has a circle.

    results: the folder of campaigns, from the page. A grade links to its campaign, and its title says what it rests on.
    brief: each cell has its first two answers, one of them weak at most, and those that are decided, without older code
    beside newer; a line with a single answer, which is weak, and measured or flagged, is left out.
    """
    lines = [f"| GPUs, tokens | {' | '.join(grid.columns)} |", f"|{'---|' * (len(grid.columns) + 1)}"]
    for line in grid.lines:
        answers = [entry for entries in line.entries for entry in entries]
        if brief and len(answers) == 1 and _is_slight(answers[0]):
            continue
        shown = [_brief(entries) if brief else entries for entries in line.entries]
        texts = ["<br>".join(_entry(entry, results, brief) for entry in entries) for entries in shown]
        lines.append(f"| {' | '.join([line.head, *texts])} |")
    return "\n".join(lines) + "\n"


def _is_slight(entry: Entry) -> bool:
    """Whether an answer is weak, and of all ranks or flagged."""
    grade = entry.difference.grade
    return grade.is_weak and (not entry.is_of_one_rank or bool(grade.doubts))


def _brief(entries: Sequence[Entry]) -> list[Entry]:
    newer = [each for each in entries if "aged" not in each.difference.grade.doubts] or entries
    weak = [each for each in newer if each.difference.grade.is_weak]
    return [each for each in newer if each.is_decided or (each in newer[:2] and each not in weak[1:])]


def _entry(entry: Entry, results: str, brief: bool) -> str:
    found = entry.difference
    verdict = escape_markdown(entry.verdict)
    if entry.is_decided:
        verdict = f"**{verdict}**"
    more = f" ({entry.more})" if entry.more else ""
    if brief and more:  # of a single weak answer it says little; of packs it is the answer
        more = "" if found.grade.is_weak and not is_packed(found.fast) else f" ({entry.range.replace(' to ', EN_DASH)})"
    title = escape_markdown(entry.where).replace('"', "")
    link = f'({results}/{entry.campaign}/_campaign.yaml "{title}")'
    if entry.is_of_one_rank:
        mark = "\N{MIDDLE DOT}".join(("\N{WHITE CIRCLE}", *found.grade.doubts))
        return f"[{mark}]{link} {escape_markdown(entry.label)}: {verdict}{more}"
    text = f"{escape_markdown(entry.label)}: {verdict} [{found.grade.words}]{link}{more}"
    return f"<sub>{text}</sub>" if found.grade.is_weak else text
