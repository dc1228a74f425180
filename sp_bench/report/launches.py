"""Cells that ran both ways: launched call by call, and replayed as a CUDA graph, without the host's part of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sp_bench.report.cells import Cell
from sp_bench.report.ratios import PairedRatio, paired_ratio, ratio_of_medians
from sp_bench.rows.names import config_leaves


@dataclass(frozen=True)
class Pair:
    """One cell but for its launch."""

    eager: Cell
    replayed: Cell

    @property
    def cells(self) -> tuple[Cell, Cell]:
        return self.eager, self.replayed

    @property
    def paired(self) -> PairedRatio | None:
        return paired_ratio(self.eager, self.replayed)

    @property
    def ratio(self) -> float:
        """Step time launched call by call over that of a replay: of pairs from 6 replicates on, else of the medians."""
        return self.paired.ratio if self.paired else ratio_of_medians(self.eager, self.replayed)


def pairs(cells: Sequence[Cell]) -> list[Pair]:
    """In the order of the cells launched call by call; both were measured."""
    measured = [(key, cell) for cell in cells if cell.ok and (key := _but_launch(cell)) is not None]
    replayed = {key: cell for key, cell in measured if cell.launch_note}
    return [Pair(cell, replayed[key]) for key, cell in measured if not cell.launch_note and key in replayed]


def _but_launch(cell: Cell) -> tuple[Any, ...] | None:
    """What both cells of a pair share; None for a row without a readable config."""
    return (cell.pool, *cell.but("workload.launch")) if config_leaves(cell.asked["config"]) else None
