"""Ratios of the step times of two cells, paired by replicate, with intervals."""

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
    """The median ratio of step times over pairs of equal replicates, with its interval. A pair ran in one block."""

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
        """(ratio, interval in brackets) with `digits` decimals, or more if a bound would be printed as 1."""
        low, high = self.interval.low, self.interval.high
        while digits < MAX_DIGITS and any(bound != 1 and round(bound, digits) == 1 for bound in (low, high)):
            digits += 1  # a bound printed as 1 would not show on which side it lies
        return f"{self.ratio:.{digits}f}", f"[{low:.{digits}f}, {high:.{digits}f}]"


def decimals(ratio: float) -> int:
    """3 decimals below or near 1, else 2: two would hide a small lead."""
    return 3 if ratio < 1.05 else 2


def times(ratio: float) -> str:
    return f"{ratio:.{decimals(ratio)}f}x"


def shared_replicates(over: Cell, under: Cell, campaign: str | None = None) -> list[Launch]:
    """The keys of replicates that both cells have, in one campaign or any. Replicates on separate devices do not pair:
    the machines' difference would count as the methods'. None do of a cell that is in no verdict."""
    if not over.is_comparable or not under.is_comparable:
        return []
    both = sorted(over.step_ms.keys() & under.step_ms.keys())
    both = [key for key in both if campaign in (None, key.campaign)]
    return [key for key in both if len({cell.device_sets.get(key) for cell in (over, under)} - {None}) < 2]


def of_one_machine(keys: Iterable[Launch], *cells: Cell) -> list[Launch]:
    """The replicates of one campaign on one machine, since an interval needs those: the largest such group, or the
    first campaign by name among equals. If one machine is known, unknown ones count as that one."""
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
    """The keys of the replicates that two cells are compared by."""
    return of_one_machine(shared_replicates(over, under, campaign), over, under)


def paired_ratio(over: Cell, under: Cell, campaign: str | None = None) -> PairedRatio | None:
    """The paired ratio; None with fewer than 6 pairs of one campaign and machine."""
    return median_ratio([over.step_ms[key] / under.step_ms[key] for key in pairs(over, under, campaign)])


def median_ratio(ratios: Sequence[float]) -> PairedRatio | None:
    """The median of pairs' ratios with its interval; None with fewer than 6 pairs."""
    interval = median_interval(ratios)
    return None if interval is None else PairedRatio(median(ratios), interval, len(ratios))


def ratio_of_medians(over: Cell, under: Cell) -> float:
    """The ratio of two cells' median step times, whether or not replicates pair."""
    return (over.median_step_ms or 0.0) / (under.median_step_ms or 1.0)


def ratio_of_pairs(over: Cell, under: Cell, campaign: str | None = None) -> float | None:
    """The paired ratio; with fewer than 6 pairs, the ratio of their medians. None if no replicates pair: campaigns,
    machines or code would be compared too."""
    if (paired := paired_ratio(over, under, campaign)) is not None:
        return paired.ratio
    if not (keys := pairs(over, under, campaign)):
        return None
    return median(over.step_ms[key] for key in keys) / median(under.step_ms[key] for key in keys)


def rounded_ratio(over: Cell, under: Cell) -> tuple[str, str]:
    """(ratio of pairs, its interval in brackets, or empty)."""
    if (paired := paired_ratio(over, under)) is not None:
        return paired.rounded(3)
    ratio = ratio_of_pairs(over, under)
    return (MISSING if ratio is None else f"{ratio:.3f}"), ""


def by_speed(cell: Cell) -> tuple[float, str]:
    """A sort key for measured cells: by median step time, then by name."""
    return cell.median_step_ms or 0.0, cell.series


def ranked(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=by_speed)


def fastest(cells: Sequence[Cell]) -> Cell:
    return ranked(cells)[0]
