"""Whole training steps of Hugging Face's context parallelism on FSDP2, on real ranks: equal to training on one process.

Neither Accelerate's FSDP2 nor torch's context parallelism runs on a CPU. On gloo two stand-ins make them: Accelerate is
told that its ranks have devices, and `sdpa_stand_in` computes instead of aten's flash attention. All the rest is
theirs: the mesh, the sharding, the cutting of a batch, the loader, the clipping.
"""

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import sdpa_stand_in
import torch
from ranks import here, local_rank, run, worlds
from test_engines import tensors_left
from trials import PARITY, TINY, TRAIN, assembled, job, trial

from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.engines import hf_fsdp2, hugging_face
from sp_bench.hardware import package_versions
from sp_bench.training import rotary, train
from sp_bench.workloads import parity, train_step

ENGINE, FLASH = EngineConfig("hf_fsdp2"), KernelConfig("sdpa_flash")
GATHER, ROTATE = (MethodConfig("torch_context_parallel", "zigzag", way) for way in ("allgather", "alltoall"))
SINGLE, RING = MethodConfig("single"), MethodConfig("ring", "zigzag", dkv_dtype="float32")
RECOMPUTED, THREE = replace(TRAIN, activation_checkpointing="full"), replace(TRAIN, micro_batches=3)
STRETCHED = {"rope_factor": 4.0, "rope_original_seq_len": 16}
LLAMA = replace(TINY, name="llama", qk_norm=False, tie_embeddings=True, rope_scaling="llama3", **STRETCHED)
YARN = replace(TINY, rope_scaling="yarn", **STRETCHED)

pytestmark = pytest.mark.skipif(
    bool(missing := [name for name in ("transformers", "accelerate") if name not in package_versions()]),
    reason=f"{' and '.join(missing)} not installed",
)


def as_on_devices(rank: int, world_size: int) -> None:
    """Sets what Accelerate reads of a rank. On gloo, takes the ranks' CPUs for devices from here on."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank()), "WORLD_SIZE": str(world_size)}
    if here().type == "cuda":
        return
    from accelerate.state import DistributedType, PartialState  # pyright: ignore[reportMissingImports]

    sdpa_stand_in.install()
    real = hf_fsdp2._accelerator

    def accelerator(config: TrialConfig) -> Any:
        PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU
        return real(config)

    mock.patch.object(hf_fsdp2, "_accelerator", accelerator).start()


def cases(world_size: int) -> list[TrialConfig]:
    """Both ways of K and V, padded and not, tied and not, with recomputation, micro-batches and data parallelism."""
    make = {"engine": ENGINE, "kernel": FLASH}
    if world_size == 2:
        return [
            trial(GATHER, 2, workload=RECOMPUTED, model=YARN, **make),
            trial(ROTATE, 2, seq_len=45, model=LLAMA, batch_size=2, workload=THREE, **make),
            trial(SINGLE, 1, dp_shard_size=2, seq_len=45, model=LLAMA, **make),
            trial(GATHER, 2, dtype="bfloat16", **make),
        ]
    return [
        trial(GATHER, 2, dp_shard_size=2, seq_len=45, workload=THREE, **make),
        trial(ROTATE, 4, workload=RECOMPUTED, **make),
        trial(SINGLE, 1, dp_replicate_size=2, dp_shard_size=2, **make),
    ]


@pytest.mark.parametrize("model", [LLAMA, YARN, replace(LLAMA, head_dim=128, rope_original_seq_len=8192)])
def test_transformers_scales_the_rotary_embedding_as_ours(model: ModelConfig) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # pyright: ignore[reportMissingImports]

    positions = torch.arange(50)
    theirs = LlamaRotaryEmbedding(hugging_face.model_config(model, 50))(torch.zeros(1), positions[None])
    for their, our in zip(theirs, rotary.rotation(positions, model, torch.float32), strict=True):
        torch.testing.assert_close(their[0, :, : model.head_dim // 2], our[:, 0], rtol=0, atol=1e-5)


def placed(config: TrialConfig) -> TrialConfig:
    """On GPUs in half precision, on cuDNN, with sizes that it takes."""
    if here().type == "cpu":
        return config
    fabric, hardware = FabricConfig("nvlink", "nccl"), HardwareConfig("h200", "cuda")
    sizes = {
        "model": replace(config.model, head_dim=64),
        "seq_len": 8 * config.seq_len,
        "workload": replace(config.workload, correctness_seq_len=256),
    }
    config = replace(config, kernel=KernelConfig("cudnn"), dtype="bfloat16", **sizes)
    return replace(config, fabric=fabric, hardware=hardware)


def check(config: TrialConfig) -> None:
    measurement = train_step.run(job(config))
    counted = {
        key: size
        for key, (_, size) in measurement.counts.items()
        if size and key[0] not in ("other", *measurement.unpredicted)
    }
    assert counted == measurement.predicted, config
    # without context parallelism nothing stands in for torch's choice on a CPU
    picked_by_torch = here().type == "cpu" and config.sp_size == 1
    ran = replace(config, kernel=KernelConfig("cpu_flash")) if picked_by_torch else config
    columns = assembled(ran, measurement)
    assert any(loss != float(torch.tensor(loss).bfloat16()) for loss in columns["loss"]), "a loss rounded to bfloat16"
    attention = training_costs.attention_flops(config, train.padded_seq_len(config, config.seq_len))
    assert columns["counted_matmul_flops"] + attention == columns["hardware_flops"], config
    assert columns["counted_parameters"] == config.dp_replicate_size * training_costs.num_parameters(config.model)


def check_engine(rank: int, world_size: int) -> None:
    as_on_devices(rank, world_size)
    for config in cases(world_size):
        check(placed(config))
        left = [
            each for each in tensors_left() if "torch.float" in each
        ]  # what is left would take memory during the next training of this process
        assert left == [], f"{config}: {left}"


@pytest.mark.parametrize(("backend", "world_size"), worlds(gloo=(2, 4), nccl=(2, 4)))
def test_its_steps_are_those_of_our_decoder_on_one_process(backend: str, world_size: int) -> None:
    run(world_size, check_engine, world_size, backend=backend)


def check_packs_and_masked_labels(rank: int) -> None:
    """On two ranks of a sequence, cut head and tail, each has another number of labels."""
    as_on_devices(rank, 2)
    pack = replace(TRAIN, packing="lognormal", document_len=32, document_sigma=1.0, masked_label_share=0.3)
    math, masked = KernelConfig("math"), replace(TRAIN, masked_label_share=0.7, micro_batches=2)
    for config in (
        trial(SINGLE, 1, dp_shard_size=2, seq_len=96, workload=pack, engine=ENGINE, kernel=math),
        trial(GATHER, 2, seq_len=45, workload=masked, engine=ENGINE, kernel=FLASH),
    ):
        columns = assembled(config, train_step.run(job(config)))
        assert columns["timed_loss_error"] < 1e-5


def test_packs_and_masked_labels_take_the_steps_of_one_process() -> None:
    run(2, check_packs_and_masked_labels)


def check_parity(rank: int) -> None:
    """Each step has another text. So a wrong order of samples shows."""
    as_on_devices(rank, 2)
    for workload in (PARITY, replace(PARITY, micro_batches=3)):
        columns = parity.run(job(trial(GATHER, 2, workload=workload, engine=ENGINE, kernel=FLASH))).columns
        assert columns["max_nll_difference"] <= parity.NLL_TOLERANCE
        assert columns["max_grad_norm_difference"] <= parity.GRAD_NORM_TOLERANCE
        assert len(columns["loss"]) == 20


def test_twenty_steps_agree_with_one_process() -> None:
    run(2, check_parity)


def check_cpu(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank()), "WORLD_SIZE": "2"}
    with hugging_face.accelerate_restored(), pytest.raises(ValueError, match="does not match num_processes"):
        hf_fsdp2._accelerator(trial(SINGLE, 1, dp_shard_size=2, engine=ENGINE, kernel=FLASH))


def test_on_a_cpu_accelerate_itself_refuses_fsdp2() -> None:
    run(2, check_cpu)
