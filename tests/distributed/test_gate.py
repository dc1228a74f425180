"""The gate itself: whatever is wrong with a kernel or a method comes out `incorrect`, before any time is kept."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.device_mesh import init_device_mesh

from sp_bench import layouts, methods, rings
from sp_bench.config import (
    FabricConfig,
    HardwareConfig,
    KernelConfig,
    MethodConfig,
    ModelConfig,
    TrialConfig,
    WorkloadConfig,
)
from sp_bench.exchange import Collectives, Message
from sp_bench.head_chunks import ChunkedAttention
from sp_bench.kernels import cpu_flash
from sp_bench.measure import Measurement
from sp_bench.record import assemble
from sp_bench.workloads import Incorrect, Job, attention

MODEL = ModelConfig("tiny", 1, 64, 64, 8, 2, 16, 256, 1e4, 1e-5, False, False, True)
ULYSSES, ZIGZAG = MethodConfig("ulysses"), MethodConfig("ring", "zigzag", dkv_dtype="input")


def trial(method: MethodConfig, sp_size: int, dtype: str = "float32") -> TrialConfig:
    return TrialConfig(
        method,
        KernelConfig("cpu_flash"),
        MODEL,
        WorkloadConfig("attention", "forward_backward", True, 0, 1, 64),
        FabricConfig("gloo", "gloo"),
        HardwareConfig("cpu", "cpu", None, 1),
        batch_size=1,
        seq_len=128,
        sp_size=sp_size,
        dp_replicate_size=1,
        dp_shard_size=1,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        seed=0,
    )


def row(config: TrialConfig) -> dict[str, Any]:
    """What the worker does between init and hand-over."""
    layout = methods.get(config.method.name).layout(config.method, config.sp_size)
    axes = {"dp_replicate": 1, "dp_shard": 1, "ring": layout.ring_degree, "ulysses": layout.ulysses_degree}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    measurement = attention.run(Job(config, mesh, torch.device("cpu"), lambda name: None))
    gathered: list[Measurement] = [measurement] * config.sp_size
    dist.all_gather_object(gathered, measurement)
    return assemble(config, gathered, None, own=True)


def zero_kernel(q, k, v, *, causal, scale):
    return torch.zeros_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])


def silent_exchange(transport, sent):
    return Message(sent, [t.clone() for t in sent], [])


def misplaced_runs(self, rank: int, seq_len: int):
    return right_runs(self, (rank + 1) % self.sp_size, seq_len)


def scaled_backward(ctx, dout):
    none, *gradients = right_backward(ctx, dout)
    return none, *(gradient / dist.get_world_size() for gradient in gradients)


def chatty_shift(transport, tensor):
    """Right, but a hop more than the closed form says: the bytes must give it away."""
    right_shift(transport, tensor).wait()
    return right_shift(transport, tensor)


def dropped_merge(out, lse, part_out, part_lse) -> None:
    """A ring that forgets what the other ranks hold."""


def overwritten_last_token(ctx, chunks, *qkv):
    """Wrong at one token only, far from the first: whole-sequence errors must see it."""
    out = right_ulysses(ctx, chunks, *qkv)
    if chunks.transport.group.rank() == chunks.transport.group.size() - 1:
        out[:, -1] = 0
    return out


right_runs = layouts.SequenceLayout.runs
right_shift = Collectives.shift
right_backward = ChunkedAttention.backward
right_ulysses = ChunkedAttention.forward

FAULTS: list[tuple[str, MethodConfig, Any, str, Callable[..., Any], str]] = [
    ("a kernel that returns zeros", ULYSSES, cpu_flash, "forward", zero_kernel, "kernel cpu_flash on one device"),
    ("an exchange that sends nothing", ULYSSES, Collectives, "all_to_all", silent_exchange, "method on"),
    ("a ring that drops a block", ZIGZAG, rings, "merge", dropped_merge, "method on"),
    ("tokens in the wrong place", ZIGZAG, layouts.SequenceLayout, "runs", misplaced_runs, "method on"),
    (
        "gradients scaled by 1/P",
        ULYSSES,
        ChunkedAttention,
        "backward",
        staticmethod(scaled_backward),
        "method on 2 ranks: relative error of dq",
    ),
    ("bytes beyond the closed form", ZIGZAG, Collectives, "shift", chatty_shift, "bytes sent by rank 0 differ"),
    (
        "one wrong token",
        ULYSSES,
        ChunkedAttention,
        "forward",
        staticmethod(overwritten_last_token),
        "relative error of output",
    ),
]


def check_faults(rank: int, sp_size: int) -> None:
    for method in (ULYSSES, ZIGZAG):  # the control: without a fault both are right
        assert row(trial(method, sp_size))["rel_error_dq"] < 1e-6
    for what, method, owner, name, fault, message in FAULTS:
        print(f"fault: {what}")  # names the culprit, should it go unnoticed
        with patch.object(owner, name, fault), pytest.raises(Incorrect, match=message):
            row(trial(method, sp_size))


def test_each_fault_is_incorrect() -> None:
    run(2, check_faults, 2)
