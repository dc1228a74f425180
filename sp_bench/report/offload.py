"""What a ratio of tokens/s consists of where the optimizer steps in host memory.

A step trains T tokens with F model FLOPs on N devices in t ms, and in t' with the optimizer offloaded:

    T/t' = N * (T/F) * (F/(N t)) * (t/t')

so that the ratio of two such rates, of long sequences over a baseline, is exactly the product of four: devices, work a
token (attention makes tokens of longer sequences dearer), utilization without offload (what parallelism and more work
gain or lose), and offload (what it adds to a step, spread over more tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sp_bench.analysis.cells import Cell
from sp_bench.rows.names import group_of

# How the ranks share the work; the lengths of one split are lines of one table.
_SPLIT = ("method", "sp_size", "dp_replicate_size", "dp_shard_size", "engine.variable_seq_len")
_OFFLOAD = "engine.optimizer_offload"


@dataclass(frozen=True)
class Pair:
    """A cell with the optimizer offloaded, and the same without; None: not part of the campaign."""

    offloaded: Cell
    plain: Cell | None

    @property
    def slowdown(self) -> float | None:
        """Of the step, by offload."""
        return _over(self.offloaded.median_step_ms, self.plain.median_step_ms if self.plain else None)

    @property
    def flops_per_token(self) -> float | None:
        known = next((c for c in (self.offloaded, self.plain) if c and c.middle("model_flops")), None)
        return _over(known.middle("model_flops"), known.tokens_per_step) if known else None


@dataclass(frozen=True)
class Parts:
    """Of the tokens/s of `long` over those of `start`, both offloaded; None: a cell it needs did not run."""

    long: Pair
    start: Pair

    @property
    def ratio(self) -> float | None:
        return _over(_tokens_per_s(self.long.offloaded), _tokens_per_s(self.start.offloaded))

    @property
    def plain_ratio(self) -> float | None:
        """The same without offload on either side."""
        return _over(_tokens_per_s(self.long.plain), _tokens_per_s(self.start.plain))

    @property
    def devices(self) -> float:
        return self.long.offloaded.asked["world_size"] / self.start.offloaded.asked["world_size"]

    @property
    def work(self) -> float | None:
        """Below 1 where tokens of `long` need more FLOPs."""
        return _over(self.start.flops_per_token, self.long.flops_per_token)

    @property
    def utilization(self) -> float | None:
        return _over(_flops_per_s(self.long.plain), _flops_per_s(self.start.plain))

    @property
    def offload(self) -> float | None:
        """Above 1 where offload slows the step of `start` down by more than that of `long`."""
        return _over(self.start.slowdown, self.long.slowdown)

    @property
    def product(self) -> float | None:
        found = 1.0
        for factor in (self.devices, self.work, self.utilization, self.offload):
            if factor is None:
                return None
            found *= factor
        return found

    @property
    def cells(self) -> tuple[Cell, ...]:
        pairs = (self.long, self.start)
        return tuple(cell for pair in pairs for cell in (pair.offloaded, pair.plain) if cell is not None)


def breakdowns(cells: Sequence[Cell]) -> list[tuple[Parts, ...]]:
    """Per way to split a sequence, place of the optimizer and baseline the lengths, shortest first.

    A baseline is the shortest length of `single`, on one device or with a sequence on each. None where nothing is known
    without offload: then nothing can be said of it.
    """
    kin: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if cell.asked["workload"] == "train_step" and cell.asked["seq_len"] and cell.asked["world_size"]:
            kin.setdefault(_kin(cell), []).append(cell)
    found = []
    for group in kin.values():
        splits: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in group:
            splits.setdefault(_split(cell), []).append(cell)
        starts = [each for each in splits.values() if each[0].asked["sp_size"] == 1]
        starts.sort(key=lambda each: each[0].asked["world_size"])
        longs = [each for each in splits.values() if each[0].asked["sp_size"] != 1]
        found += [made for long in longs for start in starts for made in _breakdowns(long, start)]
    plain = any(pair.plain for parts in found for each in parts for pair in (each.long, each.start))
    return found if plain else []


def _breakdowns(longs: Sequence[Cell], starts: Sequence[Cell]) -> list[tuple[Parts, ...]]:
    """One for each Adam that steps in host memory on both sides."""
    adams = {c.asked["optimizer_offload"] for c in longs} & {c.asked["optimizer_offload"] for c in starts}
    made = []
    for adam in sorted(adams - {None}):
        pairs = _pairs(starts, adam)
        start = next((pair for pair in pairs if pair.offloaded.ok), pairs[0])
        made.append(tuple(Parts(long, start) for long in _pairs(longs, adam)))
    return made


def _pairs(cells: Sequence[Cell], adam: str) -> list[Pair]:
    """By length."""
    plain = {c.asked["seq_len"]: c for c in cells if c.asked["optimizer_offload"] is None}
    offloaded = sorted((c for c in cells if c.asked["optimizer_offload"] == adam), key=lambda c: c.asked["seq_len"])
    return [Pair(cell, plain.get(cell.asked["seq_len"])) for cell in offloaded]


def _kin(cell: Cell) -> tuple[Any, ...]:
    """Equal for cells that differ in length, in how ranks share the work and in offload alone."""
    return cell.pool, *cell.but(*_SPLIT, "seq_len", _OFFLOAD)


def _split(cell: Cell) -> tuple[Any, ...]:
    of_split = ((path, value) for path, value in cell.options.items() if path in _SPLIT or group_of(path) in _SPLIT)
    return cell.asked["implementation"], *sorted(of_split)


def _tokens_per_s(cell: Cell | None) -> float | None:
    return cell.rate(cell.median_step_ms, per_rank=False) if cell and cell.median_step_ms else None


def _flops_per_s(cell: Cell | None) -> float | None:
    """Of one device."""
    return _over(_over(cell.middle("model_flops"), cell.median_step_ms), cell.asked["world_size"]) if cell else None


def _over(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
