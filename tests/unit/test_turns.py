"""Steps of attention read two sets of inputs in turn, the last timed one a third, and its results stay."""

from itertools import combinations, pairwise

import pytest
import torch

from sp_bench.config.trial import AttentionShape, WorkloadConfig
from sp_bench.measure.timing import Schedule
from sp_bench.workloads.attention import Turns
from sp_bench.workloads.step import local_inputs, three_sets

SHAPE = AttentionShape(2, 12, 4, 2, 8, True, "float32")
CPU = torch.device("cpu")


def test_sets_of_inputs_differ_and_share_memory_but_for_a_token() -> None:
    sets, drawn = three_sets(SHAPE, 6, CPU, seed=0), local_inputs(SHAPE, 6, CPU, seed=0)
    for *tensors, alone in zip(*sets, drawn, strict=True):
        assert {x.shape for x in tensors} == {alone.shape}
        assert all(x.is_contiguous() for x in tensors)
        assert len({x.data_ptr() for x in tensors}) == 3
        assert tensors[0].untyped_storage().nbytes() == alone.nbytes + 2 * alone[0, 0].nbytes
        assert not any(torch.equal(one, other) for one, other in combinations(tensors, 2))


@pytest.mark.parametrize(("warmup_steps", "timed_steps"), [(0, 1), (1, 2), (2, 3), (2, 4)])
def test_no_step_reads_the_inputs_of_the_one_before_nor_those_of_the_last_timed_one(warmup_steps, timed_steps) -> None:
    read = []
    schedule = Schedule(WorkloadConfig("attention", "forward_backward", True, warmup_steps, timed_steps, 64))
    turns = Turns(
        [lambda number=number: read.append(number) or [torch.tensor(number)] for number in range(3)], schedule
    )
    for _ in range(warmup_steps + timed_steps + 1):
        turns()
    assert all(one != other for one, other in pairwise(read))
    assert [step for step, number in enumerate(read) if number == 2] == [warmup_steps + timed_steps - 1]
    assert turns.results() == [torch.tensor(2)]
    assert turns.results() == []
