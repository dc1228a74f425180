"""Whole training steps on real gloo ranks: equal to one process, with the predicted bytes; wrong ones are refused."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trials import ODD, TINY, TRAIN, assembled, job, trial

from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.engines import fsdp2
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.timing import Measurement
from sp_bench.methods import ulysses
from sp_bench.oracle import one_process, training_step
from sp_bench.oracle.training_step import Finding
from sp_bench.training import text, train
from sp_bench.workloads import train_step

ULYSSES = MethodConfig("ulysses")
GATHER = MethodConfig("all_gather", "zigzag", dkv_dtype="input")
STRIPED = MethodConfig("ring", "striped", dkv_dtype="input")
ZIGZAG = MethodConfig("ring", "zigzag", dkv_dtype="float32")
UPIPE, DOUBLE = MethodConfig("upipe"), MethodConfig("double_ring", "zigzag", dkv_dtype="input", inner_ring_degree=2)
RECOMPUTED = replace(TRAIN, activation_checkpointing="full")
ONE_LAYER = replace(TINY, num_layers=1)
TWO, THREE = (replace(TRAIN, micro_batches=n) for n in (2, 3))
SENT_AGAIN = {  # ops of the attention, by what is recomputed and method
    "full": {"ulysses": {"all_to_all"}, "ring": {"send"}, "all_gather": {"all_gather"}, "usp": {"all_to_all", "send"}}
    | {"upipe": {"all_to_all"}, "double_ring": {"send"}, "deepspeed_ulysses_hf": {"all_to_all", "all_gather"}},
    "selective_output": {"ulysses": {"all_to_all"}, "usp": {"all_to_all"}},
}
TILES = {"loss_tile_tokens": 7}


def usp(placement: str) -> MethodConfig:
    return MethodConfig("usp", "zigzag", None, 2, placement, "input")  # pyright: ignore[reportArgumentType]


def cases(world_size: int) -> list[TrialConfig]:
    """Methods, layouts, dtypes, checkpointing, data parallelism, several micro-batches and losses in tiles. The odd
    length is padded, and so is each shard of the odd model."""
    bf16 = {"dtype": "bfloat16"}
    return {
        1: [
            trial(MethodConfig("single"), 1, batch_size=2),
            trial(MethodConfig("single"), 1, workload=RECOMPUTED, model=ODD, **bf16),
            trial(MethodConfig("single"), 1, workload=replace(THREE, **TILES), batch_size=2),
        ],
        2: [
            trial(ULYSSES, 2, seq_len=45, model=ODD, workload=replace(TWO, **TILES)),
            trial(ZIGZAG, 2, seq_len=45, batch_size=2, workload=replace(RECOMPUTED, micro_batches=3, **TILES), **bf16),
            trial(MethodConfig("single"), 1, dp_replicate_size=2, model=ODD),
            trial(MethodConfig("single"), 1, dp_shard_size=2, batch_size=2, workload=TWO, dtype="float64"),
            trial(UPIPE, 2, seq_len=45, model=ODD, workload=RECOMPUTED, **bf16),
        ],
        3: [
            trial(STRIPED, 3, seq_len=43, model=ODD, workload=RECOMPUTED),
            trial(GATHER, 3, seq_len=43, batch_size=2, **bf16),
        ],
        4: [
            trial(usp("ulysses_inner"), 4, seq_len=45, model=ODD, workload=RECOMPUTED, **bf16),
            trial(usp("ring_inner"), 4, seq_len=45),
            trial(DOUBLE, 4, seq_len=45, model=ODD, workload=RECOMPUTED, **bf16),
            trial(ZIGZAG, 2, dp_replicate_size=2, seq_len=45, model=ODD, workload=RECOMPUTED),
            trial(STRIPED, 2, dp_shard_size=2, batch_size=2, seq_len=45, workload=replace(TWO, **TILES)),
            trial(MethodConfig("single"), 1, dp_replicate_size=2, dp_shard_size=2, model=ODD),
        ],
    }[world_size]


def more_on_four_ranks() -> list[TrialConfig]:
    """Methods beside data parallelism that `cases` has with others."""
    return [
        trial(GATHER, 2, dp_shard_size=2, batch_size=2, seq_len=45, dtype="bfloat16"),
        trial(ULYSSES, 2, dp_replicate_size=2, seq_len=45, model=ODD, workload=THREE),
    ]


def prove(config: TrialConfig) -> dict[str, Any]:
    mine = job(config)
    return training_step.prove(config, mine.mesh, mine.device)


def check_counted_bytes(config: TrialConfig) -> Measurement:
    """`run` also proves the step: it raises Incorrect when losses, gradients or updates are not what they must be."""
    measurement = train_step.run(job(config))
    counted = {key: size for key, (_, size) in measurement.counts.items() if size and key[0] != "other"}
    assert counted == measurement.predicted, config
    if config.sp_size > 1:
        again = {op for phase, op in counted if phase == "recompute"}
        assert again == SENT_AGAIN.get(config.workload.activation_checkpointing, {}).get(config.method.name, set()), (
            config
        )
    assert len(measurement.columns["loss"]) == config.workload.timed_steps
    check_counted_work(config, assembled(config, measurement))
    return measurement


def check_counted_work(config: TrialConfig, columns: dict[str, Any]) -> None:
    """All FLOPs are counted, in any layout, with padding, recomputation, tiles, micro-batches and replicas."""
    assert columns["counted_matmul_flops"] + columns["counted_attention_flops"] == columns["hardware_flops"], config
    parameters = training_costs.num_parameters(config.model)
    assert columns["counted_parameters"] == config.dp_replicate_size * parameters, config


def check_parameters_after_a_step(config: TrialConfig) -> None:
    """In fp64 with SGD the update is the gradient: every element equals that of one process."""
    config = replace(config, dtype="float64", workload=replace(config.workload, optimizer="sgd", learning_rate=0.1))
    trial_job = job(config)
    sequences = text.sequences(0, config.num_sequences, config.seq_len)
    alone = one_process.OneProcess(config, torch.float64, trial_job.device)
    alone.step(sequences)
    with train.open_layers(config, train.padded_seq_len(config, config.seq_len), trial_job.mesh) as layers:
        training = fsdp2.start(config, layers, trial_job.mesh, trial_job.device)
        (batches,) = train.shard_batches(config, [sequences], layers[0].layout, trial_job.mesh, trial_job.device)
        training.step(batches)
    assert [*alone.weights] == [name for name, _ in training.decoder.named_parameters()]
    for name, parameter in training.decoder.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = parameter.detach().full_tensor()
        assert torch.allclose(whole, alone.weights[name], rtol=0, atol=1e-12), f"{name} of {config}"


def check_world(rank: int, world_size: int) -> None:
    for number, config in enumerate(cases(world_size)):
        check_counted_bytes(config)  # and the gradients, in fp32
        if number < 3 and world_size < 4:
            check_parameters_after_a_step(config)
    if world_size == 1:
        check_losses_are_those_after_the_warm_up()
    if world_size == 2:
        check_slightly_wrong_losses_are_refused_by_every_rank()
        check_wrong_training_is_refused()
        check_wrong_accumulation_is_refused()
        check_wrong_updates_are_refused()
        check_other_updates_are_proven()
        check_half_precision_is_proven_in_fp32_too()
        check_micro_batches_are_only_a_way_to_train_on_more_sequences()


@contextmanager
def positions_of_the_local_order() -> Iterator[None]:
    """A mistake: the model numbers its local tokens itself, which is right for the contiguous layout only."""
    real = train.shard_batch

    def numbered(sequences, config, layout, mesh: DeviceMesh, device) -> train.Batch:
        batch = real(sequences, config, layout, mesh, device)
        first = (mesh.get_rank() % layout.sp_size) * len(batch.positions)
        return replace(batch, positions=torch.arange(first, first + len(batch.positions)))

    with mock.patch.object(train, "shard_batch", numbered):
        yield


@contextmanager
def losses_scaled(by: float) -> Iterator[None]:
    """A mistake: each token's loss is off and the gradient is right, as with a softmax in too few bits."""
    real = fsdp2.Training.step

    def scaled(self, batches) -> train.StepResult:
        result = real(self, batches)
        assert result.token_losses is not None
        return result._replace(token_losses=result.token_losses * by)

    with mock.patch.object(fsdp2.Training, "step", scaled):
        yield


@contextmanager
def averaged_gradients() -> Iterator[None]:
    """A mistake: FSDP's default, which divides the gradient of the sum of P ranks' losses by P."""
    real = fsdp2.shard

    def averaging(decoder, config, mesh: DeviceMesh, device) -> None:
        real(decoder, config, mesh, device)
        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(mesh.size())

    with mock.patch.object(fsdp2, "shard", averaging):
        yield


@contextmanager
def labels_shifted_after_sharding() -> Iterator[None]:
    """A mistake: each rank shifts its own tokens, so the label of its last token is missing."""
    real = train.shard_batch

    def late(sequences, *args) -> train.Batch:
        batch = real(sequences, *args)
        missing = torch.full_like(batch.labels[:, :1], train.IGNORED)
        return replace(batch, labels=torch.cat((batch.tokens[:, 1:], missing), dim=1))

    with mock.patch.object(train, "shard_batch", late):
        yield


@contextmanager
def micro_batches_of_one_loss_each() -> Iterator[None]:
    """A mistake: the losses of micro-batches are means that are added up. With m of them the gradient is m times too
    large."""
    real = fsdp2.Training._accumulate

    def whole(self, batch: train.Batch, num_valid_tokens: int) -> torch.Tensor:
        return real(self, batch, batch.num_valid_tokens)

    with mock.patch.object(fsdp2.Training, "_accumulate", whole):
        yield


@contextmanager
def gradients_of_the_last_micro_batch() -> Iterator[None]:
    """A mistake: the gradient of each micro-batch overwrites the one before."""
    real = fsdp2.Training._accumulate

    def forgetful(self, batch: train.Batch, num_valid_tokens: int) -> torch.Tensor:
        self.decoder.zero_grad()
        return real(self, batch, num_valid_tokens)

    with mock.patch.object(fsdp2.Training, "_accumulate", forgetful):
        yield


@contextmanager
def micro_batches_in_another_order() -> Iterator[None]:
    """A mistake: micro-batches are in the wrong order. The gradient is right, but the tokens' losses are misplaced."""
    real = train.shard_batches

    def backwards(*args) -> list[list[train.Batch]]:
        return [step[::-1] for step in real(*args)]

    with mock.patch.object(train, "shard_batches", backwards):
        yield


def check_losses_are_those_after_the_warm_up() -> None:
    """A row's losses belong to the same steps as its times."""
    config = trial(MethodConfig("single"), 1, workload=replace(TRAIN, warmup_steps=2))
    texts = [text.sequences(0, config.num_sequences, config.seq_len)] * 4
    alone = [float(result.loss) for result in one_process.run_steps(config, texts, torch.float32, job(config).device)]
    assert min(before - after for before, after in pairwise(alone)) > 1e-3  # so that the steps can be told apart
    assert train_step.run(job(config)).columns["loss"] == pytest.approx(alone[2:], rel=1e-5)


def check_slightly_wrong_losses_are_refused_by_every_rank() -> None:
    """An error of 1e-4 is ten times the budget of fp32. Each rank computes the error over all tokens. If it saw only
    its own, one rank could accept what another refuses, and the row would depend on rank 0."""
    config = trial(ULYSSES, 2, model=ONE_LAYER)
    with (
        losses_scaled(by=1 + 1e-4),
        pytest.raises(Incorrect, match=r"loss of step 1 differs from one process by 0\.0001 "),
    ):
        prove(config)


def check_wrong_accumulation_is_refused() -> None:
    mistakes = {
        micro_batches_of_one_loss_each: "the gradient of .* in step 1, before clipping, differs",
        gradients_of_the_last_micro_batch: "the gradient of .* in step 1, before clipping, differs",
        micro_batches_in_another_order: "loss of step 1",
    }
    check_refused(trial(ULYSSES, 2, workload=TWO, model=ONE_LAYER), mistakes)


def check_refused(config: TrialConfig, mistakes: Mapping[Callable[[], AbstractContextManager[None]], str]) -> None:
    """The step passes its proof, and with each mistake it does not. mistakes: a mistake -> what the error says."""
    prove(config)
    for mistake, names in mistakes.items():
        with mistake(), pytest.raises(Incorrect, match=names):
            prove(config)


def check_micro_batches_are_only_a_way_to_train_on_more_sequences() -> None:
    """The same sequences give the same step, in one micro-batch and in several."""
    whole = trial(ULYSSES, 2, batch_size=6, dtype="float64", model=ONE_LAYER)
    expected = losses_and_norms(whole)
    for workload in (TWO, THREE):
        parts = replace(whole, batch_size=6 // workload.num_micro_batches, workload=workload)
        assert losses_and_norms(parts) == pytest.approx(expected, rel=1e-12)


def losses_and_norms(config: TrialConfig) -> list[float]:
    """The loss and the gradient norm of each of two steps on one text."""
    mine, sequences = job(config), text.sequences(0, config.num_sequences, config.seq_len)
    results = fsdp2.run(config, [sequences] * 2, mine.mesh, mine.device, lambda: None, token_losses=0)
    return [float(value) for result in results for value in (result.loss, result.grad_norm)]


def check_wrong_training_is_refused() -> None:
    for dtype, model in (("float32", replace(ONE_LAYER, qk_norm=False)), ("bfloat16", ONE_LAYER)):
        mistakes = {
            positions_of_the_local_order: "loss of step 1",
            averaged_gradients: "the gradient of .* in step 1, before clipping, differs",
            labels_shifted_after_sharding: "loss.* of step 1",
        }
        check_refused(trial(ZIGZAG, 2, dtype=dtype, model=model), mistakes)


@contextmanager
def updating(change: Callable[..., None], *, before: bool = False) -> Iterator[None]:
    """A mistake: beside each update, `change(parameters, optimizer)` is called, before it or after it."""
    real = train.update

    def changed(parameters, optimizer, max_grad_norm, **options):
        if before:
            change(parameters, optimizer)
        norm = real(parameters, optimizer, max_grad_norm, **options)
        if not before:
            change(parameters, optimizer)
        return norm

    with mock.patch.object(train, "update", changed):
        yield


@torch.no_grad()
def negate_gradients(parameters, optimizer) -> None:
    for parameter in parameters:
        parameter.grad.neg_()


@torch.no_grad()
def scale_parameters(parameters, optimizer) -> None:
    for parameter in parameters:
        parameter *= 1 + 1e-4


def forget_moments(parameters, optimizer) -> None:
    optimizer.state.clear()


def update_again(parameters, optimizer) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def optimizer_without_the_head() -> Iterator[None]:
    """A mistake: the optimizer does not know the last parameter."""
    real = train.make_optimizer

    def some(parameters, workload):
        optimizer = real(parameters, workload)
        optimizer.param_groups[0]["params"].pop()
        return optimizer

    with mock.patch.object(train, "make_optimizer", some):
        yield


@contextmanager
def losses_of_the_first_step() -> Iterator[None]:
    """A mistake: the update does not reach what the model computes with."""
    real, first = fsdp2.Training.step, []

    def step(self, batches) -> train.StepResult:
        first.append(real(self, batches))
        return first[0]

    with mock.patch.object(fsdp2.Training, "step", step):
        yield


@contextmanager
def a_gradient_not_shown() -> Iterator[None]:
    """A mistake: an engine leaves out a parameter where it shows gradients."""
    real = train.parts
    with mock.patch.object(train, "parts", lambda d: (part for part in real(d) if part.name != "norm.weight")):
        yield


def check_wrong_updates_are_refused() -> None:
    """Each in one dtype, by turns. An update that does not reach the model is another thing in bf16, where the model
    computes with a copy."""
    received = "the gradient of .* that the optimizer gets in step"
    for mistake, dtypes, names in (
        (
            partial(updating, negate_gradients, before=True),
            ["float32"],
            rf"{received} . differs from the clipped one by 2 ",
        ),
        (partial(updating, scale_parameters), ["bfloat16"], "between steps . and . something changes parameter of"),
        (partial(updating, forget_moments), ["float64"], "between steps . and . something changes exp_avg"),
        (partial(updating, update_again), ["float32"], rf"{received} [246] differs from the clipped one by 1 "),
        (optimizer_without_the_head, ["bfloat16"], "the optimizer took 0 of 3 steps on head.weight"),
        (losses_of_the_first_step, ["bfloat16", "float64"], "the tokens' losses of steps 1 and 2 are equal"),
        (a_gradient_not_shown, ["float32"], "the engine shows no gradient of norm.weight"),
    ):
        for dtype in dtypes:
            with mistake(), pytest.raises(Incorrect, match=names):
                prove(trial(ULYSSES, 2, dtype=dtype, model=ONE_LAYER))


def check_other_updates_are_proven() -> None:
    """SGD with momentum, and gradients that nobody clips."""
    sgd, unclipped = replace(TRAIN, optimizer="sgd"), replace(TRAIN, max_grad_norm=None)
    for workload in (sgd, unclipped, replace(unclipped, optimizer="sgd")):
        config = trial(ULYSSES, 2, workload=workload, model=ONE_LAYER)
        assert prove(config)["update_error"]["error"] <= 4


def check_half_precision_is_proven_in_fp32_too() -> None:
    low, wide = (trial(ULYSSES, 2, dtype=dtype, model=ONE_LAYER) for dtype in ("bfloat16", "float32"))
    assert "fp32_proof" not in prove(wide)
    assert prove(low)["fp32_proof"] == "method"
    half_only = lambda method, kernel, shape, sp_size: "half precision only" if kernel == "math" else None  # noqa: E731
    with mock.patch.object(ulysses, "unsupported_reason", half_only):
        columns = prove(low)
    assert columns["fp32_proof"] == "step_only"
    assert columns["fp32_grad_error"]["error"] < 1e-5 < columns["grad_error"]["error"]


def test_the_proof_has_as_many_tiles_as_the_timed_length() -> None:
    workload = replace(RECOMPUTED, loss_tile_tokens=512, mlp_tile_tokens=1024)
    config = trial(ULYSSES, 2, seq_len=6144, workload=workload)
    proof = training_step.proof_config(config)
    assert 48 / proof.workload.loss_tile_tokens == 6144 / 512
    assert 48 / proof.workload.mlp_tile_tokens == 6144 / 1024
    assert training_step.proof_config(trial(ULYSSES, 2)).workload == TRAIN


def test_the_proof_has_two_layers_and_two_that_share_host_memory() -> None:
    deep = trial(ULYSSES, 2, model=replace(TINY, num_layers=32))
    offloaded = replace(deep, workload=replace(RECOMPUTED, checkpoint_offload=True))
    assert [training_step.proof_config(each).model.num_layers for each in (deep, offloaded)] == [2, 3]


def test_a_proof_that_is_not_a_number_is_refused() -> None:
    """NaN is not within any budget, and worse than any number."""
    good = {kind: Finding(0.0, 1e-5, f"{kind} is wrong") for kind in training_step.KINDS}
    training_step.require(good)
    for kind in training_step.KINDS:
        wrong = good[kind]._replace(error=math.nan)
        assert wrong.excess == math.inf
        with pytest.raises(Incorrect, match=f"^{kind} is wrong"):
            training_step.require(good | {kind: wrong})


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_steps_equal_one_process_and_send_the_predicted_bytes(world_size: int) -> None:
    run(world_size, check_world, world_size)


def check_more(rank: int) -> None:
    for config in more_on_four_ranks():
        check_counted_bytes(config)


@pytest.mark.faults
def test_more_training_steps_on_four_ranks_send_the_predicted_bytes() -> None:
    run(4, check_more)
