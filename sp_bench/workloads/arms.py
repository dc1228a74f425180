"""Where a step's time goes, without a profiler in the timed loop. Two arms time the same step with a part taken out:
`compute_only` without communication, `comm_only` without attention kernels.

Exposed communication is the time of the step minus that of its compute-only arm.
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
    """Time both arms: name of the arm -> ms of each of this rank's steps. Every rank of the world calls it.

    compute_only: every message is a local copy of the same shape, which runs beside the kernels as the message would.
    comm_only: messages, packing and merging; the attention kernel does nothing.
    """
    with open_method(kernel) as attention, exchange.local_copies():
        compute_only = time_arm(as_launched(partial(step, attention), workload), workload, device)
    with open_method(NoKernel()) as attention:
        comm_only = time_arm(as_launched(partial(step, attention), workload), workload, device)
    return {"compute_only": compute_only, "comm_only": comm_only}


class NoKernel:
    """A kernel that computes nothing and returns tensors of the right shapes (as `kernels.Kernel`)."""

    CUDA_KERNELS: tuple[str, str] | None = None

    @staticmethod
    def unsupported_reason(shape: AttentionShape, device: str) -> str | None:
        return None

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **packed: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
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
        **packed: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
