"""The section on launching: each cell that was launched call by call, and replayed as a CUDA graph, where the host's
part of a step is gone."""

from collections.abc import Sequence
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.formats import counted, number, whole
from sp_bench.report.page.parts import Line, Section, Table, Words, median_ms, processors, ref, say, with_kernel
from sp_bench.report.ratios import behind, fastest, paired_ratio, ratio_of_medians
from sp_bench.report.series import REPLAYED, config_leaves

Pair = tuple[Cell, Cell]  # of one cell: launched call by call, replayed
HEAD = ("method", "kernel", "sp_size", "seq_len (tokens)", "call by call (ms)", "replayed (ms)", "ratio", "evidence")
BASIS = "Each ratio is of one method at one seq_len and sp_size: no scaling. The baseline is the replayed step."
CAPTION = (
    "Ratio: step time launched call by call over that of the same step replayed as a CUDA graph, which the host issues "
    "at one call. Near 1 the device is the bound. Well above 1 a step launched call by call waits for the host: for "
    "Python, autograd, the dispatcher and a library's own checks, on this machine. Intervals are of the paired ratio."
)


def section(cells: Sequence[Cell]) -> Section | None:
    """None where nothing ran in both ways."""
    found = pairs(cells)
    if not found:
        return None
    tables = tuple(
        Table(setting, CAPTION, HEAD, tuple(_line(*pair) for pair in group), left=(0, 1, 7))
        for setting, group in groupby(found, key=lambda pair: pair[0].setting)
    )
    return Section("launches", "What launching costs", BASIS, points=tuple(_turned(found)), tables=tables)


def summary(cells: Sequence[Cell]) -> list[Words]:
    """How far the pairs' ratios reach."""
    if not (found := pairs(cells)):
        return []
    most, least = (choose(found, key=lambda pair: _ratio(*pair)) for choose in (max, min))
    reach = say(ref(f"{_ratio(*least):.2f}x", least), " to ", ref(f"{_ratio(*most):.2f}x", most))
    which = f"({counted(len(found), 'cell')}); the most is that of {with_kernel(most[0])} at {_place(most[0])}."
    return [say("Launched call by call, a step takes ", reach, f" the time of the same step {REPLAYED} {which}")]


def pairs(cells: Sequence[Cell]) -> list[Pair]:
    """In the order of the cells launched call by call."""
    measured = [(key, cell) for cell in cells if cell.ok and (key := _but_launch(cell)) is not None]
    replayed = {key: cell for key, cell in measured if cell.launch_note}
    return [(cell, replayed[key]) for key, cell in measured if not cell.launch_note and key in replayed]


def _but_launch(cell: Cell) -> tuple[str, ...] | None:
    """What both cells of a pair share; None for a row without a readable config."""
    leaves = config_leaves(cell.asked["config"])
    same = sorted(f"{name}={value}" for name, value in leaves.items() if name != "workload.launch")
    return (cell.pool, *same) if leaves else None


def _turned(found: Sequence[Pair]) -> list[Words]:
    """Of each place and kernel with several of our methods, that the two ways have different fastest ones."""
    own = [pair for pair in found if not pair[0].is_library]

    def place(pair: Pair) -> tuple[str, str, int, int]:
        asked = pair[0].asked
        return pair[0].setting, str(asked["kernel"]), -asked["sp_size"], -asked["seq_len"]

    sentences = []
    for _, group in groupby(sorted(own, key=place), key=place):
        eager, replayed = (fastest(side) for side in zip(*group, strict=True))
        if eager.series != replayed.series:
            words = say("At ", _place(eager), f" {with_kernel(eager)} has the lowest median launched call by call, ")
            words = say(words, median_ms(eager), f", and {with_kernel(replayed)} replayed, ", median_ms(replayed), ".")
            sentences.append(words)
    return sentences


def _place(cell: Cell) -> str:
    return f"{whole(cell.asked['seq_len'])} tokens on {processors(cell)}"


def _ratio(eager: Cell, replayed: Cell) -> float:
    paired = paired_ratio(eager, replayed)
    return paired.ratio if paired else ratio_of_medians(eager, replayed)


def _line(eager: Cell, replayed: Cell) -> Line:
    paired, both = paired_ratio(eager, replayed), (eager, replayed)
    texts = (
        *(eager.series, str(eager.asked["kernel"]), whole(eager.asked["sp_size"]), whole(eager.asked["seq_len"])),
        *(ref(number(eager.median_step_ms), eager), ref(number(replayed.median_step_ms), replayed)),
        *(ref(paired.words if paired else f"{ratio_of_medians(*both):.3f}x", both), behind(paired, *both)),
    )
    return Line(texts, both)
