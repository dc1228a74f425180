"""What is said of a ratio: as many digits as tell its bounds from 1, and the doubts about the times that it is of."""

import pytest

from sp_bench.analysis.cells import Cell, cells
from sp_bench.analysis.provenance import origin
from sp_bench.analysis.ratios import PairedRatio
from sp_bench.analysis.selection import Selection
from sp_bench.analysis.statistics import Interval
from sp_bench.costs.flags import flags_of_leftover, flags_of_memory
from sp_bench.report.caveats import caveats

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


@pytest.mark.parametrize(
    ("leftover", "peak", "flags"),
    [
        ([0, 23 * GIB], [91 * GIB, 114 * GIB], ["leftover_memory"]),  # as hf_deepspeed had in h200x1_engines
        ([1.9 * GIB, 0], [100 * GIB, 100 * GIB], []),  # below 2% of the peak
        ([2.1 * GIB, 0], [100 * GIB, 100 * GIB], ["leftover_memory"]),
        ([2.1 * GIB, 0], [200 * GIB, 1 * GIB], []),  # of the same rank's peak
        ([100 * 2**20], [GIB], []),  # workspaces of libraries
        ([200 * 2**20], [GIB], ["leftover_memory"]),
        (None, [GIB], []),  # rows of before it was measured
        (None, None, []),  # on CPUs
    ],
)
def test_a_peak_with_leftovers_of_other_work_in_it_is_flagged(leftover, peak, flags) -> None:
    assert flags_of_leftover(leftover, peak) == flags


def two_cells(**columns) -> tuple[Selection, list[Cell]]:
    """A ring with these columns, and Ulysses."""
    selection = selection_of([row(median_ms=12.0, **columns), row(**ULYSSES)])
    return selection, cells(selection.rows)


def test_who_reads_a_ratio_reads_of_the_doubts_about_its_times() -> None:
    ring, ulysses = two_cells(flags=["unsettled"])[1]
    assert "steps that grew or shrank by over 3% (1)" in " ".join(caveats([ring, ulysses], [], []))
    assert "; flagged unsettled: 1 of 2 cells; " in origin([ring, ulysses])


def test_a_row_of_before_there_were_flags_of_memory_has_them_all_the_same() -> None:
    capped = {"device_memory_gib": 1.0, "device_used_bytes": [2 * GIB], "allocator_retries": [1]}
    selection = selection_of([row(**capped), row(status="oom", seq_len=8192, device_memory_gib=1.0)])
    ran, _ = cells(selection.rows)
    assert ran.flags == ["above_device_memory", "allocator_retried"]


def test_that_nothing_sends_what_no_bytes_predict_is_no_evidence() -> None:
    silent = {"comm_predicted_bytes": 0.0, "comm_counted_bytes": 0.0, "comm": []}
    selection = selection_of([row(method="single", sp_size=1, **silent)])
    assert "ounted bytes" not in "".join(caveats(cells(selection.rows), [], []))
