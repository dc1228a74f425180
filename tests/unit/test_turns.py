"""Timed steps of attention read two sets of inputs in turn, and the last one's results stay."""

import torch

from sp_bench.config.trial import AttentionShape, WorkloadConfig
from sp_bench.measure.timing import Schedule
from sp_bench.workloads.attention import Turns
from sp_bench.workloads.step import local_inputs, two_sets

SHAPE = AttentionShape(2, 12, 4, 2, 8, True, "float32")
CPU = torch.device("cpu")


def test_two_sets_of_inputs_differ_and_share_memory_but_for_a_token() -> None:
    first, second = two_sets(SHAPE, 6, CPU, seed=0)
    for one, other, drawn in zip(first, second, local_inputs(SHAPE, 6, CPU, seed=0), strict=True):
        assert one.shape == other.shape == drawn.shape
        assert one.is_contiguous()
        assert other.is_contiguous()
        assert one.data_ptr() != other.data_ptr()
        assert one.untyped_storage().nbytes() == drawn.nbytes + drawn[0, 0].nbytes
        assert not torch.equal(one, other)


def test_what_is_kept_while_inputs_stay_is_computed_anew_in_each_step() -> None:
    """A method may keep its result while memory and version of its inputs stay. That is right, and no step."""
    computed, kept = [], {}

    def attention(x: torch.Tensor) -> torch.Tensor:
        key = x.data_ptr(), x._version
        if key not in kept:
            kept.clear()
            kept[key] = x * 2
            computed.append(key)
        return kept[key]

    sets = two_sets(SHAPE, 6, CPU, seed=0)
    schedule = Schedule(WorkloadConfig("attention", "forward_backward", True, 2, 3, 64))
    turns = Turns([lambda q=q: [attention(q)] for q, *_ in sets], schedule)
    for _ in range(6):
        turns()
    assert len(computed) == 6
    assert turns.kept_from == 0
    (result,) = turns.results()
    assert torch.equal(result, sets[0][0] * 2)
    assert turns.results() == []
