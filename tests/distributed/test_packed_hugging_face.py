"""Hugging Face's stacks on packed documents and on masked labels, on real ranks: which of them train as one process
does on each document alone, and which do not.

A test is skipped if its libraries are not installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run
from test_engines import HF, WITH_TRL, as_a_rank, needs, tensors_left
from trials import PARITY, TRAIN, assembled, job, trial

from sp_bench import engines
from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.engines import hugging_face, trl_sft
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import training_step
from sp_bench.training import text, train
from sp_bench.workloads import parity, train_step

PACK = {"packing": "fixed", "document_len": 32}  # at 96 tokens three; on two ranks a shard ends within the second
STEP, MASKED = replace(TRAIN, **PACK), replace(TRAIN, masked_label_share=0.5)
DRAWN = replace(TRAIN, packing="lognormal", document_len=32, document_sigma=1.0, masked_label_share=0.3)
STACKS = pytest.mark.parametrize("engine", ["hf_deepspeed", "hf_trainer", WITH_TRL])
LIBRARIES = needs("deepspeed", "transformers", "accelerate")


def alone(engine: str, **fields: Any) -> TrialConfig:
    """Two ranks with a sequence each."""
    return trial(MethodConfig("single"), 1, dp_shard_size=2, seq_len=96, engine=EngineConfig(engine), **fields)


def shared(engine: str, **fields: Any) -> TrialConfig:
    """Two ranks of a sequence."""
    return trial(MethodConfig(HF), 2, seq_len=96, engine=EngineConfig(engine), **fields)


def check(config: TrialConfig) -> None:
    columns = assembled(config, train_step.run(job(config)))
    assert columns["counted_matmul_flops"] is None, "who tells attention's products from the others?"
    assert columns["timed_loss_error"] < 1e-5
    assert tensors_left() == []


def prove(config: TrialConfig) -> None:
    mine = job(config)
    training_step.prove(config, mine.mesh, mine.device)


def check_whole_packs(rank: int, engine: str) -> None:
    as_a_rank(rank, 2)
    check(alone(engine, workload=STEP))
    check(alone(engine, workload=replace(DRAWN, micro_batches=2, activation_checkpointing="full")))
    if engine == "hf_deepspeed":
        check(alone(engine, workload=replace(DRAWN, loss_tile_tokens=20)))


@LIBRARIES
@STACKS
def test_a_rank_with_whole_packs_trains_on_each_document_alone(engine: str) -> None:
    run(2, check_whole_packs, engine)


def check_masked_labels(rank: int, engine: str) -> None:
    """The first rank of a sequence has no label."""
    as_a_rank(rank, 2)
    check(shared(engine, workload=MASKED))
    check(shared(engine, workload=replace(MASKED, masked_label_share=0.3, micro_batches=2)))
    check(alone(engine, workload=MASKED))
    if engine == "hf_deepspeed":
        check(shared(engine, workload=replace(MASKED, loss_tile_tokens=7)))
        check_a_loss_averaged_over_ranks_is_refused()


def check_a_loss_averaged_over_ranks_is_refused() -> None:
    def averaged(_: object, model: Any, inputs: dict[str, Any], *__: object) -> tuple[torch.Tensor, Any]:
        outputs = model(**inputs, labels=inputs["shift_labels"])
        return outputs.loss, outputs

    with (
        mock.patch("transformers.integrations.deepspeed.deepspeed_sp_compute_loss", averaged),
        pytest.raises(Incorrect, match="differs from one process"),
    ):
        prove(shared("hf_deepspeed", workload=replace(MASKED, masked_label_share=0.3)))


@LIBRARIES
@STACKS
def test_the_loss_is_the_mean_over_the_labels_of_all_ranks(engine: str) -> None:
    run(2, check_masked_labels, engine)


def check_sdpa_under_ulysses(rank: int, engine: str) -> None:
    as_a_rank(rank, 2)
    config = shared(engine, workload=STEP)
    with pytest.raises(Incorrect, match=r"loss of step 1 differs from one process by 0\.\d+ \(relative\)"):
        prove(config)
    found: dict[str, Any] = {}
    with mock.patch.object(training_step, "require", lambda every, *_: found.update(every)):
        prove(config)
    assert found["gradient"].error > 0.3
    assert found["received"].error <= found["received"].budget, "the clipping is right"
    mine, texts = job(config), [text.sequences(0, 1, 96)]

    def losses(config: TrialConfig) -> torch.Tensor:
        step = partial(engines.get(config.engine.name).run, config, texts, mine.mesh, mine.device, lambda: None)
        (result,) = step(token_losses=1)
        assert result.token_losses is not None
        return result.token_losses

    ours = replace(config, method=MethodConfig("ulysses"), engine=EngineConfig())
    real = TrialConfig.attention_shape

    def without_documents(config: TrialConfig, seq_len: int, *kind: Any) -> AttentionShape:
        return replace(real(config, seq_len, *kind), documents=())

    right = losses(ours)
    with mock.patch.object(TrialConfig, "attention_shape", without_documents):
        running_together = losses(ours)
    theirs = losses(config)
    torch.testing.assert_close(theirs, running_together, rtol=1e-5, atol=1e-5)
    first_document = slice(0, 32 if rank == 0 else 0)
    torch.testing.assert_close(theirs[:, first_document], right[:, first_document], rtol=1e-5, atol=1e-5)
    assert (theirs - right).abs().max() > 0.1


@LIBRARIES
@STACKS
def test_sdpa_under_ulysses_lets_documents_see_those_before_them(engine: str) -> None:
    """`register_with_transformers` drops transformers' mask of documents, which sdpa needs. Their positions restart."""
    run(2, check_sdpa_under_ulysses, engine)


@contextmanager
def flash_attn_here() -> Iterator[None]:
    """transformers builds models for flash attention without flash-attn and without CUDA."""
    from transformers import PreTrainedModel, modeling_utils  # pyright: ignore[reportMissingImports]

    with (
        mock.patch.object(PreTrainedModel, "_flash_attn_can_dispatch", return_value=True),
        mock.patch.object(modeling_utils, "lazy_import_flash_attention"),
    ):
        yield


def check_flash_attention(rank: int, engine: str) -> None:
    as_a_rank(rank, 2)
    half = KernelConfig("flash_attn")
    for config in (shared(engine, workload=DRAWN), alone(engine, workload=DRAWN), shared(engine, workload=MASKED)):
        twin, proven = float32_twin(replace(config, kernel=half, dtype="bfloat16"))
        packed = config.workload.packing != "none"
        assert (twin.kernel.name, twin.dtype, proven) == ("flash_attn" if packed else "math", "float32", "method")
        with flash_attn_here():
            prove(twin)
    with flash_attn_here(), one_document(), pytest.raises(Incorrect, match="differs from one process"):
        prove(replace(shared(engine, workload=DRAWN), kernel=half))


def one_document() -> Any:
    """A stack that does not look for documents."""
    from transformers import modeling_flash_attention_utils as utils  # pyright: ignore[reportMissingImports]

    return mock.patch.object(utils, "_is_packed_sequence", return_value=False)


@LIBRARIES
@STACKS
def test_flash_attention_finds_the_documents_under_ulysses_too(engine: str) -> None:
    """By the positions that DeepSpeed gathers. The arithmetic of flash-attn is our math kernel's, as in the proof in
    float32 of a step in half precision."""
    run(2, check_flash_attention, engine)


def check_parity(rank: int, engine: str) -> None:
    as_a_rank(rank, 2)
    twelve = replace(PARITY, timed_steps=12)
    for config in (
        alone(engine, workload=replace(twelve, **PACK)),
        shared(engine, workload=replace(twelve, masked_label_share=0.3)),
    ):
        assert 0 <= parity.run(job(config)).columns["max_nll_difference"] <= parity.NLL_TOLERANCE


@LIBRARIES
@STACKS
def test_twelve_steps_agree_with_one_process(engine: str) -> None:
    run(2, check_parity, engine)


def check_packing_of_trl(rank: int) -> None:
    as_a_rank(rank, 2)
    real = trl_sft.stack

    def as_packing_does(config: TrialConfig) -> Any:
        stack = real(config)
        return replace(stack, own_arguments=stack.own_arguments | {"padding_free": True})

    with mock.patch.object(trl_sft, "stack", as_packing_does), pytest.raises(IndexError, match="tuple index"):
        prove(shared("trl_sft", workload=STEP))


@needs("deepspeed", "transformers", "accelerate", "trl")
def test_deepspeeds_loader_cannot_cut_the_batches_of_trls_own_packing() -> None:
    """They have `cu_seq_lens_q`, a tensor of one dimension. So the engine feeds TRL's other collator."""
    run(2, check_packing_of_trl)


@needs("transformers", "trl")
def test_both_libraries_make_the_same_batch_of_a_pack() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # pyright: ignore[reportMissingImports]

    config, sequences = alone("trl_sft", workload=DRAWN), text.sequences(0, 1, 96)
    transformers = hugging_face.sample(sequences, config)
    rows = list(trl_sft.dataset(config, [sequences[0]]))
    for padding_free in (True, False):
        trl = DataCollatorForLanguageModeling(0, padding_free=padding_free, return_position_ids=True)(rows)
        for name, values in transformers.items():
            assert torch.equal(trl[name], values), name
    lengths = config.documents(96)
    assert transformers["position_ids"].tolist() == [[place for length in lengths for place in range(length)]]
    shifted = hugging_face.shifted(transformers)
    wanted = train.shift_and_pad(sequences, 96)[1].masked_fill(~train.is_labelled(config, 96, 96), train.IGNORED)
    assert torch.equal(shifted, wanted)
