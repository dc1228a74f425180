"""A trace of the untimed step, on request."""

import gzip
import json
import subprocess
import sys

import pytest

from sp_bench.rows import store

SHORT = ("seq_len=64", "workload.warmup_steps=1", "workload.timed_steps=1", "campaign=night", "--no-report")


def run(folder, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sp_bench", "run", *words, *SHORT]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("workload", ["attention", "train_step"])
def test_the_row_names_a_readable_trace_of_each_rank(tmp_path, workload):
    words = (f"workload={workload}", "method=ulysses", "sp_size=2")
    assert run(tmp_path, *words, "workload.trace=true").returncode == 0
    (row,) = store.read(tmp_path / "results" / "night")[0].to_pylist()
    assert len(row["trace_files"]) == 2
    for file in row["trace_files"]:
        with gzip.open(tmp_path / "results" / "night" / file) as text:
            names = {event.get("name") for event in json.load(text)["traceEvents"]}
        assert any(name and "attention" in name for name in names if isinstance(name, str))
    assert run(tmp_path, *words).returncode == 0
    plain = [r for r in store.read(tmp_path / "results" / "night")[0].to_pylist() if r["trace_files"] is None]
    assert len(plain) == 1


def test_a_single_step_has_no_untimed_step_to_trace(tmp_path):
    words = ("workload=train_step", "method=single", "workload.single_step=true", "workload.trace=true")
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert "workload.trace=true traces an untimed step" in done.stderr
