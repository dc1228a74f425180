"""Trials over two hosts without Slurm: two network namespaces, and the same torchrun command in each."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sp_bench.config.parsing import ConfigError
from sp_bench.driver import nodes
from sp_bench.planning import allocation
from sp_bench.rows import store

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # torchrun lies beside this Python
INTERFACE = "spb0"
SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "kernel=math", "sp_size=4", "num_nodes=2")
SHORT = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2")
DEADLINES = ("deadlines.init=60", "deadlines.correctness=60", "deadlines.warmup=60")
WORDS = ("run", "method=ring", "seq_len=96", "campaign=two", *SMALL, *DEADLINES, "--no-report")
LONG = (*WORDS, "workload.timed_steps=100000", "deadlines.measure=120")


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, joined by a cable."""
    names = (f"sp-a-{os.getpid()}", f"sp-b-{os.getpid()}")
    cable = [f"sp{os.getpid() % 10**6}{end}" for end in "ab"]
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", INTERFACE)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"ip netns does not make network namespaces here: {error}")
    finally:
        for name in made:
            _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Starts the same command on both."""

    def __init__(self, names: tuple[str, str], folder: Path) -> None:
        self.names, self.folder, self.started = names, folder, []
        self.variables = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": INTERFACE, "PATH": PATH}

    def start(self, node: int, *command: str, **variables: str) -> subprocess.Popen[str]:
        with (self.folder / f"host{node}.txt").open("a") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], *command],
                cwd=self.folder,
                env=self.variables | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
            )
        self.started.append(process)
        return process

    def run(self, *words: str, **variables: str) -> list[subprocess.Popen[str]]:
        """As torchrun starts `sp-bench` on both, without the seconds that torchrun takes."""
        shared = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
        shared |= {"MASTER_ADDR": ADDRESSES[0], **variables}
        command = (sys.executable, "-m", "sp_bench", *words)
        return [self.start(node, *command, RANK=str(node), **shared) for node in (0, 1)]

    def wait(self) -> list[int]:
        return [process.wait(120) for process in self.started]

    @property
    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("host*.txt")))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return store.read(self.folder / "results" / "two")[0].to_pylist()

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            try:
                if "sp_bench.worker" in process.cmdline() and Path(process.cwd()).is_relative_to(self.folder):
                    found[int(process.environ()["RANK"])] = process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def measuring(self) -> dict[int, psutil.Process]:
        """The ranks, once all of them measure."""
        events = [*self.folder.glob("results/two/_work/trials/*/rank*.events.jsonl")]
        return self.ranks() if sum('"measure"' in path.read_text() for path in events) == 4 else {}


@pytest.fixture
def two(hosts, tmp_path) -> Iterator[Hosts]:
    both = Hosts(hosts, tmp_path)
    yield both
    for process in both.started:
        process.kill()
        process.wait()
    assert both.ranks() == {}


def wait_for(of: Callable[[], Any], both: Hosts, limit_s: float = 90) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := of()):
        assert time.monotonic() < deadline, both.said
        time.sleep(0.2)
    return found


def test_the_torchrun_command_of_the_page_runs_trials_over_both_hosts(two):
    page = (ROOT / "docs" / "CLUSTER.md").read_text().partition("## Untried")[0]
    (line,) = [line for line in page.splitlines() if line.startswith("    torchrun ")]
    for node in (0, 1):
        command = line.replace("$NODE_RANK", str(node)).replace("$HOST0", ADDRESSES[0])
        two.start(node, *command.replace("campaign=both", "campaign=two").split(), *SHORT)
    assert two.wait() == [0, 0], two.said
    (row,) = two.rows
    assert (row["status"], row["num_nodes"], row["ranks_per_node"]) == ("ok", 2, 2), row["reason"]
    assert row["internode_counted_bytes"] == row["internode_predicted_bytes"]
    assert [*(two.folder / "results" / "two" / "_work" / "nodes").iterdir()] == []


def test_doctor_measures_the_links_between_hosts(two):
    words = ("hardware=cpu", "fabric=gloo", "method=ring", "kernel=math", "seq_len=96", "sp_size=4", "num_nodes=2")
    two.run("doctor", "--gpus", *words, "campaign=two", "--json")
    codes = two.wait()
    found = json.loads((two.folder / "host0.txt").read_text())
    assert codes == [int(bool(found["wrong"])), 0], two.said  # which depends on how busy this machine is
    hosts = [device["host"].partition(" (")[0] for device in found["devices"]]
    assert hosts == ["node 0", "node 0", "node 1", "node 1"]
    assert len({frozenset(pair["devices"]) for pair in found["pair_bytes_per_s"]}) == 6
    assert [*(two.folder / "results" / "two" / "_work" / "nodes").iterdir()] == []


def test_a_rank_killed_on_the_other_host_is_an_error_and_no_rank_outlives_it(two):
    two.run(*LONG)
    wait_for(two.measuring, two)[3].send_signal(signal.SIGKILL)
    assert two.wait() == [1, 0], two.said
    (row,) = two.rows
    assert (row["status"], row["reason"]) == ("error", "rank 3 died with SIGKILL in phase measure")
    assert len(row["node_environments"]) == 2


@pytest.mark.faults
def test_a_hang_on_the_other_host_is_a_timeout(two):
    two.run(*LONG[:-1], "deadlines.measure=3", SP_BENCH_FAULT="hang:2:measure")
    assert two.wait() == [1, 0], two.said
    (row,) = two.rows
    assert row["status"] == "timeout", row["reason"]


@pytest.mark.faults
@pytest.mark.parametrize(("number", "code", "statuses"), [("SIGINT", 130, []), ("SIGTERM", 143, ["preempted"])])
def test_a_signal_to_the_driver_ends_the_ranks_of_both_hosts(two, number, code, statuses):
    driver, _ = two.run(*LONG)
    wait_for(two.measuring, two)
    driver.send_signal(signal.Signals[number])
    assert two.wait() == [code, 0], two.said
    assert [row["status"] for row in two.rows] == statuses


@pytest.mark.faults
def test_a_killed_driver_takes_the_ranks_of_the_other_host_with_it(two):
    driver, _ = two.run(*LONG)
    ranks = wait_for(two.measuring, two)
    driver.kill()
    assert two.wait() == [-signal.SIGKILL, 1]
    assert "the driver is gone" in two.said
    ranks[0].wait(60)  # of the driver's own host
    assert two.rows == []


@pytest.mark.faults
def test_a_lost_host_ends_the_trial_and_the_run_and_resume_goes_on(two):
    words = (*LONG[:-2], "workload.timed_steps=400", "replicates=2")
    _, agent = two.run(*words)
    wait_for(two.measuring, two)
    agent.kill()
    assert two.wait() == [2, -signal.SIGKILL]
    assert "node 1 of this run is lost" in two.said
    (row,) = two.rows
    assert row["status"] == "error"
    assert row["reason"].startswith("the host of rank 2 was lost"), row["reason"]
    two.started.clear()
    two.run("resume", *words[1:])
    assert two.wait() == [0, 0], two.said
    assert sorted(row["status"] for row in two.rows) == ["error", "ok", "ok"]


def test_srun_or_torchrun_that_starts_several_runs_is_told_how_to_start_one(tmp_path):
    srun = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    for variables, said in ((srun, "SLURM_PROCID=1 of SLURM_NTASKS=2"), (torchrun(LOCAL_WORLD_SIZE="8"), "per-node=1")):
        with pytest.raises(ConfigError, match=said):
            allocation.here(variables)
    done = subprocess.run(
        [sys.executable, "-m", "sp_bench", *WORDS], env=os.environ | srun, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "sp-bench run num_nodes=2" in done.stderr
    assert not (tmp_path / "results").exists()


def torchrun(**changes: str) -> dict[str, str]:
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "1"}
    return sizes | {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"} | changes


def test_who_started_a_run_says_which_hosts_it_has():
    assert allocation.here({}) == allocation.Allocation("nobody")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "n1", "SLURM_NTASKS": "4"}
    assert allocation.here(slurm) == allocation.Allocation("slurm", 4)
    assert allocation.here({**slurm, "SLURM_STEP_NUM_TASKS": "1"}).num_hosts == 4
    beside = {name: value for name, value in slurm.items() if name != "SLURMD_NODENAME"}
    assert allocation.here(beside).num_hosts == 1  # a shell of salloc, on a login node
    assert allocation.here(torchrun()) == allocation.Allocation("torchrun", 2, 1, "none-a-1")


def test_more_nodes_than_the_run_has_are_unsupported_and_the_row_says_what_would_work(tmp_path):
    words = ("run", "method=ring", "sp_size=4", "num_nodes=2,3", "seq_len=96", "campaign=two", "--no-report")
    done = subprocess.run([sys.executable, "-m", "sp_bench", *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "all 2 trials are unsupported here" in done.stderr) == (1, True)
    reasons = sorted(row["reason"] for row in store.read(tmp_path / "results" / "two")[0].to_pylist())
    assert reasons[0].startswith("num_nodes=2 needs 2 hosts, and this run has 1")
    assert reasons[1] == "num_nodes=3 does not divide 4 ranks; use one of 1, 2, 4"


def test_a_host_that_does_not_join_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "JOIN_LIMIT_S", 0.3)
    both = allocation.Allocation("torchrun", 2, 0, "x")
    with (
        pytest.raises(ConfigError, match="node 1 of 2 did not join this run"),
        nodes.joined(both, tmp_path, {}, lambda: None),
    ):
        pass
    assert [*(tmp_path / "_work" / "nodes").iterdir()] == []
