"""What surrounds the steps of a world of one, and what the host and the profiler are asked."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_bench.config.trial import WorkloadConfig
from sp_bench.measure import timing
from sp_bench.measure.step_parts import ran_on
from sp_bench.measure.timing import Clock

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
        measurement = timing.measure(step, WORKLOAD, CPU, entered.append, None)
    else:
        clock = Clock(WORKLOAD, CPU, entered.append, None)
        clock.tick()
        for _ in range(timing.num_steps(WORKLOAD)):
            step()
            clock.tick()
        measurement = clock.measurement
    assert entered == ["warmup", "measure", "ledger"]
    assert steps == ["warmup"] * 3 + ["measure"] * 5 + ["ledger"]
    assert len(measurement.rank_step_ms) == 5
    assert measurement.counts == {("gradients", "all_reduce"): (1, Fraction(0))}


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
