"""docs/RESULTS.md from rows: tables whose lines end with their evidence and campaigns. Nothing is written by hand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sp_bench.analysis import identifiers, words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.device_sets import several
from sp_bench.analysis.grades import legend
from sp_bench.analysis.ladder import ladders
from sp_bench.analysis.limits import Limit
from sp_bench.analysis.longest import ends, is_fit_only, longest, tries
from sp_bench.analysis.metrics import memory_gib, sent_gib, tflops, wire_gib
from sp_bench.analysis.rivals import counterparts
from sp_bench.analysis.scaling import Scaling, Scalings, scalings
from sp_bench.analysis.settings import APART, Difference, Place, Setting, is_baseline
from sp_bench.analysis.signs import RIVALS, Count, counts
from sp_bench.formats import counted, gib, number
from sp_bench.report.cards import compared, verdict
from sp_bench.report.caveats import statuses
from sp_bench.report.page.appendix import parity
from sp_bench.report.published import beside
from sp_bench.report.setting_tables import Line, tables
from sp_bench.report.table import Column, Table, plain, section
from sp_bench.rows import git

INTRODUCTION = """# Results

`sp-bench report results/* --findings docs/RESULTS.md` wrote this page from the rows; the page of a campaign has its
devices too. [CAMPAIGNS.md](CAMPAIGNS.md) says where the rows come from, and which are of code before commit c1f674b.
Methods are compared at one length, number of GPUs, fabric and kernel, each by its fastest variant, by ratios of step
times. A tie: the whole interval is within
{smallest:.0%} of 1. Undecided: an interval that is neither a tie nor clear of 1, or replicates that differ by more than
the methods do. Brackets hold intervals, of 6 replicates or more; without them nothing is proven.
[Grades](METRICS.md#grades): {grades}.
Each ratio of two step times is of replicates that pair: of one campaign, on one machine, with one code. Without such
replicates two methods are not compared. Times and other numbers are medians over all replicates: compare them within
one campaign, since machines and code differ. `code` is the commit that the rows name; where rows come from a copy of
the tree, CAMPAIGNS.md has the commit whose files were measured.
"""


def findings(settings: Sequence[Setting], cells: Sequence[Cell]) -> str:
    """The whole file. It leaves out CPU cells, whose times mean nothing for GPUs."""
    on_gpus = [s for s in settings if s.main is not None and s.main.first.processor == "GPU"]
    smallest = settings[0].smallest if settings else 0.0
    sections: list[Table[Any]] = [
        _over_campaigns(counts(on_gpus)),
        *(_places(setting) for setting in on_gpus),
        plain("Libraries beside our method of their kind, on the same kernel", "", LIBRARIES, _libraries(on_gpus)),
        *_steps(on_gpus),
        plain("Stacks net of their baseline", ABOUT_NET, NET, [(s, of) for s in scalings(on_gpus) for of in s.lines]),
        plain("Kernels alone", "", KERNELS, _kernels(settings)),
        *_memory([s for s in settings if any(cell.processor == "GPU" for cell in s.cells)]),
        plain("Bytes", "", BYTES, _bytes(cells)),
        *(parity(cells), beside(cells)),
    ]
    first = [
        INTRODUCTION.format(smallest=smallest, grades=legend()),
        f"{statuses(cells)} They are of {_campaigns(cells)}.\n",
    ]
    return "\n".join([*first, *filter(None, map(section, sections))]).rstrip() + "\n"


def _evidence_of(cells: Callable[[Any], Sequence[Cell]]) -> tuple[Column[Any], Column[Any]]:
    """The last columns of most sections."""
    return (Column("evidence", lambda of: _evidence(cells(of))), Column("campaigns", lambda of: _among(cells(of))))


@dataclass(frozen=True)
class Over:
    """Counts of one place, by rival."""

    of_rivals: Mapping[str, Count]

    @property
    def campaigns(self) -> str:
        return ", ".join(sorted({name for count in self.of_rivals.values() for name in count.ratios}))


def _over_campaigns(found: Sequence[Count]) -> Table[Over]:
    """One line per place, one column per method that was measured beside Ulysses."""

    def tally(rival: str) -> Column[Over]:
        head = f"Ulysses ahead of {words.METHODS[rival]}"
        return Column(head, lambda of: of.of_rivals[rival].tally if rival in of.of_rivals else "")

    places = {count.of: Over({each.rival: each for each in found if each.of == count.of}) for count in found}
    rivals = [rival for rival in RIVALS if any(count.rival == rival for count in found)]
    columns: tuple[Column[Over], ...] = (
        Column("where", lambda of: next(iter(of.of_rivals.values())).where),
        *map(tally, rivals),
        Column("campaigns", lambda of: of.campaigns),
    )
    return plain("Over campaigns", "Step time of the other method over that of Ulysses.", columns, places.values())


def _places(setting: Setting) -> Table[Place]:
    columns: tuple[Column[Place], ...] = (
        Column("where", lambda place: _where(place.first)),
        Column("answer", _answer),
        Column("grade", lambda place: _grade(place.difference)),
        Column("numbers", lambda place: compared(setting, place)),
        *_evidence_of(lambda place: place.cells),
    )
    return plain(setting.title, "", columns, reversed(setting.contests))


def _where(first: Cell) -> str:
    return ", ".join(filter(None, [words.place(first), words.fabric(first.asked["fabric"]), words.kernel(first)]))


STEP: tuple[Column[Cell], ...] = (
    Column("step (ms)", lambda cell: cell.median_step_ms, number),
    Column("MFU", lambda cell: cell.mfu, "{:.3f}".format),
    Column("peak GiB", memory_gib, gib),
    *_evidence_of(lambda cell: [cell]),
)


def _steps(settings: Sequence[Setting]) -> Iterator[Table[Cell]]:
    """Options and engines of a training step, which settings keep apart; then the steps that no table has yet."""
    shown = {cell.cell_id for setting in settings for place in setting.contests for cell in place.cells}
    for ladder in ladders(settings):
        names = ladder.names
        yield plain(ladder.setting.title, "", (_named("options", names), *STEP), ladder.measured)
        shown |= names.keys()
    alone = {
        cell.cell_id: (cell, setting.title)
        for setting in settings
        for cell in setting.cells
        if cell.asked["workload"] == "train_step" and cell.ok and cell.cell_id not in shown
    }
    columns: tuple[Column[Cell], ...] = (
        Column("what", words.method),
        _named("setting", {cell_id: title for cell_id, (_, title) in alone.items()}),
        Column("where", words.place),
        Column("kernel", words.kernel),
        *STEP,
    )
    yield plain("Training steps beside no other", "", columns, [cell for cell, _ in alone.values()])


def _named(head: str, names: Mapping[str, str]) -> Column[Cell]:
    return Column(head, lambda cell: names[cell.cell_id])


ABOUT_NET = (
    "Tokens/s a GPU over those of the same stack's baseline, where each GPU has a sequence of the same length, and "
    "the ratio of the best such share over this one. Each share is of one machine, two shares maybe of two."
)
NET: tuple[Column[tuple[Scalings, Scaling]], ...] = (
    Column("stack", lambda of: of[0].names[of[1].cell.cell_id]),
    Column("where", lambda of: of[0].where),
    Column("baseline", lambda of: of[1].baseline),
    Column("of its speed a GPU", lambda of: of[1].words),
    Column("net ratio to the first", lambda of: of[0].net_ratio(of[1]).words),
    *_evidence_of(lambda of: [of[1].cell, of[1].alone]),
)

KERNELS: tuple[Column[tuple[Line, str]], ...] = (
    Column("kernel", lambda of: of[0].name),
    Column("setting", lambda of: of[0].setting.title),
    Column("where", lambda of: of[1]),
    Column("numbers", lambda of: f"{number(tflops(of[0].cell))} TFLOP/s, {number(of[0].cell.median_step_ms)} ms"),
    *_evidence_of(lambda of: [of[0].cell]),
)


def _kernels(settings: Sequence[Setting]) -> list[tuple[Line, str]]:
    """(line, its place) of the settings that measured kernels without a method."""
    found = tables([s for s in settings if all(is_baseline(cell) for cell in s.cells)])
    return [(line, group.title) for table in found for group in table.groups for line in group.lines]


def _memory(settings: Sequence[Setting]) -> Iterator[Table[tuple[str, Limit]]]:
    """One line per method and set of options whose longest sequence is known or bounded."""
    if (found := longest(settings)) is None:
        return
    columns: tuple[Column[tuple[str, Limit]], ...] = (
        Column(found.title, lambda of: of[0]),
        Column("fits", lambda of: ends(of[1])[0]),
        Column("does not fit", lambda of: ends(of[1])[1]),
        Column("evidence", lambda of: _of_tries(of[1])),
        Column("campaigns", lambda of: _among(of[1].cells)),
    )
    about = (
        "The longest sequence that fits, and the shortest that does not, in tokens. At least, not reached: nothing "
        "longer has a row that says whether it fits, so this is neither a bracket nor the longest. Host memory: that "
        "of the machine ran out, not a device's. Fit only: most layers' attention was left out of the step. "
        "Tries: of the one and of the other."
    )
    yield plain("Where memory runs out", about, columns, zip(found.names, found.limits, strict=True))


def _of_tries(limit: Limit) -> str:
    """How often each end was tried, and whether attention was left out."""
    fit_only = ["fit only"] if is_fit_only(limit) else []
    return ", ".join([*fit_only, f"tries: {tries(limit)}", *_code(limit.cells)])


BYTES: tuple[Column[tuple[str, str]], ...] = (Column("what", lambda of: of[0]), Column("campaigns", lambda of: of[1]))


def _bytes(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Compares counted bytes with the closed form and with NVLink's counters."""
    sent = [c for c in cells if c.ok and c.communication.equal is not None and c.communication.predicted_bytes]
    different = [c for c in sent if not c.communication.equal]
    lines = [
        (
            f"Counted bytes equal the closed form in {len(sent) - len(different)} of {counted(len(sent), 'cell')}.",
            _campaigns(sent),
        )
    ]
    off = []
    for cell in sent:
        wire, sent = wire_gib(cell), sent_gib(cell)
        if wire is not None and sent and sent >= 1 / 16 and cell.asked["workload"] == "attention":
            off.append((wire / sent - 1, cell))
    if off:
        low, high = min(each[0] for each in off), max(each[0] for each in off)
        what = f"NVLink's counters are {low:+.3%} to {high:+.3%} off the counted bytes, of 64 MiB or more a step"
        lines.append((f"{what} ({counted(len(off), 'cell')} of attention).", _campaigns([cell for _, cell in off])))
    return lines


def _answer(place: Place) -> str:
    """The verdict. None is given if each method ran once and briefly, as in trials that only prove correctness."""
    if all(len(cell.step_ms) == 1 and "short_window" in cell.flags for cell in place.cells):
        return f"No verdict: each method has one replicate, {words.FLAGS['short_window']}."
    return verdict(place)


LIBRARIES: tuple[Column[tuple[Cell, Cell, Difference, str]], ...] = (
    Column("library", lambda of: f"{words.method(of[0])} / {words.method(of[1])}"),
    Column("setting", lambda of: of[3]),
    Column("where", lambda of: _beside(of[0])),
    Column("its step time over ours", lambda of: _over(of[2])),
    Column("grade", lambda of: _grade(of[2])),
    Column("evidence", lambda of: _evidence(of[:2])),
    Column("campaigns", lambda of: _among(of[:1])),
)


def _libraries(settings: Sequence[Setting]) -> list[tuple[Cell, Cell, Difference, str]]:
    """(library, our method of its kind, the difference of their times, their setting)."""
    return [
        (their, ours, Difference(ours, their, setting.smallest_for(ours)), setting.title)
        for setting in settings
        for their, ours in counterparts(setting.cells)
    ]


def _beside(their: Cell) -> str:
    return ", ".join(filter(None, [words.place(their), words.kernel(their), words.unusual(their, identifiers.LAUNCH)]))


def _grade(found: Difference | None) -> str:
    return found.grade.words if found and found.ratio is not None else ""


def _over(found: Difference) -> str:
    """The library's ratio, with slower, faster or a tie."""
    if found.ratio is None:
        return APART
    return f"{found.words} ({found.doubt or ('slower' if found.ratio > 1 else 'faster')})"


def _evidence(cells: Sequence[Cell]) -> str:
    sizes = sorted({len(cell.step_ms) for cell in cells})
    spread = counted(sizes[-1], "replicate") if len(sizes) == 1 else f"{sizes[0]} to {counted(sizes[-1], 'replicate')}"
    devices = several(number for cell in cells for number in cell.ran_on)
    flags = sorted({flag for cell in cells for flag in cell.flags})
    parts = [spread, devices and f"on {devices}", *_code(cells), flags and f"flagged {' '.join(flags)}"]
    return ", ".join(filter(None, parts))


def _code(cells: Sequence[Cell]) -> list[str]:
    shas = sorted({git.short(row["git_sha"]) for c in cells for row in c.rows if isinstance(row["git_sha"], str)})
    return [f"code {' '.join(shas)}"] if shas else []


def _campaigns(cells: Sequence[Cell]) -> str:
    return counted(len({row["folder"] for cell in cells for row in cell.rows}), "campaign")


def _among(cells: Sequence[Cell]) -> str:
    return ", ".join(sorted({str(row["folder"]) for cell in cells for row in cell.rows}))
