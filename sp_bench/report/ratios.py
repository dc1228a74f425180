"""Two cells compared: the ratio of their step times, and what may be claimed of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sp_bench.report.cells import Cell
from sp_bench.report.device_sets import are_several
from sp_bench.report.statistics import Interval, median_interval

MAX_DIGITS = 6
MIN_REPLICATES = 6  # below, no order-statistic interval of the median reaches 95%


@dataclass(frozen=True)
class PairedRatio:
    """Median of the step-time ratios of equal replicates, which ran in the same block, with its interval."""

    ratio: float
    interval: Interval
    pairs: int

    @property
    def excludes_1(self) -> bool:
        return self.interval.low > 1 or self.interval.high < 1

    @property
    def words(self) -> str:
        """1.25x [1.22, 1.27], with a third decimal near 1 and below."""
        near = min(abs(bound - 1) for bound in (self.interval.low, self.interval.high)) < 0.005
        return "x ".join(self.rounded(3 if near else decimals(self.ratio)))

    def rounded(self, digits: int) -> tuple[str, str]:
        """The ratio, and its interval in brackets, with so many decimals, or as many that no bound is printed as 1."""
        low, high = self.interval.low, self.interval.high
        while digits < MAX_DIGITS and any(bound != 1 and round(bound, digits) == 1 for bound in (low, high)):
            digits += 1  # a bound printed as 1 could lie on either side of it
        return f"{self.ratio:.{digits}f}", f"[{low:.{digits}f}, {high:.{digits}f}]"


def decimals(ratio: float) -> int:
    """A third near 1 and below, where two would leave little of a lead."""
    return 3 if ratio < 1.05 else 2


def times(ratio: float) -> str:
    return f"{ratio:.{decimals(ratio)}f}x"


def shared_replicates(over: Cell, under: Cell) -> list[str]:
    """Keys of those that both cells have. Two that ran on separate devices are no pair: what machines differ in would
    count as the methods' difference."""
    both = sorted(over.step_ms.keys() & under.step_ms.keys())
    return [key for key in both if len({cell.device_sets.get(key) for cell in (over, under)} - {None}) < 2]


def paired_ratio(over: Cell, under: Cell) -> PairedRatio | None:
    """None with fewer than 6 replicates that pair, and where they are of several machines: an interval is of one."""
    shared = shared_replicates(over, under)
    if are_several(cell.device_sets.get(key) for key in shared for cell in (over, under)):
        return None
    return median_ratio([over.step_ms[key] / under.step_ms[key] for key in shared])


def median_ratio(ratios: Sequence[float]) -> PairedRatio | None:
    """Of the ratios of equal replicates. None with fewer than 6."""
    interval = median_interval(ratios)
    return None if interval is None else PairedRatio(median(ratios), interval, len(ratios))


def ratio_of_medians(over: Cell, under: Cell) -> float:
    """Of two cells that were measured."""
    return (over.median_step_ms or 0.0) / (under.median_step_ms or 1.0)


def rounded_ratio(over: Cell, under: Cell) -> tuple[str, str]:
    """The paired ratio and its interval in brackets; without one the ratio of the medians and nothing."""
    paired = paired_ratio(over, under)
    return (f"{ratio_of_medians(over, under):.3f}", "") if paired is None else paired.rounded(3)


def by_speed(cell: Cell) -> tuple[float, str]:
    """Sorts cells by median step time, the fastest first; equal ones by name. All were measured."""
    return cell.median_step_ms or 0.0, cell.series


def ranked(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=by_speed)


def fastest(cells: Sequence[Cell]) -> Cell:
    return ranked(cells)[0]
