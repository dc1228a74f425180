"""The gate: whatever is wrong with a kernel or a method makes the trial `incorrect`. No time of it is kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor
from trials import TRAIN, job, row

from sp_bench import kernels
from sp_bench.attention import layouts, ring
from sp_bench.attention.exchange import Collectives, Message
from sp_bench.attention.head_chunks import ChunkedAttention
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.kernels import cpu_flash
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import SequenceParallelAttention, ulysses
from sp_bench.oracle import reduced_length
from sp_bench.workloads import train_step

MODEL = ModelConfig("tiny", 1, 64, 64, 8, 2, 16, 256, 1e4, 1e-5, False, False, True)
PROOF_LEN, SEQ_LEN = 64, 128
ULYSSES, ZIGZAG = MethodConfig("ulysses"), MethodConfig("ring", "zigzag", dkv_dtype="input")


def trial(method: MethodConfig, sp_size: int, dtype: str = "float32") -> TrialConfig:
    return TrialConfig(
        method,
        KernelConfig("cpu_flash"),
        MODEL,
        WorkloadConfig("attention", "forward_backward", True, 0, 1, PROOF_LEN),
        FabricConfig("gloo", "gloo"),
        HardwareConfig("cpu", "cpu", None, 1),
        batch_size=1,
        seq_len=SEQ_LEN,
        sp_size=sp_size,
        dp_replicate_size=1,
        dp_shard_size=1,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        seed=0,
    )


def zero_kernel(q, k, v, *, causal, scale):
    return torch.zeros_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])


def nan_kernel(q, k, v, *, causal, scale):
    return torch.full_like(q, float("nan")), q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("nan"))


def silent_exchange(transport, sent):
    return Message(sent, [t.clone() for t in sent], [])


def misplaced_runs(self, rank: int, seq_len: int):
    return right_runs(self, (rank + 1) % self.sp_size, seq_len)


def scaled_backward(ctx, dout):
    chunks, kept, *gradients = right_backward(ctx, dout)
    return chunks, kept, *(None if gradient is None else gradient / dist.get_world_size() for gradient in gradients)


def scaled_dk(ctx, dout):
    *others, dq, dk, dv, dsinks = right_backward(ctx, dout)
    return *others, dq, dk / dist.get_world_size(), dv, dsinks


def scaled_dv(ctx, dout):
    *others, dq, dk, dv, dsinks = right_backward(ctx, dout)
    return *others, dq, dk, dv / dist.get_world_size(), dsinks


def chatty_shift(transport, sent, hops=1):
    """A fault: the result is right, but it travels one hop more than the closed form says. Only the bytes show it."""
    right_shift(transport, sent, hops).wait_all()
    return right_shift(transport, sent, hops)


def dropped_merge(parts, out, lse=None) -> None:
    """A fault: the ring leaves out what the other ranks hold."""
    right_merge(parts[:1], out, lse)


def overwritten_last_token(ctx, chunks, *qkv):
    """A fault at one token only, far from the first. Errors over the whole sequence must show it."""
    out = right_ulysses(ctx, chunks, *qkv)
    if chunks.transport.group.rank() == chunks.transport.group.size() - 1:
        out[:, -1] = 0
    return out


def inexact(ctx, chunks, *qkv):
    """A fault of ten times the fp32 budget, as of a kernel in a lower precision."""
    return right_ulysses(ctx, chunks, *qkv) * (1 + 1e-5)


def inexact_when_timed(ctx, chunks, *qkv):
    """A fault that is right at the length of the proof, and wrong at the timed length."""
    num_tokens = qkv[-2].shape[1] * chunks.transport.group.size()
    return (inexact if num_tokens == SEQ_LEN else right_ulysses)(ctx, chunks, *qkv)


def timed_gradient(wrong: Callable[[Tensor], Tensor], place: int) -> Callable[..., Any]:
    """A fault of one gradient: right at the length of the proof, and `wrong` at the timed length."""

    def backward(ctx, dout):
        results = list(right_backward(ctx, dout))
        if dout.shape[1] * dist.get_world_size() == SEQ_LEN:
            results[place] = wrong(results[place])
        return tuple(results)

    return staticmethod(backward)


def moved(gradient: Tensor) -> Tensor:
    """Each token gets the gradient of its neighbour."""
    return gradient.roll(1, 1)


def cut_off(gradient: Tensor) -> Tensor:
    """The last tokens of the last rank are wrong. They see many keys, and few queries see them."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return torch.cat([gradient[:, :-3], gradient[:, -3:] * (not last)], dim=1)


def lost_head(gradient: Tensor) -> Tensor:
    """The last head of the last rank is wrong."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return torch.cat([gradient[:, :, :-1], gradient[:, :, -1:] * (not last)], dim=2)


@contextmanager
def answers_at_hand(method, kernel, shape, mesh) -> Iterator[SequenceParallelAttention]:
    """A fault: output and gradients of the proof are right, but no rank exchanges anything. Each has drawn the inputs
    of the whole sequence itself."""
    layout = ulysses.layout(method, mesh.size())
    positions = layout.global_positions(mesh.get_rank(), shape.seq_len)
    inputs = reduced_length.random_inputs(shape, torch.device("cpu"), 0)
    out, *gradients = (x[:, positions] for x in reduced_length._run_kernel(kernel, inputs, shape))

    class Answers(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *qkv):
            return out.clone()

        @staticmethod
        def backward(ctx, *dout):
            return tuple(gradients)

    yield SequenceParallelAttention(layout, Answers.apply)  # pyright: ignore[reportArgumentType]


right_runs = layouts.SequenceLayout.runs
right_shift = Collectives.shift
right_merge = ring.merge
right_backward = ChunkedAttention.backward
right_ulysses = ChunkedAttention.forward

FAULTS: list[tuple[str, MethodConfig, Any, str, Callable[..., Any], str]] = [
    ("a kernel that returns zeros", ULYSSES, cpu_flash, "forward", zero_kernel, "kernel cpu_flash on one device"),
    (
        "a kernel that returns NaN",
        ULYSSES,
        cpu_flash,
        "forward",
        nan_kernel,
        "on one device: relative error of output is nan",
    ),
    ("an exchange that sends nothing", ULYSSES, Collectives, "all_to_all", silent_exchange, "method on"),
    ("a ring that drops a block", ZIGZAG, ring, "merge", dropped_merge, "method on"),
    ("tokens in the wrong place", ZIGZAG, layouts.SequenceLayout, "runs", misplaced_runs, "method on"),
    (
        "gradients scaled by 1/P",
        ULYSSES,
        ChunkedAttention,
        "backward",
        staticmethod(scaled_backward),
        "method on 2 ranks: relative error of dq",
    ),
    ("a wrong dk", ULYSSES, ChunkedAttention, "backward", staticmethod(scaled_dk), "relative error of dk"),
    ("a wrong dv", ULYSSES, ChunkedAttention, "backward", staticmethod(scaled_dv), "relative error of dv"),
    ("a lower precision", ULYSSES, ChunkedAttention, "forward", staticmethod(inexact), "relative error of output"),
    (
        "a lower precision at the timed length",
        ULYSSES,
        ChunkedAttention,
        "forward",
        staticmethod(inexact_when_timed),
        f"the last timed step at seq_len={SEQ_LEN}",
    ),
    *(
        (
            f"a {tensor} that is {wrong.__name__} at the timed length",
            ULYSSES,
            ChunkedAttention,
            "backward",
            timed_gradient(wrong, place),
            f"(sampled rows|the last timed step) at seq_len={SEQ_LEN}: (relative error of {tensor} is |sum)",
        )
        for place, tensor in enumerate(("dq", "dk", "dv"), start=-4)
        for wrong in (moved, cut_off, lost_head)
    ),
    ("ranks that keep to themselves", ULYSSES, ulysses, "open", answers_at_hand, "nothing was exchanged"),
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


def check_budget(published: dict[str, float]) -> None:
    """The budget of fp32 is twice the error of fp32 itself. A wider one would pass kernels that users think exact."""
    shape = trial(ULYSSES, 2).attention_shape(PROOF_LEN)
    inputs = reduced_length.random_inputs(shape, torch.device("cpu"), 0)
    low, want = (
        reduced_length._run_kernel(kernels.get("math"), [x.to(dtype) for x in inputs], shape)
        for dtype in (torch.float32, torch.float64)
    )
    for name, got, expected in zip(("output", "dq", "dk", "dv"), low, want, strict=True):
        error = float((got.double() - expected).norm() / expected.norm())
        assert published[name] == pytest.approx(2 * (error + 2**-23), rel=1e-6), name


def check_flops(config: TrialConfig, model_forwards: float, hardware_forwards: float) -> None:
    """A row's FLOP/s and MFU are these FLOPs over its time. Model FLOPs do not count the scores that a flash backward
    computes again."""
    forward = 4 * (SEQ_LEN * (SEQ_LEN + 1) // 2) * 8 * 16  # two matmuls for each visible pair, 8 heads of size 16
    found = row(config)
    assert found["model_flops"] == model_forwards * forward
    assert found["hardware_flops"] == hardware_forwards * forward


def check_faults(rank: int, sp_size: int) -> None:
    for method in (ULYSSES, ZIGZAG):  # without a fault both are right
        found = row(trial(method, sp_size))
        assert found["rel_error_dq"] < 1e-6
        check_budget(found["error_budget"])
    both = trial(ULYSSES, sp_size)
    check_flops(both, 3.0, 3.5)
    check_flops(replace(both, workload=replace(both.workload, pass_kind="forward")), 1.0, 1.0)
    for what, method, owner, name, fault, message in FAULTS:
        print(f"fault: {what}")  # names the culprit, should it go unnoticed
        with patch.object(owner, name, fault), pytest.raises(Incorrect, match=message):
            row(trial(method, sp_size))


def test_each_fault_is_incorrect() -> None:
    run(2, check_faults, 2)


def prove_attention(config: TrialConfig) -> dict[str, Any]:
    columns, budgets = train_step.prove_attention(job(config))
    return columns | train_step.check_timed_length(job(config), budgets)


def check_training(rank: int) -> None:
    """The attention of a training step is proven at the timed length too."""
    config = replace(trial(ULYSSES, 2), workload=replace(TRAIN, correctness_seq_len=PROOF_LEN))
    columns = prove_attention(config)
    assert columns["correctness_seq_len"] == PROOF_LEN
    assert set(columns["sampled_grad_error"]) == {"dq", "dk", "dv"}
    wrong = patch.object(ChunkedAttention, "backward", timed_gradient(cut_off, -3))
    with wrong, pytest.raises(Incorrect, match=f"sampled rows at seq_len={SEQ_LEN}: relative error of dk is "):
        prove_attention(config)


def test_the_attention_of_a_training_step_is_proven_at_the_timed_length() -> None:
    run(2, check_training)
