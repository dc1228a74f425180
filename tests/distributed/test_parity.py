"""The parity workload: up to 20 training steps with each method against one process, and what is refused."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from ranks import run
from test_train_step import averaged_gradients
from trials import PARITY, TINY, job, trial

from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.engines import fsdp2
from sp_bench.measure.incorrect import CannotTell, Incorrect
from sp_bench.workloads import parity

TWELVE = replace(PARITY, timed_steps=12)
OFFLOADED = replace(
    TWELVE, micro_batches=2, loss_tile_tokens=7, activation_checkpointing="full", checkpoint_offload=True
)
OFFLOADED_BYTES = 24 * TINY.hidden_size * 4  # the input of the first of two layers: a rank's tokens in fp32


def cases(world_size: int) -> list[TrialConfig]:
    if world_size == 2:
        return [
            trial(MethodConfig("ulysses"), 2, workload=PARITY),
            trial(MethodConfig("ring", "zigzag", dkv_dtype="input"), 2, workload=TWELVE, seq_len=47),
            trial(MethodConfig("all_gather", "zigzag", dkv_dtype="input"), 2, workload=TWELVE),
            trial(MethodConfig("single"), 1, dp_shard_size=2, workload=TWELVE),
            trial(MethodConfig("ulysses"), 2, workload=OFFLOADED, seq_len=47),
        ]
    return [
        trial(MethodConfig("usp", "striped", None, 2, "ring_inner", "input"), 4, workload=PARITY, seq_len=47),
        trial(MethodConfig("ring", "striped", dkv_dtype="input"), 2, dp_replicate_size=2, workload=TWELVE),
    ]


def check_world(rank: int, world_size: int) -> None:
    for config in cases(world_size):
        measurement = parity.run(job(config))
        difference = measurement.columns["max_nll_difference"]
        assert difference <= parity.NLL_TOLERANCE, config
        if config.sp_size > 1:  # sums are in another order, so exactly 0 would be a training compared with itself
            assert difference > 0, config
        assert len(measurement.rank_step_ms) == len(measurement.columns["loss"]) == config.workload.timed_steps
        counted = {key: size for key, (_, size) in measurement.counts.items() if size and key[0] != "other"}
        assert counted == measurement.predicted, config
        assert measurement.columns["compile_s"] is None
        offloads = config.workload.checkpoint_offload
        assert measurement.columns["pinned_host_bytes"] == (OFFLOADED_BYTES if offloads else None)
    if world_size == 2:
        check_checkpoints_that_stay_on_the_device_are_refused()
        check_wrong_training_is_refused()


def check_wrong_training_is_refused() -> None:
    """With averaged gradients the first loss is right, but each update is too small. The gradient norm shows it."""
    config = trial(MethodConfig("ulysses"), 2, workload=replace(PARITY, timed_steps=1))
    with averaged_gradients(), pytest.raises(Incorrect, match="step 0 differs from one process"):
        parity.run(job(config))


def check_checkpoints_that_stay_on_the_device_are_refused() -> None:
    config = trial(MethodConfig("ulysses"), 2, workload=OFFLOADED, seq_len=47)
    stay = patch.object(fsdp2, "Offload", lambda num_layers: None)
    with stay, pytest.raises(Incorrect, match="offloaded checkpoints took 0 bytes of host memory"):
        parity.run(job(config))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_all_steps_agree_with_one_process(world_size: int) -> None:
    run(world_size, check_world, world_size)


def steps(fall: float = 1.0) -> torch.Tensor:
    """[20,2]: a loss that falls by `fall`, and gradient norms."""
    return torch.stack((torch.linspace(5.0, 5.0 - fall, 20), torch.linspace(3.0, 1.0, 20)), dim=1).double()


def test_training_within_the_tolerances_is_accepted_and_its_difference_is_recorded() -> None:
    got = steps()
    got[7, 0] += 4e-6
    differences = {"max_nll_difference": 4e-6, "mean_nll_difference": 2e-7, "max_grad_norm_difference": 0.0}
    assert parity.compare(got, steps(), [steps()]) == pytest.approx(differences)


@pytest.mark.parametrize(("column", "factor"), [(0, 1 + 1e-5), (1, 1 + 2e-5), (1, 0.25), (0, float("nan"))])
def test_a_step_that_differs_is_refused_and_its_number_is_named(column: int, factor: float) -> None:
    got = steps()
    got[3, column] *= factor
    with pytest.raises(Incorrect, match="step 3 differs from one process"):
        parity.compare(got, steps(), [steps()])


def test_agreement_of_models_that_do_not_learn_is_refused() -> None:
    with pytest.raises(CannotTell, match=r"the loss fell by 0.4 nats over 20 steps, less than 0.5"):
        parity.require_fall(steps(0.4))


def test_configs_whose_parity_would_prove_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="parity needs sgd"):
        replace(PARITY, optimizer="adamw")
    with pytest.raises(ConfigError, match=r"use float32 or float64, or workload\.linear_dtype=float8_rowwise"):
        trial(MethodConfig("ulysses"), 2, workload=PARITY, dtype="bfloat16")
    trial(MethodConfig("ulysses"), 2, workload=replace(PARITY, linear_dtype="float8_rowwise"), dtype="bfloat16")
    with pytest.raises(ConfigError, match="the training text is bytes"):
        trial(MethodConfig("ulysses"), 2, workload=PARITY, model=replace(TINY, vocab_size=100))


def test_budgets_grow_with_what_rounding_makes_of_the_reference() -> None:
    got, reordered = steps(), steps()
    got[5, 1] *= 1 + 2e-5
    reordered[4, 1] *= 1 + 2e-6  # from that step on
    parity.compare(got, steps(), [reordered])
    got[3, 1] *= 1 + 2e-5
    with pytest.raises(Incorrect, match="step 3 differs from one process"):
        parity.compare(got, steps(), [reordered])


def test_in_fp8_the_loss_of_any_step_may_be_twice_as_far_off_as_that_of_the_control_in_its_farthest() -> None:
    got, control = steps(), steps()
    control[17, 0] += 0.01
    got[3, 0] += 0.02
    got[5, 1] *= 2  # the norm of a step whose loss leaps is chance
    found = parity.compare(got, steps(), [control], in_float8=True)
    assert (found["max_nll_difference"], found["control_nll_difference"]) == pytest.approx((0.02, 0.01))
    got[3, 0] += 0.001
    with pytest.raises(Incorrect, match=r"step 3 differs from one process: NLL by 0\.021 nats \(allowed 0\.02\)"):
        parity.compare(got, steps(), [control], in_float8=True)
