"""What the rows of campaigns say, as Markdown: a line, its evidence and its campaigns. None of it is by hand."""

from collections.abc import Sequence

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.device_sets import several
from sp_bench.analysis.formats import MISSING, counted, escape_markdown, number
from sp_bench.analysis.ladder import ladders
from sp_bench.analysis.limits import Limit
from sp_bench.analysis.longest import ends, is_fit_only, longest, tries
from sp_bench.analysis.ratios import times
from sp_bench.analysis.rivals import SAME, counterparts
from sp_bench.analysis.scaling import scalings
from sp_bench.analysis.settings import APART, TIE, UNPROVEN, Difference, Place, Setting, is_baseline
from sp_bench.analysis.signs import RIVALS, Count, counts
from sp_bench.report.cards import compared, gib, memory_gib, statuses, tflops, verdict
from sp_bench.report.page.appendix import device, parity
from sp_bench.report.published import beside
from sp_bench.report.table import tables, with_bounds

LONG = 131072  # tokens from which the devices are listed: shorter steps are hardly long enough to say what they draw
STEP_HEADS = ("step (ms)", "MFU", "peak GiB", "evidence", "campaigns")
INTRODUCTION = """# Results

`sp-bench report results/* --findings docs/RESULTS.md` wrote this page from the rows. [CAMPAIGNS.md](CAMPAIGNS.md) says
where the rows come from, and which are of code before commit c1f674b. Methods are compared at one length, number of
GPUs, fabric and kernel, each by its fastest variant, by ratios of step times. A tie: the interval holds 1, or the
difference is below {smallest:.0%}. Brackets hold intervals, of 6 replicates or more; without them nothing is proven.
Each ratio of two step times is of replicates that pair: of one campaign, on one machine, with one code. Without such
replicates two methods are not compared. Times and other numbers are medians over all replicates: compare them within
one campaign, since machines and code differ. `code` is the commit that the rows name; where rows come from a copy of
the tree, CAMPAIGNS.md has the commit whose files were measured.
"""


def findings(settings: Sequence[Setting], cells: Sequence[Cell]) -> str:
    """The whole file, without cells of CPUs: their times say nothing."""
    on_gpus = [s for s in settings if s.main is not None and s.main.first.processor == "GPU"]
    smallest = settings[0].smallest if settings else 0.0
    parts = [INTRODUCTION.format(smallest=smallest), f"{statuses(cells)} They are of {_campaigns(cells)}.\n"]
    parts += _over_campaigns(counts(on_gpus))
    for setting in on_gpus:
        rows = [_of_place(setting, place) for place in reversed(setting.contests)]
        parts += _section(setting.title, ("where", "answer", "numbers", "evidence", "campaigns"), rows)
    rows = [row for setting in on_gpus for row in _libraries(setting)]
    parts += _section(
        "Libraries beside our method of their kind, on the same kernel",
        ("library", "where", "its step time over ours", "evidence", "campaigns"),
        rows,
    )
    parts += _steps(on_gpus)
    parts += _net(on_gpus)
    parts += _kernels(settings)
    parts += _memory([s for s in settings if any(cell.processor == "GPU" for cell in s.cells)])
    parts += _section("Bytes", ("what", "campaigns"), _bytes(cells))
    shown = {cell.cell_id: cell for setting in on_gpus if setting.main for cell in setting.main.cells}
    shown |= {a.cell_id: a for s in on_gpus for c in s.cells if c.cell_id in shown and (a := s.alone.get(c.cell_id))}
    of_devices = [cell for cell in shown.values() if (cell.asked["seq_len"] or 0) >= LONG]
    for title, about, heads, lines in (device(of_devices), parity(cells), beside(cells)):
        parts += _section(title, heads, lines, about)
    return "\n".join(parts).rstrip() + "\n"


def _over_campaigns(found: Sequence[Count]) -> list[str]:
    """A line a place, a column a method that met Ulysses there."""
    places = {count.of: count.where for count in found}
    rivals = [rival for rival in RIVALS if any(count.rival == rival for count in found)]
    rows = []
    for place, where in places.items():
        here = {count.rival: count for count in found if count.of == place}
        campaigns = sorted({name for count in here.values() for name in count.ratios})
        rows.append((where, *(here[r].tally if r in here else "" for r in rivals), ", ".join(campaigns)))
    heads = ("where", *(f"Ulysses ahead of {words.METHODS[rival]}" for rival in rivals), "campaigns")
    return _section("Over campaigns", heads, rows, "Step time of the other method over that of Ulysses.")


def _steps(settings: Sequence[Setting]) -> list[str]:
    """Options and engines of a training step, which settings keep apart; then steps that stand beside no other."""
    parts, told = [], {cell.cell_id for setting in settings for place in setting.contests for cell in place.cells}
    for ladder in ladders(settings):
        rows = [(ladder.names[cell.cell_id], *_of_step(cell)) for cell in ladder.measured]
        parts += _section(ladder.setting.title, ("options", *STEP_HEADS), rows)
        told |= ladder.names.keys()
    rows = [
        (words.method(cell), setting.title, words.place(cell), words.kernel(cell), *_of_step(cell))
        for setting in settings
        for cell in setting.cells
        if cell.asked["workload"] == "train_step" and cell.ok and cell.cell_id not in told
    ]
    return parts + _section("Training steps beside no other", ("what", "setting", "where", "kernel", *STEP_HEADS), rows)


def _net(settings: Sequence[Setting]) -> list[str]:
    """Training steps over ranks beside the same stack's with a sequence a GPU."""
    rows = []
    for found in scalings(settings):
        for each in found.lines:
            net, paired = found.net_ratio(each)
            told = "" if each is found.lines[0] else paired.words if paired else times(net)
            where = ", ".join(found.setting.parts[1:-1])
            cells = [each.cell, each.alone]
            rows.append(
                (
                    *(found.names[each.cell.cell_id], where, each.baseline, with_bounds(each), told),
                    *(_evidence(cells), _among(cells)),
                )
            )
    heads = ("stack", "where", "baseline", "of its speed a GPU", "net ratio to the first", "evidence", "campaigns")
    about = (
        "Tokens/s a GPU over those of the same stack's baseline, where each GPU has a sequence of the same length, and "
        "the ratio of the best such share over this one. Each share is of one machine, two shares maybe of two."
    )
    return _section("Stacks net of their baseline", heads, rows, about)


def _of_step(cell: Cell) -> tuple[str, ...]:
    mfu, memory = cell.mfu, memory_gib(cell)
    return (
        number(cell.median_step_ms),
        MISSING if mfu is None else f"{mfu:.3f}",
        MISSING if memory is None else gib(memory),
        _evidence([cell]),
        _among([cell]),
    )


def _kernels(settings: Sequence[Setting]) -> list[str]:
    """Campaigns of kernels alone: settings in which no method meets another."""
    rows = []
    for table in tables([s for s in settings if all(is_baseline(cell) for cell in s.cells)]):
        for group in table.groups:
            for line in group.lines:
                told = f"{number(tflops(line.cell))} TFLOP/s, {number(line.cell.median_step_ms)} ms"
                rows.append(
                    (line.texts[0], table.setting.title, group.title, told, _evidence([line.cell]), _among([line.cell]))
                )
    return _section("Kernels alone", ("kernel", "setting", "where", "numbers", "evidence", "campaigns"), rows)


def _memory(settings: Sequence[Setting]) -> list[str]:
    """A line a method and set of options of which something says how long a sequence may be."""
    found = longest(settings)
    if found is None:
        return []
    rows = []
    for name, limit in zip(found.names, found.limits, strict=True):
        rows.append((name, *ends(limit), _of_tries(limit), _among(limit.cells)))
    heads = (found.title, "fits", "does not fit", "evidence", "campaigns")
    about = (
        "The longest sequence that fits, and the shortest that does not, in tokens. At least, not reached: nothing "
        "longer has a row that says whether it fits, so this is neither a bracket nor the longest. Host memory: that "
        "of the machine ran out, not a device's. Fit only: most layers' attention was left out of the step. "
        "Tries: of the one and of the other."
    )
    return _section("Where memory runs out", heads, rows, about)


def _of_tries(limit: Limit) -> str:
    """How often each end was tried, and whether with attention left out."""
    fit_only = ["fit only"] if is_fit_only(limit) else []
    return ", ".join([*fit_only, f"tries: {tries(limit)}", *_code(limit.cells)])


def _bytes(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Counted against the closed form and against NVLink's counters, over attention on GPUs."""
    sent = [c for c in cells if c.ok and c.communication.equal is not None and c.communication.predicted_bytes]
    different = [c for c in sent if not c.communication.equal]
    told = [
        (
            f"Counted bytes equal the closed form in {len(sent) - len(different)} of {counted(len(sent), 'cell')}.",
            _campaigns(sent),
        )
    ]
    off = []
    for cell in sent:
        wire, bytes_counted = cell.middle("comm_wire_bytes"), cell.communication.counted_bytes
        if wire is not None and bytes_counted and bytes_counted >= 64 * 2**20 and cell.asked["workload"] == "attention":
            off.append((wire / bytes_counted - 1, cell))
    if off:
        low, high = min(each[0] for each in off), max(each[0] for each in off)
        what = f"NVLink's counters are {low:+.3%} to {high:+.3%} off the counted bytes, of 64 MiB or more a step"
        told.append((f"{what} ({counted(len(off), 'cell')} of attention).", _campaigns([cell for _, cell in off])))
    return told


def _of_place(setting: Setting, place: Place) -> tuple[str, ...]:
    first = place.first
    where = [words.place(first), words.fabric(first.asked["fabric"]), words.kernel(first)]
    return (
        ", ".join(filter(None, where)),
        _answer(place),
        compared(setting, place),
        _evidence(place.cells),
        _among(place.cells),
    )


def _answer(place: Place) -> str:
    """The verdict, unless each method ran once and for a moment only, as trials do that prove and do not measure."""
    if all(len(cell.step_ms) == 1 and "short_window" in cell.flags for cell in place.cells):
        return f"No verdict: each method has one replicate, {words.FLAGS['short_window']}."
    return verdict(place)


def _libraries(setting: Setting) -> list[tuple[str, ...]]:
    made = []
    for their in setting.cells:
        if their.ok and their.is_library and (ours := dict(counterparts(their, setting.cells)).get(SAME)) is not None:
            ratio = Difference(ours, their, setting.smallest)
            where = ", ".join([words.place(their), words.kernel(their), *(["CUDA graph"] if their.launch_note else [])])
            outcome = APART if ratio.ratio is None else f"{ratio.words} ({_outcome(ratio, ratio.ratio)})"
            made.append(
                (
                    f"{words.method(their)} / {words.method(ours)}",
                    where,
                    outcome,
                    _evidence([their, ours]),
                    _among([their]),
                )
            )
    return made


def _outcome(found: Difference, ratio: float) -> str:
    """Either side may be the faster one."""
    if found.outcome == TIE:
        return ", ".join(filter(None, (TIE, found.proof)))
    return UNPROVEN if found.outcome == UNPROVEN else "slower" if ratio > 1 else "faster"


def _evidence(cells: Sequence[Cell]) -> str:
    sizes = sorted({len(cell.step_ms) for cell in cells})
    spread = counted(sizes[-1], "replicate") if len(sizes) == 1 else f"{sizes[0]} to {counted(sizes[-1], 'replicate')}"
    devices = several(number for cell in cells for number in cell.ran_on)
    flags = sorted({flag for cell in cells for flag in cell.flags})
    told = [spread, devices and f"on {devices}", *_code(cells), flags and f"flagged {' '.join(flags)}"]
    return ", ".join(filter(None, told))


def _code(cells: Sequence[Cell]) -> list[str]:
    shas = sorted({row["git_sha"][:7] for c in cells for row in c.rows if isinstance(row["git_sha"], str)})
    return [f"code {' '.join(shas)}"] if shas else []


def _campaigns(cells: Sequence[Cell]) -> str:
    return counted(len({row["folder"] for cell in cells for row in cell.rows}), "campaign")


def _among(cells: Sequence[Cell]) -> str:
    return ", ".join(sorted({str(row["folder"]) for cell in cells for row in cell.rows}))


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], about: str = "") -> list[str]:
    if not rows:
        return []
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(map(escape_markdown, row))} |" for row in rows]
    return [f"## {escape_markdown(title)}\n", *([f"{about}\n"] if about else []), "\n".join(lines) + "\n"]
