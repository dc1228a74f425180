"""Two cells compared: the ratio of their step times, and what may be claimed of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from sp_bench.analysis.cells import Cell, Launch
from sp_bench.analysis.statistics import Interval, median_interval
from sp_bench.formats import MISSING

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


def shared_replicates(over: Cell, under: Cell, campaign: str | None = None) -> list[Launch]:
    """Keys of those that both cells have, of one campaign or of any. Two that ran on separate devices are no pair: what
    machines differ in would count as the methods' difference."""
    both = sorted(over.step_ms.keys() & under.step_ms.keys())
    both = [key for key in both if campaign in (None, key.campaign)]
    return [key for key in both if len({cell.device_sets.get(key) for cell in (over, under)} - {None}) < 2]


def of_one_machine(keys: Iterable[Launch], *cells: Cell) -> list[Launch]:
    """Of these replicates those of one campaign on one machine, the most that there are: an interval is of no others.
    Of equally many those of the first campaign by name. An unknown machine is the known one, if there is one."""
    machines = {key: {cell.device_sets.get(key) for cell in cells} - {None} for key in keys}
    known: dict[str, set[int | None]] = {}
    for key, found in machines.items():
        known.setdefault(key.campaign, set()).update(found)
    groups: dict[tuple[str, int], list[Launch]] = {}
    for key, found in machines.items():
        campaign = key.campaign
        of = found or (known[campaign] if len(known[campaign]) == 1 else set())
        groups.setdefault((campaign, next(iter(of), None) or 0), []).append(key)
    return groups[min(groups, key=lambda group: (-len(groups[group]), group))] if groups else []


def pairs(over: Cell, under: Cell, campaign: str | None = None) -> list[Launch]:
    """Keys of the replicates by which the two are compared."""
    return of_one_machine(shared_replicates(over, under, campaign), over, under)


def paired_ratio(over: Cell, under: Cell, campaign: str | None = None) -> PairedRatio | None:
    """None with fewer than 6 replicates of one campaign and machine that pair."""
    return median_ratio([over.step_ms[key] / under.step_ms[key] for key in pairs(over, under, campaign)])


def median_ratio(ratios: Sequence[float]) -> PairedRatio | None:
    """Of the ratios of equal replicates. None with fewer than 6."""
    interval = median_interval(ratios)
    return None if interval is None else PairedRatio(median(ratios), interval, len(ratios))


def ratio_of_medians(over: Cell, under: Cell) -> float:
    """Of two cells that were measured, whether or not their replicates pair."""
    return (over.median_step_ms or 0.0) / (under.median_step_ms or 1.0)


def ratio_of_pairs(over: Cell, under: Cell, campaign: str | None = None) -> float | None:
    """The paired ratio; below 6 pairs the ratio of the medians over them. None: no replicates pair, so that campaigns,
    machines or code would be compared as well."""
    if (paired := paired_ratio(over, under, campaign)) is not None:
        return paired.ratio
    if not (keys := pairs(over, under, campaign)):
        return None
    return median(over.step_ms[key] for key in keys) / median(under.step_ms[key] for key in keys)


def rounded_ratio(over: Cell, under: Cell) -> tuple[str, str]:
    """The ratio of pairs, and its interval in brackets or nothing."""
    if (paired := paired_ratio(over, under)) is not None:
        return paired.rounded(3)
    ratio = ratio_of_pairs(over, under)
    return (MISSING if ratio is None else f"{ratio:.3f}"), ""


def by_speed(cell: Cell) -> tuple[float, str]:
    """Sorts cells by median step time, the fastest first; equal ones by name. All were measured."""
    return cell.median_step_ms or 0.0, cell.series


def ranked(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=by_speed)


def fastest(cells: Sequence[Cell]) -> Cell:
    return ranked(cells)[0]
