"""What devices hold outside torch's allocator, beside committed rows of ranks that have a GPU each."""

from pathlib import Path

import pytest

from sp_bench.costs import nccl
from sp_bench.predict import outside
from sp_bench.rows import store

RESULTS = Path(__file__).parents[2] / "results"
CAMPAIGNS = sorted(path for path in RESULTS.iterdir() if path.is_dir())


def test_the_file_of_the_package_is_what_committed_rows_say():
    """Written anew by: python -m sp_bench.predict.fitted results/*"""
    assert outside.fitted(CAMPAIGNS) == nccl.known()


@pytest.mark.parametrize(
    ("campaign", "number"),
    [
        ("h200x2_step_methods_4", nccl.counts(1, 2, sends=False)),
        ("h200x2_million", nccl.counts(1, 2, sends=True)),
        ("h200x2_step_methods", nccl.counts(2, 2, sends=False)),
        ("h200x4_step_methods", nccl.counts(4, 4, sends=False)),
        ("h200x4_train_step", nccl.counts(2, 4, sends=True)),
        ("h200x1_one_rank_map", nccl.Held()),
    ],
)
def test_rows_are_near_it(campaign, number):
    rows = store.read(RESULTS / campaign, outside.COLUMNS)[0].to_pylist()
    of_kind = [gib for found, gib in outside._samples(rows) if found == number]
    assert of_kind == pytest.approx([nccl.outside_bytes(number) / nccl.GIB] * len(of_kind), abs=0.05)
    assert of_kind


def test_an_exchange_holds_more_with_each_peer_of_the_host_and_a_ring_does_not():
    held = [nccl.outside_bytes(nccl.counts(degree, 8, sends=False)) for degree in (1, 2, 4, 8, 64)]
    assert held[0] < held[1] < held[2] < held[3] == held[4]
    assert nccl.counts(1, 2, sends=True) == nccl.counts(1, 64, sends=True)
