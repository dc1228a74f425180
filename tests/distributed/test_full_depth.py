"""Right steps of all layers fall as their gradients say, in all engines, layouts and dtypes; and a budget that can tell
nothing refuses nothing."""

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import local_rank, run
from trials import ODD, TINY, TRAIN, job, trial

from sp_bench.config.engine import EngineConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.hardware import package_versions
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import full_depth, one_process, timed_step, training_step
from sp_bench.training import text, train
from sp_bench.workloads import train_step

ULYSSES, SINGLE = MethodConfig("ulysses"), MethodConfig("single")
ZIGZAG = MethodConfig("ring", "zigzag", dkv_dtype="input")
DEEP = replace(TINY, num_layers=5)
SHORT = replace(TRAIN, learning_rate=1e-6, correctness_seq_len=48)


def cases(engine: str = "fsdp2") -> list[TrialConfig]:
    """Learning rates, layouts, padded lengths, replicas, micro-batches, tiles, checkpoints and dtypes."""
    fields = {"engine": EngineConfig(engine), "model": DEEP, "seq_len": 96}

    def of(method: MethodConfig, sp_size: int, **others) -> TrialConfig:
        workload = replace(SHORT, **{n: others.pop(n) for n in list(others) if hasattr(SHORT, n)})
        return trial(method, sp_size, workload=workload, **fields | others)

    shared = [
        *(of(ULYSSES, 2, learning_rate=rate) for rate in (1e-6, 1e-4, 1e-2)),
        of(ZIGZAG, 2, optimizer="sgd", micro_batches=2),
        of(ZIGZAG, 2, dtype="bfloat16"),
        of(SINGLE, 1, dp_shard_size=2, micro_batches=2),
    ]
    ours = [
        of(ULYSSES, 2, model=ODD, seq_len=99, batch_size=2),
        of(ZIGZAG, 2, dtype="float64", loss_tile_tokens=7, mlp_tile_tokens=7, activation_checkpointing="full"),
        of(ULYSSES, 2, activation_checkpointing="selective_output", checkpoint_offload=True),
        of(SINGLE, 1, dp_replicate_size=2, masked_label_share=0.25),
        of(ULYSSES, 2, packing="fixed", document_len=24),
    ]
    return shared + (ours if engine == "fsdp2" else [])


def check_right_steps(rank: int, configs: list[TrialConfig]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank()), "WORLD_SIZE": "2"}  # DeepSpeed reads them
    for config in configs:
        mine, sequences = job(config), text.sequences(0, config.num_sequences, config.seq_len)
        found = timed_step.run_shorter(config, sequences, mine.mesh, mine.device).columns
        assert found["fall_error"] <= found["fall_budget"] / 3, (config, found)
        assert found["fall_budget"] <= 2 * full_depth.FALL_TOLERANCE, (config, found)
        assert found["full_update_error"]["error"] <= 2.7, (config, found)


def test_right_steps_fall_as_their_gradients_say() -> None:
    run(2, check_right_steps, cases())


@pytest.mark.skipif("deepspeed" not in package_versions(), reason="deepspeed not installed")
def test_right_steps_of_zero3_fall_as_their_gradients_say() -> None:
    run(2, check_right_steps, cases("deepspeed"))


def check_old_moments(rank: int) -> None:
    """What an optimizer had before a single step is a part of it."""
    honest, workload = train.make_moments, replace(SHORT, single_step=True, timed_steps=1)
    config = trial(ULYSSES, 2, seq_len=96, workload=workload)
    mine, sequences = job(config), text.sequences(0, 1, 96)
    timed_step.run_shorter(config, sequences, mine.mesh, mine.device)

    def left(optimizer: torch.optim.Optimizer) -> None:
        honest(optimizer)
        for state in optimizer.state.values():
            state["exp_avg"].add_(1e-3)

    reason = "before its first step AdamW has exp_avg of .*, not zero"
    with mock.patch.object(train, "make_moments", left), pytest.raises(Incorrect, match=reason):
        timed_step.run_shorter(config, sequences, mine.mesh, mine.device)
    assert train_step.run(mine).columns["last_update_error"]["error"] <= 2.7
    plain: Any = timed_step.run_shorter(config, sequences, mine.mesh, mine.device)
    with (
        mock.patch.object(timed_step, "run_shorter", return_value=plain),
        mock.patch.object(train, "make_moments", left),
        pytest.raises(Incorrect, match="in the step that is not timed: before the only step exp_avg of tensor 0"),
    ):
        train_step.run(mine)


def test_moments_that_are_not_zero_before_a_single_step_are_refused() -> None:
    run(2, check_old_moments)


def check_by_layer(rank: int) -> None:
    for config in cases()[-5:]:
        sequences = training_step.labelled(config, text.sequences(0, config.num_sequences, 48))
        stored = getattr(torch, config.dtype)
        (whole,) = one_process.gradients(config, sequences, [stored], torch.device("cpu"))
        by_layer = one_process.token_losses(config, sequences, torch.device("cpu"))
        labelled = whole.token_losses != 0
        assert labelled.any()
        assert torch.allclose(by_layer[labelled], whole.token_losses[labelled], rtol=1e-6)


def test_one_process_that_computes_layer_by_layer_has_the_losses_of_the_whole_model() -> None:
    run(1, check_by_layer)


@pytest.mark.parametrize(
    ("error", "budget", "is_refused"), [(9e-4, 1e-3, False), (1.1e-3, 1e-3, True), (0.5, 0.02, False)]
)
def test_a_budget_that_is_too_wide_to_tell_refuses_nothing(error, budget, is_refused) -> None:
    fall = full_depth.Fall(error, budget, "the loss changes by 1 nats")
    if is_refused:
        with pytest.raises(Incorrect, match="all layers: the loss changes by 1 nats"):
            full_depth.require_fall(fall, "all layers")
    else:
        full_depth.require_fall(fall, "all layers")
