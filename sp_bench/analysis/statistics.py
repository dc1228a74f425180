"""Distribution-free intervals of the median. Source: Hoefler & Belli, SC15, rule 5 and section 3.1.3."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import bdtr  # the binomial's; scipy.stats has it too and takes a second to import

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """`coverage` is what the two order statistics achieve, at least CONFIDENCE: 6 samples give 0.969."""

    low: float
    high: float
    coverage: float


def median_interval(samples: Sequence[float]) -> Interval | None:
    """Order-statistic interval of the median: the k-th smallest and k-th largest of n samples, with the largest k whose
    coverage 1 - 2 P(Binomial(n, 1/2) < k) reaches CONFIDENCE. None where no k does: n < 6."""
    n = len(samples)
    k, coverage = _order(n)
    if k == 0:
        return None
    ordered = sorted(samples)
    return Interval(ordered[k - 1], ordered[n - k], coverage)


@cache
def _order(n: int) -> tuple[int, float]:
    """(k, its coverage); k is 0 where there is none."""
    coverages = 1 - 2 * bdtr(np.arange(n + 1), n, 0.5)  # of the interval from the (i + 1)-th smallest, falling with i
    k = int(np.count_nonzero(coverages >= CONFIDENCE))
    return k, float(coverages[k - 1]) if k else 0.0
