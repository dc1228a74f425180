"""Timing, memory and traffic of a step that has been proven right.

Every rank runs the same fixed numbers of warm-up and timed steps. Inside the timed window there is no barrier and no
synchronisation: CUDA steps are bracketed by events on the compute stream, CPU steps by perf_counter.
"""

import contextlib
import gc
import itertools
import re
import resource
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sp_bench.config.trial import WorkloadConfig
from sp_bench.costs.attention import Traffic
from sp_bench.measure.counters import DeviceCounters
from sp_bench.measure.ledger import Counts, Ledger

LAUNCHES = 100  # of one sample; few enough that a device that is slower than the host can still queue them
MIN_ENERGY_WINDOW_MS = 1000.0  # NVML renews its energy total every 100 ms or so: shorter windows would read noise

Step = Callable[[], Any]
EnterPhase = Callable[[str], None]  # tells the trial's parent that a phase begins
T = TypeVar("T")
Phases = Generator[bool, None, T]  # waits for a step each time; True: for the one that is counted


@dataclass
class Measurement:
    """One rank's samples. `columns` holds row columns that are equal on every rank."""

    step_ms: list[float]
    window_ms: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_host_bytes: int
    device_used_bytes: int | None
    allocator_retries: int | None
    energy_j: float | None = None  # of one step
    wire_bytes: float | None = None  # of one step; None: not counted, or it does not travel by NVLink
    device_state: dict[str, Any] | None = None  # sampled while the device worked on an untimed step
    host_launch_us: float | None = None  # see `launch_us`
    host_step_ms: float | None = None  # that the host takes to issue a step; None on CPU, where it computes it
    cuda_kernels: list[str] | None = None  # all that an untimed step launched; None on CPU
    arms_ms: dict[str, list[float]] = field(default_factory=dict)  # arm -> ms of its steps
    counts: Counts = field(default_factory=dict)  # of the ledger step
    predicted: Traffic = field(default_factory=dict)  # closed form of the same step
    unpredicted: tuple[str, ...] = ()  # phases that have none
    columns: dict[str, Any] = field(default_factory=dict)


class Clock:
    """Measures steps that another loop runs: it ticks once before the first step and once after each of `num_steps`."""

    def __init__(self, workload: WorkloadConfig, device: torch.device, enter_phase: EnterPhase) -> None:
        self._phases = _phases(workload, device, enter_phase)
        self._measurement: Measurement | None = None

    def tick(self) -> None:
        try:
            next(self._phases)
        except StopIteration as end:
            self._measurement = end.value

    @property
    def measurement(self) -> Measurement:
        assert self._measurement is not None, "the loop ended before its last step"
        return self._measurement


def num_steps(workload: WorkloadConfig) -> int:
    """Steps of one measurement: those that warm up, the timed ones and the ledger's."""
    return workload.warmup_steps + workload.timed_steps + 1


def measure(
    step: Step,
    workload: WorkloadConfig,
    device: torch.device,
    enter_phase: EnterPhase,
    counted: Step | None = None,
) -> Measurement:
    """Warm up, time and then count one more, untimed step. Called by every rank together.

    counted: the step that is counted, where `step` replays a record of it, in which no collective can be seen.
    """
    return _drive(_phases(workload, device, enter_phase), step, counted)


def _drive(phases: Phases[T], step: Step, counted: Step | None = None) -> T:
    """Run a step whenever the generator waits for one; returns what it returns."""
    while True:
        try:
            to_count = next(phases)
        except StopIteration as end:
            return end.value
        (counted or step)() if to_count else step()


def _phases(workload: WorkloadConfig, device: torch.device, enter_phase: EnterPhase) -> Phases[Measurement]:
    """What surrounds the steps: it yields wherever one has to run."""
    enter_phase("warmup")
    release_memory(device)
    for _ in range(workload.warmup_steps):
        yield False
    _synchronise(device)
    counters = DeviceCounters(device) if device.type == "cuda" else None
    dist.barrier()  # what peers still take from this device is of the warm-up
    _reset_peaks(device)
    enter_phase("measure")
    before = counters.read() if counters else None
    dist.barrier()  # reading took each rank its own time: they enter the window together, and nothing inside it waits
    step_ms, window_ms, host_step_ms = yield from _timed(workload.timed_steps, device)
    measurement = Measurement(step_ms, window_ms, **_peaks(device))
    measurement.host_step_ms = host_step_ms
    if counters and before:
        dist.barrier()  # what the peers still take from this device belongs to the window
        after = counters.read()
        measurement.wire_bytes = before.sent_bytes_until(after, workload.timed_steps)
        if window_ms >= MIN_ENERGY_WINDOW_MS:
            measurement.energy_j = before.energy_j_until(after, workload.timed_steps)
    enter_phase("ledger")
    yield from _inspect(measurement, counters, replayed=workload.launch == "cuda_graph")
    measurement.host_launch_us = launch_us(device)
    return measurement


def _inspect(measurement: Measurement, counters: DeviceCounters | None, *, replayed: bool) -> Phases[None]:
    """One more, untimed step: its collectives and, on CUDA, its kernels and the device's state meanwhile. Where steps
    are `replayed`, its kernels and those of one replay."""
    if counters is None:
        with Ledger() as ledger:
            yield True
    else:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            with Ledger() as ledger:
                yield True
            if replayed:
                yield False
            end = torch.cuda.Event()
            end.record()
            state = counters.state()
            measurement.device_state = None if end.query() else state  # an idle device says nothing about the load
            torch.cuda.synchronize()
        measurement.cuda_kernels = sorted(launched(profiler, DeviceType.CUDA))
    measurement.counts = ledger.counts


def launch_us(device: torch.device) -> float:
    """us that this process takes to issue one operation on one number: the median of some samples.

    A step of n operations lasts at least n times that, however fast the device: machines that differ in it differ in
    short steps, for no reason of the method.
    """
    number = torch.zeros(1, device=device)
    samples = []
    for _ in range(9):
        _synchronise(device)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples) / LAUNCHES


def launched(profiler: profile, device_type: DeviceType) -> set[str]:
    """Names of what ran on a kind of device, from the raw events: `profiler.events()` makes an object of each and a
    tree of all, which for the 100,000 of a training step takes longer than the step."""
    recorder = profiler.profiler
    assert recorder is not None
    assert recorder.kineto_results is not None, "the profiler has not run"
    return {event.name() for event in recorder.kineto_results.events() if event.device_type() == device_type}


def time_arm(step: Step, workload: WorkloadConfig, device: torch.device) -> list[float]:
    """ms of each step, after as many that warm up as `measure` has, and one at least. Called by every rank together."""
    for _ in range(max(workload.warmup_steps, 1)):
        step()
    _synchronise(device)
    dist.barrier()
    return time_steps(step, workload.timed_steps, device)[0]


def release_memory(device: torch.device) -> None:
    """Free what a proof left behind before memory is measured: FSDP's hooks and modules refer to each other, and the
    allocator keeps the blocks of the one-device runs."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Timed = tuple[list[float], float, float | None]  # ms of each step, of wall clock around all, of the host issuing one


def time_steps(step: Step, num_steps: int, device: torch.device) -> Timed:
    """This rank's times."""
    return _drive(_timed(num_steps, device), step)


def _timed(num_steps: int, device: torch.device) -> Phases[Timed]:
    return _timed_on_cuda(num_steps) if device.type == "cuda" else _timed_on_cpu(num_steps)


def _timed_on_cpu(num_steps: int) -> Phases[Timed]:
    marks = [time.perf_counter()]
    for _ in range(num_steps):
        yield False
        marks.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in itertools.pairwise(marks)], 1e3 * (marks[-1] - marks[0]), None


def _timed_on_cuda(num_steps: int) -> Phases[Timed]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    marks = [time.perf_counter()]
    events[0].record()
    for event in events[1:]:
        yield False
        event.record()
        marks.append(time.perf_counter())
    torch.cuda.synchronize()
    window_ms = 1e3 * (time.perf_counter() - marks[0])
    # of the first steps, since a device with much to do makes the host wait
    host_step_ms = 1e3 * min(b - a for a, b in itertools.pairwise(marks[:4]))
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)], window_ms, host_step_ms


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)  # allocator retries
    with contextlib.suppress(OSError):  # some kernels refuse: the peak then includes the start-up, an upper bound
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
