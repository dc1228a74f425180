"""Training steps at the timed length: which shorter runs they are compared with, what is refused, what weights did."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sp_bench.measure.incorrect import CannotTell, Incorrect
from sp_bench.measure.timing import Schedule
from sp_bench.methods import get
from sp_bench.oracle import timed_step
from sp_bench.oracle.timed_step import Run, Shorter, Weights, check_first_step, check_timed_steps, shorter_lengths
from sp_bench.training.train import StepResult


@given(
    seq_len=st.integers(8, 5000),
    sp_size=st.integers(1, 8),
    method=st.sampled_from([("ulysses", "contiguous"), ("ring", "zigzag"), ("ring", "striped")]),
)
def test_shorter_runs_need_as_many_padded_tokens_and_cut_shards_elsewhere(make_config, seq_len, sp_size, method):
    config = make_config(
        workload="train_step", method=method[0], method__layout=method[1], seq_len=seq_len, sp_size=sp_size
    )
    layout = get(config.method.name).layout(config.method, sp_size)
    lengths = shorter_lengths(config)
    assert lengths[0] <= min(seq_len, 512)
    for length in lengths:
        assert 1 < length <= seq_len
        assert layout.padded(length) - length == layout.padded(seq_len) - seq_len
    if sp_size > 1 and seq_len >= 4 * sp_size * layout.multiple:
        shard, shorter = (layout.padded(length) // sp_size for length in (seq_len, lengths[-1]))
        assert shard * (1 - 0.5 / sp_size) - layout.multiple <= shorter < shard


def run_of(losses: list[float], seq_len: int, grad_norm: float = 1.0) -> Run:
    return Run(seq_len, torch.tensor([losses], dtype=torch.float64), torch.ones(seq_len, dtype=torch.bool), grad_norm)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([5.0, 5.0, 5.001, 4.0], "the losses of the first 3 tokens at seq_len=4 .* at seq_len=3 by 0.000115 "),
        ([5.0, float("nan"), 5.0, 4.0], "the losses of the first 2 tokens .* by nan"),
        ([5.0, 5.0, 5.00005, 4.0], "the losses of token 2 at seq_len=4 differ from those at seq_len=3"),
    ],
)
def test_a_first_step_that_differs_from_the_text_cut_short_is_refused(losses, reason):
    shorter = Shorter([run_of([5.0, 5.0], 2), run_of([5.0, 5.0, 5.0], 3)], 1e-5, 9e-6)
    found = check_first_step(
        run_of([5.0, 5.0, 5.0, 9.0], 4, grad_norm=9.0), shorter
    )  # later tokens may add any gradient
    assert found == {"timed_loss_error": 0.0, "timed_max_loss_error": 0.0}
    with pytest.raises(Incorrect, match=reason):
        check_first_step(run_of(losses, 4), shorter)


def results_of(*steps: tuple[float, float]) -> list[StepResult]:
    return [StepResult(torch.tensor(loss), torch.tensor(norm), None) for loss, norm in steps]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([(5.0, 1.0), (float("inf"), 1.0)], "step 1: loss inf and gradient norm 1.0 must be finite"),
        ([(5.0, float("nan"))], "step 0: loss 5.0 and gradient norm nan must be finite"),
        ([(5.0, 1.0), (4.9, 0.0)], "step 1: the gradient norm is 0.0: there was no backward"),
    ],
)
def test_timed_steps_without_a_loss_or_a_gradient_are_refused(steps, reason):
    assert check_timed_steps(results_of((5.0, 1.0))) == {"loss": [5.0], "grad_norm": [1.0]}
    with pytest.raises(Incorrect, match=reason):
        check_timed_steps(results_of(*steps))


def test_a_repeated_result_is_refused_unless_the_loss_hardly_moves_anyway(make_config):
    config, falls = make_config(workload="train_step"), [(5.0, 1.0), (4.9, 1.0)]
    timed_step.require_new_results(config, [5.0], [1.0], falls)
    timed_step.require_new_results(config, [5.0, 5.0], [1.0, 1.1], falls)
    equal = r"all 2 timed steps have loss 5\.0 and gradient norm 1\.0"
    for line in (falls, ()):
        with pytest.raises(Incorrect, match=f"{equal}: one was repeated"):
            timed_step.require_new_results(config, [5.0, 5.0], [1.0, 1.0], line)
    with pytest.raises(CannotTell, match=f"{equal}; use a workload.learning_rate of 1e-05 or more"):
        timed_step.require_new_results(config, [5.0, 5.0], [1.0, 1.0], [(5.0, 1.0), (5.00001, 1.0)])


FLAT = [(5.0, 1.0), (4.99, 1.0)]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (
            [(5.0, 1.0), (2.5, 1.0), (2.5, 1.0), (5.0, 1.0)],
            r"the losses .* change by 0\.5 of the largest .* budget 0\.026",
        ),
        ([(5.0, 1.0), (5.0, 1.0), (5.0, 1.0), (4.8, 1.0)], r"the losses .* change by 0\.04 "),
        ([(5.0, 1.0), (5.0, 0.7), (5.0, 0.7), (5.0, 1.0)], r"the gradient norms .* change by 0\.3 .* budget 0\.2"),
        ([(5.0, 1.0), (2.5, 1.0), (2.5, 1.0), (2.5, 1.0)], "change by 0.5"),  # the first step alone is right
        ([(5.0, 1.0), (2.5, 1.0), (5.0, 1.0), (2.5, 1.0)], "change by 0.5"),  # every second one is
        ([(5.0, 1.0), (4.9, 0.9), (4.8, 0.8), (4.7, 0.7)], None),  # further than at the reduced length, at one pace
    ],
)
def test_each_step_is_as_the_one_before_it(steps, reason):
    if reason is None:
        timed_step.check_line(results_of(*steps), FLAT)
        return
    with pytest.raises(Incorrect, match=reason):
        timed_step.check_line(results_of(*steps), FLAT)


def test_a_single_step_has_no_neighbours():
    assert timed_step.check_line(results_of((5.0, 1.0)), FLAT) == {"line_error": 0.0}


@pytest.mark.parametrize("warmup_steps", [0, 2])
@pytest.mark.parametrize(
    ("frozen_from", "frozen_until", "is_refused"),
    [(9, 9, False), (0, 9, True), (0, 2, False), (2, 9, True), (3, 9, False), (4, 9, False)],
)
def test_weights_must_change_in_the_timed_steps(
    make_config, monkeypatch, warmup_steps, frozen_from, frozen_until, is_refused
):
    """Two timed steps and the ledger's, in which the optimizer may do nothing."""
    monkeypatch.setattr(timed_step.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(timed_step.dist, "all_gather_object", lambda every, mine: every.__setitem__(0, mine))
    workload = make_config(workload="train_step", workload__warmup_steps=warmup_steps, workload__timed_steps=2).workload
    model, weights, ticks = nn.Linear(3, 2), Weights(Schedule(workload)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with weights.watched(lambda: ticks.append(1)) as tick:
        tick()
        for step in range(warmup_steps + 3):
            model(torch.ones(3)).sum().backward()
            timed = step - warmup_steps + 2  # 2 and 3 are timed
            optimizer.param_groups[0]["lr"] = 0.0 if frozen_from <= timed < frozen_until else 1e-3
            optimizer.step()
            tick()
    assert len(ticks) == warmup_steps + 4
    if is_refused:
        with pytest.raises(Incorrect, match="the optimizer changed no weight of ranks 0 in the timed steps"):
            weights.require_changed()
    else:
        weights.require_changed()


def test_an_optimizer_that_never_steps_changes_no_weight(make_config, monkeypatch):
    monkeypatch.setattr(timed_step.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(timed_step.dist, "all_gather_object", lambda every, mine: every.__setitem__(0, mine))
    weights = Weights(Schedule(make_config(workload="train_step").workload))
    with weights.watched(lambda: None) as tick:
        for _ in range(9):
            tick()
    with pytest.raises(Incorrect, match="changed no weight"):
        weights.require_changed()
