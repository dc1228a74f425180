"""Who wins: the fastest series at each (seq_len, sp_size) of a setting, against the best of every other method.

Methods are compared on one kernel: of those that two methods ran on at a place, the one with the fastest step. The
series of one method do not compete with each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sp_bench.report.cells import Cell
from sp_bench.report.limits import out_of_memory
from sp_bench.report.ratios import PairedRatio, by_speed, fastest, paired_ratio, ranked, ratio_of_medians


@dataclass(frozen=True)
class Win:
    """The best series of each method at one place, fastest first: at least two."""

    ranked: tuple[Cell, ...]
    out_of_memory: tuple[Cell, ...]  # every series that was, on any kernel

    @property
    def winner(self) -> Cell:
        return self.ranked[0]

    @property
    def second(self) -> Cell:
        return self.ranked[1]

    @cached_property
    def paired(self) -> PairedRatio | None:
        """Step time of the second over the winner's; None where that has no interval."""
        return paired_ratio(self.second, self.winner)

    @property
    def lead(self) -> float:
        return self.paired.ratio if self.paired else ratio_of_medians(self.second, self.winner)

    @cached_property
    def unproven_against(self) -> tuple[Cell, ...]:
        """Those that the winner is not proven to be faster than: the interval of the paired ratio is not above 1."""
        pairs = ((rival, paired_ratio(rival, self.winner)) for rival in self.ranked[1:])
        return tuple(rival for rival, paired in pairs if paired is None or paired.interval.low <= 1)

    @property
    def proven(self) -> bool:
        return not self.unproven_against


@dataclass(frozen=True)
class Place:
    seq_len: int
    sp_size: int
    win: Win | None  # None: no two methods ran on one kernel
    measured: tuple[Cell, ...]
    out_of_memory: tuple[Cell, ...]


def places(cells: Sequence[Cell]) -> list[Place]:
    """All places of one setting at which anything ran or was out of memory, by sp_size and seq_len."""
    grouped: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        if cell.asked["sp_size"] and cell.asked["seq_len"] and (cell.ok or out_of_memory(cell)):
            grouped.setdefault((cell.asked["sp_size"], cell.asked["seq_len"]), []).append(cell)
    return [_place(seq_len, sp_size, group) for (sp_size, seq_len), group in sorted(grouped.items())]


def best_of_methods(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Of cells of one place that ran, the best series of each method, fastest first: on one kernel where two methods
    ran on one, of several on that with the fastest step."""
    by_kernel: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        methods = by_kernel.setdefault(str(cell.asked["kernel"]), {})
        methods.setdefault(str(cell.asked["method"]), []).append(cell)
    kernels = [ranked([fastest(each) for each in methods.values()]) for methods in by_kernel.values()]
    compared = [each for each in kernels if len(each) > 1]
    return tuple(min(compared or kernels, key=lambda each: by_speed(each[0]), default=[]))


def _place(seq_len: int, sp_size: int, group: Sequence[Cell]) -> Place:
    measured, failed = tuple(c for c in group if c.ok), tuple(c for c in group if not c.ok)
    best = best_of_methods(measured)
    return Place(seq_len, sp_size, Win(best, failed) if len(best) > 1 else None, measured, failed)
