"""What is in host memory instead of the device's: steps stay as they were, and the device's peak falls.

Checkpoint offload changes no bit of losses, gradients and parameters over several steps of many layers. On GPUs the
copies run beside the layers, so that a buffer used too early shows here.
"""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import here, run, worlds
from torch import Tensor
from torch.distributed.tensor import DTensor
from trials import TINY, TRAIN, job, trial

from sp_bench.config.engine import EngineConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import num_parameters
from sp_bench.engines import fsdp2
from sp_bench.measure.timing import release_memory
from sp_bench.oracle import training_step
from sp_bench.training import text, train
from sp_bench.training.offload import host_memory, release_page_locked

LAYERS, STEPS = 12, 3
# On a GPU a layer's input has MiBs, so that a copy takes a good part of a layer's time. `math` is deterministic. Its
# scores outweigh the moments, so that the peak is in the last layer's backward, where all checkpoints are.
LARGE = {"hidden_size": 1024, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


def several_steps(config: TrialConfig) -> tuple[list[Tensor], int, int]:
    """Loss, norm and token losses of each step, and then all parameters; the peak of the last step on the device; and
    the bytes of host memory."""
    mine = job(config)
    release_memory(mine.device)  # what the training before this one left in cycles would be in the peak
    sequences = text.sequences(0, config.num_sequences, config.seq_len)
    found, peak = [], 0
    with host_memory() as memory:
        with train.open_attention(config, train.padded_seq_len(config, config.seq_len), mine.mesh) as attention:
            training = fsdp2.start(config, attention, mine.mesh, mine.device)
            (batches,) = train.shard_batches(config, [sequences], attention.layout, mine.mesh, mine.device)
            for _ in range(STEPS):
                if mine.device.type == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                result = training.step(batches)
                assert result.token_losses is not None
                found += [result.loss, result.grad_norm, result.token_losses]
            if mine.device.type == "cuda":
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated()
        host_bytes = memory.num_bytes
    for parameter in training.decoder.parameters():
        assert isinstance(parameter, DTensor)
        found.append(parameter.to_local())
    return [t.detach().cpu().clone() for t in found], peak, host_bytes


def on(backend: str, seq_len: int) -> dict[str, Any]:
    """Fields of a trial on the devices of `backend`; large ones on GPUs."""
    model = replace(TINY, num_layers=LAYERS)
    if backend == "gloo":
        return {"seq_len": 48, "model": model}
    nvlink, h200 = FabricConfig("nvlink", "nccl"), HardwareConfig("h200", "cuda")
    return {"seq_len": seq_len, "model": replace(model, **LARGE), "fabric": nvlink, "hardware": h200}


def check_bits(rank: int, world_size: int, backend: str) -> None:
    method = MethodConfig("single") if world_size == 1 else MethodConfig("ulysses")
    fields = on(backend, 4096) | {"dtype": "bfloat16"}
    for checkpointing in ("full", "selective", "selective_output") if backend == "nccl" else ("selective_output",):
        workload = replace(TRAIN, activation_checkpointing=checkpointing, micro_batches=2, loss_tile_tokens=512)
        plain = trial(method, world_size, workload=workload, **fields)
        offloaded = replace(plain, workload=replace(workload, checkpoint_offload=True))
        expected, plain_peak, _ = several_steps(plain)
        found, peak, host_bytes = several_steps(offloaded)
        assert all(map(torch.equal, found, expected)), checkpointing
        assert host_bytes > 0
        if here().type == "cuda":
            layer_bytes = host_bytes / (LAYERS - 1)
            print(f"{checkpointing}: {plain_peak} bytes on the device, {peak} with {host_bytes} bytes on the host")
            # At the peak two layers' are there, or three: the last one's, and two that come back.
            assert plain_peak - peak > 0.95 * (LAYERS - 3) * layer_bytes, checkpointing


@pytest.mark.parametrize(("backend", "world_size"), worlds(gloo=[2], nccl=[1, 2]))
def test_offload_changes_no_bit_and_frees_the_device(backend: str, world_size: int) -> None:
    run(world_size, check_bits, world_size, backend, backend=backend)


def check_optimizer(rank: int, world_size: int) -> None:
    """The proof of losses, gradients and updates, with gradients that NCCL cannot send from where they are."""
    method = MethodConfig("single") if world_size == 1 else MethodConfig("ulysses")
    fields = on("nccl", 256)
    plain = trial(method, world_size, workload=replace(TRAIN, activation_checkpointing="full"), **fields)
    offloaded = replace(plain, engine=EngineConfig(optimizer_offload="torch_adamw"))
    mine = job(offloaded)
    training_step.prove(offloaded, mine.mesh, mine.device)
    (_, plain_peak, _), (_, peak, _) = several_steps(plain), several_steps(offloaded)
    state = 4 * num_parameters(plain.model) / world_size  # fp32: parameters, gradients and each of Adam's two moments
    print(f"optimizer: {plain_peak} bytes on the device, {peak} with it on the host")
    assert plain_peak - peak > 2 * state


@pytest.mark.parametrize(("backend", "world_size"), worlds(nccl=[1, 2]))
def test_an_optimizer_in_host_memory_is_proven_and_frees_the_device(backend: str, world_size: int) -> None:
    run(world_size, check_optimizer, world_size, backend=backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; 0 here")
@pytest.mark.parametrize(("said", "code"), [("expandable_segments:True", 0), ("expandable_segments:False", 1)])
def test_a_worker_insists_on_the_allocator_that_was_asked_for(said: str, code: int) -> None:
    program = "from sp_bench.worker import _require_allocator; _require_allocator('expandable_segments')"
    environment = os.environ | {"PYTORCH_ALLOC_CONF": said}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == code


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; 0 here")
def test_page_locked_memory_that_no_tensor_holds_goes_back() -> None:
    held = torch.empty(2**20, pin_memory=True)
    freed = torch.empty(2**20, pin_memory=True)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    freed_bytes = freed.nbytes
    del freed
    release_page_locked(torch.device("cuda"))
    assert held.is_pinned()
    assert before - torch.cuda.host_memory_stats()["allocated_bytes.current"] >= freed_bytes
