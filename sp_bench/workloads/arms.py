"""Where a step's time goes, without a profiler in the timed loop. Arms time the same step with a part taken out:
`compute_only` without communication, `comm_only` without attention kernels. A stream has the first alone.

Exposed communication is the time of the step minus that of its compute-only arm.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import methods
from sp_bench.attention import exchange
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.config.trial import TrialConfig
from sp_bench.kernels import Kernel
from sp_bench.measure.cuda_graph import as_launched
from sp_bench.measure.timing import Schedule, synchronise, time_arm, time_steps
from sp_bench.methods import SequenceParallelAttention

if TYPE_CHECKING:
    from sp_bench.engines.fsdp2 import Pass

STILL = 1e-30  # learning rate: gradients are wrong, and weights keep the values that a training has

Open = Callable[[Kernel], AbstractContextManager[SequenceParallelAttention]]


def are_timed(config: TrialConfig) -> bool:
    """Whether a trial asks for arms and can have them: it sends messages, and all are ours."""
    ours = methods.get(config.method.name).IMPLEMENTATION == "sp_bench" and config.engine.name == "fsdp2"
    return config.workload.attribution and ours and config.world_size > 1


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


def compute_only(
    config: TrialConfig, steps: Sequence[Sequence["Pass"]], mesh: DeviceMesh, device: torch.device
) -> list[float]:
    """Train on these steps without messages. Returns the ms of each of this rank's steps. Every rank calls it.

    Messages of attention, parameters and gradients are local copies; a rank waits for no other.
    """
    from sp_bench.engines import fsdp2  # a second of imports, which attention alone does without

    workload = replace(config.workload, learning_rate=STILL)
    with exchange.local_copies():
        step = fsdp2.step_of_passes(replace(config, workload=workload), steps[0][0], mesh, device)
        step(steps[0])
        synchronise(device)
        dist.barrier()
        left = iter(steps)
        return time_steps(lambda: step(next(left)), len(steps), device)[0]
