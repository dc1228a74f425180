"""Layouts are permutations, and the ring's blocks compute each visible score exactly once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.attention.layouts import SequenceLayout, visible_block

KINDS = ("contiguous", "zigzag", "striped")


@st.composite
def layouts(draw: st.DrawFn, max_degree: int = 6) -> SequenceLayout:
    return SequenceLayout(
        draw(st.sampled_from(KINDS)),
        draw(st.integers(1, max_degree)),
        draw(st.integers(1, max_degree)),
        draw(st.booleans()),
    )


@given(layouts(), st.integers(1, 4))
def test_ranks_together_hold_every_token_once(layout: SequenceLayout, times: int) -> None:
    seq_len = layout.multiple * times
    held = [layout.global_positions(rank, seq_len) for rank in range(layout.sp_size)]
    assert {len(tokens) for tokens in held} == {seq_len // layout.sp_size}
    assert sorted(p for tokens in held for p in tokens) == list(range(seq_len))


@given(layouts(), st.integers(1, 4))
def test_local_order_is_global_order(layout: SequenceLayout, times: int) -> None:
    # causal masks on local indices are right only then
    for rank in range(layout.sp_size):
        tokens = layout.global_positions(rank, layout.multiple * times)
        assert tokens == sorted(tokens)


@given(layouts(), st.integers(1, 4))
def test_gathering_a_ulysses_group_gives_the_ring_shard_in_order(layout: SequenceLayout, times: int) -> None:
    seq_len = layout.multiple * times
    shard_layout = SequenceLayout(layout.kind, layout.ring_degree)
    ranks = {layout.coordinates(rank): rank for rank in range(layout.sp_size)}
    for ring_rank in range(layout.ring_degree):
        gathered = [
            token
            for ulysses_rank in range(layout.ulysses_degree)
            for token in layout.global_positions(ranks[ring_rank, ulysses_rank], seq_len)
        ]
        assert gathered == shard_layout.global_positions(ring_rank, seq_len)


@given(layouts(), st.integers(1, 10_000))
def test_padding_is_the_smallest_length_that_can_be_cut(layout: SequenceLayout, seq_len: int) -> None:
    padded = layout.padded(seq_len)
    assert seq_len <= padded < seq_len + layout.multiple
    assert layout.unsupported_reason(padded) is None
    assert (layout.unsupported_reason(seq_len) is None) == (padded == seq_len)


def test_the_reason_names_the_nearest_lengths() -> None:
    assert SequenceLayout(ring_degree=4).unsupported_reason(6145) == (
        "seq_len=6145 is not divisible by 4 (contiguous layout, sp_size=4); nearest lengths: 6144 or 6148"
    )
    assert "nearest lengths: 8" in str(SequenceLayout("zigzag", ring_degree=4).unsupported_reason(3))


@pytest.mark.parametrize("causal", [True, False])
@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 4))
def test_blocks_cover_every_visible_pair_exactly_once(causal: bool, kind: str, ring_degree: int, times: int) -> None:
    layout = SequenceLayout(kind, ring_degree)  # pyright: ignore[reportArgumentType]
    seq_len = layout.multiple * times
    held = [layout.global_positions(rank, seq_len) for rank in range(ring_degree)]
    computed: Counter[tuple[int, int]] = Counter()
    for q_rank, kv_rank in ((q, kv) for q in range(ring_degree) for kv in range(ring_degree)):
        block = visible_block(layout.kind, q_rank, kv_rank, len(held[kv_rank]), causal=causal)
        if block is None:
            continue
        queries, keys = held[q_rank][block.q], held[kv_rank][block.kv]
        assert not block.causal or len(queries) == len(keys)
        computed.update(
            (query, key) for i, query in enumerate(queries) for j, key in enumerate(keys) if not block.causal or j <= i
        )
    visible = [(q, k) for q in range(seq_len) for k in range(seq_len) if not causal or k <= q]
    assert computed == Counter(visible)


@given(st.integers(2, 8), st.integers(1, 8))
def test_zigzag_gives_every_rank_the_same_causal_work(ring_degree: int, times: int) -> None:
    layout = SequenceLayout("zigzag", ring_degree)
    seq_len = layout.multiple * times
    work = {sum(p + 1 for p in layout.global_positions(rank, seq_len)) for rank in range(ring_degree)}
    assert len(work) == 1
