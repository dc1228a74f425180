"""A step as a CUDA graph: recorded once, then issued by the host in one call, however many operations it has.

A short step lasts as long as the host takes to launch it. Replayed, it lasts as long as the device takes: what is left
is the method's, not that of its Python, its autograd and its dispatcher.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sp_bench.config import WorkloadConfig

Tensors = Callable[[], Sequence[Tensor]]


def launched(step: Tensors, workload: WorkloadConfig) -> Tensors:
    """`step`, launched as the workload says: call by call, or replayed. Called by every rank together."""
    return Replay(step) if workload.launch == "cuda_graph" else step


class Replay:
    """What one run of `step` issued, on all streams. Each call issues it again: it reads the same inputs where they
    lie, and gives the same tensors, which the next call overwrites.

    Raises:
        RuntimeError: the step does what no graph can hold, such as waiting for the device.
    """

    peak_allocated_bytes: int  # by torch's allocator, while it was recorded; a replay allocates nothing

    def __init__(self, step: Tensors) -> None:
        step()  # kernels that compile, and whatever else happens at the first call only
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: meanwhile the threads of NCCL ask for its earlier events
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = step()
        self.peak_allocated_bytes = torch.cuda.max_memory_allocated()

    def __call__(self) -> Sequence[Tensor]:
        self._graph.replay()
        return self._results
