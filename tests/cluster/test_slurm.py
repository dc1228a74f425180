"""`submit` on a real Slurm of two nodes: every planned trial has its row, whatever becomes of the jobs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sp_bench.rows import store

SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")
DEADLINES = ("deadlines.init=60", "deadlines.correctness=60", "deadlines.warmup=60", "deadlines.measure=600")
CLUSTER = "name: two\npartition: main\ngpus_per_node: 0\ntime_limit_minutes: {minutes}\nsetup: [export SP_SETUP=done]\n"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sp_bench(slurm, tmp_path) -> Run:
    """`sp_bench("submit", ...)` in a folder with a file for this cluster."""
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "two.yaml").write_text(CLUSTER.format(minutes=60))
    root = str(Path(__file__).parents[2])
    variables = (
        slurm.variables | {"PYTHONPATH": root} | {n: v for n, v in os.environ.items() if n.startswith("SP_BENCH")}
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sp_bench", *words]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    return run


def rows(folder: Path) -> list[store.RowName]:
    return list(store.committed(folder)) if folder.is_dir() else []


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("_work/jobs/*.txt")))


def planned(sp_bench: Run, *words: str) -> set[str]:
    return {trial["trial_id"] for trial in json.loads(sp_bench("plan", *words, "--json").stdout)["trials"]}


def jobs(printed: str) -> list[str]:
    return re.findall(r"^job (\d+): ", printed, re.MULTILINE)


def wait_until(done: Callable[[], object], folder: Path, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.2)


def test_a_submitted_sweep_has_a_row_for_each_planned_trial(sp_bench, slurm, tmp_path):
    words = ("method=single", "sp_size=1", "seq_len=96", "replicates=2", "campaign=two", *SMALL, *DEADLINES)
    folder = tmp_path / "results" / "two"
    done = sp_bench("submit", *words, "--cluster", "two", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr + logs(folder)
    assert len(jobs(done.stdout)) == 2
    assert {row.trial_id for row in rows(folder)} == planned(sp_bench, *words)
    assert [row.status for row in rows(folder)] == ["ok", "ok"]
    (status,) = json.loads(sp_bench("status", "results/two", "--json").stdout)
    assert (status["planned"], status["left"], status["jobs"], status["queue_problem"]) == (2, 0, [], None)
    again = sp_bench("submit", *words, "--cluster", "two")
    assert "2 trials: 2 done, 0 in earlier jobs, 0 in 0 new jobs" in again.stdout


LONGER = (
    *(word for word in SMALL if "timed_steps" not in word),
    *DEADLINES,
    "campaign=two",
    "method=single",
    "sp_size=1",
)
WORDS = (*LONGER, "seq_len=96,112", "replicates=2", "workload.timed_steps=3000")  # some seconds a trial


def at_work(folder: Path) -> bool:
    """Whether a rank of a trial runs that has no row yet."""
    keys = {f"{row.trial_id}-{row.env_id}-{row.attempt}" for row in rows(folder)}
    begun = folder.glob("_work/trials/*/rank0.events.jsonl")
    return any(path.parent.name.partition(".")[0] not in keys for path in begun)


def drivers(folder: Path) -> list[psutil.Process]:
    """Processes of `sp-bench resume` that jobs run."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if "resume" in words and process.info["cwd"] == str(folder.parents[1]):
            found.append(process)
    return found


def require_exactly_the_planned_rows(sp_bench: Run, folder: Path, words: tuple[str, ...] = WORDS) -> Counter[str]:
    """Each planned trial is ok once, and nothing is left of any job. Returns how many rows have which status."""
    found = rows(folder)
    ok = Counter(row.trial_id for row in found if row.status == "ok")
    assert ok == dict.fromkeys(planned(sp_bench, *words), 1), logs(folder)
    assert len({(row.trial_id, row.attempt) for row in found}) == len(found)
    assert [*folder.glob("_work/claims/*")] == []
    assert drivers(folder) == []
    return Counter(row.status for row in found)


@pytest.mark.faults
def test_after_scancel_a_second_submission_runs_what_is_left(sp_bench, slurm, tmp_path):
    folder = tmp_path / "results" / "two"
    first = jobs(sp_bench("submit", *WORDS, "--cluster", "two").stdout)
    wait_until(lambda: at_work(folder), folder)
    (status,) = json.loads(sp_bench("status", "results/two", "--json").stdout)
    assert [str(job["job_id"]) for job in status["jobs"]] == first
    slurm.say("scancel", *first)
    slurm.wait_for("", "squeue", "--noheader", limit_s=60)
    assert "preempted" in {row.status for row in rows(folder)}, logs(folder)
    left = 4 - sum(row.status == "ok" for row in rows(folder))
    again = sp_bench("submit", *WORDS, "--cluster", "two", "--wait")
    assert again.returncode == 0, again.stderr + logs(folder)
    assert f"{left} in {len(jobs(again.stdout))} new job" in again.stdout
    assert require_exactly_the_planned_rows(sp_bench, folder) == {"ok": 4, "preempted": 1}


@pytest.mark.faults
def test_two_submissions_at_once_measure_nothing_twice(sp_bench, tmp_path):
    folder = tmp_path / "results" / "two"
    sp_bench("submit", *WORDS, "--cluster", "two")
    second = sp_bench("submit", *WORDS, "--cluster", "two", "--wait")
    assert "in 0 new jobs" in second.stdout
    assert second.returncode == 0, second.stderr + logs(folder)
    assert require_exactly_the_planned_rows(sp_bench, folder) == {"ok": 4}


@pytest.mark.faults
def test_requeued_jobs_go_on_with_what_has_no_row(sp_bench, slurm, tmp_path):
    folder = tmp_path / "results" / "two"
    submitted = jobs(sp_bench("submit", *WORDS, "--cluster", "two").stdout)
    slurm.wait_for("RUNNING\nRUNNING", "squeue", "--noheader", "--format=%T")
    wait_until(lambda: at_work(folder), folder)
    slurm.say("scontrol", "requeue", ",".join(submitted))
    slurm.wait_for("PENDING\nPENDING", "squeue", "--noheader", "--format=%T")
    for job in submitted:
        slurm.say("scontrol", "update", f"JobId={job}", "StartTime=now")  # it would wait for two minutes
    waited = sp_bench("submit", *WORDS, "--cluster", "two", "--wait")
    assert "in 0 new jobs" in waited.stdout
    assert waited.returncode == 0, waited.stderr + logs(folder)
    assert require_exactly_the_planned_rows(sp_bench, folder) == {"ok": 4, "preempted": 1}


@pytest.mark.faults
def test_before_its_time_limit_a_job_records_the_running_trial(sp_bench, slurm, tmp_path):
    folder = tmp_path / "results" / "two"
    words = (*LONGER, "seq_len=96", "workload.timed_steps=40000")  # Slurm looks at its limits twice a minute
    (job,) = jobs(sp_bench("submit", *words, "--cluster", "two").stdout)
    wait_until(lambda: at_work(folder), folder)
    slurm.say("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # so it is told at once
    slurm.wait_for("", "squeue", "--noheader", limit_s=150)
    assert [row.status for row in rows(folder)] == ["preempted"], logs(folder)
    again = sp_bench("submit", *words, "--cluster", "two", "--wait")
    assert again.returncode == 0, again.stderr + logs(folder)
    assert require_exactly_the_planned_rows(sp_bench, folder, words) == {"ok": 1, "preempted": 1}


@pytest.mark.faults
def test_a_killed_run_leaves_its_trials_to_the_next_submission(sp_bench, slurm, tmp_path):
    folder = tmp_path / "results" / "two"
    sp_bench("submit", *WORDS, "--cluster", "two")
    wait_until(lambda: at_work(folder), folder)
    for driver in drivers(folder):
        driver.send_signal(signal.SIGKILL)
    slurm.wait_for("", "squeue", "--noheader", limit_s=60)
    assert len(rows(folder)) < 4
    again = sp_bench("submit", *WORDS, "--cluster", "two", "--wait")
    assert again.returncode == 0, again.stderr + logs(folder)
    assert require_exactly_the_planned_rows(sp_bench, folder) == {"ok": 4}


@pytest.mark.faults
def test_a_killed_slurmd_costs_no_row_and_doubles_none(sp_bench, slurm, tmp_path):
    folder = tmp_path / "results" / "two"
    sp_bench("submit", *WORDS, "--cluster", "two")
    wait_until(lambda: at_work(folder), folder)
    slurm.end("n1", signal.SIGKILL)
    try:
        waited = sp_bench("submit", *WORDS, "--cluster", "two", "--wait")
    finally:
        slurm.start_node("n1")
        slurm.wait_for("2 idle", "sinfo", "--noheader", "--format=%D %t", limit_s=90)
    assert "in 0 new jobs" in waited.stdout
    if waited.returncode:  # Slurm may have given up a job that it would not start again
        waited = sp_bench("submit", *WORDS, "--cluster", "two", "--wait")
    assert waited.returncode == 0, waited.stderr + logs(folder)
    assert set(require_exactly_the_planned_rows(sp_bench, folder)) <= {"ok", "preempted"}


PAGE = Path(__file__).parents[2] / "docs" / "CLUSTER.md"


def block(text: str, begin: str) -> str:
    """The indented block of the page whose first line is `begin`."""
    found = re.search(rf"^    {re.escape(begin)}\n((    .*)?\n)*", text, re.MULTILINE)
    assert found, begin
    return "\n".join(line[4:] for line in found[0].splitlines()).rstrip() + "\n"


@pytest.mark.faults
def test_the_commands_of_the_page_about_clusters_do_what_it_says(sp_bench, slurm, tmp_path):
    text = PAGE.read_text().partition("## Untried")[0]
    (tmp_path / "conf" / "cluster" / "mine.yaml").write_text(block(text, "name: mine"))
    commands = [line.partition("#")[0].split() for line in text.splitlines() if line.startswith("    sp-bench ")]
    assert len(commands) == 7
    for command in commands:
        done = sp_bench(*command[1:])
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    folder = tmp_path / "results" / "night"
    assert [row.status for row in rows(folder)] == ["ok", "ok"]
    assert (folder / "_work" / "report" / "index.html").is_file()
    assert [row.status for row in rows(tmp_path / "results" / "both")] == ["ok"]

    (tmp_path / "job.sh").write_text(block(text, "#!/bin/bash").replace("campaign=night", "campaign=second"))
    variables = slurm.variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (line,) = [line.split() for line in text.splitlines() if line.startswith("    sbatch ")]
    subprocess.run(line, cwd=tmp_path, env=variables, check=True, capture_output=True)
    slurm.wait_for("", "squeue", "--noheader", limit_s=120)
    assert [row.status for row in rows(tmp_path / "results" / "second")] == ["ok", "ok"]
