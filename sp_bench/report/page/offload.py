"""The section on what a ratio of tokens/s consists of: devices, work a token, utilization, the offloaded optimizer."""

from collections.abc import Iterable, Sequence

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING, counted, number, whole
from sp_bench.report.offload import Pair, Parts, breakdowns
from sp_bench.report.page.parts import Line, Ref, Section, Table, Words, ref, say
from sp_bench.report.ratios import by_medians
from sp_bench.report.tables.parts import words_of
from sp_bench.report.tables.sources import Figure, published_tokens_per_s

HEAD = (
    *("seq_len (tokens)", "tokens/s", "over the baseline", "= devices", "x work a token", "x utilization", "x offload"),
    *("product", "utilization x offload", "without offload", "published", "missing"),
)
BASIS = (
    "Neither strong nor weak scaling: length, work a token and number of devices change together; the baseline is "
    "single, with one sequence on one device or one on each, and the optimizer offloaded on both sides."
)
CAPTION = (
    "Over the baseline: ratio of tokens/s, both with the optimizer in host memory. It is the product of four. Devices. "
    "Work a token: model FLOPs of the baseline's over those of these, which attention makes dearer. Utilization: model "
    "FLOP/s of a device over the baseline's, both without offload: what parallelism and more work a step gain or lose. "
    "Offload: how much longer it makes the baseline's step over how much longer it makes this one: what it costs, "
    "spread over more tokens. Utilization x offload: what devices and work leave of the ratio, known also where the "
    "two cannot be told apart. Without offload: the same ratio with the optimizer on the device on both sides. From "
    "medians over the replicates, with {batches}."
)


def section(cells: Sequence[Cell]) -> Section | None:
    found = breakdowns(cells)
    if not found:
        return None
    points = tuple(_consists(parts) for each in found if (parts := _told(each)) is not None)
    return Section("offload", "What the speed-up consists of", BASIS, points=points, tables=tuple(map(_table, found)))


def summary(cells: Sequence[Cell]) -> list[Words]:
    """For the verdict: each ratio beside the one that somebody published."""
    told = [parts for each in breakdowns(cells) if (parts := _told(each)) is not None and _published(parts)]
    return [say(_over(parts), ".") for parts in told]


def _table(parts: Sequence[Parts]) -> Table:
    long, start = parts[-1].long.offloaded, parts[0].start
    name = f"{long.series} on {_devices(long)} over {_where(start.offloaded)} ({_stack(long)})"
    caption = CAPTION.format(batches=long.micro_batches_note or "one micro-batch a step")
    return Table(name, caption, HEAD, tuple(map(_line, parts)), (10, 11), setting=long.setting)


def _line(parts: Parts) -> Line:
    long, start = parts.long, parts.start
    both, plain = _ran(long.offloaded, start.offloaded), _ran(long.plain, start.plain)
    texts = (
        ref(whole(long.offloaded.asked["seq_len"]), long.offloaded),
        _rate(long.offloaded),
        _times(parts.ratio, both),
        _times(parts.devices, (long.offloaded, start.offloaded)),
        _times(parts.work, (long.offloaded, start.offloaded)),
        _times(parts.utilization, plain),
        _times(parts.offload, parts.cells),
        _times(parts.product, parts.cells),
        _times(parts.utilization_and_offload, both),
        _times(parts.plain_ratio, plain),
        MISSING
        if (published := _published(parts)) is None
        else f"{_ratio(*published):.2f}x {published[1].reading}".strip(),
        "; ".join(_missing(parts)) or "nothing",
    )
    return Line(texts, parts.cells)


def _told(parts: Sequence[Parts]) -> Parts | None:
    """The longest that somebody published, else the longest; of those that are whole, if any is."""
    known = [p for p in parts if p.ratio is not None]
    complete = [p for p in known if p.product is not None] or known
    told = [p for p in complete if _published(p)] or complete
    return told[-1] if told else None


def _over(parts: Parts) -> Words:
    """The ratio, what it is of and what was published."""
    long, start = parts.long.offloaded, parts.start.offloaded
    words = say(f"{long.series}, {_where(long)} over {_where(start)}, {_stack(long)}: ")
    return say(words, _times(parts.ratio, (long, start)), f" the tokens/s ({_evidence(parts)})", _said(parts))


def _consists(parts: Parts) -> Words:
    """The ratio and its factors."""
    if parts.product is None:
        return say(_over(parts), "; ", _known_factors(parts), f" ({'; '.join(_missing(parts))}).")
    return say(_over(parts), "; ", _factors(parts))


def _factors(parts: Parts) -> Words:
    long, start = parts.long, parts.start
    plain = _ran(long.plain, start.plain)
    slower = [_times(pair.slowdown, _ran(pair.offloaded, pair.plain)) for pair in (start, long)]
    return say(
        _devices_and_work(parts),
        *(", ", _times(parts.utilization, plain), " by utilization", *_mfu(start, long)),
        *(" and ", _times(parts.offload, parts.cells), " by offload, which makes the baseline's step ", slower[0]),
        *(" as long and this one's ", slower[1], ". With the optimizer on the device on both sides the ratio is "),
        *(_times(parts.plain_ratio, plain), "."),
    )


def _known_factors(parts: Parts) -> Words:
    """Where what would tell utilization and offload apart did not run."""
    together = _times(parts.utilization_and_offload, (parts.long.offloaded, parts.start.offloaded))
    return say(_devices_and_work(parts), " and ", together, " by utilization and offload, which cannot be told apart")


def _devices_and_work(parts: Parts) -> Words:
    both = (parts.long.offloaded, parts.start.offloaded)
    devices, work = _times(parts.devices, both), _times(parts.work, both)
    return say(devices, " by the number of devices, ", work, " by the work a token")


def _mfu(start: Pair, long: Pair) -> Words:
    known = [pair.plain for pair in (start, long) if pair.plain and pair.plain.mfu is not None]
    if len(known) < 2:
        return ()
    before, after = (ref(f"{100 * (cell.mfu or 0.0):.1f}%", cell) for cell in known)
    return say(" (MFU without offload from ", before, " to ", after, ")")


def _said(parts: Parts) -> str:
    """What the source published of the same two, for context."""
    if (published := _published(parts)) is None:
        return ""
    over, under = published
    context = f", published {_ratio(over, under):.2f}x = {over.value:,} / {under.value:,} {under.reading}".rstrip()
    if (over.micro_batches or 1) == 1:
        return context
    same = ", as here" if over.micro_batches == parts.long.offloaded.micro_batches else ""
    return f"{context}, with {over.micro_batches} micro-batches a step{same}"


def _published(parts: Parts) -> tuple[Figure, Figure] | None:
    return published_tokens_per_s(parts.long.offloaded, parts.start.offloaded)


def _ratio(over: Figure, under: Figure) -> float:
    return float(over.value) / float(under.value)


def _evidence(parts: Parts) -> str:
    return by_medians(*(cell for cell in parts.cells if cell.ok))


def _missing(parts: Parts) -> list[str]:
    """Which cells did not run and why, and whether work is unknown."""
    told = []
    for pair in (parts.long, parts.start):
        for cell, how in ((pair.offloaded, "with"), (pair.plain, "without")):
            if cell is None or not cell.ok:
                why = "not part of the campaign" if cell is None else words_of(cell).text
                told.append(f"{_where(pair.offloaded)} {how} offload: {why}")
    if not told and parts.product is None:
        told.append("model FLOPs not recorded")
    return told


def _where(cell: Cell) -> str:
    """8,192 tokens on 1 GPU; 4 x 8,192 tokens on 4 GPUs."""
    sequences = cell.asked["batch_size"] * cell.asked["world_size"] // cell.asked["sp_size"]
    several = f"{sequences} x " if sequences > 1 else ""
    return f"{several}{whole(cell.asked['seq_len'])} tokens on {_devices(cell)}"


def _devices(cell: Cell) -> str:
    return counted(cell.asked["world_size"], cell.processor)


def _stack(cell: Cell) -> str:
    cap = cell.asked["device_memory_gib"]
    capped = "" if cap is None else f", capped at {cap:g} GiB a device"
    offload = f"optimizer offloaded ({cell.asked['optimizer_offload']})"
    stack = (cell.asked["engine"], cell.asked["kernel"], offload, cell.micro_batches_note)
    return ", ".join(filter(None, stack)) + capped


def _rate(cell: Cell) -> Ref:
    rate = cell.rate(cell.median_step_ms, per_rank=False) if cell.median_step_ms else None
    return ref(words_of(cell).text if rate is None else number(rate), cell)


def _ran(*cells: Cell | None) -> tuple[Cell, ...]:
    return tuple(cell for cell in cells if cell is not None)


def _times(value: float | None, cells: Iterable[Cell]) -> Ref | str:
    return MISSING if value is None else ref(f"{value:.2f}x", cells)
