"""Megatron-Core's model, data parallelism and distributed optimizer, on real ranks: equal to training on one process.

They take CUDA tensors only. On gloo a stand-in tells them that CPUs are CUDA devices; the layers are Megatron-Core's
own on torch, and our ring is the attention, as where a step is proven in float32. TransformerEngine needs GPUs.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import here, local_rank, run, worlds
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from trials import ODD, PARITY, TINY, TRAIN, job, trial

from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.engines import megatron, megatron_groups
from sp_bench.hardware import package_versions
from sp_bench.measure.incorrect import Incorrect
from sp_bench.workloads import stream, train_step

ENGINE = EngineConfig("megatron")
RING, ULYSSES, SINGLE = (
    MethodConfig("ring", "zigzag", dkv_dtype="float32"),
    MethodConfig("ulysses"),
    MethodConfig("single"),
)
DRAWN = replace(
    PARITY,
    name="stream",
    timed_steps=12,
    policy="dynamic",
    packing="lognormal",
    document_len=32,
    document_sigma=1.0,
)
SELECTIVE = replace(TRAIN, activation_checkpointing="selective")
LLAMA = replace(TINY, name="llama", qk_norm=False, qkv_bias=True, tie_embeddings=True)

pytestmark = pytest.mark.skipif("megatron-core" not in package_versions(), reason="megatron-core not installed")


class CpuForCuda(TorchFunctionMode):
    """Makes a tensor on the CPU where one on CUDA is asked for, and says of CPU tensors that they are CUDA's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:
            return function(*args, **kwargs).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    from megatron.core.tensor_parallel import random  # pyright: ignore[reportMissingImports]

    stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(random, "_get_cuda_rng_state", return_value=None),
        mock.patch.object(random, "_set_cuda_rng_state"),
        CpuForCuda(),
    ):
        yield


def cases(world_size: int) -> list[TrialConfig]:
    if world_size == 1:
        return [trial(SINGLE, 1, batch_size=2, engine=ENGINE)]
    return [
        trial(RING, 2, engine=ENGINE, workload=replace(TRAIN, activation_checkpointing="full")),
        trial(ULYSSES, 2, seq_len=45, model=LLAMA, engine=ENGINE, workload=replace(SELECTIVE, micro_batches=3)),
        trial(SINGLE, 1, dp_shard_size=2, model=replace(ODD, head_dim=10), engine=ENGINE),
    ]


def check_engine(rank: int, world_size: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank()), "WORLD_SIZE": str(world_size)}
    with as_on_cuda():
        for config in cases(world_size):
            measurement = train_step.run(job(config))
            assert len(measurement.columns["loss"]) == 2, config


@pytest.mark.parametrize(("backend", "world_size"), worlds(gloo=(1, 2)))
def test_its_steps_are_those_of_our_decoder_on_one_process(backend: str, world_size: int) -> None:
    run(world_size, check_engine, world_size, backend=backend)


def check_recomputation(rank: int) -> None:
    """Megatron recomputes nothing, or attention, whatever it is told; honest steps multiply as often as predicted."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    honest, step = megatron._transformer_config, megatron.Training.step
    counted_flops = []

    def recomputing(granularity: str | None, modules: list[str] | None) -> Callable[[TrialConfig], Any]:
        def made(config: TrialConfig) -> Any:
            told = honest(config)
            told.recompute_granularity, told.recompute_modules = granularity, modules
            return told

        return made

    def counted(self: megatron.Training, batches: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = step(self, batches)
        products = counter.get_flop_counts()["Global"]
        flops = sum(products.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
        assert flops == training_costs.matmul_flops(self.config, batches[0].tokens.shape[1]), self.config
        counted_flops.append(flops)
        return result

    kept = replace(TRAIN, micro_batches=2)
    with as_on_cuda():
        for checkpointing, told, reason in (
            (
                "full",
                (None, None),
                r"core_attention of each layer runs its forward 4 times, and they ran \[2, 2\] times",
            ),
            ("selective", (None, None), r"mlp of each layer runs its forward 4 times, and they ran \[2, 2\] times"),
            ("selective", ("selective", ["core_attn"]), r"core_attention .* 2 times, and they ran \[4, 4\] times"),
        ):
            workload = replace(kept, activation_checkpointing=checkpointing)
            config = trial(SINGLE, 1, engine=ENGINE, workload=workload)
            lie = mock.patch.object(megatron, "_transformer_config", recomputing(*told))
            with lie, pytest.raises(Incorrect, match=f"activation_checkpointing={checkpointing}: .*{reason}"):
                train_step.run(job(config))
            with mock.patch.object(megatron.Training, "step", counted):
                train_step.run(job(config))
    assert len(set(counted_flops)) > 1


def test_layers_that_are_recomputed_otherwise_are_noticed_and_products_are_as_predicted() -> None:
    run(1, check_recomputation)


def check_gpus(rank: int, world_size: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank()), "WORLD_SIZE": str(world_size)}
    on_gpus = {"fabric": FabricConfig("nvlink", "nccl"), "hardware": HardwareConfig("h200", "cuda")}
    model = replace(TINY, head_dim=64, num_kv_heads=4)
    for variant in ("p2p", "all_gather", "a2a"):
        method, kernel = MethodConfig("transformer_engine", "zigzag", variant), KernelConfig("cudnn")
        options = {"engine": ENGINE, "kernel": kernel, "dtype": "bfloat16", "model": model, "seq_len": 512}
        for checkpointing in ("none", "selective", "full"):
            workload = replace(TRAIN, correctness_seq_len=256, activation_checkpointing=checkpointing)
            train_step.run(job(trial(method, world_size, workload=workload, **options, **on_gpus)))
    assert here().type == "cuda"


@pytest.mark.parametrize(("backend", "world_size"), worlds(nccl=(2, 4)))
def test_on_transformer_engine_its_steps_are_those_of_our_decoder_too(backend: str, world_size: int) -> None:
    run(world_size, check_gpus, world_size, backend=backend)


def check_dynamic_groups(rank: int, world_size: int) -> None:
    """A rank holds 64 tokens, and documents have up to 128."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank()), "WORLD_SIZE": str(world_size)}
    workload = replace(DRAWN, activation_checkpointing="full")
    change = megatron_groups._Ours.change

    def alone(ours: megatron_groups._Ours, length: int, num_ranks: int) -> None:
        change(ours, length // num_ranks, 1)

    ring = replace(RING, layout="document_zigzag")  # as the twin of transformer_engine has it
    config = trial(ring, 2, workload=workload, engine=ENGINE, dp_shard_size=world_size // 2, seq_len=128)
    with as_on_cuda():
        found = stream.run(job(config)).columns
        assert found["max_nll_difference"] <= 1e-5
        assert {size for batch in found["batches"] for size in batch["groups"]} > {1}
        with (
            mock.patch.object(megatron_groups._Ours, "change", alone),
            pytest.raises(Incorrect, match=r"step \d+ differs from one"),
        ):
            stream.run(job(config))


@pytest.mark.parametrize("world_size", [2, 4])
def test_documents_on_its_dynamic_groups_are_those_of_one_process(world_size: int) -> None:
    run(world_size, check_dynamic_groups, world_size)
