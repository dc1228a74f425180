"""The section on where the time of an attention step goes: a sentence a cell and a table a setting."""

from collections.abc import Sequence
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING, number, whole
from sp_bench.report.page.parts import Line, Ref, Section, Table, Words, in_ms, median_ms, processors, ref, say
from sp_bench.report.ratios import behind, by_speed, paired_ratio
from sp_bench.report.time_parts import Attribution, attributions, largest

HEAD = (
    *("method", "sp_size", "seq_len (tokens)", "kernel alone (ms)", "compute only (ms)", "step (ms)", "comm only (ms)"),
    *("alone / step", "compute beyond the kernel (ms)", "imbalance (ms)", "exposed communication (ms)"),
    "overlap efficiency",
)
WITHOUT_ARMS = (0, 1, 2, 3, 5, 7)  # columns of a table none of whose cells has a compute-only or comm-only arm
BASIS = (
    "Strong scaling: seq_len is fixed and a rank's share shrinks with sp_size; the baseline is the kernel alone, "
    "single on one device with the whole sequence and 1/P of the heads."
)
ALONE = "Kernel alone: the same kernel on one device with the whole sequence and 1/P of the heads. "
ARMS = (
    "Compute only: the same step with its messages replaced by local copies. Comm only: the same step without "
    "attention kernels, that is, communication with its packing and merging, which compute only has too: the two add "
    "up to more than a step without overlap. "
    "Compute beyond the kernel = compute only - kernel alone, of each replicate that both have: uneven ranks, smaller "
    "blocks, merges and copies. Imbalance = compute only of the slowest rank - the mean over ranks: uneven work, or "
    "uneven devices. Exposed communication = step - compute only, of each replicate. "
    "Overlap efficiency = 1 - exposed / comm only: 1 where all communication is hidden; without overlap about the "
    "share of packing and merging in comm only, not 0; above 1 where the host's launches bound step and arms, which "
    "then tell nothing of communication. "
)
BRACKETS = (
    "Medians over replicates, of each column its own: differences of medians need not be medians of differences. "
    "Brackets: order-statistic intervals, from 6 replicates on."
)


def section(cells: Sequence[Cell]) -> Section | None:
    by_setting = {setting: list(group) for setting, group in groupby(attributions(cells), key=lambda a: a.cell.setting)}
    if not by_setting:
        return None
    return Section(
        anchor="attribution",
        title="Where the time goes",
        basis=BASIS,
        points=tuple(_words(a) for group in by_setting.values() for a in _by_time(largest(group))),
        tables=tuple(_table(setting, group) for setting, group in by_setting.items()),
    )


def _table(setting: str, group: Sequence[Attribution]) -> Table:
    with_arms = any(a.compute_only_ms is not None or a.comm_only_ms is not None for a in group)
    caption = f"{ALONE}{ARMS if with_arms else ''}{BRACKETS}"
    columns = range(len(HEAD)) if with_arms else WITHOUT_ARMS
    lines = (Line(tuple(_texts(a)[i] for i in columns), (a.cell,)) for a in group)
    return Table(setting, caption, tuple(HEAD[i] for i in columns), tuple(lines))


def _by_time(group: Sequence[Attribution]) -> list[Attribution]:
    return sorted(group, key=lambda a: by_speed(a.cell))


def _words(a: Attribution) -> Words:
    cell, asked = a.cell, a.cell.asked
    heads = f"{whole(asked['num_heads'])}/{whole(asked['num_kv_heads'])} heads"
    where = f"{whole(asked['seq_len'])} tokens, {heads}, {processors(cell)}, {asked['fabric']}, {asked['pass_kind']}"
    words = say(f"{where}: {cell.series} takes ", median_ms(cell))
    if a.alone is not None:
        evidence = behind(paired_ratio(a.alone, cell), a.alone, cell)
        words = say(words, ", ", ref(a.fraction_words, (a.alone, cell)), " of the speed of the kernel alone, ")
        words = say(words, median_ms(a.alone), f" ({evidence})")
    if a.beyond_kernel is not None and a.alone is not None:
        words = say(words, "; ", ref(f"{a.beyond_kernel.words} ms", (cell, a.alone)), " is compute beyond the kernel")
    if a.imbalance is not None:
        words = say(words, "; ", ref(f"{a.imbalance.words} ms", cell), " is imbalance, the slowest rank - the mean")
    if a.exposed is not None:
        words = say(words, "; ", ref(f"{a.exposed.words} ms", cell), " is exposed communication")
        if a.comm_only_ms is not None:
            words = say(words, ", which alone, with its packing and merging, takes ", in_ms(a.comm_only_ms, cell))
    if a.unsettled_arms:
        words = say(words, f"; unsettled: {' and '.join(a.unsettled_arms)}")
    return say(words, ".")


def _texts(a: Attribution) -> tuple[str | Ref, ...]:
    overlap = MISSING if a.overlap_efficiency is None else f"{a.overlap_efficiency:.2f}"
    both = (a.cell,) if a.alone is None else (a.cell, a.alone)
    parts = (a.beyond_kernel, a.imbalance, a.exposed)
    beyond, imbalance, exposed = (MISSING if part is None else part.words for part in parts)
    alone_ms = MISSING if a.alone is None else ref(number(a.alone_ms), a.alone)
    return (
        *(a.cell.series, whole(a.cell.asked["sp_size"]), whole(a.cell.asked["seq_len"]), alone_ms),
        *map(number, (a.compute_only_ms, a.cell.median_step_ms, a.comm_only_ms)),
        *(ref(a.fraction_words, both), ref(beyond, both), imbalance, exposed, overlap),
    )
