"""What surrounds the steps of a world of one, and what the host and the profiler are asked."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_bench.config.workload import WorkloadConfig
from sp_bench.measure import timing
from sp_bench.measure.step_parts import ran_on
from sp_bench.measure.timing import Clock, Schedule

CPU = torch.device("cpu")
WORKLOAD = WorkloadConfig("attention", "forward_backward", True, 3, 5, 64)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("who_steps", ["measure", "another loop"])
def test_steps_warm_up_then_are_timed_then_one_is_counted(who_steps: str) -> None:
    entered: list[str] = []
    steps: list[str] = []

    def step() -> None:
        steps.append(entered[-1])
        dist.all_reduce(torch.ones(4))

    if who_steps == "measure":
        measurement = timing.measure(step, Schedule(WORKLOAD), CPU, entered.append, None)
    else:
        clock = Clock(Schedule(WORKLOAD), CPU, entered.append, None)
        wanted = [not clock.tick()]
        for _ in range(timing.num_steps(WORKLOAD)):
            step()
            wanted.append(not clock.tick())
        assert wanted == [True] * 9 + [False]
        measurement = clock.measurement
    assert entered == ["warmup", "measure", "ledger"]
    assert steps == ["warmup"] * 3 + ["measure"] * 5 + ["ledger"]
    assert len(measurement.rank_step_ms) == 5
    assert measurement.counts == {("gradients", "all_reduce"): (1, Fraction(0))}


def slowest_peer(monkeypatch: pytest.MonkeyPatch, step_ms: float) -> None:
    """Every rank hears that the slowest took so long."""
    monkeypatch.setattr(timing.dist, "all_reduce", lambda ms, op: ms.fill_(step_ms))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("slowest_ms", "num_timed"), [(20.0, 63), (1000.0, 5), (4000.0, 2), (0.1, 5000)])
def test_auto_times_as_many_steps_as_the_slowest_ranks_last_warm_up_step_says(
    monkeypatch: pytest.MonkeyPatch, slowest_ms: float, num_timed: int
) -> None:
    slowest_peer(monkeypatch, slowest_ms)
    schedule, entered, taken = Schedule(replace(WORKLOAD, timed_steps="auto")), [], []
    assert (schedule.last_timed, schedule.last) == (None, None)
    measurement = timing.measure(lambda: taken.append(entered[-1]), schedule, CPU, entered.append, None)
    assert Counter(taken) == {"warmup": 3, "measure": num_timed, "ledger": 1}
    assert len(measurement.rank_step_ms) == num_timed
    assert (schedule.last_timed, schedule.last) == (3 + num_timed, 4 + num_timed)


@pytest.mark.usefixtures("alone")
def test_a_loop_that_goes_on_after_the_last_step_is_an_error_and_not_a_longer_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowest_peer(monkeypatch, 1000.0)
    trains = {"name": "train_step", "pass_kind": "step", "optimizer": "adamw", "learning_rate": 1e-6}
    workload = replace(WORKLOAD, timed_steps="auto", activation_checkpointing="none", **trains)
    clock = Clock(Schedule(workload), CPU, lambda name: None, None)
    while not clock.tick():
        pass
    with pytest.raises(RuntimeError, match="a step after its tick had returned True"):
        clock.tick()
    assert len(clock.measurement.rank_step_ms) == 5


def test_what_the_host_takes_to_issue_a_step_is_of_the_first_ones_before_a_device_that_is_behind_holds_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = iter([0.0, 0.010, 0.014, 0.020, 0.021, 0.100])  # s; the fourth step is not looked at
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda later: 20.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=marks.__next__))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    step_ms, window_ms, host_step_ms = timing.time_steps(lambda: None, 4, torch.device("cuda"))
    assert (step_ms, window_ms, host_step_ms) == ([20.0] * 4, pytest.approx(100), pytest.approx(4))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_a_drawn_step_is_looked_at_once_while_the_clock_stands_still(
    monkeypatch: pytest.MonkeyPatch, drawn: int
) -> None:
    now, looked_after = [0.0], []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(timing.secrets, "randbelow", lambda number: {3: drawn}[number])
    monkeypatch.setattr(timing.dist, "broadcast", lambda number, source: None)

    def take(seconds: float, taken: list[float]) -> None:
        now[0] += seconds
        taken.append(now[0])

    steps: list[float] = []
    schedule = Schedule(replace(WORKLOAD, warmup_steps=1, timed_steps=3))
    look = lambda: take(5.0, looked_after)  # noqa: E731
    measurement = timing.measure(lambda: take(1.0, steps), schedule, CPU, lambda name: None, None, look=look)
    assert looked_after == [1 + (drawn + 1) + 5.0]
    assert measurement.rank_step_ms == [1000.0] * 3
    assert measurement.window_ms == 3000.0


def test_an_event_after_the_look_begins_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            Event.made += 1
            self.number = Event.made

        def record(self) -> None:
            said.append(f"event {self.number}")

        def elapsed_time(self, later: "Event") -> float:
            return float(f"{self.number}.{later.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    phases = timing._timed(3, torch.device("cuda"), timing.Look(2, lambda: said.append("look")))
    step_ms, *_ = timing._drive(phases, lambda: said.append("step"))
    assert said == [
        *("event 1", "step", "event 2", "step", "event 3", "look", "event 4", "step", "event 5"),
    ]
    assert step_ms == [1.2, 2.3, 4.5]


def test_launching_takes_the_median_sample_over_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = [3600, *(1e-4 * n for n in (2, 9, 4, 5, 6, 1, 8, 3))]  # s; the median is 5e-4
    times = chain.from_iterable((0.0, seconds) for seconds in lasting)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=times.__next__))
    assert timing.LAUNCHES == 100
    assert timing.launch_us(CPU) == pytest.approx(5.0)


def test_the_hosts_peak_is_the_largest_resident_set_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    status = "VmPeak:\t 9000000 kB\nVmHWM:\t  123456 kB\nVmRSS:\t  100000 kB\n"
    monkeypatch.setattr(
        timing, "Path", lambda path: SimpleNamespace(read_text=lambda: {"/proc/self/status": status}[path])
    )
    assert timing._peaks(CPU)["peak_host_bytes"] == 123456 * 1024


def names(profiler: profile, device_type: DeviceType) -> Counter[str]:
    return Counter(kernel.name for kernel in ran_on(profiler, device_type))


def test_raw_events_have_the_names_that_the_profiler_gives_its_events() -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:  # else torch 2.11 warns
        (torch.ones(4, 4) @ torch.ones(4, 4)).sum()
    counts = names(profiler, DeviceType.CPU)
    assert counts["aten::matmul"] == 1
    assert counts.keys() == {event.name for event in profiler.events() or () if event.device_type == DeviceType.CPU}
    assert names(profiler, DeviceType.CUDA) == {}


def test_a_named_range_of_the_program_is_no_launch() -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, record_function("attention"):
        torch.ones(4).sum()
    assert "attention" in {event.name for event in profiler.events() or ()}
    assert names(profiler, DeviceType.CPU).keys() & {"attention", "aten::sum"} == {"aten::sum"}
