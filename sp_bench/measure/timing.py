"""Measures a step that has been proven right: its times, its memory and its traffic.

Every rank runs the same numbers of warm-up and timed steps, fixed before the first timed step. Inside the timed
window there is no barrier and no synchronisation: a step is timed by events on the compute stream on CUDA, and by
perf_counter on a CPU.
"""

import contextlib
import gc
import re
import resource
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from sp_bench.config.workload import AUTO, WorkloadConfig
from sp_bench.costs.attention import Traffic
from sp_bench.costs.work import ExpectedWork
from sp_bench.measure import trace
from sp_bench.measure.counters import DeviceCounters
from sp_bench.measure.ledger import Counts, Ledger
from sp_bench.measure.memory_parts import at_peak
from sp_bench.measure.step_parts import by_class, ran_on
from sp_bench.measure.work import Work

LAUNCHES = 100  # of one sample of `launch_us`; few enough that a device slower than the host can still queue them
MIN_ENERGY_WINDOW_MS = 1000.0  # NVML updates its energy total about every 100 ms: shorter windows would read noise

Step = Callable[[], Any]
EnterPhase = Callable[[str], None]  # tells the driver that a phase of the trial begins
T = TypeVar("T")
Phases = Generator[bool, None, T]  # each time it yields, a step must run; it yields True for the step that is counted


@dataclass
class RankColumns:
    """Row columns of one rank. None: it cannot be measured on this device."""

    rank_step_ms: list[float]  # of each timed step
    window_ms: float  # wall clock around all timed steps
    peak_allocated_bytes: int | None  # this and the next: of torch's allocator
    peak_reserved_bytes: int | None
    peak_host_bytes: int  # resident memory of the process
    device_used_bytes: int | None  # by all processes, after the timed steps
    allocator_retries: int | None
    leftover_bytes: int | None = None  # see `allocated_bytes`
    energy_j: float | None = None  # a step
    device_state: dict[str, Any] | None = None  # sampled while the device worked on an untimed step
    power_limit_w: float | None = None  # this and the next: what the driver allows the device
    application_clock_mhz: int | None = None
    host_launch_us: float | None = None  # see `launch_us`
    host_step_ms: float | None = None  # time in which the host issues a step; None on a CPU, which computes it itself
    part_ms: Mapping[str, float] | None = None  # of the counted step: step_parts.PARTS
    kernel_ms: Mapping[str, float] | None = None  # of the same: step_parts.KERNEL_PARTS
    phase_end_bytes: Mapping[str, int] | None = None  # allocated by torch as each phase of that step ended
    peak_parts_bytes: Mapping[str, int] | None = None  # of its peak, if it was traced: memory_parts.PARTS
    limit_ms: float | None = None  # a training step whose kernels are all that it does


@dataclass
class Measurement(RankColumns):
    """What one rank measured: its columns, and what columns of the whole trial are made of."""

    wire_bytes: float | None = None  # a step, over NVLink; None as above
    cuda_kernels: Mapping[str, int] | None = None  # all kernels that the untimed steps launched -> how often
    profiled_steps: int = 1  # these steps; with a replay, the eager step that was counted and the replay
    arms_ms: dict[str, list[float]] = field(default_factory=dict)  # arm -> ms of each of its steps
    counts: Counts = field(default_factory=dict)  # bytes counted in the ledger step
    between_nodes: Traffic = field(default_factory=dict)  # of them to other nodes
    predicted: Traffic = field(default_factory=dict)  # bytes of the same step by closed form
    unpredicted: tuple[str, ...] = ()  # phases that have no closed form
    work: Work = field(default_factory=Work)  # what the ledger step computed
    expected: ExpectedWork = field(default_factory=ExpectedWork)  # the same by closed form
    trace_files: list[str] = field(default_factory=list)  # of the untimed step, as paths from the campaign's folder
    columns: dict[str, Any] = field(default_factory=dict)  # row columns that are equal on every rank
    proof: Mapping[str, Any] | None = None  # for trials of the same key (rows/proofs.py); None: this one relied on one


class Schedule:
    """Which steps of one measurement are timed, counted from 1. With workload.timed_steps=auto nobody knows before the
    ranks have agreed on it, after the warm-up."""

    def __init__(self, workload: WorkloadConfig, windows: Sequence[int] = ()) -> None:
        """windows: numbers of timed steps between which one untimed step runs; none: no step comes between."""
        self.workload = workload
        self._windows = windows
        self._timed_steps = None if workload.timed_steps == AUTO else workload.timed_steps

    @property
    def timed_steps(self) -> int:
        assert self._timed_steps is not None, "the ranks have not agreed on workload.timed_steps=auto yet"
        return self._timed_steps

    @property
    def windows(self) -> Sequence[int]:
        return self._windows or [self.timed_steps]

    @property
    def last_timed(self) -> int | None:
        """The last timed step; None: not known yet."""
        return None if self._timed_steps is None else self.workload.warmup_steps + self._timed_steps

    @property
    def last(self) -> int | None:
        """The last of all, which is counted and not timed, unless it is the single step. None: not known yet."""
        return None if self.last_timed is None else self.last_timed + (not self.workload.single_step)

    def agree(self, step_ms: float, device: torch.device) -> None:
        """Fix the number of timed steps, by the slowest rank's time of its last warm-up step. Every rank of the world
        calls it."""
        slowest_ms = torch.tensor(step_ms, dtype=torch.float64, device=device)
        dist.all_reduce(slowest_ms, dist.ReduceOp.MAX)
        self._timed_steps = self.workload.num_timed_steps(float(slowest_ms))

    def draw(self, device: torch.device) -> int:
        """One of the timed steps, counted from 1, which nobody could know before. Every rank of the world calls it, and
        gets the same."""
        number = torch.tensor(1 + secrets.randbelow(self.timed_steps), device=device)
        dist.broadcast(number, 0)
        return int(number)


class Clock:
    """Measures steps that another loop runs. The loop must call `tick` once before its first step, and once after each,
    until it returns True: that was the last."""

    def __init__(
        self, schedule: Schedule, device: torch.device, enter_phase: EnterPhase, trace_to: Path | None
    ) -> None:
        self._phases = _phases(schedule, device, enter_phase, trace_to)
        self._measurement: Measurement | None = None

    def tick(self) -> bool:
        """
        Raises:
            RuntimeError: the last step is over already.
        """
        if self._measurement is not None:
            raise RuntimeError(
                "the engine took a step after its tick had returned True; it must end its loop there, or be measured "
                "with a number for workload.timed_steps"
            )
        try:
            next(self._phases)
        except StopIteration as end:
            self._measurement = end.value
        return self._measurement is not None

    @property
    def measurement(self) -> Measurement:
        """What was measured; only after the last tick."""
        assert self._measurement is not None, "the loop ended before its last step"
        return self._measurement


def num_steps(workload: WorkloadConfig) -> int:
    """Steps of one measurement, at most: warm-up steps, timed steps and the ledger step. A single step is all of
    them."""
    return workload.warmup_steps + workload.most_timed_steps + (not workload.single_step)


def measure(
    step: Step,
    schedule: Schedule,
    device: torch.device,
    enter_phase: EnterPhase,
    trace_to: Path | None,
    counted: Step | None = None,
    look: Callable[[], None] | None = None,
) -> Measurement:
    """Warm up, time steps, and then count the bytes of one more, untimed step. Every rank of the world calls it.

    trace_to: where a trace of that step is written; None: nowhere. counted: the step whose bytes are counted, if `step`
    is a replay, in which the ledger sees no collective. look: is called once, between the clock of a timed step that is
    drawn at random and that of the next one; it must wait for nothing.
    """
    return _drive(_phases(schedule, device, enter_phase, trace_to, look), step, counted)


def _drive(phases: Phases[T], step: Step, counted: Step | None = None) -> T:
    """Run a step whenever the generator yields. Returns what the generator returns."""
    while True:
        try:
            to_count = next(phases)
        except StopIteration as end:
            return end.value
        (counted or step)() if to_count else step()


def _phases(
    schedule: Schedule,
    device: torch.device,
    enter_phase: EnterPhase,
    trace_to: Path | None,
    look: Callable[[], None] | None = None,
) -> Phases[Measurement]:
    """All of a measurement except the steps. It yields wherever a step must run."""
    workload = schedule.workload
    enter_phase("warmup")
    release_memory(device)
    if workload.timed_steps == AUTO:
        yield from _no_time(workload.warmup_steps - 1)
        (last_ms,), *_ = yield from _timed(1, device)
        schedule.agree(last_ms, device)
    else:
        yield from _no_time(workload.warmup_steps)
    drawn = Look(schedule.draw(device), look) if look else NO_LOOK
    synchronise(device)
    counters = DeviceCounters(device) if device.type == "cuda" else None
    dist.barrier()  # until peers have taken the last of the warm-up from this device
    _reset_peaks(device)
    enter_phase("measure")
    before = counters.read() if counters else None
    dist.barrier()  # the ranks took different times to read, but enter the window together; inside it nothing waits
    book = Ledger(device) if workload.single_step else None
    with book or contextlib.nullcontext():
        step_ms, window_ms, host_step_ms = yield from _windows(schedule.windows, device, drawn)
    measurement = Measurement(step_ms, window_ms, **_peaks(device))
    measurement.host_step_ms = host_step_ms
    if counters and before:
        measurement.power_limit_w, measurement.application_clock_mhz = counters.limits()
        dist.barrier()  # until peers have taken the last of the window from this device
        after = counters.read()
        measurement.wire_bytes = before.sent_bytes_until(after, schedule.timed_steps)
        if window_ms >= MIN_ENERGY_WINDOW_MS:
            measurement.energy_j = before.energy_j_until(after, schedule.timed_steps)
    enter_phase("ledger")
    if book is None:
        yield from _inspect(measurement, device, counters, trace_to, replayed=workload.launch == "cuda_graph")
        measurement.trace_files = trace.files(trace_to)
    else:
        measurement.counts, measurement.work = book.counts, book.work
        measurement.part_ms, measurement.phase_end_bytes = book.phase_times.ms(), book.phase_times.end_bytes()
        measurement.between_nodes = book.between_nodes
    measurement.host_launch_us = launch_us(device)
    return measurement


def _inspect(
    measurement: Measurement,
    device: torch.device,
    counters: DeviceCounters | None,
    trace_to: Path | None,
    *,
    replayed: bool,
) -> Phases[None]:
    """Run one more, untimed step. Records its collectives and, on CUDA, its kernels and the state of the device
    meanwhile. If steps are `replayed`, the kernels of one replay are recorded too."""
    with trace.profiled(device, trace_to) as traced:
        with Ledger(device) as ledger:
            yield True
        if counters is not None:
            if replayed:
                yield False
            end = torch.cuda.Event()
            end.record()
            state = counters.state()
            measurement.device_state = None if end.query() else state  # None: the device was idle again already
            torch.cuda.synchronize()
    if counters is not None:
        assert traced is not None
        ran = ran_on(traced.profiler, DeviceType.CUDA)
        measurement.cuda_kernels = Counter(kernel.name for kernel in ran)
        measurement.profiled_steps = 1 + replayed
        measurement.kernel_ms = None if replayed else by_class(ran)
        if traced.events is not None:
            measurement.peak_parts_bytes = at_peak(traced.events, traced.held_before, ledger.work.update_bytes)
    measurement.part_ms, measurement.phase_end_bytes = ledger.phase_times.ms(), ledger.phase_times.end_bytes()
    measurement.counts, measurement.work = ledger.counts, ledger.work
    measurement.between_nodes = ledger.between_nodes


def launch_us(device: torch.device) -> float:
    """us in which this process issues one operation on one number, as the median of 9 samples.

    A step of n operations lasts at least n times as long, however fast the device is. So short steps can differ between
    two machines only because their hosts differ.
    """
    number = torch.zeros(1, device=device)
    samples = []
    for _ in range(9):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples) / LAUNCHES


def time_arm(step: Step, schedule: Schedule, device: torch.device) -> list[float]:
    """ms of each of this rank's steps, as many as were timed, after the workload's warm-up steps, at least one. Every
    rank calls it."""
    for _ in range(max(schedule.workload.warmup_steps, 1)):
        step()
    synchronise(device)
    dist.barrier()
    return time_steps(step, schedule.timed_steps, device)[0]


def release_memory(device: torch.device) -> None:
    """Free what a proof left behind, before memory is measured: FSDP's hooks and modules, which refer to each other,
    and blocks that the allocator keeps."""
    gc.collect()
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes of torch's allocator that are in use; None on a CPU. Workloads read it before they build what they measure:
    what is there by then is of an earlier trial of the process or of a proof, and would be part of the peak."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def synchronise(device: torch.device) -> None:
    """Wait for all streams of `device`. Before memory goes back to the device this is needed: with expandable segments
    torch waits for one stream, while another may still use what was freed (pytorch issue 196258)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Timed = tuple[list[float], float, float | None]  # ms: of each step; of the window; in which the host issues a step


def time_steps(step: Step, num_steps: int, device: torch.device) -> Timed:
    """This rank's times of `num_steps` steps."""
    return _drive(_timed(num_steps, device), step)


class Look(NamedTuple):
    """What is done once while steps are timed; it must wait for nothing."""

    after: int  # number of a timed step: behind its clock, and before that of the next one
    take: Callable[[], None]


NO_LOOK = Look(0, lambda: None)


def _windows(windows: Sequence[int], device: torch.device, look: Look) -> Phases[Timed]:
    """The times of all steps of several windows, and their sum. One step runs between two windows, in none of them.
    look: is of the first window."""
    step_ms, window_ms, host_step_ms = yield from _timed(windows[0], device, look)
    for num_steps in windows[1:]:
        yield from _no_time(1)
        synchronise(device)
        more_ms, more_window_ms, _ = yield from _timed(num_steps, device)
        step_ms, window_ms = step_ms + more_ms, window_ms + more_window_ms
    return step_ms, window_ms, host_step_ms


def _no_time(num_steps: int) -> Phases[None]:
    for _ in range(num_steps):
        yield False


def _timed(num_steps: int, device: torch.device, look: Look = NO_LOOK) -> Phases[Timed]:
    return _timed_on_cuda(num_steps, look) if device.type == "cuda" else _timed_on_cpu(num_steps, look)


def _timed_on_cpu(num_steps: int, look: Look) -> Phases[Timed]:
    step_ms, start = [], time.perf_counter()
    for number in range(1, num_steps + 1):
        yield False
        end = time.perf_counter()
        step_ms.append(1e3 * (end - start))
        start = end
        if number == look.after:
            look.take()
            start = time.perf_counter()
    return step_ms, sum(step_ms), None


def _timed_on_cuda(num_steps: int, look: Look) -> Phases[Timed]:
    events = iter([torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 2)])
    spans, issued = [], []  # of each step: its events, and seconds in which the host issues it
    first = mark = time.perf_counter()
    start = next(events)
    start.record()
    for number in range(1, num_steps + 1):
        yield False
        end = next(events)
        end.record()
        now = time.perf_counter()
        spans.append((start, end))
        issued.append(now - mark)
        start, mark = end, now
        if number == look.after:
            look.take()
            start, mark = next(events), time.perf_counter()
            start.record()
    torch.cuda.synchronize()
    window_ms = 1e3 * (time.perf_counter() - first)
    # the smallest of the first three: a device with a full queue makes the host wait at later steps
    host_step_ms = 1e3 * min(issued[:3])
    return [start.elapsed_time(end) for start, end in spans], window_ms, host_step_ms


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)  # allocator retries
    with contextlib.suppress(OSError):  # where Linux refuses, the peak includes the start-up and is an upper bound
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak resident set


def _peaks(device: torch.device) -> dict[str, Any]:
    host = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    peak_host = int(host[1]) * 1024 if host else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type != "cuda":
        return dict.fromkeys(
            ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "allocator_retries")
        ) | {"peak_host_bytes": peak_host}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "peak_host_bytes": peak_host,
        "device_used_bytes": total - free,
        "allocator_retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
    }
