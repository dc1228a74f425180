"""Times the method's communication primitive over message sizes. The driver fits latency and bandwidth to the times.

There is no attention. A row says how fast this fabric moves what the method would send, in the way that the method
sends it: from the call on the host until the compute stream may use the result.

P ranks, n elements of a slice.
"""

from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.attention import copy_engines
from sp_bench.costs import message_sizes
from sp_bench.costs.message_sizes import MessageSize
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.timing import Measurement, Schedule, Step, allocated_bytes, measure, release_memory, time_arm
from sp_bench.workloads import Job

STAMPS = 251  # values 0 to 250 mark what is sent: whole numbers up to 256 are exact in every dtype


def run(job: Job) -> Measurement:
    config, device = job.config, job.device
    sizes = message_sizes.message_sizes(config)
    job.enter_phase("correctness")
    for size in sizes:
        prove(job, size)
    release_memory(device)
    leftover = allocated_bytes(device)
    schedule = Schedule(config.workload)
    measurement = measure(_step(job, sizes[-1]), schedule, device, job.enter_phase, job.trace_to)
    # The other sizes are timed in the last phase that `measure` entered, because no phase is entered twice.
    times_ms = [_median_of_slowest(time_arm(_step(job, size), schedule, device)) for size in sizes[:-1]]
    times_ms.append(_median_of_slowest(measurement.rank_step_ms))
    measurement.leftover_bytes = leftover
    measurement.predicted = message_sizes.traffic(config, sizes[-1])
    curve = [{"message_bytes": size.sent_bytes, "ms": ms} for size, ms in zip(sizes, times_ms, strict=True)]
    measurement.columns = {"curve": curve}
    return measurement


def prove(job: Job, size: MessageSize) -> None:
    """Prove that every rank received, slice by slice, what its peers sent it.

    Raises:
        Incorrect: some rank received something else. Raised on every rank, and names those ranks.
    """
    wrong: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(wrong, not torch.equal(_step(job, size)(), _expected(job, size)))
    if any(wrong):
        ranks = ", ".join(str(rank) for rank, is_wrong in enumerate(wrong) if is_wrong)
        op = message_sizes.OPS[job.config.method.name]
        raise Incorrect(f"{op} of {size.sent_bytes} bytes: ranks {ranks} did not receive what their peers sent")


def _group(job: Job) -> dist.ProcessGroup:
    return job.mesh.get_group("ulysses" if job.config.method.name == "ulysses" else "ring")


def _step(job: Job, size: MessageSize) -> Step:
    """A step: sends stamped slices, [P, n] for all_to_all and otherwise [n], and returns what it received."""
    group, method = _group(job), job.config.method.name
    rank, transport = group.rank(), copy_engines.transport(job.config.method.exchange, group)
    if method == "ulysses":
        sent = torch.stack([stamped(job, size, rank, to) for to in range(group.size())])
        return lambda: transport.all_to_all([sent]).wait()
    sent = stamped(job, size, rank, 0)
    if method == "ring":
        return lambda: transport.shift([sent]).wait()
    return lambda: transport.all_gather(sent).wait()


def _expected(job: Job, size: MessageSize) -> Tensor:
    """What the step of the same method and size must return on this rank: [P, n], [n] or [P*n]."""
    group, method = _group(job), job.config.method.name
    rank, ranks = group.rank(), range(group.size())
    if method == "ulysses":
        return torch.stack([stamped(job, size, sender, rank) for sender in ranks])
    if method == "ring":
        return stamped(job, size, (rank - 1) % group.size(), 0)
    return torch.cat([stamped(job, size, sender, 0) for sender in ranks])


def stamped(job: Job, size: MessageSize, sender: int, receiver: int) -> Tensor:
    """A slice [n] whose values tell the sender, the receiver and the place within the slice."""
    dtype = getattr(torch, job.config.dtype)
    length = size.slice_bytes // dtype.itemsize
    first = sender * job.config.sp_size + receiver
    stamps = ((torch.arange(STAMPS, device=job.device) + first) % STAMPS).to(dtype)
    return stamps.repeat(-(-length // STAMPS))[:length].contiguous()


def _median_of_slowest(step_ms: list[float]) -> float:
    """The median over steps of the slowest rank's time, in ms; the same on every rank."""
    rank_step_ms: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(rank_step_ms, step_ms)
    return median(map(max, zip(*rank_step_ms, strict=True)))
