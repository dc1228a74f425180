"""The section on launching: what a step takes call by call, and replayed as a CUDA graph."""

from collections.abc import Sequence
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.formats import counted, number, whole
from sp_bench.report.launches import Pair, pairs
from sp_bench.report.page.comparisons import against
from sp_bench.report.page.parts import Line, Section, Table, Words, processors, ref, say, with_kernel
from sp_bench.report.ratios import behind, ranked
from sp_bench.report.series import REPLAYED

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
        Table(setting, CAPTION, HEAD, tuple(map(_line, group)), left=(0, 1, 7))
        for setting, group in groupby(found, key=lambda pair: pair.eager.setting)
    )
    return Section("launches", "What launching costs", BASIS, points=tuple(_turned(found)), tables=tables)


def summary(cells: Sequence[Cell]) -> list[Words]:
    """How far the pairs' ratios reach."""
    if not (found := pairs(cells)):
        return []
    most, least = (choose(found, key=lambda pair: pair.ratio) for choose in (max, min))
    reach = say(ref(f"{least.ratio:.2f}x", least.cells), " to ", ref(f"{most.ratio:.2f}x", most.cells))
    which = f"({counted(len(found), 'cell')}); the most is that of {with_kernel(most.eager)} at {_place(most.eager)}."
    return [say("Launched call by call, a step takes ", reach, f" the time of the same step {REPLAYED} {which}")]


def _turned(found: Sequence[Pair]) -> list[Words]:
    """Of each place and kernel of our methods, where the two ways have different fastest ones: what may be claimed of
    either."""
    own = [pair for pair in found if not pair.eager.is_library]

    def place(pair: Pair) -> tuple[str, str, int, int]:
        asked = pair.eager.asked
        return pair.eager.setting, str(asked["kernel"]), -asked["sp_size"], -asked["seq_len"]

    sentences = []
    for _, group in groupby(sorted(own, key=place), key=place):
        eager, replayed = (ranked(side) for side in zip(*(pair.cells for pair in group), strict=True))
        if eager[0].series != replayed[0].series:
            where = f"At {_place(eager[0])} with {eager[0].asked['kernel']}, launched call by call: "
            sentences.append(say(where, against(*eager[:2]), "; replayed: ", against(*replayed[:2]), "."))
    return sentences


def _place(cell: Cell) -> str:
    return f"{whole(cell.asked['seq_len'])} tokens on {processors(cell)}"


def _line(pair: Pair) -> Line:
    eager, replayed = pair.cells
    ratio = pair.paired.words if pair.paired else f"{pair.ratio:.3f}x"
    texts = (
        *(eager.series, str(eager.asked["kernel"]), whole(eager.asked["sp_size"]), whole(eager.asked["seq_len"])),
        *(ref(number(eager.median_step_ms), eager), ref(number(replayed.median_step_ms), replayed)),
        *(ref(ratio, pair.cells), behind(pair.paired, *pair.cells)),
    )
    return Line(texts, pair.cells)
