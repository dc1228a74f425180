"""What a schedule leaves exposed of its messages, against cases worked out by hand and what holds of every schedule."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.analysis.overlap import exposed_ms

METHODS = (["all_to_all"], ["send"], ["all_to_all", "send"], ["all_gather", "reduce_scatter"])  # their ops


def asked(**changes: Any) -> dict[str, Any]:
    plain = {"pass_kind": "forward_backward", "causal": True, "num_kv_heads": 8, "ring_degree": 1}
    plain |= {"head_dim": 128, "v_head_dim": None}
    return plain | {"head_chunks": None, "head_stride": None} | changes


def of_both(op: str, forward_ms: float, backward_ms: float) -> dict[tuple[str, str], float]:
    return {("forward", op): forward_ms, ("backward", op): backward_ms}


@pytest.mark.parametrize(
    ("chunks", "compute_ms", "expected"),
    [
        (None, 1e6, 30.0),  # all of 10 and 20
        (2, 1e6, 15.0),  # in and out of one of two chunks
        (4, 1e6, 7.5),
        # two kernels of 1 forward and of 2.5 backward; messages of 2.5 and of 5 a way beside each
        (2, 7.0, 15.0 + 2 * (2.5 - 1.0) + 2 * (5.0 - 2.5)),
    ],
)
def test_of_an_exchange_in_chunks_of_heads_one_chunk_hides_behind_nothing(chunks, compute_ms, expected) -> None:
    assert exposed_ms(asked(head_chunks=chunks), of_both("all_to_all", 10, 20), compute_ms) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "compute_ms", "expected"),
    [
        (2, 1e6, 0.0),
        # one hop of 6 beside a block of 5; of 15 with dK and dV, beside a block of 12.5
        (2, 35.0, 1.0 + 2.5),
        # two hops, beside two blocks of 1, and of 2.5
        (3, 10.5, (6.0 - 2.0) + (15.0 - 5.0)),
    ],
)
def test_the_hops_of_a_ring_hide_behind_all_blocks_but_one(ranks, compute_ms, expected) -> None:
    assert exposed_ms(asked(ring_degree=ranks), of_both("send", 6, 15), compute_ms) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # P=2, forward 10 and backward 25, of which a quarter is of this rank's KV: 2.5, and 3.125 twice
        ({}, (8 - 2.5) + (8 - 3.125) + (8 - 3.125)),
        ({"causal": False}, 24.0),  # every block needs the others' KV
        # two groups: 4 beside 1.25, then beside 5; 4 beside 1.5625, then 8 beside 12.5, the last 4 beside 1.5625
        ({"head_stride": 4}, (4 - 1.25) + (4 - 1.5625) + (4 - 1.5625)),
    ],
)
def test_a_whole_gather_hides_behind_what_needs_no_other_ranks_kv(changes, expected) -> None:
    times = of_both("all_gather", 8, 8) | {("backward", "reduce_scatter"): 8.0}
    assert exposed_ms(asked(ring_degree=2, **changes), times, 35.0) == pytest.approx(expected)


def test_a_forward_alone_has_all_of_the_compute() -> None:
    forward = asked(ring_degree=2, pass_kind="forward")
    assert exposed_ms(forward, {("forward", "send"): 6.0}, 10.0) == pytest.approx(1.0)


def test_a_pass_has_its_share_of_the_flops_that_its_heads_make() -> None:
    # one hop of 6 beside a block, which is half of the forward: of 10 where D = Dv, of 320 / 1152 of it elsewhere
    times = {("forward", "send"): 6.0}
    assert exposed_ms(asked(ring_degree=2), times, 35.0) == pytest.approx(1.0)
    of_latents = asked(ring_degree=2, head_dim=192, v_head_dim=128)
    assert exposed_ms(of_latents, times, 35.0) == pytest.approx(6.0 - 35.0 * 320 / (320 + 3 * 192 + 2 * 128) / 2)


@given(data=st.data())
def test_more_compute_exposes_no_more_and_none_exposes_everything(data: st.DataObject) -> None:
    config = asked(
        pass_kind=data.draw(st.sampled_from(["forward", "forward_backward"])),
        causal=data.draw(st.booleans()),
        ring_degree=data.draw(st.integers(2, 8)),
        head_chunks=data.draw(st.sampled_from([None, 1, 2, 4])),
        head_stride=data.draw(st.sampled_from([None, 1, 3, 8])),
    )
    sizes, ops = st.floats(0, 1e3), data.draw(st.sampled_from(METHODS))
    times = {("forward", op): data.draw(sizes) for op in ops if op != "reduce_scatter"}
    if config["pass_kind"] == "forward_backward":  # where KV travels again, and dK and dV
        times |= {("backward", op): times.get(("forward", op), 0.0) + data.draw(sizes) for op in ops}
    less, more = sorted((data.draw(sizes), data.draw(sizes)))
    total = sum(times.values())
    assert exposed_ms(config, times, 0.0) == pytest.approx(total)
    assert 0 <= exposed_ms(config, times, more) <= exposed_ms(config, times, less) + 1e-9 <= total + 1e-6
    grown = more + exposed_ms(config, times, more)
    assert grown >= less + exposed_ms(config, times, less) - 1e-6, "a step never shrinks as compute grows"
