"""How long the console takes over a campaign of 20,000 rows, before anything is launched: 5 s each at most."""

import subprocess
import sys
from unittest.mock import Mock

import pytest

from sp_bench.driver import attempt, campaign

from ..unit.test_load import filled, settings

pytestmark = pytest.mark.load
ROWS = 20_000
POINTS = f"seq_len=range(8,{8 * (ROWS // 10 + 1)},8)"


@pytest.fixture(scope="module")
def full(tmp_path_factory, make_config):
    return filled(tmp_path_factory.mktemp("results"), make_config, ROWS)


@pytest.fixture
def timed(benchmark, full):
    """`timed("plan", ...)` times that command where the campaign is."""

    def run(*words):
        return benchmark.pedantic(
            subprocess.run,
            ([sys.executable, "-m", "sp_bench", *words],),
            {"cwd": full[0], "capture_output": True, "text": True, "check": True},
            rounds=3,
        )

    return run


def test_status_of_20_000_rows(timed):
    assert "4000" in timed("status", "full").stdout


def test_plan_of_20_000_rows(timed):
    words = ("method=ring", "kernel=math", POINTS, "replicates=10", "campaign=full", "results_root=.")
    assert timed("plan", *words).stdout.splitlines()[-1].startswith("20000 trials: 20000 done")


def test_resume_of_20_000_rows_up_to_its_first_launch(benchmark, full, monkeypatch):
    root, configs = full
    monkeypatch.setattr(attempt, "run_next", Mock(side_effect=KeyboardInterrupt))

    def resume():
        with pytest.raises(SystemExit):
            campaign.run(configs, settings(root, resume=True, plan_only=False), Mock())

    benchmark.pedantic(resume, rounds=3)
