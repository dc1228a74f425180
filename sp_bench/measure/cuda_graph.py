"""A step as a CUDA graph: recorded once, then issued by the host in one call, however many operations it has.

An eager step of short kernels lasts as long as the host takes to launch them. A replayed one lasts as long as the
device takes. So it measures the method, without its Python code, autograd and torch's dispatcher.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sp_bench.config.workload import WorkloadConfig

Step = Callable[[], Sequence[Tensor]]


def as_launched(step: Step, workload: WorkloadConfig) -> Step:
    """`step` itself, or a `Replay` of it if the workload asks for one. All ranks must call the result together."""
    return Replay(step) if workload.launch == "cuda_graph" else step


class Replay:
    """A step that is recorded at its first call, on all streams, and replayed at each call. A replay reads the inputs
    from the same memory, and writes its results into the same tensors, which the next replay overwrites."""

    peak_allocated_bytes: int  # by torch's allocator during the recording; a replay allocates nothing

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Sequence[Tensor] = ()

    def __call__(self) -> Sequence[Tensor]:
        """
        Raises:
            Exception: what `step` raises at the first call, such as a RuntimeError if it waits for the device.
        """
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()
        return self._results

    def _record(self) -> torch.cuda.CUDAGraph:
        self._step()  # before the recording: kernels compile, and whatever else happens at the first run only
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        graph, failure = torch.cuda.CUDAGraph(), None
        try:
            # thread_local, because NCCL's own threads query earlier events meanwhile, which "global" would forbid
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    self._results = self._step()
                except Exception as error:
                    failure = error
        except RuntimeError as error:  # ending a failed recording raises as well; the step's own failure is the reason
            raise failure or error from None
        if failure is not None:
            raise failure
        self.peak_allocated_bytes = torch.cuda.max_memory_allocated()
        return graph
