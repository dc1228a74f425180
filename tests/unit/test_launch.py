"""Steps launched call by call or replayed: whose cell it is, what cannot be, what is counted, what a page says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_bench.config.parsing import ConfigError
from sp_bench.config.workload import WorkloadConfig
from sp_bench.driver import progress
from sp_bench.measure import timing
from sp_bench.measure.cuda_graph import Replay
from sp_bench.planning import plan

from .rows import asked_for, cells_of, row

ON_GPUS = {"fabric": "nvlink", "hardware": "h200", "kernel": "math", "workload__launch": "cuda_graph"}
RING = {"method": "ring", "layout": "zigzag"}
ULYSSES = {"method": "ulysses", "ulysses_degree": 2, "ring_degree": 1}


def test_identities_of_before_there_was_a_choice_hold(make_config) -> None:
    """Computed from the tree before: an old row is still the row of its cell, and eager is what it had."""
    for launch in (None, "eager"):
        assert plan.cell_id(make_config(workload__launch=launch)) == "f9a1bc35338a"
    assert plan.cell_id(make_config(workload="collective", fabric="nvlink", hardware="h200")) == "8dd421b0dc54"
    assert plan.cell_id(make_config(workload="train_step", workload__learning_rate=1e-4)) == "2eb7e912ac74"
    assert plan.cell_id(make_config(**ON_GPUS)) != plan.cell_id(make_config(**ON_GPUS | {"workload__launch": "eager"}))


def test_a_plan_tells_both_launches_apart_and_a_row_says_its_own(make_config) -> None:
    configs = [make_config(**ON_GPUS | {"workload__launch": launch}) for launch in ("eager", "cuda_graph")]
    assert [asked_for(config)["launch"] for config in configs] == ["eager", "cuda_graph"]
    assert asked_for(make_config(workload="train_step"))["launch"] == "eager"
    options = progress.apart(plan.plan(configs, 1, 0, 2))
    assert sorted(options.values()) == [[("workload.launch", "cuda_graph")], [("workload.launch", "eager")]]


def test_only_attention_has_a_choice_and_both_ways_are_named(make_config) -> None:
    for workload in ("train_step", "parity", "collective"):
        with pytest.raises(ConfigError, match=r"workload\.launch=eager: only workload=attention has a choice"):
            make_config(workload=workload, workload__launch="eager")
    with pytest.raises(ConfigError, match=r"workload\.launch='graph'.*eager.*cuda_graph"):
        make_config(workload__launch="graph")
    with pytest.raises(ConfigError, match=r"workload\.warmup_steps=0: the first of them records the CUDA graph"):
        make_config(**ON_GPUS, workload__warmup_steps=0)


def test_what_no_graph_can_hold_is_refused_before_anything_is_launched(make_config) -> None:
    reason = plan.unsupported_reason(make_config(workload__launch="cuda_graph"), 8) or ""
    assert "not fabric=gloo; use fabric=nvlink with hardware=h200 or h100, or workload.launch=eager" in reason
    in_turn = make_config(**ON_GPUS, method="ring", method__layout="zigzag", method__exchange="copy_engines")
    reason = plan.unsupported_reason(in_turn, 8) or ""
    assert "use workload.launch=eager, or method.exchange=collectives" in reason
    assert plan.unsupported_reason(make_config(**ON_GPUS), 8) is None


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_where_a_step_is_replayed_an_eager_one_is_counted() -> None:
    entered: list[str] = []
    ran: list[tuple[str, str]] = []

    def replayed() -> None:
        ran.append((entered[-1], "replayed"))

    def eager() -> None:
        ran.append((entered[-1], "eager"))
        dist.all_reduce(torch.ones(4))

    workload = WorkloadConfig("attention", "forward_backward", True, 1, 2, 64)
    measurement = timing.measure(
        replayed, timing.Schedule(workload), torch.device("cpu"), entered.append, None, counted=eager
    )
    assert ran == [("warmup", "replayed"), *[("measure", "replayed")] * 2, ("ledger", "eager")]
    assert measurement.counts == {("gradients", "all_reduce"): (1, Fraction(0))}


class Recorder:
    """In place of torch.cuda: counts replays; the end of a recording that failed raises an error of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replays, self.modes = 0, []
        for name, value in {
            "CUDAGraph": lambda: self,
            "graph": self.record,
            "synchronize": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "max_memory_allocated": lambda: 4096,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def replay(self) -> None:
        self.replays += 1

    @contextmanager
    def record(self, graph: "Recorder", capture_error_mode: str) -> Iterator[None]:
        self.modes.append(capture_error_mode)
        self.failed = False
        yield
        if self.failed:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_a_step_is_recorded_at_the_first_call_and_replayed_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, runs = Recorder(monkeypatch), []

    def step() -> list[torch.Tensor]:
        runs.append(recorder.modes.copy())
        return [torch.tensor(len(runs))]

    replay = Replay(step)
    assert not runs
    results = [replay() for _ in range(3)]
    assert runs == [[], ["thread_local"]], "once as it is, once recorded"
    assert recorder.replays == 3
    assert all(each is results[0] for each in results)
    assert results[0] == [torch.tensor(2)]
    assert replay.peak_allocated_bytes == 4096


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("no such shape")])
def test_what_a_recording_failed_of_is_not_lost_to_how_it_ended(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)

    def step() -> list[torch.Tensor]:
        if recorder.modes:
            recorder.failed = True
            raise error
        return []

    with pytest.raises(type(error)) as raised:
        Replay(step)()
    assert raised.value is error


def launched(launch: str | None, times: dict[str, float], replicates: int = 1, **columns: Any) -> list[dict[str, Any]]:
    """Rows of a ring and of Ulysses, as they are written: each says in its config what it is."""
    rows = []
    for name, ms in times.items():
        method = {"ring": RING, "ulysses": ULYSSES}[name]
        said = {"workload": {"launch": launch}} if launch == "cuda_graph" else {}
        what = {"method": {"name": name}, "seq_len": columns.get("seq_len", 1024), "hardware": {"device": "cpu"}}
        config = json.dumps(what | said)
        rows += [
            row(median_ms=ms * (1 + r / 1000), replicate=r, launch=launch, config=config, **method, **columns)
            for r in range(replicates)
        ]
    return rows


BOTH = launched("eager", {"ring": 3.0, "ulysses": 2.8}) + launched("cuda_graph", {"ring": 0.8, "ulysses": 0.9})


def test_replays_are_another_setting_and_rows_of_before_are_eager() -> None:
    old, new = launched(None, {"ring": 3.0}), launched("eager", {"ulysses": 2.8})
    eager, replayed = cells_of(old + new), cells_of(launched("cuda_graph", {"ring": 0.8}))
    assert len({cell.setting for cell in eager}) == 1
    assert {cell.asked["launch"] for cell in eager} == {"eager"}
    assert replayed[0].setting == f"{eager[0].setting}, replayed as a CUDA graph"
