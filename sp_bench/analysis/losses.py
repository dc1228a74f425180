"""First losses of training steps. Cells that differ only in the method must have equal losses, or one is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, listed
from sp_bench.formats import counted, whole
from sp_bench.rows.names import config_leaves

# Largest relative difference of the first timed step's loss, by dtype. In half precision it covers the rounding of the
# steps before; for fp32 and fp64 it is the budget of the correctness check.
BUDGETS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 0.02, "float16": 0.02}


class First(NamedTuple):
    """The loss of the first timed step of a launch."""

    cell: Cell
    loss: float


@dataclass(frozen=True)
class Compared:
    """Cells that differ only in the method, and the two of their launches whose first losses differ most."""

    cells: tuple[Cell, ...]
    low: First
    high: First

    @property
    def difference(self) -> float:
        """The relative difference of the two losses."""
        return self.high.loss / self.low.loss - 1

    @property
    def budget(self) -> float:
        return BUDGETS[self.low.cell.asked["dtype"]]

    @property
    def agrees(self) -> bool:
        return self.difference <= self.budget


def compared(cells: Sequence[Cell]) -> list[Compared]:
    """The training steps that ran with two or more methods, those with the largest difference over budget first."""
    groups: dict[object, list[First]] = {}
    for cell in cells:
        if cell.asked["workload"] != "train_step":
            continue
        for row in cell.measured:
            before = (row["warmup_steps"], config_leaves(row["config"]).get("seed"))  # neither is part of a cell's name
            if losses := listed(row["loss"]):
                groups.setdefault((cell.pool, cell.but("method"), *before), []).append(First(cell, losses[0]))
    found = []
    for firsts in groups.values():
        ordered = sorted(firsts, key=lambda first: first.loss)
        pairs = [(low, high) for low, high in combinations(ordered, 2) if low.cell.cell_id != high.cell.cell_id]
        if pairs:
            low, high = max(pairs, key=lambda pair: pair[1].loss / pair[0].loss)
            of_all = {first.cell.cell_id: first.cell for first in firsts}
            found.append(Compared(tuple(of_all.values()), low, high))
    return sorted(found, key=lambda each: each.difference / each.budget, reverse=True)


def sentences(cells: Sequence[Cell]) -> list[str]:
    """A sentence that losses agree, or one per pair that does not. Empty if no training step ran with two methods."""
    found = compared(cells)
    if wrong := [each for each in found if not each.agrees]:
        return [_disagreement(each) for each in wrong]
    if not found:
        return []
    number = sum(len(each.cells) for each in found)
    furthest = max(each.difference for each in found)
    dtypes = sorted({each.low.cell.asked["dtype"] for each in found})
    budgets = " and ".join(f"{BUDGETS[dtype]:.2g} in {words.option('dtype', dtype)}" for dtype in dtypes)
    return [
        f"First losses of {counted(number, 'cell')} agree between methods, within {furthest:.1e} (allowed: {budgets})."
    ]


def _disagreement(each: Compared) -> str:
    low, high = each.low, each.high
    place = f"At {whole(low.cell.asked['seq_len'])} tokens on {words.processors(low.cell)}"
    losses = f"{_loss(low)} and {_loss(high)} nats a token"
    allowed = f"{each.budget:.2g} in {words.dtype(low.cell)}"
    return (
        f"{place} first losses differ: {losses}, by {each.difference:.1e} (allowed: {allowed}). One of them is wrong."
    )


def _loss(first: First) -> str:
    return f"{words.the_method(first.cell)} with {words.kernel(first.cell)} has {first.loss:#.6g}"
