"""What trials of one process leave to the next: nothing that would be part of its peak.

The trials run as the worker runs them, frozen objects included: `gc.get_objects` does not list those.
A test is skipped if its libraries are not installed.
"""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from ranks import run
from test_engines import HF, SETTLED_S, needs
from test_engines import as_a_rank as on_cpus
from test_hf_fsdp2 import as_on_devices
from test_megatron import as_on_cuda
from torch.distributed.tensor import DTensor
from trials import TINY, job, trial

from sp_bench import worker
from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.workloads import train_step

DEEP = replace(TINY, num_layers=3)  # the proof's models have two
SINGLE, ULYSSES, SHARED = MethodConfig("single"), MethodConfig("ulysses"), MethodConfig(HF)
GATHER = MethodConfig("torch_context_parallel", "zigzag", "allgather")
PLANTED = 2**20  # float32 elements

Tensors = list[tuple[str, int]]  # dtype and bytes of each


def tensors() -> Tensors:
    """Those of several floating-point numbers that this process has in memory; each memory once. What was frozen is
    unfrozen after the collection, so garbage in it is counted: a trial would not get rid of it either."""
    time.sleep(SETTLED_S)
    gc.collect()
    gc.unfreeze()
    found = (each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not isinstance(each, DTensor))
    kept = (each for each in found if each.device.type == "cpu" and each.is_floating_point() and each.numel() > 1)
    storages = [(str(each.dtype), each.untyped_storage()) for each in kept]
    return sorted({memory.data_ptr(): (dtype, memory.nbytes()) for dtype, memory in storages}.values())


def of_trial(config: TrialConfig) -> Tensors:
    """The tensors in memory as the warm-up of a trial begins: its engine is built, and no step was taken."""
    seen: list[Tensors] = []

    def enter_phase(name: str) -> None:
        if name == "warmup":
            seen.append(tensors())

    worker.freeze_loaded()
    train_step.run(replace(job(config), enter_phase=enter_phase))
    (at_warmup,) = seen
    return at_warmup


def check_engine(
    rank: int,
    config: TrialConfig,
    prepare: Callable[[int, int], None],
    inside: Callable[[], AbstractContextManager[None]],
) -> None:
    prepare(rank, config.world_size)
    with inside():
        first, second, third = (of_trial(config) for _ in range(3))
    assert first
    assert second == third == first, (first, second, third)
    assert (left := tensors()) == [], left


def cases(name: str, world_size: int) -> TrialConfig:
    of_engine = {"fsdp2": ULYSSES, "deepspeed": ULYSSES, "megatron": ULYSSES, "hf_fsdp2": GATHER}
    kernels = {"fsdp2": "math", "deepspeed": "math", "megatron": "math", "hf_fsdp2": "sdpa_flash"}
    method = SINGLE if world_size == 1 else of_engine.get(name, SHARED)
    kernel = KernelConfig(kernels.get(name, "cpu_flash"))
    dtype = "bfloat16" if name in ("deepspeed", "hf_deepspeed") else "float32"
    return trial(method, world_size, engine=EngineConfig(name), kernel=kernel, model=DEEP, dtype=dtype)


ZERO3 = ("deepspeed", "transformers", "accelerate")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "fsdp2",
        pytest.param("deepspeed", marks=needs("deepspeed")),
        pytest.param("hf_deepspeed", marks=needs(*ZERO3)),
        pytest.param("hf_trainer", marks=needs(*ZERO3)),
        pytest.param("trl_sft", marks=needs(*ZERO3, "trl")),
    ],
)
def test_the_next_trial_of_a_process_begins_its_steps_with_the_same_tensors_in_memory(
    name: str, world_size: int
) -> None:
    run(world_size, check_engine, cases(name, world_size), on_cpus, nullcontext)


@needs("transformers", "accelerate")
def test_the_next_trial_of_accelerates_fsdp2_begins_its_steps_with_the_same_tensors_in_memory() -> None:
    run(2, check_engine, cases("hf_fsdp2", 2), as_on_devices, nullcontext)


@needs("megatron-core")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_trial_of_megatron_begins_its_steps_with_the_same_tensors_in_memory(world_size: int) -> None:
    run(world_size, check_engine, cases("megatron", world_size), on_cpus, as_on_cuda)


def check_leftover(rank: int) -> None:
    """The CPU's tensors stand in for what torch's allocator has in use on a GPU."""
    config, held = trial(SINGLE, 1), lambda device: sum(size for _, size in tensors())
    with mock.patch.object(train_step, "allocated_bytes", held):
        measure = partial(train_step.run, job(config))
        clean = measure().leftover_bytes
        planted = torch.zeros(PLANTED)
        worker.freeze_loaded()
        with_planted = measure().leftover_bytes
        del planted
    assert clean is not None
    assert with_planted is not None
    assert clean < 2**16 < 4 * PLANTED <= with_planted - clean < 4 * PLANTED + 2**16


def test_what_an_earlier_trial_left_is_seen_before_the_measured_engine_is_built() -> None:
    run(1, check_leftover)
