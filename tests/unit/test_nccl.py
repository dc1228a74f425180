"""What NCCL holds of a device's memory, beside committed rows of ranks that have a GPU each."""

from pathlib import Path

import pytest

from sp_bench.costs import nccl
from sp_bench.rows import store

RESULTS = Path(__file__).parents[2] / "results"
ONE_RANK = 0.8 * nccl.GIB  # that one rank of P has beside its allocator's, in rows of world=one_rank
COLUMNS = ("started_at", "method", "device_used_bytes", "peak_reserved_bytes")
STEPS = [  # the first trial of each, in fresh processes
    ("h200x2_step_methods_4", "all_gather", {"ulysses_degree": 1, "ranks_per_node": 2, "sends": False}),
    ("h200x2_million", "ring", {"ulysses_degree": 1, "ranks_per_node": 2, "sends": True}),
    ("h200x2_step_methods", "ulysses", {"ulysses_degree": 2, "ranks_per_node": 2, "sends": False}),
    ("h200x4_step_methods", "ulysses", {"ulysses_degree": 4, "ranks_per_node": 4, "sends": False}),
    ("h200x4_train_step", "usp", {"ulysses_degree": 2, "ranks_per_node": 4, "sends": True}),
]


@pytest.mark.parametrize(("campaign", "method", "of"), STEPS)
def test_what_nccl_holds_is_that_of_rows(campaign, method, of):
    rows = [row for row in store.read(RESULTS / campaign, COLUMNS)[0].to_pylist() if row["method"] == method]
    first = min(rows, key=lambda row: row["started_at"])
    held = max(map(int.__sub__, first["device_used_bytes"], first["peak_reserved_bytes"]))
    assert held - ONE_RANK == pytest.approx(nccl.held_bytes(**of), abs=0.05 * nccl.GIB)


def test_an_exchange_holds_more_with_each_peer_of_the_host_and_a_ring_does_not():
    held = [nccl.held_bytes(degree, 8, sends=False) for degree in (1, 2, 4, 8, 64)]
    assert held[0] < held[1] < held[2] < held[3] == held[4]
    assert nccl.held_bytes(1, 2, sends=True) == nccl.held_bytes(1, 64, sends=True)
