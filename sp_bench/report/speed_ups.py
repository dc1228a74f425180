"""How a step scales over sp_size: speed-ups over a named baseline, at one seq_len or at fixed tokens a rank.

Strong scaling: one seq_len on more ranks. Weak scaling: seq_len / sp_size is fixed; attention makes the work of a rank
grow with seq_len all the same, so rates of model FLOPs are compared, of which equal seq_lens have equally many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sp_bench.report.cells import Cell
from sp_bench.report.ratios import baseline, paired_ratio, ratio_of_medians, shared_replicates
from sp_bench.report.statistics import Interval

Kind = Literal["strong", "weak"]


@dataclass(frozen=True)
class SpeedUp:
    """Rate of `cell` over that of `start`, in model FLOP/s of all ranks; ideal is the ratio of their ranks."""

    cell: Cell
    start: Cell
    value: float  # of paired replicates from 6 on, else of the medians; 1 for the baseline itself
    interval: Interval | None = None
    replicates: Mapping[str, float] = field(default_factory=dict)  # of equal replicates of both

    @property
    def ideal(self) -> float:
        return self.cell.asked["sp_size"] / self.start.asked["sp_size"]

    @property
    def single(self) -> bool:
        """Of one launch each."""
        return min(len(self.cell.step_ms), len(self.start.step_ms)) == 1


@dataclass(frozen=True)
class Scaling:
    """Speed-ups that share a question, a baseline and so an ideal; ordered by series and sp_size, baselines among them.

    `tokens` of a sequence (strong) or of a rank (weak). `over_single`: the baseline is `single` on one rank, else each
    series' own cell on its fewest ranks, `start_size`."""

    kind: Kind
    tokens: int
    over_single: bool
    start_size: int
    speed_ups: tuple[SpeedUp, ...]

    @property
    def sizes(self) -> list[int]:
        return sorted({s.cell.asked["sp_size"] for s in self.speed_ups})

    @property
    def starts(self) -> list[Cell]:
        return list({s.start.cell_id: s.start for s in self.speed_ups}.values())


def scalings(cells: Sequence[Cell], kind: Kind) -> list[Scaling]:
    """Of the cells of one setting, those with the most sp_sizes first, then with the most series and tokens."""
    measured = [c for c in cells if c.ok and c.asked["sp_size"] and c.asked["seq_len"]]
    singles = [c for c in measured if c.asked["method"] == "single"]
    lines: dict[tuple[int, str], list[Cell]] = {}
    for cell in measured:
        if cell.asked["method"] != "single" and (tokens := _tokens(cell, kind)) is not None:
            lines.setdefault((tokens, cell.series), []).append(cell)
    grouped: dict[tuple[int, bool, int], list[SpeedUp]] = {}
    for (tokens, _), line in lines.items():
        ordered = sorted(line, key=lambda c: (c.asked["sp_size"], c.cell_id))
        single = baseline(ordered[0], singles, seq_len=tokens)
        start = single or ordered[0]
        made = [s for c in ordered if (s := _speed_up(c, start)) is not None]
        if any(s.ideal > 1 for s in made):
            key = (tokens, single is not None, start.asked["sp_size"])
            grouped.setdefault(key, []).extend([SpeedUp(start, start, 1.0)] * (single is not None) + made)
    found = [Scaling(kind, *key, _distinct(each)) for key, each in grouped.items()]
    return sorted(found, key=lambda s: (-len(s.sizes), -len(s.speed_ups), -s.tokens, s.start_size))


def _tokens(cell: Cell, kind: Kind) -> int | None:
    """What is fixed. None: weak scaling of a cell without known work or with uneven ranks."""
    seq_len, sp_size = cell.asked["seq_len"], cell.asked["sp_size"]
    if kind == "strong":
        return seq_len
    return seq_len // sp_size if seq_len % sp_size == 0 and cell.middle("model_flops") else None


def _speed_up(cell: Cell, start: Cell) -> SpeedUp | None:
    """None where the work of two lengths is not known."""
    if cell is start:
        return SpeedUp(cell, start, 1.0)
    work = 1.0
    if cell.asked["seq_len"] != start.asked["seq_len"]:
        flops, start_flops = cell.middle("model_flops"), start.middle("model_flops")
        if not flops or not start_flops:
            return None
        work = flops / start_flops
    shared = shared_replicates(start, cell)
    replicates = {key: work * start.step_ms[key] / cell.step_ms[key] for key in shared}
    if (paired := paired_ratio(start, cell)) is None:
        return SpeedUp(cell, start, work * ratio_of_medians(start, cell), None, replicates)
    bounds = paired.interval
    scaled = Interval(work * bounds.low, work * bounds.high, bounds.coverage)
    return SpeedUp(cell, start, work * paired.ratio, scaled, replicates)


def _distinct(speed_ups: Sequence[SpeedUp]) -> tuple[SpeedUp, ...]:
    """Series over one `single` share its mark."""
    return tuple({(s.cell.cell_id, s.start.cell_id): s for s in speed_ups}.values())
