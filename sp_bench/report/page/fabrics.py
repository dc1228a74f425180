"""The section on fabrics: which method wins at which measured bandwidth, and where bytes over bandwidth say so."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sp_bench.report.cells import Cell
from sp_bench.report.fabric_model import Place, Point, compared, fastest_of, places
from sp_bench.report.formats import GIB, counted, in_bytes, number
from sp_bench.report.page.parts import Line, Ref, Section, Table, Words, listing, ref, say
from sp_bench.report.ratios import by_speed, paired_ratio, ratio_of_medians

MODEL = (
    "Two predictions stand beside the measured winner, each of a method, in the fastest of those of its ways to send "
    "that it does not tell apart. Bytes alone: the smallest predicted bytes / bandwidth of the primitive that moves "
    "them. With compute: the smallest sum of compute and of what the method's schedule leaves exposed of these times, "
    "where each message hides behind the kernel beside it as far as that is long. An exchange in one has none beside "
    "it, one in chunks of heads but for the first on its way there and the last on its way back; a ring's hop has a "
    "block, a whole gather what needs this rank's KV only, one in groups of heads the group before. A forward is taken "
    "as 1/3.5 of compute, blocks as equal; latency, packing and merging are left out, reduce-scatter is given the "
    "bandwidth of all-gather, and the groups of a hybrid that of all ranks. Compute is the compute-only arm or, "
    "without one, what leaves the step on the series' fastest fabric: there the second prediction is a calibration and "
    "does not count."
)
BASIS = (
    "seq_len and sp_size are fixed and the fabric changes, so that no ratio is about scaling; the baseline of each is "
    "the fastest method at its place."
)
HEAD = (
    *("method", "fabric", "slowest primitive", "its bandwidth (GiB/s)", "predicted bytes", "bytes / bandwidth (ms)"),
    *("compute (ms)", "predicted step (ms)", "measured step (ms)", "measured / predicted", "fastest by"),
)
CAPTION = (
    "Predicted bytes: what one rank sends off-rank in a step, closed form. Bandwidth: bytes one rank sends off-rank a "
    "second, with the largest message of the collective workload on the same fabric and ranks. Fastest by: measured "
    "median, bytes over bandwidth, or the prediction with compute."
)
WINNERS_HEAD = (
    *("shape", "fabric (bandwidths of the methods' primitives)", "fastest", "its step (ms)", "next", "next / fastest"),
    *("named by bytes alone", "named with compute"),
)
WINNERS_CAPTION = (
    "By median step time; *: without an interval, or with one that holds 1, so that nothing is proven. Next: the best "
    "of another method, or of the same where there is no other. In brackets: step time of the named method over the "
    "fastest one's."
)
PREDICTIONS = ("Bytes over bandwidth alone", "With compute")
NEAR = 1.02  # step time of the named method over the fastest one's


@dataclass(frozen=True)
class Judgement:
    """Of one prediction at one place and fabric; agrees, differs or undecided, or calibrates where it is no prediction.

    Undecided: the measured winner is another one, but not proven faster than the predicted one."""

    winner: Point
    outcome: str
    times: float  # its step time over the measured winner's


def section(cells: Sequence[Cell]) -> Section | None:
    found = places(cells)
    if not found:
        return None
    return Section(
        anchor="fabrics",
        title="Fabrics",
        basis=BASIS,
        words=(*_summary(found), (MODEL,), *_left_out(cells, found)),
        points=tuple(sentence for place in found for sentence in _ratios(place)),
        tables=(_winners(found), *(_table(place) for place in found)),
    )


def summary(cells: Sequence[Cell]) -> list[Words]:
    """Which method has the lowest median on which fabric, one sentence a shape and length."""
    return [_fastest_by_fabric(place) for place in places(cells)]


def _fastest_by_fabric(place: Place) -> Words:
    each = []
    for points in (place.on(fabric) for fabric in place.fabrics):
        if len(points) > 1:
            winner = fastest_of(points)
            second = _second(points).cell
            ratio, proven = _lead(winner.cell, second)
            behind = (winner.cell, second)
            each.append(say(f"{winner.cell.series} on {winner.fabric} (", ref(ratio, behind), f"{proven})"))
    what = "lowest median step time by fabric, with its lead over the next method (*: not proven)"
    return say(f"{place.title}, {what}: ", listing(each), ".")


def _second(points: Sequence[Point]) -> Point:
    """The fastest of another method than the winner's, or of this one where there is no other."""
    winner = fastest_of(points)
    others = [p for p in points if p.cell.asked["method"] != winner.cell.asked["method"]]
    return fastest_of(others or [p for p in points if p is not winner])


def _lead(winner: Cell, second: Cell) -> tuple[str, str]:
    """(step time of the second over the winner's, a star where that proves nothing)."""
    paired = paired_ratio(second, winner)
    if paired is None:
        return f"{ratio_of_medians(second, winner):.3f}x", " *"
    return paired.words, "" if paired.interval.low > 1 else " *"


def judge(points: Sequence[Point], value: Callable[[Point], float], *, calibrated: bool) -> Judgement:
    """A prediction, the smallest `value`, against the measured winner on one fabric. Of points that it does not tell
    apart, chunks of heads send as many bytes as one exchange, it names the fastest."""
    winner = fastest_of(points)
    least = min(map(value, points))
    predicted = fastest_of([p for p in points if math.isclose(value(p), least)])
    if calibrated:
        return Judgement(predicted, "calibrates", predicted.measured_ms / winner.measured_ms)
    if predicted is winner:
        return Judgement(predicted, "agrees", 1.0)
    paired = paired_ratio(predicted.cell, winner.cell)
    outcome = "undecided" if paired is not None and not paired.excludes_1 else "differs"
    times = ratio_of_medians(predicted.cell, winner.cell)
    return Judgement(predicted, outcome, times)


def _judgements(points: Sequence[Point]) -> tuple[Judgement, Judgement]:
    """By bytes alone, and with compute."""
    calibrated = any(p.calibrates for p in points)
    return (
        judge(points, lambda p: p.communication_ms, calibrated=False),
        judge(points, lambda p: p.predicted_ms, calibrated=calibrated),
    )


def _summary(found: Sequence[Place]) -> list[Words]:
    """One paragraph a prediction: how often it is right, and where it is not."""
    return [words for index, name in enumerate(PREDICTIONS) for words in _verdict(found, index, name)]


Judged = tuple[Place, str, Judgement]  # place, fabric and what became of a prediction there


def _verdict(found: Sequence[Place], index: int, name: str) -> list[Words]:
    pairs = [(place, f, _judgements(place.on(f))[index]) for place in found for f in place.fabrics]
    pairs = [pair for pair in pairs if len(pair[0].on(pair[1])) > 1 and pair[2].outcome != "calibrates"]
    if not pairs:
        return [(f"{name}, every fabric calibrates the prediction: nothing is left to judge.",)]
    by_outcome = {o: [p for p in pairs if p[2].outcome == o] for o in ("agrees", "undecided", "differs")}
    near = [pair for pair in by_outcome["differs"] if pair[2].times < NEAR]
    words = say(f"{name}, the prediction names the fastest method in ", _how_many(by_outcome["agrees"]), " of ")
    words = say(words, _how_many(pairs, "pair"), " of shape and fabric")
    if by_outcome["undecided"]:
        words = say(words, "; in ", _how_many(by_outcome["undecided"]), " more it is not proven wrong")
    if near:
        words = say(words, "; in ", _how_many(near), f" more the named one takes less than {NEAR - 1:.0%} longer")
    by_shape: dict[str, list[Words]] = {}
    for place, fabric, judged in (pair for pair in by_outcome["differs"] if pair[2].times >= NEAR):
        times = ref(f"{judged.times:.2f}x", (judged.winner.cell, fastest_of(place.on(fabric)).cell))
        by_shape.setdefault(place.title, []).append(say(f"{fabric} (", times, ")"))
    if by_shape:
        where = listing([say(f"{shape}, on ", listing(each)) for shape, each in by_shape.items()], "; ")
        why = ". It names a slower one, whose step time over the fastest's is in brackets, at "
        words = say(words, why, where)
    return [say(words, ".")]


def _how_many(pairs: Sequence[Judged], noun: str = "") -> Ref:
    """The quantity, which the cells of these places and fabrics are behind."""
    text = counted(len(pairs), noun) if noun else f"{len(pairs)}"
    return ref(text, (p.cell for place, fabric, _ in pairs for p in place.on(fabric)))


def _left_out(cells: Sequence[Cell], found: Sequence[Place]) -> list[Words]:
    shown = {p.cell.cell_id for place in found for p in place.points}
    settings = {place.over_fabrics for place in found}
    absent = [c for c in compared(cells) if c.over_fabrics in settings and c.cell_id not in shown]
    if not absent:
        return []
    names = sorted({f"{c.series} on {c.asked['fabric']} at {c.asked['sp_size']} ranks" for c in absent})
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    quantity = ref(counted(len(absent), "cell"), absent)
    return [
        say(
            "Not compared, without a measured bandwidth or a second fabric: ",
            quantity,
            f", {', '.join(names[:6])}{more}.",
        )
    ]


def _ratios(place: Place) -> list[Words]:
    """Ulysses' predicted bytes over each ring's, from the rows, beside the closed form where it applies."""
    cells = {p.cell.series: p.cell for p in place.points}.values()
    rings = [c for c in cells if c.asked["method"] == "ring"]
    alike: dict[float, list[Cell]] = {}  # in chunks of heads or not, the bytes are the same
    for cell in cells:
        if cell.asked["method"] == "ulysses":
            alike.setdefault(cell.communication.predicted_bytes or 0.0, []).append(cell)
    return [_ratio(place, each, ring) for each in alike.values() for ring in rings]


def _ratio(place: Place, ulysses: Sequence[Cell], ring: Cell) -> Words:
    asked, first, behind = ring.asked, ulysses[0], (*ulysses, ring)
    group, size = asked["num_heads"] / asked["num_kv_heads"], place.sp_size
    sent = (first.communication.predicted_bytes or 0.0) / (ring.communication.predicted_bytes or 1.0)
    names = ", ".join(c.series for c in ulysses)
    verb = "sends" if len(ulysses) == 1 else "send"
    words = say(f"{place.title}: {names} {verb} ", ref(f"{sent:.3f}", behind), f" of the bytes of {ring.series}")
    if asked["pass_kind"] == "forward_backward":
        ours, rings = (c.communication.phases.get("forward", (None, None))[0] for c in (first, ring))
        words = say(words, ", ", ref(f"{ours / rings:.3f}", behind), " in the forward") if ours and rings else words
    if size <= asked["num_kv_heads"] and asked["dkv_dtype"] in (None, "input"):
        forms = f"; (G+1)/P = {(group + 1) / size:.3f} is the forward's, "
        forms += f"2(G+1)/(3P) = {2 * (group + 1) / (3 * size):.3f} the whole's, G = {group:g}, P = {size}"
        words = say(words, forms)
    return say(words, ". By bytes alone Ulysses wins where its bandwidth is more than that part of the ring's.")


def _winners(found: Sequence[Place]) -> Table:
    """The fastest of each place and fabric, the next one, and what both predictions say."""
    lines = [_winner(place, f) for place in found for f in place.fabrics if len(place.on(f)) > 1]
    return Table("The fastest method by fabric", WINNERS_CAPTION, WINNERS_HEAD, tuple(lines), (0, 1, 2, 4, 6, 7))


def _winner(place: Place, fabric: str) -> Line:
    points = place.on(fabric)
    winner = fastest_of(points).cell
    second = _second(points).cell
    ratio, proven = _lead(winner, second)
    by_bytes, with_compute = (_judged(judgement, winner) for judgement in _judgements(points))
    texts = (
        *(ref(place.title, (p.cell for p in points)), _bandwidths(fabric, points), winner.series + proven),
        *(ref(number(winner.median_step_ms), winner), second.series, ratio, by_bytes, with_compute),
    )
    return Line(texts, (winner, second))


def _judged(judgement: Judgement, winner: Cell) -> Ref:
    named = judgement.winner.cell
    if judgement.outcome == "calibrates":
        return ref(f"{named.series}, calibrated here", named)
    times = "" if named is winner else f" ({judgement.times:.3f}x)"
    return ref(f"{named.series}, {judgement.outcome}{times}", (named, winner))


def _bandwidths(fabric: str, points: Sequence[Point]) -> Ref:
    """The slowest and the fastest of the methods' own primitives."""
    known = sorted(p.bandwidth.bytes_per_s / GIB for p in points)
    low, high = number(known[0]), number(known[-1])
    spread = f"{low} GiB/s" if low == high else f"{low} to {high} GiB/s"
    return ref(f"{fabric} ({spread})", (c for p in points for c in p.bandwidth.cells))


def _table(place: Place) -> Table:
    return Table(f"{place.title}; {place.over_fabrics}", CAPTION, HEAD, _lines(place), (0, 1, 2, 10), folded=True)


def _lines(place: Place) -> tuple[Line, ...]:
    lines = []
    for fabric in place.fabrics:
        points = place.on(fabric)
        winners = {"measured": fastest_of(points)}
        winners |= dict(zip(("bytes", "with compute"), (j.winner for j in _judgements(points)), strict=True))
        for p in sorted(points, key=lambda p: by_speed(p.cell)):
            interval = p.cell.interval_ms
            measured = number(p.measured_ms)
            measured += f" [{number(interval.low)}, {number(interval.high)}]" if interval else ""
            source = "" if p.calibrated_on is None else f" (step on {p.calibrated_on})"
            behind = (p.cell, *p.bandwidth.cells)
            texts = (
                *(p.cell.series, fabric, p.primitive, ref(number(p.bandwidth.bytes_per_s / GIB), p.bandwidth.cells)),
                *(in_bytes(p.cell.communication.predicted_bytes), ref(number(p.communication_ms), behind)),
                *(f"{number(p.compute_ms)}{source}", ref(number(p.predicted_ms), behind), measured),
                ref(f"{p.measured_ms / p.predicted_ms:.2f}", behind),
                ", ".join(name for name, winner in winners.items() if winner is p),
            )
            lines.append(Line(texts, (p.cell,)))
    return tuple(lines)
