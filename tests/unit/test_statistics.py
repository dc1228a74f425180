"""What is claimed of medians holds for skewed samples, and nothing depends on the order of the rows."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, quantile_test

from sp_bench.analysis.cells import cells, of_equal_steps
from sp_bench.analysis.limits import limits
from sp_bench.analysis.provenance import origin
from sp_bench.analysis.ratios import MIN_REPLICATES, median_ratio
from sp_bench.analysis.selection import Selection, select
from sp_bench.analysis.settings import settings as settings_of
from sp_bench.analysis.statistics import CONFIDENCE, median_interval
from sp_bench.report.cards import card
from sp_bench.report.caveats import caveats
from sp_bench.report.setting_tables import VALUES, lines, tables
from sp_bench.report.table import records

from .rows import commit, row, splits

SIZES = range(MIN_REPLICATES, 31)
DRAWS = 4000
DISTRIBUTIONS = {  # its samples, its median
    "lognormal": (lambda rng, shape: rng.lognormal(sigma=1.5, size=shape), 1.0),
    "exponential": (lambda rng, shape: rng.exponential(size=shape), math.log(2)),
}


def places(n: int) -> tuple[int, int, float]:
    """From 0, which of n ordered samples the interval begins and ends at, and the coverage it says it has."""
    interval = median_interval(list(range(n)))
    assert interval is not None
    return int(interval.low), int(interval.high), interval.coverage


@pytest.mark.parametrize("n", range(MIN_REPLICATES))
def test_below_6_samples_no_interval_is_claimed_and_none_could_be(n: int) -> None:
    assert median_interval(list(range(n))) is None
    widest = 1 - 2 * 0.5**n if n else 0.0
    assert widest < CONFIDENCE


@pytest.mark.parametrize("n", SIZES)
def test_the_claimed_coverage_is_the_binomials_and_the_narrowest_that_reaches_95_percent(n: int) -> None:
    low, high, coverage = places(n)
    assert (low + high) == n - 1
    # The interval misses the median where at most `low` samples, or all but that many, lie below it.
    assert coverage == pytest.approx(1 - 2 * binom.cdf(low, n, 0.5))
    assert coverage >= CONFIDENCE
    assert 1 - 2 * binom.cdf(low + 1, n, 0.5) < CONFIDENCE


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", SIZES)
def test_the_interval_covers_the_median_of_skewed_samples_at_least_95_times_in_100(n: int, name: str) -> None:
    draw, median = DISTRIBUTIONS[name]
    low, high, coverage = places(n)
    samples = np.sort(draw(np.random.default_rng(n), (DRAWS, n)), axis=1)
    hits = float(np.mean((samples[:, low] <= median) & (median <= samples[:, high])))
    error = math.sqrt(coverage * (1 - coverage) / DRAWS)
    assert hits == pytest.approx(coverage, abs=4 * error)
    assert hits >= CONFIDENCE - 4 * error


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 1e6), min_size=MIN_REPLICATES, max_size=30, unique=True))
def test_the_interval_is_the_one_that_scipys_quantile_test_gives(samples: list[float]) -> None:
    interval, theirs = median_interval(samples), quantile_test(samples, p=0.5).confidence_interval(CONFIDENCE)
    assert interval is not None
    assert (interval.low, interval.high) == (theirs.low, theirs.high)


def test_equal_samples_give_an_interval_of_no_width_and_a_ratio_of_1_is_not_told_apart() -> None:
    ratio = median_ratio([1.0] * 8)
    assert ratio is not None
    assert (ratio.interval.low, ratio.interval.high, ratio.excludes_1) == (1.0, 1.0, False)


def test_a_false_difference_is_claimed_in_less_than_5_percent_of_comparisons_of_equals() -> None:
    rng = np.random.default_rng(7)
    over, under = rng.lognormal(sigma=0.3, size=(2, 2000, 9))
    found = [median_ratio(list(ratios)) for ratios in over / under]
    claimed = np.mean([ratio is not None and ratio.excludes_1 for ratio in found])
    assert claimed == pytest.approx(1 - places(9)[2], abs=4 * math.sqrt(0.05 * 0.95 / 2000))
    assert claimed < 0.05


@pytest.fixture(scope="module")
def selection(tmp_path_factory: pytest.TempPathFactory) -> Selection:
    """Two campaigns with two environments, kernels, failures and a missing cell_id: 60 rows or so."""
    monday = [
        row(replicate=r, median_ms=(9.0 + r + k) * n / 1024, seq_len=n, **split)
        for r in range(3)
        for k, split in enumerate(splits(2))
        for n in (1024, 2048)
    ]
    monday += [row(status="oom", oom_site="torch", seq_len=4096, replicate=r) for r in range(2)]
    monday += [row(kernel="math", replicate=r) for r in range(6)]
    tuesday = [row(env_id="0000000f", median_ms=8.0 + r, replicate=r) for r in range(6)]
    tuesday += [row(status="error", cell_id=None, method="usp", sp_size=4)]
    folder = tmp_path_factory.mktemp("results")
    return select([commit(monday, folder / "monday"), commit(tuesday, folder / "tuesday")])


def said(rows: pd.DataFrame) -> tuple[object, ...]:
    """All that is computed of rows before anything is drawn."""
    found = cells(of_equal_steps(rows))
    made = settings_of(found)
    about = [(limit.setting, limit.series, [cell.cell_id for cell in limit.cells]) for limit in limits(found)]
    texts = [card(setting) for setting in made], caveats(found, made, []), origin(found)
    return found, texts, about, records(VALUES, lines(tables(made)))


@pytest.fixture(scope="module")
def in_order(selection: Selection) -> tuple[object, ...]:
    return said(selection.rows)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.randoms(use_true_random=False))
def test_cells_words_and_tables_do_not_depend_on_the_order_of_the_rows(
    selection: Selection, in_order: tuple[object, ...], seed
) -> None:
    places = list(range(len(selection.rows)))
    seed.shuffle(places)
    assert said(selection.rows.iloc[places]) == in_order


@settings(max_examples=5)
@given(data=st.data())
def test_a_cell_is_what_its_own_rows_say_whatever_other_rows_there_are(
    selection: Selection, data: st.DataObject
) -> None:
    whole = cells(selection.rows)
    kept = data.draw(st.lists(st.sampled_from(whole), min_size=1, unique_by=lambda cell: cell.cell_id))
    files = [row["file"] for cell in kept for row in cell.rows]
    alone = {cell.rows[0]["file"]: cell for cell in cells(selection.rows[selection.rows["file"].isin(files)])}
    assert len(alone) == len(kept)
    for cell in kept:
        twin = alone[cell.rows[0]["file"]]
        assert (cell.rows, cell.step_ms, cell.interval_ms) == (twin.rows, twin.step_ms, twin.interval_ms)
