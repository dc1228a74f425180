"""A trace of the untimed step, on request."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sp_bench.rows import store

SHORT = ("seq_len=64", "workload.warmup_steps=1", "workload.timed_steps=1", "campaign=night", "--no-report")


def run(folder, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sp_bench", "run", *words, *SHORT]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The campaign's folder, and a row of each workload with a trace and without, all of one launch."""
    folder = tmp_path_factory.mktemp("traced")
    swept = ("workload=attention,train_step", "workload.trace=true,false", "isolation=group")
    done = run(folder, *swept, "method=ulysses", "sp_size=2")
    assert done.returncode == 0, done.stdout + done.stderr
    campaign = folder / "results" / "night"
    return campaign, store.read(campaign)[0].to_pylist()


@pytest.mark.parametrize("workload", ["attention", "train_step"])
def test_the_row_names_a_readable_trace_of_each_rank(rows, workload):
    campaign, listed = rows
    plain, traced = sorted((row["trace_files"] for row in listed if row["workload"] == workload), key=bool)
    assert plain is None
    assert len(traced) == 2
    for file in traced:
        with gzip.open(campaign / file) as text:
            names = {event.get("name") for event in json.load(text)["traceEvents"]}
        assert any(name and "attention" in name for name in names if isinstance(name, str))


def test_a_single_step_has_no_untimed_step_to_trace(tmp_path):
    words = ("workload=train_step", "method=single", "workload.single_step=true", "workload.trace=true")
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert "workload.trace=true traces an untimed step" in done.stderr
