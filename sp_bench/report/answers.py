"""The grid in Markdown, for documents; the page has its own."""

from collections.abc import Sequence
from dataclasses import replace

from sp_bench.analysis import grades
from sp_bench.analysis.grades import Grade
from sp_bench.analysis.grid import Entry, Grid
from sp_bench.formats import escape_markdown

BRIEF = (
    "[a, b]: interval. Tie: under {smallest}; undecided: perhaps over; within: too few runs. **Bold**: decided. A: 6 "
    "clean pairs; B: 2 to 5, few flagged or imitated; C: once, half flagged or aged. Undivided: in one chunk. Other "
    "runs are up to {apart} apart."
)
LEGEND = (
    '"All-gather 1.02x": over the next best. Bold: an A that decides, who leads or that they tie. Tie: the interval is '
    "within {smallest}; undecided: it is on both sides of that, or there is none and runs of one method differ more "
    "than the methods; within: too few runs for an interval. Alike: not told apart from who leads. Grades: {grades}. "
    "A letter's title names its campaign. An interval is of one machine. More: other runs of the place, or other "
    "packs; below 1 the other one leads. Undivided: chunks of heads, Ulysses' best way there, were not tried."
)
CIRCLE = "\N{WHITE CIRCLE}"
EVIDENCE = "one_rank"
ONE_RANK = f" {CIRCLE}: modelled by one rank, once."


def mark(of: Grade) -> str:
    """A; C\N{MIDDLE DOT}once\N{MIDDLE DOT}aged; \N{WHITE CIRCLE}\N{MIDDLE DOT}flagged: of one real rank."""
    return "\N{MIDDLE DOT}".join((CIRCLE if of.mark == EVIDENCE else of.mark, *of.doubts))


def in_brief(grid: Grid) -> Grid:
    """The grid for a reader with ten seconds. A cell keeps its first two answers and those that are decided, and weak
    ones only if it has no other, and then one; older code does not stand beside newer. A line with a single weak
    answer, measured or flagged, is left out."""
    lines = []
    for line in grid.lines:
        answers = [entry for entries in line.entries for entry in entries]
        if len(answers) > 1 or not _is_slight(answers[0]):
            lines.append(replace(line, entries=tuple(_few(entries) for entries in line.entries)))
    return replace(grid, lines=tuple(lines))


def _is_slight(entry: Entry) -> bool:
    """Whether an answer is weak, and of all ranks or flagged."""
    grade = entry.difference.grade
    return grade.is_weak and (not entry.is_of_one_rank or bool(grade.doubts))


def _few(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    newer = [each for each in entries if "aged" not in each.difference.grade.doubts] or entries
    first = [each for each in newer if each.is_decided or each in newer[:2]]
    return tuple(each for each in first if not each.difference.grade.is_weak) or tuple(first[:1])


def legend(grid: Grid, brief: bool = False) -> str:
    """What the marks in the grid mean."""
    entries = [entry for line in grid.lines for of in line.entries for entry in of]
    smallest, *modelled = (f"{each:.0%}" for each in sorted({entry.difference.smallest for entry in entries}))
    smallest += "".join(f" (modelled {each})" for each in modelled)
    apart = [
        abs(other / entry.difference.ratio - 1) for entry in entries if entry.difference.ratio for other in entry.others
    ]
    text = (BRIEF if brief else LEGEND).format(
        smallest=smallest, grades=grades.legend(), apart=f"{max(apart, default=0):.0%}"
    )
    return text + (ONE_RANK if not brief and any(entry.is_of_one_rank for entry in entries) else "")


def markdown(grid: Grid, results: str, brief: bool = False) -> str:
    """A table; what is weak is in `<sub>`, which GitHub and the site show small. What one rank says has a circle.

    results: the folder of campaigns, from the page. A grade links to its campaign, and its title says what it rests on.
    brief: without a tie's ratio, other runs and reasons for a grade.
    """
    lines = [f"| GPUs, tokens | {' | '.join(grid.columns)} |", f"|{'---|' * (len(grid.columns) + 1)}"]
    for line in grid.lines:
        texts = ["<br>".join(_entry(entry, results, brief) for entry in entries) for entries in line.entries]
        lines.append(f"| {' | '.join([line.head, *texts])} |")
    return "\n".join(lines) + "\n"


def _entry(entry: Entry, results: str, brief: bool) -> str:
    grade = entry.difference.grade
    verdict = escape_markdown(entry.brief if brief else entry.verdict)
    if entry.is_decided:
        verdict = f"**{verdict}**"
    more = f" ({entry.more})" if entry.more and not brief else ""
    title = escape_markdown(entry.where).replace('"', "")
    link = f'({results}/{entry.campaign}/_campaign.yaml "{title}")'
    if entry.is_of_one_rank:
        return f"[{mark(grade)}]{link} {escape_markdown(entry.label)}: {verdict}{more}"
    text = f"{escape_markdown(entry.label)}: {verdict} [{grade.mark if brief else grade.words}]{link}{more}"
    return f"<sub>{text}</sub>" if grade.is_weak else text
