"""Right training steps at the timed length are far within their budgets, and the loss of a new campaign's falls."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run
from trials import ODD, TRAIN, job, trial

from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.flags import flags_of_loss
from sp_bench.engines import fsdp2
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import timed_step, training_step
from sp_bench.training import text, train
from sp_bench.workloads import train_step

SHORT = replace(TRAIN, learning_rate=1e-6, correctness_seq_len=32, timed_steps=3)
ULYSSES = MethodConfig("ulysses")
ZIGZAG = MethodConfig("ring", "zigzag", dkv_dtype="input")


def cases() -> list[TrialConfig]:
    """Padded lengths, data parallelism, micro-batches, tiles and dtypes."""
    return [
        trial(ULYSSES, 2, seq_len=99, workload=SHORT, model=ODD, batch_size=2),
        trial(ZIGZAG, 2, seq_len=97, workload=replace(SHORT, micro_batches=2), dtype="bfloat16"),
        trial(ZIGZAG, 2, seq_len=96, workload=replace(SHORT, loss_tile_tokens=7), dtype="bfloat16"),
        trial(MethodConfig("single"), 1, seq_len=96, dp_shard_size=2, workload=replace(SHORT, micro_batches=2)),
        trial(MethodConfig("ring", "striped", dkv_dtype="float32"), 2, seq_len=96, workload=SHORT, dtype="float64"),
    ]


def first_steps(config: TrialConfig) -> tuple[timed_step.Run, timed_step.Shorter]:
    mine, sequences = job(config), text.sequences(0, config.num_sequences, config.seq_len)
    shorter = timed_step.run_shorter(config, sequences, mine.mesh, mine.device)
    return timed_step._runs(config, sequences, mine.mesh, mine.device)[0], shorter


def check_right_steps() -> None:
    for config in cases():
        first, shorter = first_steps(config)
        assert first.losses.shape == (config.num_sequences, config.seq_len)
        found = timed_step.check_first_step(first, shorter)
        assert found["timed_loss_error"] <= 0.8 * shorter.loss_budget, (config, found, shorter.loss_budget)
        assert found["timed_max_loss_error"] <= 0.8 * shorter.worst_budget, (config, found, shorter.worst_budget)


def check_losses_of_all_ranks() -> None:
    """They come back in the order of the text, whatever layout and micro-batches."""
    config = cases()[1]
    mine, sequences = job(config), text.sequences(0, config.num_sequences, config.seq_len)
    layout = train.methods.get(config.method.name).layout(config.method, config.sp_size)
    of_text = torch.arange(config.num_sequences * layout.padded(config.seq_len), dtype=torch.float64)
    of_text = of_text.view(config.num_sequences, -1)
    parts = [train.local_part(part, layout, mine.mesh) for part in train.micro_batches(config, of_text)]
    want = of_text[:, : config.seq_len]
    result = train.StepResult(want.mean(), torch.tensor(1.0), torch.cat(parts))
    found = timed_step.first_step(config, result, config.seq_len, mine.mesh)
    assert torch.equal(found.losses, want)
    assert len(sequences) == len(want)


def check_refusals() -> None:
    config = trial(ULYSSES, 2, seq_len=96, workload=SHORT)
    mine, sequences = job(config), text.sequences(0, 1, 96)
    honest = fsdp2.Training.step

    def without_token_losses(self: fsdp2.Training, batches: list[train.Batch]) -> train.StepResult:
        return honest(self, batches)._replace(token_losses=None)

    def another_loss(self: fsdp2.Training, batches: list[train.Batch]) -> train.StepResult:
        result = honest(self, batches)
        return result._replace(loss=1.01 * result.loss)

    for lie, reason in (
        (without_token_losses, "engine fsdp2 gives no loss of a token: nothing proves its losses"),
        (another_loss, "the loss of the first step at seq_len=96 is .*, and its tokens' mean 6.0"),
    ):
        with mock.patch.object(fsdp2.Training, "step", lie), pytest.raises(Incorrect, match=reason):
            timed_step._runs(config, sequences, mine.mesh, mine.device)
    half = replace(config, dtype="bfloat16")
    other_weights = replace(half, dtype="float32", seed=1), "method"
    with (
        mock.patch.object(timed_step, "float32_twin", return_value=other_weights),
        pytest.raises(Incorrect, match="losses at seq_len=32 in bfloat16 differ from those in float32 by"),
    ):
        timed_step.run_shorter(half, sequences, mine.mesh, mine.device)


def check_new_campaigns(config: TrialConfig) -> None:
    """At the learning rate of conf/workload/train_step.yaml the loss falls."""
    measurement = train_step.run(job(config))
    loss = measurement.columns["loss"]
    assert flags_of_loss(loss) == []
    if config.dtype == "float32":
        assert loss == sorted(loss, reverse=True)


def check_weight_decay() -> None:
    """It is below rounding at the learning rate of new campaigns, so the proof takes steps at a higher one."""
    real = train.make_optimizer

    def without_decay(*args: Any) -> torch.optim.Optimizer:
        optimizer = real(*args)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        return optimizer

    mine = job(trial(ULYSSES, 2, workload=SHORT))
    training_step.prove(mine.config, mine.mesh, mine.device)
    wrong = mock.patch.object(train, "make_optimizer", without_decay)
    with wrong, pytest.raises(Incorrect, match=r"roundings off what adamw with lr=0\.0001 makes"):
        training_step.prove(mine.config, mine.mesh, mine.device)


def check(rank: int, new: list[TrialConfig]) -> None:
    check_losses_of_all_ranks()
    check_refusals()
    check_right_steps()
    check_weight_decay()
    for config in new:
        check_new_campaigns(config)


def test_right_steps_are_within_budget_and_wrong_ones_are_named(make_config) -> None:
    short = {"workload__correctness_seq_len": 32, "workload__warmup_steps": 1, "workload__timed_steps": 5}
    new = [
        make_config(workload="train_step", method="ring", kernel="math", seq_len=96, dtype=dtype, **short)
        for dtype in ("float32", "bfloat16")
    ]
    run(2, check, new)
