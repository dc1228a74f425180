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
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.kernels import Kernel
from sp_bench.measure.cuda_graph import as_launched
from sp_bench.measure.timing import Schedule, time_arm
from sp_bench.methods import SequenceParallelAttention

Open = Callable[[Kernel], AbstractContextManager[SequenceParallelAttention]]


def arms(
    open_method: Open,
    kernel: Kernel,
    step: Callable[[SequenceParallelAttention], Sequence[Tensor]],
    schedule: Schedule,
    device: torch.device,
) -> dict[str, list[float]]:
    """Time both arms: name of the arm -> ms of each of this rank's steps. Every rank of the world calls it.

    compute_only: every message is a local copy of the same shape, which runs beside the kernels as the message would.
    comm_only: messages, packing and merging; the attention kernel does nothing.
    """
    with open_method(kernel) as attention, exchange.local_copies():
        compute_only = time_arm(as_launched(partial(step, attention), schedule.workload), schedule, device)
    with open_method(NoKernel()) as attention:
        comm_only = time_arm(as_launched(partial(step, attention), schedule.workload), schedule, device)
    return {"compute_only": compute_only, "comm_only": comm_only}
