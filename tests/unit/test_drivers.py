"""Whole drivers as processes of their own: killed at every step, side by side, told to stop, and without a disk."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sp_bench.driver import devices
from sp_bench.rows import plans, store
from sp_bench.testing.kill_points import STEPS

DRIVERS = Path(__file__).parent / "drivers.py"
ONCE = {"resume": False}
AGAIN = {"resume": True}


class Campaign:
    """A campaign of stand-in trials in a folder of its own."""

    def __init__(self, root: Path, make_config: Any) -> None:
        self.root, self.folder = root, root / "results" / "c"
        self._make_config = make_config

    def spec(self, stages: list[list[dict[str, Any]]], num_trials: int = 2) -> str:
        make = self._make_config
        configs = [make(method="single", sp_size=1, kernel="math", seed=n).to_mapping() for n in range(num_trials)]
        configs.append(make(method="ulysses", sp_size=3).to_mapping())  # unsupported
        return json.dumps({"configs": configs, "folder": str(self.root), "stages": stages})

    def start(self, stages: list[list[dict[str, Any]]], num_trials: int = 2) -> subprocess.Popen[str]:
        return started(self.spec(stages, num_trials))

    def run(self, *stages: list[dict[str, Any]], num_trials: int = 2) -> list[list[int]]:
        """The exit codes of each stage's drivers."""
        process = self.start(list(stages), num_trials)
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return json.loads(printed)

    def said(self, stage: int, driver: int = 0) -> str:
        return (self.root / f"{stage}-{driver}.txt").read_text()

    def read(self) -> list[dict[str, Any]]:
        table, problems = store.read(self.folder)
        assert problems == []
        return table.to_pylist()

    @property
    def rows(self) -> list[tuple[str, int, str]]:
        """(trial, attempt, status), of files that are whole."""
        listed = sorted((row.trial_id, row.attempt, row.status) for row in store.committed(self.folder))
        assert sorted((row["trial_id"], row["attempt"], row["status"]) for row in self.read()) == listed
        return listed

    @property
    def statuses(self) -> list[str]:
        return sorted(status for *_, status in self.rows)

    @property
    def launches(self) -> list[str]:
        """Keys of the attempts in the order of their launches."""
        path = self.root / "launches.txt"
        return [line.partition(".")[0] for line in path.read_text().split()] if path.exists() else []

    def assert_tidy(self) -> None:
        """No claim, no temporary file, no process."""
        assert os.listdir(self.folder / store.WORK / "claims") == []
        names = {path.name for path in self.folder.iterdir() if path.suffix != ".parquet" or path.name[0] == "."}
        assert names == {store.WORK, plans.FOLDER}
        assert marked(self.root) == []


def started(*specs: str) -> subprocess.Popen[str]:
    # a test run in the background of a shell ignores interrupts, and its children would inherit that
    listen = lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None  # noqa: E731
    command = [sys.executable, str(DRIVERS), *specs]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=listen, start_new_session=True)


def marked(root: Path) -> list[int]:
    """Processes of trials below `root`."""
    found = []
    for process in psutil.process_iter():
        try:
            if devices.TOKEN in (variables := process.environ()) and str(root) in variables.get("CAMPAIGN", ""):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def drivers(tmp_path, make_config) -> Campaign:
    return Campaign(tmp_path, make_config)


def wait_for(path: Path, process: subprocess.Popen[str], text: str = "") -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text() or text not in path.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_driver_killed_at_any_step_and_once_more_while_it_resumes_loses_doubles_and_tears_nothing(
    tmp_path, make_config, record_property
):
    campaigns, specs = [], []
    for number, first in enumerate(STEPS):
        campaign = Campaign(tmp_path / str(number), make_config)
        campaign.root.mkdir()
        second = STEPS[(number + 3) % len(STEPS)]
        stages = [{"fail_point": first}, {"fail_point": second, **AGAIN}, {"fail_point": "row_replaced"}, AGAIN]
        campaigns.append(campaign)
        specs.append(campaign.spec([[stage] for stage in stages]))
    process = started(*specs)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    kills = 0
    for first, drivers, line in zip(STEPS, campaigns, printed.splitlines(), strict=True):
        codes = [code for (code,) in json.loads(line)]
        assert codes[-1] == 0, drivers.said(3)
        assert set(codes[:-1]) <= {-signal.SIGKILL, 0}
        kills += codes.count(-signal.SIGKILL)
        assert drivers.statuses == ["ok", "ok", "unsupported"], first
        assert len({trial_id for trial_id, *_ in drivers.rows}) == 3, first
        assert {attempt for _, attempt, _ in drivers.rows} == {0}
        drivers.assert_tidy()
    record_property("tried", kills)
    assert kills >= 20


def test_what_a_killed_drivers_trial_still_runs_is_ended_before_the_next_trial(drivers):
    codes = drivers.run([{"fail_point": "trial_launched", "behaviour": "hang"}], [ONCE])
    assert codes == [[-signal.SIGKILL], [0]]
    assert len(set(drivers.launches)) == 2
    assert len(drivers.launches) in (2, 3), "that of the killed driver may be ended before it says that it began"
    assert drivers.statuses == ["ok", "ok", "unsupported"]
    drivers.assert_tidy()


def test_two_drivers_share_a_campaign_and_launch_every_trial_exactly_once(drivers):
    assert drivers.run([ONCE, ONCE], num_trials=6) == [[0, 0]]
    assert len(drivers.launches) == len(set(drivers.launches)) == 6
    assert drivers.statuses == ["ok"] * 6 + ["unsupported"]
    elsewhere = [
        int(n) for i in (0, 1) for n in re.findall(r"(\d) (?:by other runs|committed before)", drivers.said(0, i))
    ]
    assert sum(elsewhere) == 7  # each trial is another run's for one of the two, or was there when that one planned
    drivers.assert_tidy()


def test_a_driver_waits_for_the_trial_that_another_one_runs_and_takes_it_over_when_that_one_dies(drivers):
    process = drivers.start([[{"behaviour": "hang"}, {"second": True}]], num_trials=1)
    wait_for(drivers.root / "0-1.txt", process, "waiting for 1 trial of other runs")
    first = int(re.findall(r"waiting for .*: process (\d+) on ", drivers.said(0, 1))[0])
    assert len(drivers.launches) == 1
    os.kill(first, signal.SIGKILL)
    printed, errors = process.communicate(timeout=120)
    assert json.loads(printed) == [[-signal.SIGKILL, 0]], errors
    assert drivers.statuses == ["ok", "unsupported"]
    assert len(drivers.launches) == 2
    assert len(set(drivers.launches)) == 1
    drivers.assert_tidy()


def test_a_driver_that_was_stopped_and_comes_back_adds_nothing_to_who_took_over(drivers):
    process = drivers.start([[{"behaviour": "slow"}, {"second": True}]], num_trials=1)
    wait_for(drivers.root / "0-1.txt", process, "waiting for 1 trial of other runs")
    stopped = int(re.findall(r"waiting for .*: process (\d+) on ", drivers.said(0, 1))[0])
    os.kill(stopped, signal.SIGSTOP)
    wait_for(drivers.root / "0-1.txt", process, "1 ok")
    before = drivers.rows
    os.kill(stopped, signal.SIGCONT)
    printed, errors = process.communicate(timeout=120)
    assert json.loads(printed) == [[0, 0]], errors
    assert drivers.statuses == ["ok", "unsupported"]
    assert drivers.rows == before
    assert len(drivers.launches) == 2
    assert len(set(drivers.launches)) == 1
    drivers.assert_tidy()


def test_resume_retries_what_failed_by_bad_luck_a_bounded_number_of_times_and_run_never(drivers):
    failing, resuming = {"behaviour": "exit"}, {"behaviour": "exit", **AGAIN}
    drivers.run([failing], [failing], [resuming], [resuming], [resuming], num_trials=1)
    trial_id = drivers.launches[0][:12]
    assert [row for row in drivers.rows if row[0] == trial_id] == [(trial_id, n, "error") for n in range(3)]
    assert len(drivers.launches) == 3
    assert "2 committed before" in drivers.said(1)
    assert "2 committed before" in drivers.said(4)


def test_a_retry_that_succeeds_is_the_last(drivers):
    drivers.run([{"behaviour": "exit"}], [AGAIN], [AGAIN], num_trials=1)
    assert drivers.statuses == ["error", "ok", "unsupported"]
    assert [key[-1] for key in drivers.launches] == ["0", "1"]


def test_a_changed_environment_starts_all_and_a_second_run_nothing(drivers):
    drivers.run([{"env_id": "0" * 8}], [{"env_id": "0" * 8}], [{"env_id": "1" * 8}])
    assert drivers.statuses == ["ok"] * 4 + ["unsupported"] * 2
    assert [key[13] for key in drivers.launches] == ["0", "0", "1", "1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_trial_and_only_a_machine_taken_away_leaves_a_row_for_resume(drivers, number):
    process = drivers.start([[{"behaviour": "hang"}], [ONCE], [AGAIN]])
    wait_for(drivers.root / "launches.txt", process)
    (driver,) = psutil.Process(process.pid).children()
    driver.send_signal(number)
    printed, errors = process.communicate(timeout=120)
    assert json.loads(printed) == [[128 + number], [0], [0]], errors
    said = drivers.said(0)
    if number == signal.SIGINT:
        assert "interrupted, 2 left" in said
        assert drivers.statuses == ["ok", "ok", "unsupported"]
    else:
        assert "interrupted, 1 left" in said
        assert drivers.statuses == ["ok", "ok", "preempted", "unsupported"]
        (reason,) = [row["reason"] for row in drivers.read() if row["status"] == "preempted"]
        assert reason == f"{number.name} in phase init: the machine was taken away"
    drivers.assert_tidy()


def test_a_second_interrupt_ends_at_once_with_the_trials_processes_first(drivers):
    process = drivers.start([[{"behaviour": "hang"}]])
    wait_for(drivers.root / "launches.txt", process)
    (driver,) = psutil.Process(process.pid).children()
    driver.send_signal(signal.SIGINT)
    driver.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert json.loads(printed) == [[130]], errors
    assert drivers.statuses == ["unsupported"]
    drivers.assert_tidy()


def trouble(said: str) -> tuple[str, dict[str, Any]]:
    """The one line that tells of it, and the record that it names."""
    (line,) = [line for line in said.splitlines() if line.startswith("sp-bench: ")]
    (path,) = re.findall(r"the record of the trial that just ended is in (\S+);", line)
    return line, json.loads(Path(path).read_text())


def test_a_folder_deleted_in_mid_campaign_stops_it_and_the_row_is_kept_in_the_folder_for_temporary_files(
    drivers, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(drivers.root))
    assert drivers.run([{"behaviour": "delete"}]) == [[2]]
    line, kept = trouble(drivers.said(0))
    assert f"cannot write to {drivers.folder} any more: No such file or directory" in line
    assert "deleted or moved while the campaign ran" in line
    assert kept["trial_id"] == drivers.launches[0][:12]
    assert str(drivers.root / "sp_bench-") in line
    assert len(drivers.launches) == 1
    assert marked(drivers.root) == []


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "mount it writable"),
        (errno.EACCES, "make it writable for you"),
    ],
)
def test_a_disk_that_gives_out_stops_the_campaign_and_keeps_what_is_committed_and_the_record(drivers, number, way_out):
    assert drivers.run([{"errno": number}], [AGAIN]) == [[2], [0]]
    line, kept = trouble(drivers.said(0))
    assert os.strerror(number) in line
    assert way_out in line
    assert "sp-bench resume" in line
    assert min(kept["rank_step_ms"][0]) > 0
    assert len(drivers.launches) == 3
    assert drivers.statuses == ["ok", "ok", "unsupported"]
    drivers.assert_tidy()
