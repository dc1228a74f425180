"""Where a step's time goes, without a profiler in the timed loop: the same step without communication, and without
attention kernels. Exposed communication = the step - its compute-only arm.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from sp_bench.attention import exchange
from sp_bench.attention.merge import wide_dtype
from sp_bench.config.trial import AttentionShape, WorkloadConfig
from sp_bench.kernels import Kernel
from sp_bench.measure.cuda_graph import as_launched
from sp_bench.measure.timing import time_arm
from sp_bench.methods import SequenceParallelAttention

Open = Callable[[Kernel], AbstractContextManager[SequenceParallelAttention]]


def arms(
    open_method: Open,
    kernel: Kernel,
    step: Callable[[SequenceParallelAttention], Sequence[Tensor]],
    workload: WorkloadConfig,
    device: torch.device,
) -> dict[str, list[float]]:
    """ms of each step of this rank, by arm. compute_only: every message is a local copy of its shape, made beside the
    kernels as the message would be. comm_only: messages, packing and merging, without attention kernels."""
    with open_method(kernel) as attention, exchange.local_copies():
        compute_only = time_arm(as_launched(partial(step, attention), workload), workload, device)
    with open_method(NoKernel()) as attention:
        comm_only = time_arm(as_launched(partial(step, attention), workload), workload, device)
    return {"compute_only": compute_only, "comm_only": comm_only}


class NoKernel:
    """Computes nothing: what is left of a step is its messages, packing and merging. Shapes as in kernels.Kernel."""

    CUDA_KERNELS: tuple[str, str] | None = None

    @staticmethod
    def unsupported_reason(shape: AttentionShape, device: str) -> str | None:
        return None

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide_dtype(q))

    @staticmethod
    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
