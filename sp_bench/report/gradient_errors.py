"""The gradient of a cell that is most wrong, and which cells tell what the options of a method cost and buy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sp_bench.report.cells import GRADIENTS, Cell


@dataclass(frozen=True)
class Point:
    """A cell and its gradient that is most wrong: relative L2, the largest over the replicates."""

    cell: Cell
    gradient: str
    error: float
    budget: float | None

    @property
    def tflops_per_s(self) -> float | None:
        """Attention TFLOP/s of one device, from the median step time; None outside the attention workload."""
        return self.cell.attention_tflops(self.cell.median_step_ms or math.inf)


def point(cell: Cell) -> Point | None:
    known = [(name, *cell.errors[name]) for name in GRADIENTS if name in cell.errors]
    worst = max(known, key=lambda e: e[1], default=None)
    # an error of zero has no place on a logarithmic axis
    return Point(cell, *worst) if worst and worst[1] > 0 and cell.asked["sp_size"] and cell.asked["seq_len"] else None


def options(cell: Cell) -> tuple[str | None, str | None]:
    """(what dK/dV travel in, what partial outputs are merged in); None: the method has no such option, as no library's
    has."""
    return cell.options["method.dkv_dtype"], cell.options["method.merge_dtype"]


def compared(cells: Sequence[Cell]) -> list[Point]:
    """Cells of the length, of several the longest, at which some method ran with two options or more; none if none."""
    points = [p for cell in cells if (p := point(cell)) is not None and p.tflops_per_s and cell.asked["sp_size"] > 1]
    choices: dict[tuple[int, int, str], set[tuple[str | None, str | None]]] = {}
    for asked, chosen in ((p.cell.asked, options(p.cell)) for p in points):
        choices.setdefault((asked["seq_len"], asked["sp_size"], str(asked["method"])), set()).add(chosen)
    seq_len = max((where[0] for where, each in choices.items() if len(each) > 1), default=None)
    return [p for p in points if p.cell.asked["seq_len"] == seq_len]
