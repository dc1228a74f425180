"""Trials that share processes, run by ranks that misbehave: no trial affects the next; wrong bytes are no result."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run

from sp_bench import handover, worker
from sp_bench.config.trial import TrialConfig
from sp_bench.driver.launch import launch as launch_trials
from sp_bench.planning.settings import DeadlinesConfig

CARELESS, CHATTY = (Path(__file__).parent / f"{name}_worker.py" for name in ("careless", "chatty"))
DEADLINES = DeadlinesConfig(120, 120, 120, 120)
SHORT = {"workload__correctness_seq_len": 48, "workload__warmup_steps": 1, "workload__timed_steps": 2}
NAMES = ("large", "small", "small_again")


def launch(configs: dict[str, TrialConfig], root: Path, script: Path) -> dict[str, dict[str, Any]]:
    """Columns of each trial, run one after another in the processes of one launch, by ranks that are this script."""
    folders = {name: root / name for name in configs}
    command = [sys.executable, str(script), *(str(folder / handover.TRIAL) for folder in folders.values())]
    results = launch_trials([(configs[n], folders[n]) for n in configs], DEADLINES, lambda phase: None, command)
    return {name: result.columns() for name, result in zip(configs, results, strict=False)}


def run_group(configs: dict[str, TrialConfig], root: Path) -> dict[str, dict[str, Any]]:
    """Columns of trials that end well, by careless ranks."""
    columns = launch(configs, root, CARELESS)
    logs = "".join(path.read_text() for path in root.glob("*/*.log"))
    assert [c["status"] for c in columns.values()] == ["ok"] * len(configs), logs
    return columns


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def group(request, make_config, tmp_path_factory) -> tuple[dict[str, dict[str, Any]], Path]:
    """A trial that needs much memory, and twice one that needs little, on two ranks; their columns and their folder."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices; {torch.cuda.device_count()} here")
    where = {"cuda": {"hardware": "h200", "fabric": "nvlink"}, "cpu": {}}[request.param]
    shared = {"method": "ulysses", "kernel": "math", "sp_size": 2, "isolation": "group", **SHORT, **where}
    # long: malloc gives back at once what is larger than 32 MiB, such as scores of this length
    lengths = dict(zip(NAMES, (1792, 96, 96), strict=True))
    root = tmp_path_factory.mktemp("group")
    return run_group({name: make_config(seq_len=length, **shared) for name, length in lengths.items()}, root), root


def test_peak_memory_is_that_of_each_trial_alone(group):
    columns, _ = group
    on_device = columns["large"]["max_peak_allocated_bytes"] is not None
    kind = "max_peak_allocated_bytes" if on_device else "max_peak_host_bytes"
    large, *small = (columns[name][kind] for name in NAMES)
    assert all(value < large - 64 * 2**20 for value in small), f"{kind}: {large}, then {small}"


def test_allocator_retries_of_one_trial_are_not_counted_in_the_next(group):
    columns, _ = group
    assert all(columns[n]["allocator_retries"] in (None, [0, 0]) for n in NAMES)


def test_every_rank_reports_the_time_of_its_host_to_launch_an_operation(group):
    columns, _ = group
    each = [columns[name]["host_launch_us"] for name in NAMES]
    assert [len(ranks) for ranks in each] == [2] * len(NAMES)
    assert all(0 < us < 1e4 for ranks in each for us in ranks)


def test_the_next_trial_finds_library_state_restored(group):
    _, root = group
    for rank in range(2):
        first, *others = (json.loads((root / n / f"rank{rank}.state.json").read_text()) for n in NAMES)
        assert first["ledger attribution"] == "{'phase': 'forward', 'attention': False, 'op': None}"
        assert others == [first, first]


def test_settings_that_were_restored_are_named_in_the_ranks_log(group):
    _, root = group
    for name in NAMES:
        log = (root / name / "rank1.log").read_text()
        for setting in worker.SETTINGS:
            assert f"the trial left the {setting.name} at" in log


def test_own_bytes_that_differ_from_the_closed_form_end_a_real_trial(make_config, tmp_path):
    """Otherwise a user would compare methods by bytes that were never sent, or that no closed form explains."""
    config = make_config(method="ulysses", kernel="math", sp_size=2, seq_len=64, **SHORT)
    columns = launch({"chatty": config}, tmp_path, CHATTY)["chatty"]
    assert columns["status"] == "incorrect", columns
    assert "bytes sent by rank 0 differ from the closed form: backward all_to_all: counted" in columns["reason"]


@pytest.mark.faults  # tests/cli/test_hosts.py has torchrun, which starts a driver
def test_torchrun_can_start_the_worker(make_config, tmp_path):
    """As anything can that sets the same variables, on several machines too: a rank does not know who started it."""
    trial = handover.write_trial(tmp_path, make_config(method="ring", kernel="math", sp_size=2, seq_len=64, **SHORT), 0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--log-dir={tmp_path}"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run([*torchrun, *meet, "-m", "sp_bench.worker", str(trial)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    columns = handover.read_record(tmp_path)
    assert columns is not None
    assert len(columns["peak_host_bytes"]) == 2


def check_parting(rank: int) -> None:
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    time.sleep(0.1 * rank)
    worker._part()
    assert store.add("sp_bench done", 0) == size
    if rank == 0:
        assert store.add("sp_bench left", 0) == size


def test_no_rank_leaves_before_all_are_done_and_the_first_leaves_last() -> None:
    run(3, check_parting)
