"""However much a rank prints, a trial leaves a few MB."""

import sys
from pathlib import Path

import pytest

from sp_bench import handover
from sp_bench.driver import launch as launching
from sp_bench.planning.settings import DeadlinesConfig

CHATTY = Path(__file__).parent / "chatty.py"
DEADLINES = DeadlinesConfig(init=60, correctness=2, warmup=60, measure=60)


@pytest.mark.parametrize("num_trials", [1, 3])
def test_a_rank_that_prints_without_end_leaves_a_few_mb_in_each_trial_of_its_group(make_config, tmp_path, num_trials):
    config = make_config(method="single", sp_size=1, isolation="group")
    folders = [tmp_path / f"trial{index}" for index in range(num_trials)]
    largest = 0

    def look(phase: str) -> None:
        nonlocal largest
        largest = max(largest, *(path.stat().st_size for path in tmp_path.glob("*/*.log")))

    command = [sys.executable, str(CHATTY), *map(str, folders)]
    results = list(launching.launch([(config, folder) for folder in folders], DEADLINES, look, command))
    assert [result.status for result in results] == [*["ok"] * (num_trials - 1), "timeout"]
    assert largest > launching.MAX_LOG_BYTES  # it did print more than it may keep
    for folder in folders:
        path = handover.log_path(folder, 0)
        assert 2 * 2**20 < path.stat().st_size <= launching.MAX_LOG_BYTES
        assert b"bytes left out" in path.read_bytes()
        assert sum(path.stat().st_size for path in folder.iterdir()) < 3 * launching.MAX_LOG_BYTES
