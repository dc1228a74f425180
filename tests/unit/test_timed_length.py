"""What the checks at the timed length read: inputs that no step has seen, and rows that each replicate draws anew."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.oracle.timed_length import NUM_ROWS, Draw, Kept, _sample, turn

LAYOUTS = [SequenceLayout(kind, 2, 2) for kind in ("contiguous", "zigzag", "striped")]


@given(st.integers(1, 9), st.integers(1, 3))
def test_turned_inputs_have_every_value_at_another_place_or_sign(num_tokens: int, num_heads: int) -> None:
    before = torch.randn(2, num_tokens, num_heads, 4)
    after = before.clone()
    turn([after])
    assert not (after == before).any()
    assert torch.equal(after.abs().sort(dim=1).values, before.abs().sort(dim=1).values)
    if num_tokens > 1:
        assert not torch.isclose(after.abs(), before.abs(), rtol=0, atol=0).any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
@pytest.mark.parametrize("seq_len", [8, 64, 4096])
def test_every_rank_owns_equally_many_rows_and_the_last_token_is_one_of_them(layout, seq_len):
    rows = _sample(layout, seq_len, Draw(0, 0)).tolist()
    assert rows == sorted(set(rows))
    assert rows[-1] == seq_len - 1
    assert rows[0] > 0
    owned = [len(set(rows) & set(layout.global_positions(rank, seq_len))) for rank in range(4)]
    assert min(owned) >= 1
    if seq_len == 4096:
        assert sorted(owned) == [16, 16, 16, 17]


def test_more_ranks_than_rows_own_a_row_each():
    layout = SequenceLayout("striped", 128)
    rows = set(_sample(layout, 1024, Draw(0, 0)).tolist())
    assert all(rows & set(layout.global_positions(rank, 1024)) for rank in range(128))


def test_seed_and_replicate_decide_the_rows():
    layout = SequenceLayout("zigzag", 4)
    drawn = [tuple(_sample(layout, 4096, Draw(*each)).tolist()) for each in itertools.product((0, 1), (0, 1, 2))]
    assert len(set(drawn)) == 6
    assert drawn[1] == tuple(_sample(layout, 4096, Draw(0, 1)).tolist())


@pytest.mark.parametrize(("num_wrong", "at_least"), [(41, 0.47), (205, 0.96)])
def test_wrong_rows_are_sampled_as_often_as_the_docs_say(num_wrong, at_least):
    """1% and 5% of 4,096 rows, in one block: 1 - (1 - n/S)^64."""
    layout = SequenceLayout("contiguous", 2)
    wrong = range(1500, 1500 + num_wrong)
    found = [bool(set(wrong) & set(_sample(layout, 4096, Draw(0, r)).tolist())) for r in range(400)]
    expected = 1 - (1 - num_wrong / 4096) ** NUM_ROWS
    assert expected == pytest.approx(at_least, abs=0.01)
    assert sum(found) / 400 > expected - 0.07


@pytest.mark.parametrize("num_rows", [2, 0])
def test_what_is_kept_is_as_it_was_then(num_rows: int) -> None:
    """A rank of a short sequence may own no sampled row."""
    results = [torch.randn(2, num_rows, 4, 8).bfloat16(), torch.randn(2, num_rows, 4)]
    kept, before = Kept([torch.empty_like(x) for x in results]), [x.clone() for x in results]
    kept.keep(results)
    for x in results:
        x.zero_()
    assert all(map(torch.equal, kept.tensors(), before))
