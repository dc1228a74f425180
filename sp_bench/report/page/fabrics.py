"""The section on fabrics: which method wins at which measured bandwidth, and where bytes over bandwidth say so."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.fabric_model import Place, Point, compared, fastest_of, places
from sp_bench.report.figures.drawings import finish
from sp_bench.report.figures.fabrics import CAPTION as FIGURE_CAPTION
from sp_bench.report.figures.fabrics import draw_fabrics
from sp_bench.report.figures.styles import Style
from sp_bench.report.formats import counted, in_bytes, number
from sp_bench.report.page.parts import Line, Section, Table
from sp_bench.report.ratios import paired_ratio, ratio_of_medians, ratio_words

GIB = 2.0**30
MODEL = (
    "Two predictions stand beside the measured winner. Bytes alone: the method with the smallest predicted bytes / "
    "bandwidth of the primitive that moves them. With compute: the smallest a + max(compute, h), where a is the time "
    "of the bytes that move by all-to-all, taken to hide behind nothing, and h that of all others, taken to hide "
    "behind compute. Latency is left out, reduce-scatter is given the bandwidth of all-gather, and the groups of a "
    "hybrid that of all ranks. Compute is the compute-only arm or, without one, the step on the series' fastest fabric "
    "less its a: there the second prediction is a calibration and does not count."
)
HEAD = (
    *("method", "fabric", "slowest primitive", "its bandwidth (GiB/s)", "predicted bytes", "bytes / bandwidth (ms)"),
    *("compute (ms)", "predicted step (ms)", "measured step (ms)", "measured / predicted", "fastest by"),
)
CAPTION = (
    "Predicted bytes: what one rank sends off-rank in a step, closed form. Bandwidth: bytes one rank sends off-rank a "
    "second, from the rows of the collective workload on the same fabric and ranks. Fastest by: measured median, bytes "
    "over bandwidth, or the prediction with compute."
)
WINNERS_HEAD = (
    *("shape", "fabric (bandwidths of the methods' primitives)", "fastest", "its step (ms)", "next", "next / fastest"),
    *("named by bytes alone", "named with compute"),
)
WINNERS_CAPTION = (
    "By median step time; *: without an interval, or with one that holds 1, so that nothing is proven. In brackets: "
    "step time of the named method over the fastest one's. Open a shape for the rows."
)
PREDICTIONS = ("Bytes over bandwidth alone", "With compute")
NEAR = 1.02  # step time of the named method over the fastest one's


@dataclass(frozen=True)
class Judgement:
    """Of one prediction at one place and fabric; agrees, differs or undecided, or calibrates where it is no prediction.

    Undecided: the measured winner is another one, but not proven faster than the predicted one."""

    winner: Point
    outcome: str
    evidence: str
    times: float  # its step time over the measured winner's


def section(cells: Sequence[Cell], style: Mapping[str, Style]) -> Section | None:
    found = places(cells)
    if not found:
        return None
    taken: set[str] = set()
    drawings = []
    for words, group in groupby(sorted(found, key=_figure_of), key=_figure_of):
        shown = sorted(group, key=lambda p: (-p.seq_len, p.sp_size, p.title))
        drawings.append(
            finish("fabrics", words, shown[0].points[0].cell, (draw_fabrics(shown, style), FIGURE_CAPTION), taken)
        )
    return Section(
        anchor="fabrics",
        title="Fabrics",
        words=(*_summary(found), MODEL, *_left_out(cells, found)),
        points=tuple(sentence for place in found for sentence in _ratios(place)),
        drawings=tuple(drawings),
        tables=(_winners(found), *(_table(place) for place in found)),
    )


def _figure_of(place: Place) -> str:
    """Places of one pass, mask, dtype, device and isolation share a figure; lengths, heads and ranks have panels."""
    asked = place.points[0].cell.asked
    words = [f"{asked['workload']} {asked['pass_kind']} over fabrics: heads of {asked['head_dim']}"]
    words += ["causal" if asked["causal"] else "not causal", str(asked["dtype"]), f"batch {asked['batch_size']}"]
    words.append(str(asked["hardware"]))
    if asked["isolation"] == "group":
        words.append("warm process group")
    return ", ".join(words)


def judge(points: Sequence[Point], value: Callable[[Point], float], *, calibrated: bool) -> Judgement:
    """A prediction, the smallest `value`, against the measured winner on one fabric."""
    winner = fastest_of(points)
    predicted = min(points, key=lambda p: (value(p), p.cell.series))
    if calibrated:
        return Judgement(predicted, "calibrates", "", predicted.measured_ms / winner.measured_ms)
    if predicted is winner:
        return Judgement(predicted, "agrees", "", 1.0)
    paired = paired_ratio(predicted.cell, winner.cell)
    outcome = "undecided" if paired is not None and not paired.excludes_1 else "differs"
    times = ratio_of_medians(predicted.cell, winner.cell)
    return Judgement(predicted, outcome, ratio_words(predicted.cell, winner.cell), times)


def _judgements(points: Sequence[Point]) -> tuple[Judgement, Judgement]:
    """By bytes alone, and with compute."""
    calibrated = any(p.calibrates for p in points)
    return (
        judge(points, lambda p: p.communication_ms, calibrated=False),
        judge(points, lambda p: p.predicted_ms, calibrated=calibrated),
    )


def _summary(found: Sequence[Place]) -> list[str]:
    """One paragraph a prediction: how often it is right, and where it is not."""
    return [words for index, name in enumerate(PREDICTIONS) for words in _verdict(found, index, name)]


def _verdict(found: Sequence[Place], index: int, name: str) -> list[str]:
    pairs = [(place, f, _judgements(place.on(f))[index]) for place in found for f in place.fabrics]
    pairs = [pair for pair in pairs if len(pair[0].on(pair[1])) > 1 and pair[2].outcome != "calibrates"]
    if not pairs:
        return [f"{name}, every fabric calibrates the prediction: nothing is left to judge."]
    outcomes = [judgement.outcome for _, _, judgement in pairs]
    words = f"{name}, the prediction names the fastest method in {outcomes.count('agrees')} of "
    words += f"{counted(len(pairs), 'pair')} of shape and fabric"
    if undecided := outcomes.count("undecided"):
        words += f"; in {undecided} more it is not proven wrong"
    wrong = [pair for pair in pairs if pair[2].outcome == "differs"]
    if near := sum(judgement.times < NEAR for _, _, judgement in wrong):
        words += f"; in {near} more the named one takes less than {NEAR - 1:.0%} longer"
    by_shape: dict[str, list[str]] = {}
    for place, fabric, judged in wrong:
        if judged.times >= NEAR:
            by_shape.setdefault(place.title, []).append(f"{fabric} ({judged.times:.2f}x)")
    if by_shape:
        where = "; ".join(f"{shape}, on {', '.join(fabrics)}" for shape, fabrics in by_shape.items())
        words += f". It names a slower one, whose step time over the fastest's is in brackets, at {where}"
    return [f"{words}."]


def _left_out(cells: Sequence[Cell], found: Sequence[Place]) -> list[str]:
    shown = {p.cell.cell_id for place in found for p in place.points}
    settings = {place.over_fabrics for place in found}
    absent = [c for c in compared(cells) if c.over_fabrics in settings and c.cell_id not in shown]
    if not absent:
        return []
    names = sorted({f"{c.series} on {c.asked['fabric']} at {c.asked['sp_size']} ranks" for c in absent})
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return [f"Not compared, without a measured bandwidth or a second fabric: {', '.join(names[:6])}{more}."]


def _ratios(place: Place) -> list[str]:
    """Ulysses' predicted bytes over each ring's, from the rows, beside the closed form where it applies."""
    cells = {p.cell.series: p.cell for p in place.points}.values()
    asked = place.points[0].cell.asked
    group, size = asked["num_heads"] / asked["num_kv_heads"], place.sp_size
    sentences = []
    for ulysses in (c for c in cells if c.asked["method"] == "ulysses"):
        for ring in (c for c in cells if c.asked["method"] == "ring"):
            sent = (ulysses.communication.predicted_bytes or 0.0) / (ring.communication.predicted_bytes or 1.0)
            words = f"{place.title}: {ulysses.series} sends {sent:.3f} of the bytes of {ring.series}"
            if asked["pass_kind"] == "forward_backward":
                first, second = (c.communication.phases.get("forward", (None, None))[0] for c in (ulysses, ring))
                words += f", {first / second:.3f} in the forward" if first and second else ""
            if size <= asked["num_kv_heads"] and ring.asked["dkv_dtype"] in (None, "input"):
                words += f"; (G+1)/P = {(group + 1) / size:.3f} is the forward's"
                words += f", 2(G+1)/(3P) = {2 * (group + 1) / (3 * size):.3f} the whole's, G = {group:g}, P = {size}"
            sentences.append(
                f"{words}. It wins by bytes alone where its bandwidth is more than that part of the ring's."
            )
    return sentences


def _winners(found: Sequence[Place]) -> Table:
    """The fastest of each place and fabric, the next one, and what both predictions say."""
    lines = [_winner(place, f) for place in found for f in place.fabrics if len(place.on(f)) > 1]
    return Table("The fastest method by fabric", WINNERS_CAPTION, WINNERS_HEAD, tuple(lines), (0, 1, 2, 4, 6, 7))


def _winner(place: Place, fabric: str) -> Line:
    points = place.on(fabric)
    winner = fastest_of(points).cell
    second = fastest_of([p for p in points if p.cell is not winner]).cell
    paired = paired_ratio(second, winner)
    proven = "" if paired is not None and paired.interval.low > 1 else " *"
    ratio = paired.words if paired is not None else f"{ratio_of_medians(second, winner):.3f}x"
    texts = (
        *(place.title, f"{fabric} ({_bandwidths(points)})", winner.series + proven, number(winner.median_step_ms)),
        *(second.series, ratio, *map(_judged, _judgements(points))),
    )
    evidence = f"{second.series} takes {ratio_words(second, winner)}"
    return Line(texts, (evidence, *winner.files, *second.files))


def _judged(judgement: Judgement) -> str:
    name = judgement.winner.cell.series
    if judgement.outcome == "calibrates":
        return f"{name}, calibrated here"
    return f"{name}, {judgement.outcome}" + (f" ({judgement.times:.3f}x)" if judgement.evidence else "")


def _bandwidths(points: Sequence[Point]) -> str:
    """The slowest and the fastest of the methods' own primitives."""
    known = sorted(p.bandwidth.bytes_per_s / GIB for p in points)
    low, high = number(known[0]), number(known[-1])
    return f"{low} GiB/s" if low == high else f"{low} to {high} GiB/s"


def _table(place: Place) -> Table:
    return Table(f"{place.title}; {place.over_fabrics}", CAPTION, HEAD, _lines(place), (0, 1, 2, 10), folded=True)


def _lines(place: Place) -> tuple[Line, ...]:
    lines = []
    for fabric in place.fabrics:
        points = place.on(fabric)
        winners = {"measured": fastest_of(points)}
        winners |= dict(zip(("bytes", "with compute"), (j.winner for j in _judgements(points)), strict=True))
        for p in sorted(points, key=lambda p: (p.measured_ms, p.cell.series)):
            interval = p.cell.interval_ms
            measured = number(p.measured_ms)
            measured += f" [{number(interval.low)}, {number(interval.high)}]" if interval else ""
            source = "" if p.calibrated_on is None else f" (step on {p.calibrated_on})"
            texts = (
                *(p.cell.series, fabric, p.primitive, number(p.bandwidth.bytes_per_s / GIB)),
                *(in_bytes(p.cell.communication.predicted_bytes), number(p.communication_ms)),
                *(f"{number(p.compute_ms)}{source}", number(p.predicted_ms), measured),
                f"{p.measured_ms / p.predicted_ms:.2f}",
                ", ".join(name for name, winner in winners.items() if winner is p),
            )
            lines.append(Line(texts, (*p.cell.files, *(f"bandwidth: {file}" for file in p.bandwidth.files))))
    return tuple(lines)
