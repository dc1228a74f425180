"""Published figures beside what was measured here, with what differs: context, never a like-for-like claim."""

from collections.abc import Sequence

from sp_bench.report.cells import Cell, listed
from sp_bench.report.formats import MISSING, whole
from sp_bench.report.limits import limits, out_of_memory
from sp_bench.report.provenance import words
from sp_bench.report.ratios import fastest
from sp_bench.report.tables.metrics import LONGEST, METRICS
from sp_bench.report.tables.parts import Column, Entry, PaperTable, legend, measured, significant, words_of
from sp_bench.report.tables.sources import Figure, figures

OOM = "OOM"
CAPTION = (
    "Context, not a like-for-like comparison: each line says what differs. Measured is a cell of the same workload, "
    "model or heads, length and number of devices: under the source's own training stack or the closest to it, with "
    "the optimizer offloaded or not and memory capped or not, then the fastest of any other; elsewhere the fastest by "
    "the same kind of method and by any; of NLL differences the largest. Of cells with several numbers of "
    "micro-batches a step those with the source's, else with the fewest; of memory the source's engine goes before "
    "that number. Ratio: measured / published."
)
OF_MEMORY = ("peak_memory_gb", LONGEST)  # the engine decides them first; of times the number of micro-batches


def tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """One, or none where no published figure has a cell of ours beside it."""
    pairs = [(figure, cell) for figure in figures() for cell in _ours(figure, cells)]
    if not pairs:
        return []
    lines = tuple(_line(figure, cell, cells) for figure, cell in pairs)
    columns = (
        *(Column("source"), Column("figure")),
        *(Column(name, is_number=True) for name in ("published", "measured", "ratio")),
        *(Column("measured with"), Column("differs in")),
    )
    used = tuple({(cell.setting, cell.cell_id): cell for _, cell in pairs}.values())
    settings = sorted({cell.setting for cell in used})
    notes = dict.fromkeys(figure.note for figure, _ in pairs if figure.note)
    caption = " ".join([CAPTION, *dict.fromkeys(_about(figure) for figure, _ in pairs), *notes]) + legend(lines)
    setting = settings[0] if len(settings) == 1 else ""
    title = "Published figures"
    return [PaperTable("published", setting, "published", title, caption, columns, lines, words(used))]


def _about(figure: Figure) -> str:
    """A sentence on what the source ran, for the caption."""
    kernel = f", {figure.kernel}" if figure.kernel else ""
    subject = f"{figure.subject} against {figure.reference}" if figure.reference else figure.subject
    devices = f"{figure.where['world_size']} x {figure.device}"
    several = (figure.micro_batches or 1) > 1
    batches = f"{figure.micro_batches} micro-batches a step (ours 1 unless a line says more)" if several else ""
    engine = f"ours of the same engine: {figure.our_engines[0]}" if figure.our_engines else ""
    ran = "; ".join(filter(None, (subject, f"{figure.engine}{kernel}", engine, batches, devices)))
    return f"{figure.source}: {ran}; figures {figure.read}."


def _ours(figure: Figure, cells: Sequence[Cell]) -> list[Cell]:
    """Of its own training stack a cell for each way to have memory, and one of the others; without any of its stack one
    of its kind and one of all, once if they are one; else one that failed."""
    asked = [c for c in cells if figure.is_asked_of(c)]
    if figure.metric == LONGEST:
        longest = max((limit.largest_ok.asked["seq_len"] for limit in limits(asked) if limit.largest_ok), default=None)
        asked = [c for c in asked if c.asked["seq_len"] == longest]
    ran = [c for c in asked if c.ok and METRICS[figure.metric].read(c, cells) is not None]
    failed = [c for c in asked if not c.ok]
    if of_stack := _of_its_stack(figure, [*ran, *failed], cells):
        groups = [[c for c in ran if not figure.is_of_its_stack(c)]]
    else:
        of_kind, failed_of_kind = ([c for c in group if figure.is_of_its_kind(c)] for group in (ran, failed))
        groups = [of_kind, ran] if of_kind else [failed_of_kind[:1], ran]
    found = [_shown(figure, group, cells) for group in groups if group]
    return list({(c.setting, c.cell_id): c for c in [*of_stack, *found]}.values())


def _shown(figure: Figure, group: Sequence[Cell], cells: Sequence[Cell]) -> Cell:
    """The fastest; of differences, of which the smallest is best, the largest: a claim about all. Of steps of several
    numbers of micro-batches, whose times say nothing to each other, those of the closest number."""
    if len(group) > 1 and figure.reference:
        return max(group, key=lambda c: METRICS[figure.metric].read(c, cells) or 0.0)
    closest = min(_micro_batches(figure, cell) for cell in group)
    same = [cell for cell in group if _micro_batches(figure, cell) == closest]
    return same[0] if len(same) == 1 else fastest(same)


def _micro_batches(figure: Figure, cell: Cell) -> tuple[bool, int]:
    """Of a cell's step; the source's own number is the smallest, then they count up."""
    return cell.micro_batches != (figure.micro_batches or 1), cell.micro_batches


def _of_its_stack(figure: Figure, asked: Sequence[Cell], cells: Sequence[Cell]) -> list[Cell]:
    """The closest cell with the optimizer and the memory as published, then of each other way to have them. One that
    failed other than out of memory only where there is no other."""
    ways: dict[tuple[bool, bool], list[Cell]] = {}
    for cell in asked:
        cap = cell.asked["device_memory_gib"]
        if figure.is_of_its_stack(cell) and cap in (None, figure.device_memory_gib):
            differs = (_offloads(cell) != bool(figure.our_offloads), cap != figure.device_memory_gib)
            ways.setdefault(differs, []).append(cell)

    def closeness(cell: Cell) -> tuple[int | bool, ...]:
        batches, engine = _micro_batches(figure, cell), _rank(cell.asked["engine"], figure.our_engines)
        return (
            not (cell.ok or out_of_memory(cell)),
            *((engine, *batches) if figure.metric in OF_MEMORY else (*batches, engine)),
            _rank(cell.asked["kernel"], figure.our_kernels or ()),
            _rank(cell.asked["optimizer_offload"], figure.our_offloads),
        )

    found = []
    for _, way in sorted(ways.items()):
        closest = [c for c in way if closeness(c) == min(map(closeness, way))]
        found.append(_shown(figure, [c for c in closest if c.ok] or closest[:1], cells))
    return found


def _rank(name: str | None, closest_first: Sequence[str]) -> int:
    return next((rank for rank, known in enumerate(closest_first) if known == name), len(closest_first))


def _offloads(cell: Cell) -> bool:
    return cell.asked["optimizer_offload"] is not None


def _line(figure: Figure, cell: Cell, cells: Sequence[Cell]) -> tuple[Entry, ...]:
    metric = METRICS[figure.metric]
    ours = metric.read(cell, cells) if cell.ok else None
    length = f"{whole(figure.where['seq_len'])} tokens" if "seq_len" in figure.where else ""
    by = " ".join(filter(None, ("by" if figure.method else "", figure.method, figure.layout)))
    what = " ".join(filter(None, (metric.title, by)))
    is_number = not isinstance(figure.value, str)
    return (
        Entry(figure.source),
        Entry(", ".join(filter(None, (what, length, figure.reading)))),
        Entry(number=f"{figure.value:,}") if is_number else Entry(str(figure.value)),
        words_of(cell) if ours is None else measured(cell, significant(ours)),
        _ratio(figure, cell, ours),
        Entry(_named(figure, cell), cells=(cell,)),
        Entry(", ".join(_differs(figure, cell))),
    )


def _ratio(figure: Figure, cell: Cell, ours: float | None) -> Entry:
    """Or in words which of both ran out of memory."""
    there = figure.value == OOM
    if out_of_memory(cell):
        return Entry(f"both {OOM}" if there else f"{OOM} here only", cells=(cell,))
    if there and cell.ok:
        return Entry(f"{OOM} there only", cells=(cell,))
    known = ours is not None and not isinstance(figure.value, str) and figure.value
    return measured(cell, f"{(ours or 0.0) / float(figure.value):.2f}") if known else Entry(MISSING)


def _devices(cell: Cell) -> list[str]:
    names = (listed((row["environment"] or {}).get("device_names")) for row in cell.measured or cell.rows)
    found = sorted({str(name) for each in names for name in each})
    return found or [str(cell.asked["hardware"])]


def _named(figure: Figure, cell: Cell) -> str:
    kernel = str(cell.asked["kernel"])
    series = cell.series if cell.name.says_kernel else f"{cell.series}, {kernel}"
    offload = cell.asked["optimizer_offload"]
    place = f"optimizer offloaded ({offload})" if offload else "no offload" if figure.our_offloads else None
    parts = (cell.asked["engine"], place, cell.micro_batches_note)
    stack = ", ".join(str(part) for part in parts if part and cell.asked["engine"])
    cap = cell.asked["device_memory_gib"]
    capped = "" if cap is None else f" capped at {cap:g} GiB"
    devices = f"{cell.asked['world_size']} x {', '.join(_devices(cell))}{capped}, {cell.asked['fabric']}"
    return "; ".join(filter(None, (series, stack, devices)))


def _differs(figure: Figure, cell: Cell) -> list[str]:
    """Engine does unless it is the source's own, the first of ours: others run the same training code at most in part,
    and ours is this benchmark, whoever wrote the attention."""
    asked = cell.asked
    different = [] if asked["engine"] in figure.our_engines[:1] else ["engine"]
    same_device = all((figure.device_model or figure.device) in name.split() for name in _devices(cell))
    if not same_device:
        different.append("device")
    if (
        figure.device_memory_gib is not None
        and not same_device
        and asked["device_memory_gib"] != figure.device_memory_gib
    ):
        different.append("device memory")
    if _offloads(cell) and not figure.our_offloads:
        different.append("offload (not said)")
    elif _offloads(cell) != bool(figure.our_offloads):
        different.append("offload")
    checkpointing = cell.options.get("workload.activation_checkpointing")
    if figure.activation_checkpointing and checkpointing not in (None, figure.activation_checkpointing):
        different.append("checkpointing")
    if cell.launch_note:
        different.append("launch")
    if figure.micro_batches is None and cell.micro_batches > 1:
        different.append("micro-batches (not said)")
    elif figure.micro_batches is not None and cell.micro_batches != figure.micro_batches:
        different.append("micro-batches")
    if figure.our_kernels is None:
        different.append("kernel (not said)")
    elif asked["kernel"] not in figure.our_kernels:
        different.append("kernel")
    if figure.method is None:
        different.append("method (not said)")
    elif not figure.is_of_its_kind(cell):
        different.append("method")
    if cell.is_library and asked["method"] not in figure.our_methods:
        different.append("whose method")
    different += [name for name, value in figure.waived.items() if value != asked[name]]
    if figure.reference:
        different.append(f"reference ({figure.reference}, ours one process in {asked['dtype']})")
    return different
