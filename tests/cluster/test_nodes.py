"""Trials over both nodes of a real Slurm: proven, counted and reported as on one, and ended on both."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sp_bench.rows import store

from .test_slurm import (
    DEADLINES,
    SMALL,
    drivers,
    jobs,
    logs,
    planned,
    require_exactly_the_planned_rows,
    rows,
    wait_until,
)
from .test_slurm import sp_bench as sp_bench

BOTH = ("num_nodes=2", "campaign=two", *DEADLINES)


SWEEP = """\
# @package _global_
sweep:
  blocks:
    - method: [ulysses, ring]
    - method: usp
      method.ulysses_degree: 2
      method.placement: [ulysses_inner, ring_inner]
"""


def read(folder):
    return store.read(folder)[0].to_pylist()


@pytest.mark.faults  # a minute; tests/cli/test_hosts.py has two hosts without Slurm
def test_trials_over_two_nodes_are_one_job_whose_rows_are_proven_counted_and_name_both(sp_bench, tmp_path):
    """Ulysses inside each node with the ring across, and the reverse, beside both alone."""
    sweep = tmp_path / "conf" / "sweep"
    sweep.mkdir()
    (sweep / "both.yaml").write_text(SWEEP)
    words = ("sweep=both", "sp_size=4", "seq_len=96", "model.num_heads=4", "model.num_kv_heads=4", *BOTH, *SMALL)
    folder = tmp_path / "results" / "two"
    done = sp_bench("submit", *words, "--cluster", "two", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr + logs(folder)
    assert "4 trials of replicate 0 on 2 nodes" in done.stdout
    assert len(jobs(done.stdout)) == 1
    for row in read(folder):
        assert (row["status"], row["num_nodes"], row["ranks_per_node"]) == ("ok", 2, 2), row["reason"]
        assert row["comm_counted_bytes"] == row["comm_predicted_bytes"] > 0
        assert row["internode_counted_bytes"] == row["internode_predicted_bytes"]
        assert len(row["node_environments"]) == 2
        assert "unequal_nodes" not in row["flags"]
    sent = {(row["method"], row["placement"]): row["internode_counted_bytes"] for row in read(folder)}
    all_bytes = {(row["method"], row["placement"]): row["comm_counted_bytes"] for row in read(folder)}
    assert sent["ulysses", None] == pytest.approx([all_bytes["ulysses", None] * 2 / 3] * 4)  # 2 of 3 peers
    assert sent["ring", None] == [0, all_bytes["ring", None], 0, all_bytes["ring", None]]  # every second hop
    exchanged = all_bytes["usp", "ulysses_inner"] - sent["usp", "ulysses_inner"][0]
    assert sent["usp", "ring_inner"] == [exchanged] * 4  # what the other placement keeps inside
    assert sp_bench("report", "results/two").returncode == 0


def ranks(folder: Path, num_nodes: int = 2) -> dict[int, psutil.Process]:
    """The ranks that run of a trial over so many nodes."""
    found = {}
    for process in psutil.process_iter():
        try:
            if "sp_bench.worker" in process.cmdline() and Path(process.cwd()).is_relative_to(folder):
                variables = process.environ()
                if int(variables["WORLD_SIZE"]) == num_nodes * int(variables["LOCAL_WORLD_SIZE"]):
                    found[int(variables["RANK"])] = process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def measuring(folder: Path) -> dict[int, psutil.Process]:
    """The ranks over two nodes, once all of them measure."""
    found = ranks(folder)
    with suppress(psutil.NoSuchProcess, OSError):
        events = [Path(each.cwd()) / f"rank{rank}.events.jsonl" for rank, each in found.items()]
        if len(found) == 4 and all('"measure"' in path.read_text() for path in events):
            return found
    return {}


@pytest.mark.faults  # likewise
def test_a_rank_killed_on_the_second_node_is_an_error_row(sp_bench, slurm, tmp_path):
    folder = tmp_path / "results" / "two"
    words = ("method=ring", "sp_size=4", "seq_len=96", *BOTH, *SMALL[:2], SMALL[3], "workload.timed_steps=100000")
    sp_bench("submit", *words, "--cluster", "two")
    wait_until(lambda: measuring(folder), folder)
    on_second = measuring(folder)[2]
    assert on_second.environ()["SLURMD_NODENAME"] == "n2"
    on_second.kill()
    slurm.wait_for("", "squeue", "--noheader", limit_s=60)
    (row,) = read(folder)
    assert (row["status"], row["reason"]) == ("error", "rank 2 died with SIGKILL in phase measure")
    assert ranks(folder) == {}


def test_srun_of_two_runs_ends_at_once_and_says_what_to_start(slurm, tmp_path):
    command = ("srun", "--nodes=2", "--ntasks=2", sys.executable, "-m", "sp_bench", "run", "sp_size=4", *BOTH)
    variables = slurm.variables | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "SLURM_PROCID=1 of SLURM_NTASKS=2" in done.stderr
    assert "`sp-bench run num_nodes=2 ...` in the batch script" in done.stderr
    assert [*tmp_path.iterdir()] == []


SHOW = (
    *("method=ulysses,ring", "sp_size=4", "num_nodes=1,2", "seq_len=96,112", "replicates=3", "campaign=two"),
    *("workload.timed_steps=60", "model.num_heads=4", "model.num_kv_heads=4", "max_attempts=9"),
    *(word for word in SMALL if "timed_steps" not in word),
    *DEADLINES,
)


def processes(folder: Path) -> list[psutil.Process]:
    """Drivers, agents and ranks of the campaign."""
    agents = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(word.startswith(str(folder)) for word in process.info["cmdline"] or [])
    ]
    return [*drivers(folder), *agents, *ranks(folder).values(), *ranks(folder, num_nodes=1).values()]


@pytest.mark.faults
def test_a_sweep_of_24_trials_through_all_that_a_cluster_does_to_it_has_exactly_the_planned_rows(
    sp_bench, slurm, tmp_path, record_property
):
    folder, told = tmp_path / "results" / "two", []
    expected = planned(sp_bench, *SHOW)
    assert len(expected) == 24

    def submit() -> None:
        sp_bench("submit", *SHOW, "--cluster", "two")

    def at_work_on_both() -> dict[int, psutil.Process]:
        if not slurm.say("squeue", "--noheader"):
            submit()
        return measuring(folder)

    def meanwhile(what: str, do: Callable[[str], object]) -> None:
        """Do it to the job that has a trial over both nodes at work, and write down what came of that trial."""
        wait_until(at_work_on_both, folder)
        begun = measuring(folder)
        while not begun:  # ended between the looks
            begun = at_work_on_both()
        before = Counter(row.status for row in rows(folder))
        do(begun[0].environ()["SLURM_JOB_ID"])
        for process in begun.values():
            process.wait(90)
        after = Counter(row.status for row in rows(folder)) - before
        told.append({"what": what, "ok_before": before["ok"], "left": dict(after)})

    def requeue(job: str) -> None:
        slurm.say("scontrol", "requeue", job)
        slurm.wait_for("PENDING", "squeue", "--noheader", f"--job={job}", "--format=%T")
        slurm.say("scontrol", "update", f"JobId={job}", "StartTime=now")  # it would wait for two minutes

    def kill_slurmd(job: str) -> None:
        slurm.end("n2", signal.SIGKILL)
        slurm.wait_for("n2", "sinfo", "--noheader", "--states=down", "--format=%N", limit_s=60)
        slurm.start_node("n2")
        slurm.wait_for("", "sinfo", "--noheader", "--states=down", "--format=%N", limit_s=60)

    def kill_driver(job: str) -> None:
        (driver,) = [each for each in drivers(folder) if each.environ()["SLURM_JOB_ID"] == job]
        driver.kill()

    submit()
    meanwhile("scancel of its job", lambda job: slurm.say("scancel", job))
    meanwhile("scontrol requeue of its job", requeue)
    meanwhile("SIGKILL of the slurmd of the second node", kill_slurmd)
    meanwhile("SIGKILL of its driver", kill_driver)
    submissions = 0
    while submissions < 4:  # Slurm may have given up a job that it would not start again
        submissions += 1
        if sp_bench("submit", *SHOW, "--cluster", "two", "--wait").returncode == 0:
            break
    statuses = require_exactly_the_planned_rows(sp_bench, folder, SHOW)
    assert statuses["ok"] == 24
    assert set(statuses) <= {"ok", "preempted", "error"}
    assert processes(folder) == []
    record_property("cluster", {"steps": told, "rows": dict(statuses), "submissions": submissions})
