"""Training steps on packed documents and on masked labels, on real ranks: equal to one process that trains on each
document alone. The loss is the mean over the world's labels, whichever rank has them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import lies
import pytest
import torch
from ranks import run
from test_train_step import ONE_LAYER, check_counted_bytes, check_parameters_after_a_step
from trials import PARITY, TRAIN, job, trial

from sp_bench import methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import training_step
from sp_bench.training import text, train
from sp_bench.workloads import parity

ULYSSES = MethodConfig("ulysses")
GATHER = MethodConfig("all_gather", dkv_dtype="input")
ZIGZAG = MethodConfig("ring", "zigzag", dkv_dtype="input")
EACH = MethodConfig("ring", "document_zigzag", dkv_dtype="input")
PACK = {"packing": "fixed", "document_len": 32}  # at 96 tokens three; on two ranks a shard ends within the second
STEP = replace(TRAIN, **PACK)
MASKED = replace(TRAIN, masked_label_share=0.5)  # on two contiguous ranks the first has no label
TWELVE = replace(PARITY, timed_steps=12)


def steps(world_size: int) -> list[TrialConfig]:
    every_option = replace(STEP, activation_checkpointing="full", loss_tile_tokens=7, micro_batches=2)
    kept = replace(STEP, activation_checkpointing="selective_output", packing="lognormal", document_sigma=1.0)
    return {
        2: [
            trial(ULYSSES, 2, seq_len=96, workload=kept),
            trial(ZIGZAG, 2, seq_len=96, workload=replace(every_option, masked_label_share=0.3), dtype="bfloat16"),
            trial(EACH, 2, seq_len=96, workload=replace(kept, masked_label_share=0.3)),
        ],
        3: [trial(ZIGZAG, 3, seq_len=96, workload=STEP)],
    }[world_size]


def trainings(world_size: int) -> list[TrialConfig]:
    return {
        2: [
            trial(GATHER, 2, seq_len=96, workload=replace(TWELVE, **PACK)),
            trial(EACH, 2, seq_len=96, workload=replace(TWELVE, **PACK)),
            trial(MethodConfig("single"), 1, dp_shard_size=2, workload=replace(TWELVE, masked_label_share=0.5)),
        ],
        3: [],
    }[world_size]


def check_world(rank: int, world_size: int) -> None:
    for config in steps(world_size):
        measurement = check_counted_bytes(config)
        assert measurement.columns["timed_loss_error"] < (0.1 if config.dtype == "bfloat16" else 1e-5)
    check_parameters_after_a_step(steps(world_size)[0])
    for config in trainings(world_size):
        assert 0 <= parity.run(job(config)).columns["max_nll_difference"] <= parity.NLL_TOLERANCE
    if world_size == 2:
        check_a_rank_may_have_no_label(rank)
        check_mistakes_are_refused()
        check_a_loss_averaged_over_ranks_is_refused()


def check_a_rank_may_have_no_label(rank: int) -> None:
    config = trial(ULYSSES, 2, workload=replace(MASKED, loss_tile_tokens=7), model=ONE_LAYER)
    mine, layout = job(config), methods.get("ulysses").layout(ULYSSES, 2)
    batch = train.shard_batch(text.sequences(0, 1, 48), config, layout, mine.mesh, mine.device)
    assert int((batch.labels != train.IGNORED).sum()) == (0, 24)[rank]
    assert batch.num_valid_tokens == 24
    training_step.prove(config, mine.mesh, mine.device)


def check_a_loss_averaged_over_ranks_is_refused() -> None:
    """The proof's ranks have different numbers of labels, whether or not the trial's have."""
    lies.LIES["loss_averaged_over_ranks"]()
    for workload in (MASKED, STEP, TRAIN):
        config = trial(ULYSSES, 2, seq_len=96, workload=workload, model=ONE_LAYER)
        mine = job(config)
        with pytest.raises(Incorrect, match=r"the gradient of .* differs from one process"):
            training_step.prove(config, mine.mesh, mine.device)


def batch_with(**changes: Callable[[TrialConfig, torch.Tensor, train.Batch], object]) -> Any:
    """A mistake in a rank's share of the tokens."""
    real = train.shard_batch

    def wrong(sequences, config, *args) -> train.Batch:
        batch = real(sequences, config, *args)
        return replace(batch, **{name: change(config, sequences, batch) for name, change in changes.items()})

    return mock.patch.object(train, "shard_batch", wrong)


def check_mistakes_are_refused() -> None:
    """The proof of a step knows documents: each mistake is one that a whole sequence would not show."""
    config = trial(ULYSSES, 2, seq_len=96, workload=STEP, model=ONE_LAYER)
    whole = trial(ULYSSES, 2, seq_len=96, model=ONE_LAYER)
    real = train.shard_batch
    mine = job(config)

    def of_whole(name: str) -> Callable[..., object]:
        layout = methods.get("ulysses").layout(ULYSSES, 2)
        return lambda _, sequences, batch: getattr(real(sequences, whole, layout, mine.mesh, mine.device), name)

    mistakes = {
        # that positions go on over a boundary would not show: RoPE sees their differences within a document only
        "a shard's positions begin at 0": batch_with(
            positions=lambda *given: torch.arange(given[-1].positions.numel())
        ),
        "labels cross boundaries": batch_with(labels=of_whole("labels"), num_valid_tokens=of_whole("num_valid_tokens")),
        "labels crossing boundaries are counted": batch_with(num_valid_tokens=of_whole("num_valid_tokens")),
        "the last documents run together": mock.patch.object(
            train, "open_attention", _with_documents(lambda lengths: (*lengths[:-2], sum(lengths[-2:])))
        ),
    }
    for mistake in mistakes.values():
        with mistake, pytest.raises(Incorrect, match="differs from one process"):
            training_step.prove(config, mine.mesh, mine.device)


def _with_documents(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[..., object]:
    real = train.open_attention

    def opened(config: TrialConfig, seq_len: int, mesh, kind: str | None = None) -> object:
        wrong = change(config.documents(seq_len))
        with mock.patch.object(TrialConfig, "documents", return_value=wrong):
            return real(config, seq_len, mesh, kind)

    return opened


@pytest.mark.parametrize("world_size", [2, 3])
def test_packed_training_is_that_of_each_document_alone(world_size: int) -> None:
    run(world_size, check_world, world_size)
