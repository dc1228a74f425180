"""What is said of a ratio: as many digits as tell its bounds from 1, and the doubts about the times that it is of."""

import pytest

from sp_bench.costs.flags import flags_of_memory
from sp_bench.report.cells import Cell, cells
from sp_bench.report.page.comparisons import against
from sp_bench.report.page.parts import plain
from sp_bench.report.page.verdict import judge
from sp_bench.report.provenance import words
from sp_bench.report.ratios import PairedRatio, behind, by_medians, paired_ratio
from sp_bench.report.selection import Selection
from sp_bench.report.statistics import Interval

from .rows import row, selection_of

ULYSSES = {"method": "ulysses", "ulysses_degree": 2, "ring_degree": 1}


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ((1.22, 1.27), "1.24x [1.22, 1.27]"),
        ((0.9991, 1.27), "1.240x [0.999, 1.270]"),
        ((1.0, 1.27), "1.240x [1.000, 1.270]"),
        ((1.00028, 1.27), "1.2400x [1.0003, 1.2700]"),
        ((0.99994, 1.27), "1.2400x [0.9999, 1.2700]"),
        ((1.000000001, 1.27), "1.240000x [1.000000, 1.270000]"),
    ],
)
def test_no_bound_is_printed_as_1_that_lies_beside_it(bounds: tuple[float, float], said: str) -> None:
    assert PairedRatio(1.24, Interval(*bounds, coverage=0.969), 6).words == said


GIB = 2**30


@pytest.mark.parametrize(
    ("cap_gib", "used", "retries", "flags"),
    [
        (80, [79 * GIB, 81 * GIB], [0, 0], ["above_device_memory"]),
        (80, [80 * GIB], [0, 3], ["allocator_retried"]),
        (80, [81 * GIB, None], [None, 1], ["allocator_retried", "above_device_memory"]),
        (None, [141 * GIB], [0], []),
        (80, None, None, []),
        (80, (), (), []),
    ],
)
def test_doubts_about_memory(cap_gib, used, retries, flags) -> None:
    assert flags_of_memory(cap_gib, used, retries) == flags


def two_cells(**columns) -> tuple[Selection, list[Cell]]:
    """A ring with these columns, and Ulysses."""
    selection = selection_of([row(median_ms=12.0, **columns), row(**ULYSSES)])
    return selection, cells(selection.rows)


def test_who_reads_a_ratio_reads_of_the_doubts_about_its_times() -> None:
    ring, ulysses = two_cells(flags=["unsettled"])[1]
    assert by_medians(ring, ulysses) == "by medians of 1 replicate, no interval; flagged unsettled"
    assert "flagged unsettled" in plain(against(ulysses, ring))
    assert "; flagged unsettled: 1 of 2 cells; " in words([ring, ulysses])
    assert "flagged" not in words([ring, ulysses], of_times=False)


def test_a_row_of_before_there_were_flags_of_memory_has_them_all_the_same() -> None:
    capped = {"device_memory_gib": 1.0, "device_used_bytes": [2 * GIB], "allocator_retries": [1]}
    selection = selection_of([row(**capped), row(status="oom", seq_len=8192, device_memory_gib=1.0)])
    ran, _ = found = cells(selection.rows)
    assert ran.flags == ["above_device_memory", "allocator_retried"]
    (sentence,) = judge(found, selection).out_of_memory
    assert "at 1,024; flagged above_device_memory, allocator_retried (" in plain(sentence)


def test_that_nothing_sends_what_no_bytes_predict_is_no_evidence() -> None:
    silent = {"comm_predicted_bytes": 0.0, "comm_counted_bytes": 0.0, "comm": []}
    selection = selection_of([row(method="single", sp_size=1, **silent)])
    assert "Bytes counted" not in "".join(plain(w) for w in judge(cells(selection.rows), selection).caveats)
    secret = silent | {"comm_counted_bytes": 8.0}
    selection = selection_of([row(method="single", sp_size=1, **secret)])
    assert "differ from the closed form in 1 of 1 cell" in "".join(
        plain(w) for w in judge(cells(selection.rows), selection).caveats
    )


def test_a_paired_ratio_names_the_doubts_about_its_times_too() -> None:
    steps = [390.0, 391.0, 396.0, 376.0, 379.0]
    rows = [row(replicate=n, median_ms=390.0 + n, step_ms=steps) for n in range(6)]
    rows += [row(replicate=n, median_ms=380.0 + n, **ULYSSES) for n in range(6)]
    ring, ulysses = cells(selection_of(rows).rows)
    assert ring.flags == ["unsettled"]  # read off their steps: these rows were written before there was the flag
    paired = paired_ratio(ring, ulysses)
    assert behind(paired, ring, ulysses) == "paired over 6 replicates, coverage 96.9%; flagged unsettled"
    assert behind(paired, ulysses) == "paired over 6 replicates, coverage 96.9%"
    assert "coverage 96.9%; flagged unsettled" in plain(against(ulysses, ring))
