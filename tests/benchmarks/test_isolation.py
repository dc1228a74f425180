"""Warm process groups measure what fresh processes measure: the intervals of their medians overlap."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sp_bench import hardware
from sp_bench.analysis.statistics import Interval, median_interval
from sp_bench.rows import store

COMMITTED = Path(__file__).parents[2] / "results" / "h200x2_isolation"
REPLICATES = 6
ASKED = ("method", "layout", "kernel", "fabric", "sp_size", "seq_len", "isolation")


def intervals(folder: Path) -> dict[tuple[Any, ...], dict[str, Interval]]:
    """What was asked for, but the isolation -> isolation -> the interval of the median step time over replicates."""
    rows, problems = store.read(folder, ("status", "reason", "median_step_ms", *ASKED))
    assert not problems
    samples: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows.to_pylist():
        assert row["status"] == "ok", row["reason"]
        *cell, isolation = (row[name] for name in ASKED)
        samples.setdefault(tuple(cell), {}).setdefault(isolation, []).append(row["median_step_ms"])
    return {cell: {name: _interval(ms) for name, ms in both.items()} for cell, both in samples.items()}


def _interval(step_ms: Sequence[float]) -> Interval:
    assert len(step_ms) == REPLICATES
    found = median_interval(step_ms)
    assert found is not None
    return found


def disagreements(folder: Path) -> list[str]:
    """One line for each cell whose two intervals do not overlap."""
    lines = []
    for cell, both in intervals(folder).items():
        assert both.keys() == {"trial", "group"}, cell
        trial, group = both["trial"], both["group"]
        if max(trial.low, group.low) > min(trial.high, group.high):
            ranges = ", ".join(f"{name} [{i.low:.3f}, {i.high:.3f}] ms" for name, i in both.items())
            lines.append(f"{'/'.join(map(str, cell))}: {ranges}")
    return lines


def place() -> list[str]:
    """A small cell of the best that this machine has: two GPUs, or two processes."""
    found = hardware.gpus()
    if not found or len(found.devices) < 2:
        return ["hardware=cpu", "fabric=gloo", "seq_len=2048", "workload.timed_steps=30"]
    name = "h100" if "H100" in found.devices[0].name else "h200"
    shape = ["model=llama3_8b", "dtype=bfloat16", "seq_len=16384", "workload.timed_steps=50"]
    return [f"hardware={name}", "fabric=nvlink", "kernel=cudnn", *shape]


def test_group_and_trial_mode_agree_within_their_intervals(benchmark, request, tmp_path):
    if not request.config.getoption("benchmark_only"):
        pytest.skip("compares times of 12 launches, which takes minutes of a quiet machine; run with --benchmark-only")

    arguments = ["method=ring", "sp_size=2", "isolation=trial,group", f"replicates={REPLICATES}", *place()]
    command = [sys.executable, "-m", "sp_bench", "run", *arguments]
    done = benchmark.pedantic(
        subprocess.run, (command,), {"cwd": tmp_path, "capture_output": True, "text": True}, rounds=1
    )
    assert done.returncode == 0, done.stderr
    assert disagreements(tmp_path / "results" / "default") == []


def test_the_committed_campaign_agrees_within_its_intervals():
    assert len(intervals(COMMITTED)) == 2
    assert disagreements(COMMITTED) == []
