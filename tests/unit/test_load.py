"""Many rows in one campaign: what is done before a launch goes by file names, and opens no row. How long it takes for
20,000 of them, tests/benchmarks says."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from sp_bench.cli import rows as verbs
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import attempt, campaign
from sp_bench.planning import identity, plan
from sp_bench.planning.settings import CampaignConfig, DeadlinesConfig
from sp_bench.rows import store

ROWS = 2_000
STATUSES = ("ok", "oom", "timeout", "error", "incorrect")  # of the rows, in turn


@pytest.fixture(scope="module")
def full(tmp_path_factory, make_config):
    return filled(tmp_path_factory.mktemp("results"), make_config, ROWS)


def filled(root: Path, make_config: Callable[..., TrialConfig], rows: int) -> tuple[Path, list[TrialConfig]]:
    """A results root whose campaign `full` has a row of every trial, none of which can be read; and the configs."""
    folder = root / "full"
    folder.mkdir()
    garbage = root / "garbage"
    garbage.write_bytes(b"no parquet")
    base = make_config(method="ring", kernel="math")
    configs = [replace(base, seq_len=8 * n) for n in range(1, rows // 10 + 1)]
    env_id = identity.env_id(base)
    for index, trial in enumerate(plan.plan(configs, 10, 0, None)):
        name = store.RowName(trial.trial_id, env_id, 0, STATUSES[index % len(STATUSES)])
        os.link(garbage, folder / name.file_name)
    return root, configs


def settings(root, **changes) -> CampaignConfig:
    base = CampaignConfig("full", str(root), 10, 0, DeadlinesConfig(1, 1, 1, 1), False, 3, True, 100_000)
    return replace(base, **changes)


def never(*arguments):
    raise AssertionError("nothing is to be launched")


@pytest.fixture
def unopened(monkeypatch):
    """Any attempt to open a row fails the test."""
    monkeypatch.setattr(store.pq, "ParquetFile", never)


def test_a_plan_of_committed_trials_shows_each_and_opens_none(full, unopened, capsys):
    root, configs = full
    campaign.run(configs, settings(root), Mock())
    *lines, counts = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + ROWS  # a heading, and above it what all trials share
    assert counts == "2000 trials: 2000 done; nothing was launched"
    assert Counter(line.rpartition("done: ")[2] for line in lines[2:]) == dict.fromkeys(STATUSES, ROWS // 5)


def test_a_plan_to_resume_them_has_those_again_that_may_end_otherwise(full, unopened, capsys):
    root, configs = full
    campaign.run(configs, settings(root, resume=True), Mock())
    counts = capsys.readouterr().out.splitlines()[-1]
    assert counts == "2000 trials: 1200 done, 800 to run; nothing was launched"


def test_resuming_them_reaches_its_first_launch_without_opening_a_row(full, unopened, capsys, monkeypatch):
    root, configs = full
    attempts = []

    def launch(left, driver):
        attempts.extend(left)
        raise KeyboardInterrupt

    monkeypatch.setattr(attempt, "run_next", launch)
    with pytest.raises(SystemExit, match="130"):
        campaign.run(configs, settings(root, resume=True, plan_only=False), Mock())
    assert len(attempts) == 800
    assert {attempt.number for attempt in attempts} == {1}
    assert "1200 of 2000 trials are committed already" in capsys.readouterr().out


def test_status_counts_them_without_opening_one(full, unopened, capsys):
    verbs.status([full[0] / "full"] * 2)  # of one campaign alone, the newest failures are opened for their reasons
    heading, line, *_ = capsys.readouterr().out.splitlines()
    counts = dict(zip(heading.split(), line.split(), strict=True))
    assert {status: counts[status] for status in STATUSES} == dict.fromkeys(STATUSES, str(ROWS // 5))
