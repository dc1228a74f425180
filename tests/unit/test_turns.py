"""Steps of attention read two sets of inputs in turn, the last timed one a third. What they return is there in time."""

from itertools import combinations, pairwise

import pytest
import torch

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.shape import AttentionShape
from sp_bench.config.workload import WorkloadConfig
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.timing import Schedule
from sp_bench.methods import SequenceParallelAttention
from sp_bench.workloads.attention import Turns
from sp_bench.workloads.step import attention_step, local_inputs, three_sets

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
    for _ in range(warmup_steps + timed_steps):
        turns()
        assert (turns.read, turns.results) == (read[-1], [torch.tensor(read[-1])])
    assert turns.timed == timed_steps
    turns()
    assert all(one != other for one, other in pairwise(read))
    assert [step for step, number in enumerate(read) if number == 2] == [warmup_steps + timed_steps - 1]


def test_what_a_step_returned_is_gone_before_the_next_one_takes_memory() -> None:
    held = []
    schedule = Schedule(WorkloadConfig("attention", "forward_backward", True, 1, 2, 64))
    step = lambda: held.append(turns.results) or [torch.tensor(1)]  # noqa: E731
    turns = Turns([step] * 3, schedule)
    for _ in range(3):
        turns()
    assert held == [()] * 3


def test_a_result_that_is_computed_when_it_is_read_is_none() -> None:
    class Later(torch.Tensor):
        pass

    inputs = local_inputs(SHAPE, 6, CPU, seed=0)
    attention = SequenceParallelAttention(SequenceLayout("contiguous"), lambda q, k, v: q.as_subclass(Later))
    with pytest.raises(Incorrect, match="the method returns a Later, which may be computed later than the step ends"):
        attention_step(inputs, attention, backward=False)
