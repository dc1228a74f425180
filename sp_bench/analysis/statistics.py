"""Distribution-free intervals of the median. Source: Hoefler & Belli, SC15, rule 5 and section 3.1.3."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import bdtr  # the binomial's; scipy.stats has it too and takes a second to import

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An interval and its coverage, which is at least CONFIDENCE: 0.969 for 6 samples."""

    low: float
    high: float
    coverage: float


def median_interval(samples: Sequence[float]) -> Interval | None:
    """Order-statistic interval of the median: the k-th smallest and k-th largest of n samples, with the largest k whose
    coverage 1 - 2 P(Binomial(n, 1/2) < k) reaches CONFIDENCE. None if no k does, which is for n < 6."""
    n = len(samples)
    k, coverage = _order(n)
    if k == 0:
        return None
    ordered = sorted(samples)
    return Interval(ordered[k - 1], ordered[n - k], coverage)


@cache
def _order(n: int) -> tuple[int, float]:
    """(k, its coverage); k is 0 if there is no interval."""
    coverages = 1 - 2 * bdtr(
        np.arange(n + 1), n, 0.5
    )  # coverage of the interval from the (i + 1)-th smallest; falls with i
    k = int(np.count_nonzero(coverages >= CONFIDENCE))
    return k, float(coverages[k - 1]) if k else 0.0
