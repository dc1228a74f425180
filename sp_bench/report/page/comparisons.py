"""Cells that answer the same question, compared in a sentence. Nothing is called faster without an interval."""

from collections.abc import Sequence
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.formats import counted, number, whole
from sp_bench.report.page.parts import Ref, Words, listing, median_ms, processors, ref, say
from sp_bench.report.ratios import (
    MIN_REPLICATES,
    baseline,
    behind,
    by_medians,
    fastest,
    flagged,
    paired_ratio,
    ranked,
    ratio_of_medians,
    times,
)
from sp_bench.report.winners import best_of_methods

PAIR = ("ulysses", "ring")  # the question of the benchmark
Group = tuple[tuple[str, int, int], list[Cell]]


def by_place(cells: Sequence[Cell]) -> list[Group]:
    """(setting, sp_size, seq_len) and its cells, the most ranks and tokens of a setting first."""
    placed = [c for c in cells if c.asked["sp_size"] is not None and c.asked["seq_len"] is not None]

    def place(cell: Cell) -> tuple[str, int, int]:
        return cell.setting, -cell.asked["sp_size"], -cell.asked["seq_len"]

    return [((s, -p, -n), list(group)) for (s, p, n), group in groupby(sorted(placed, key=place), key=place)]


def largest_places(groups: Sequence[Group]) -> dict[str, list[Cell]]:
    """Of each setting the cells with the largest seq_len x sp_size."""
    ordered = sorted(groups, key=lambda g: (g[0][0], -g[0][1] * g[0][2], -g[0][1]))
    return {setting: next(each)[1] for setting, each in groupby(ordered, key=lambda g: g[0][0])}


def headline(group: Sequence[Cell], every: Sequence[Cell]) -> tuple[Words, ...]:
    """Of one place: Ulysses against the ring where both ran on one kernel, the fastest where it is neither of them, and
    how far the faster scales from one rank."""
    best, pair = best_of_methods(group), _pair(group)
    first = best[0]
    sentences = [say("At ", _place(group), ", ", against(*pair), ".")] if pair else []
    if not pair or all(first is not cell for cell in pair):
        sentences.append(compare(best))
    return (*sentences, *_scaling(pair[0] if pair else first, every))


def compare(best: Sequence[Cell]) -> Words:
    """The best series of a place's methods, fastest first: the first against the next one and the slowest."""
    first, *others = best
    proven = all((paired := paired_ratio(other, first)) is not None and paired.interval.low > 1 for other in others)
    claim = "fastest" if proven else "lowest median step time"
    words = say(_place(best), f", {claim} of {len(best)} methods: ", against(first, others[0]))
    last, paired, next_paired = others[-1], paired_ratio(others[-1], first), paired_ratio(others[0], first)
    # by pairs the next one may be as slow as the slowest, whatever their medians
    if len(best) > 2 and not (paired and next_paired and paired.ratio <= next_paired.ratio):
        ratio = paired.words if paired else times(ratio_of_medians(last, first))
        evidence = flagged(first, last) if paired else f" ({by_medians(first, last)})"
        words = say(words, "; ", ref(ratio, (first, last)), f" over the slowest, {last.series}{evidence}")
    rate = first.attention_tflops(first.median_step_ms or 0.0) if first.median_step_ms else None
    if rate is not None:
        words = say(words, "; ", ref(number(rate), first), f" attention TFLOP/s/{first.processor}")
    return say(words, ".")


def against(first: Cell, second: Cell) -> Words:
    """The one with the smaller median against the other, and what may be claimed."""
    paired = paired_ratio(second, first)
    if paired is None:
        took = say(f"{first.series} takes ", median_ms(first), f" and {second.series} ", median_ms(second), ", ")
        ratio = Ref(times(ratio_of_medians(second, first)), (first, second), strong=True)
        return say(took, ratio, f", {by_medians(first, second)}")
    if paired.interval.high < 1:  # by pairs the other one is faster, whatever the medians
        return against(second, first)
    ratio = Ref(paired.words, (first, second), strong=True)
    if paired.excludes_1:
        words = say(f"{first.series} is ", ratio, f" as fast as {second.series} (", median_ms(first), " against ")
        return say(words, median_ms(second), f"; {behind(paired, first, second)})")
    names = say(f"neither {first.series} (", median_ms(first), f") nor {second.series} (", median_ms(second), ")")
    return say(names, " is called faster: ", ratio, f", {behind(paired, first, second)}")


def unclaimed(contests: Sequence[Sequence[Cell]]) -> list[Words]:
    """Of how many places' best series of each method it is not claimed that the first is faster than the second, and
    why."""
    few: list[Cell] = []
    holds_1: list[Cell] = []
    for first, second, *_ in contests:
        paired = paired_ratio(second, first)
        if paired is None or not paired.excludes_1:
            (few if paired is None else holds_1).extend((first, second))
    reasons = []
    if few:
        sizes = sorted({len(cell.step_ms) for cell in few})
        spread = "" if len(sizes) == 1 else f"{sizes[0]} to "
        of_each = f"{spread}{counted(sizes[-1], 'replicate')}"
        why = f" for want of pairs ({of_each} a cell; an interval takes {MIN_REPLICATES} pairs on the same devices)"
        reasons.append(say("at ", ref(f"{len(few) // 2:,}", few), why))
    if holds_1:
        why = ", since the paired interval to the next one holds 1"
        reasons.append(say("at ", ref(f"{len(holds_1) // 2:,}", holds_1), why))
    places = f"{counted(len(contests), 'place')} (setting, sp_size, seq_len) where methods are compared"
    if not reasons:
        return []
    return [say("It is not claimed which method is fastest ", listing(reasons, "; "), f", of {places}.")]


def _scaling(cell: Cell, every: Sequence[Cell]) -> list[Words]:
    """Strong scaling of one cell over `single` on one rank, where that was measured."""
    start = baseline(cell, every)
    if start is None or start is cell or not cell.asked["sp_size"]:
        return []
    paired = paired_ratio(start, cell)
    ratio = paired.words if paired else f"{ratio_of_medians(start, cell):.2f}x"
    evidence = f"{paired.pairing}{flagged(start, cell)}" if paired else by_medians(start, cell)
    words = say(f"Strong scaling: {cell.series} on {processors(cell)} has a speed-up of ", ref(ratio, (start, cell)))
    words = say(words, f" over its baseline, single on {processors(start)} at the same seq_len ({evidence}); ideal is ")
    return [say(words, f"{whole(cell.asked['sp_size'])}x.")]


def _pair(group: Sequence[Cell]) -> tuple[Cell, Cell] | None:
    """The fastest Ulysses and the fastest ring on one kernel, of several the kernel with the fastest step; the faster
    of the two first."""
    pairs = []
    for kernel in sorted({str(c.asked["kernel"]) for c in group}):
        same = [c for c in group if str(c.asked["kernel"]) == kernel]
        both = [[c for c in same if c.asked["method"] == method] for method in PAIR]
        if all(both):
            pairs.append(ranked([fastest(each) for each in both]))
    first, second = min(pairs, key=lambda pair: pair[0].median_step_ms or 0.0, default=(None, None))
    return None if first is None or second is None else (first, second)


def _place(group: Sequence[Cell]) -> Ref:
    return ref(f"{whole(group[0].asked['seq_len'])} tokens on {processors(group[0])}", group)
