"""A step as a CUDA graph: recorded once, then issued by the host in one call, however many operations it has.

A short step lasts as long as the host takes to launch it. Replayed, it lasts as long as the device takes: what is left
is the method's, not that of its Python, its autograd and its dispatcher.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sp_bench.config.trial import WorkloadConfig

Step = Callable[[], Sequence[Tensor]]


def as_launched(step: Step, workload: WorkloadConfig) -> Step:
    """`step`, launched as the workload says: call by call, or replayed. Called by every rank together."""
    return Replay(step) if workload.launch == "cuda_graph" else step


class Replay:
    """What one run of `step` issued, on all streams; recorded at the first call. Each call issues it: it reads the same
    inputs where they lie, and gives the same tensors, which the next call overwrites."""

    peak_allocated_bytes: int  # by torch's allocator, while it was recorded; a replay allocates nothing

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Sequence[Tensor] = ()

    def __call__(self) -> Sequence[Tensor]:
        """
        Raises:
            Exception: at the first call what `step` raises; such as RuntimeError where it waits for the device.
        """
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()
        return self._results

    def _record(self) -> torch.cuda.CUDAGraph:
        self._step()  # kernels that compile, and whatever else happens at the first run only
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        graph, failure = torch.cuda.CUDAGraph(), None
        try:
            # thread_local: meanwhile the threads of NCCL ask for its earlier events
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    self._results = self._step()
                except Exception as error:
                    failure = error
        except RuntimeError as error:  # of the end of a recording that had failed: not the reason
            raise failure or error from None
        if failure is not None:
            raise failure
        self.peak_allocated_bytes = torch.cuda.max_memory_allocated()
        return graph
