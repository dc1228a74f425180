"""Scaling efficiency of a stack: its step with one sequence over P ranks, against its own step with a sequence per
rank, on one GPU or in data parallelism over as many GPUs.

Efficiency is tokens/s per rank at P over that at 1: T(1) / (P T(P)). Stacks are compared by efficiency, so a stack that
is slow on one rank already, say in its layers or its optimizer, is compared net of that. Both steps have the same
length: a token of a longer sequence costs more attention in any stack, which equal tokens per rank would mix in. If one
rank cannot hold the sequence, there is no baseline, and none is extrapolated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, Launch
from sp_bench.analysis.ladder import folders, of_place, rung_names
from sp_bench.analysis.ratios import (
    PairedRatio,
    by_speed,
    median_ratio,
    of_one_machine,
    paired_ratio,
    ratio_of_pairs,
    shared_replicates,
    times,
)
from sp_bench.analysis.settings import Setting
from sp_bench.analysis.statistics import Interval
from sp_bench.rows.names import group_of

# options in which the step over ranks may differ from its baseline
_SPLIT = ("method", "sp_size", "dp_shard_size", "fabric", "num_nodes")


_OF_ALL = ("hardware.name", "hardware.device")


@dataclass(frozen=True)
class Scaling:
    """A step with one sequence over several ranks, and its baseline with a sequence per rank, from one campaign."""

    cell: Cell
    alone: Cell
    campaign: str

    @property
    def baseline(self) -> str:
        """The baseline in words: `1 GPU`, or `4 GPUs, a sequence each`."""
        gpus = self.alone.asked["dp_shard_size"]
        return "1 GPU" if gpus == 1 else f"{gpus} GPUs, a sequence each"

    @property
    def times(self) -> PairedRatio | None:
        """T(P) / T(1), paired by replicates; None if there is no interval."""
        return paired_ratio(self.cell, self.alone, self.campaign)

    @cached_property
    def time_ratio(self) -> float:
        """T(P) / T(1). At least one pair of replicates exists."""
        ratio = ratio_of_pairs(self.cell, self.alone, self.campaign)
        assert ratio is not None
        return ratio

    @property
    def efficiency(self) -> float:
        """T(1) / (P T(P)); 1 if P ranks are P times as fast as one."""
        return 1 / (self.cell.asked["sp_size"] * self.time_ratio)

    @property
    def interval(self) -> Interval | None:
        """The interval of the efficiency; None without a paired ratio."""
        if (found := self.times) is None:
            return None
        ranks, of_times = self.cell.asked["sp_size"], found.interval
        return Interval(1 / (ranks * of_times.high), 1 / (ranks * of_times.low), of_times.coverage)

    @property
    def words(self) -> str:
        """0.953 [0.950, 0.956]."""
        bounds = f" [{self.interval.low:.3f}, {self.interval.high:.3f}]" if self.interval else ""
        return f"{self.efficiency:.3f}{bounds}"


@dataclass(frozen=True)
class NetRatio:
    """The efficiency of the first stack over that of another one."""

    ratio: float
    paired: PairedRatio | None
    is_first: bool  # the other stack is the first itself

    @property
    def words(self) -> str:
        return "" if self.is_first else self.paired.words if self.paired else times(self.ratio)


@dataclass(frozen=True)
class Scalings:
    """The stacks of one campaign, length, number of ranks, fabric and kernel; the best efficiency first."""

    setting: Setting  # of the steps over several ranks
    where: str  # the options that the steps share
    place: str  # the part of `where` with length, devices, fabric and kernel
    lines: tuple[Scaling, ...]
    names: Mapping[str, str]  # cell_id -> method, engine and the options in which the lines differ

    def net_ratio(self, line: Scaling) -> NetRatio:
        """How much slower this stack would be than the first if both were equally fast on one rank, with an interval if
        replicates pair."""
        first = self.lines[0]
        pairs = ((first.cell, first.alone), (line.cell, line.alone), (line.cell, first.cell))
        keys = set.intersection(*(set(shared_replicates(*pair, line.campaign)) for pair in pairs))
        of_one = of_one_machine(sorted(keys), *pairs[0], *pairs[1])
        paired = median_ratio([_time_ratio(line, key) / _time_ratio(first, key) for key in of_one])
        return NetRatio(paired.ratio if paired else first.efficiency / line.efficiency, paired, line is first)


def _time_ratio(line: Scaling, key: Launch) -> float:
    return line.cell.step_ms[key] / line.alone.step_ms[key]


def scalings(settings: Sequence[Setting]) -> list[Scalings]:
    """Scalings of training steps on GPUs, the longest sequences first."""
    steps = [c for s in settings for c in s.cells if c.ok and c.asked["workload"] == "train_step"]
    steps = [c for c in steps if c.processor == "GPU" and c.asked["sp_size"]]
    alone: dict[tuple[object, ...], list[Cell]] = {}
    for cell in steps:
        if cell.asked["sp_size"] == 1:
            for folder in folders(cell):
                alone.setdefault(_alike(cell, folder), []).append(cell)
    places: dict[tuple[str, ...], list[Scaling]] = {}
    for cell in steps:
        if cell.asked["sp_size"] > 1:
            for folder in folders(cell):
                if baseline := _baseline(cell, alone.get(_alike(cell, folder), ()), folder):
                    place = (folder, str(cell.asked["kernel"]), *of_place(cell))
                    places.setdefault(place, []).append(Scaling(cell, baseline, folder))
    made = []
    for (folder, *_), lines in places.items():
        ranked = sorted(lines, key=lambda line: (-line.efficiency, by_speed(line.cell)))
        names = rung_names([line.cell for line in ranked])
        made.append(_scalings(folder, ranked, settings[0].smallest, names))
    return sorted(made, key=lambda each: -(each.lines[0].cell.asked["seq_len"] or 0))


def _baseline(cell: Cell, alone: Sequence[Cell], folder: str) -> Cell | None:
    """The step's baseline: the step with a sequence per rank on as many GPUs, which shards parameters and optimizer in
    the same way, or else the step on one GPU. None if the campaign has neither."""
    gpus = cell.asked["sp_size"] * cell.asked["dp_shard_size"]
    beside = [each for each in alone if shared_replicates(cell, each, folder)]
    found = [each for each in beside if each.asked["dp_shard_size"] in (1, gpus)]
    return min(
        found,
        key=lambda c: (c.asked["dp_shard_size"] != gpus, c.asked["method"] != "single", by_speed(c)),
        default=None,
    )


def _alike(cell: Cell, folder: str) -> tuple[object, ...]:
    return (folder, cell.pool, *cell.but(*_SPLIT))


def _scalings(folder: str, lines: Sequence[Scaling], smallest: float, names: Mapping[str, str]) -> Scalings:
    first = lines[0].cell
    fabric = str(first.asked["fabric"])
    of_gpu = {path: value for path, value in first.options.items() if group_of(path) == "hardware" and value != 1}
    shared = [
        words.dtype(first),
        words.hardware(first),
        *(words.of_step(path, value) for path, value in of_gpu.items() if path not in _OF_ALL and value is not None),
        *filter(None, [first.micro_batches_note]),
    ]
    place = f"{words.place(first)}, {words.fabric(fabric)}, {words.kernel(first)}"
    what = f"A training step of {words.model(first)} net of the stack's own with a sequence a GPU"
    setting = Setting((what, *shared, place, folder), tuple(line.cell for line in lines), {}, (fabric,), smallest)
    return Scalings(setting, ", ".join([*shared, place]), place, tuple(lines), names)
