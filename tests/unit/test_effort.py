"""How much of a campaign's wall time was measurement."""

from pathlib import Path
from typing import Any

import pytest

from sp_bench.analysis.effort import Effort, effort
from sp_bench.rows import store

from .rows import commit, row

PHASES = {"init": 3.0, "correctness": 2.0, "warmup": 1.0, "measure": 3.5, "ledger": 0.5, "done": 0.0}
ASKED = ("status", "duration_s", "phase_s")


def launched(replicate: int = 0, **columns: Any) -> dict[str, Any]:
    return row(replicate=replicate, duration_s=10.0, **{"phase_s": PHASES, **columns})


def read(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    return store.read(commit(rows, folder), ASKED)[0].to_pylist()


def test_measurement_is_warm_up_timed_steps_and_ledger_of_ok_rows(tmp_path):
    rows = [launched(0), launched(1), launched(2, status="incorrect")]
    spent = effort(read(rows, tmp_path))
    seconds = {"wall_s": 30.0, "timed_s": 7.0, "measured_s": 10.0, "proof_s": 4.0, "failed_s": 10.0}
    assert spent == Effort(**seconds, num_trials=3)
    assert spent.measured_share == pytest.approx(1 / 3)
    assert spent.summary() == "measuring took 10.0 of the campaign's 30.0 s (33%; timed steps 23%)"
    assert {what: round(share, 2) for what, share in spent.shares.items()} == {
        "timed steps": 0.23,
        "warm-up, counted steps and arms": 0.1,
        "proofs of correctness": 0.13,
        "trials that are not ok": 0.33,
        "starting and ending processes": 0.2,
    }


def test_what_was_never_launched_takes_no_time(tmp_path):
    refused = row(replicate=1, status="unsupported", duration_s=None)
    assert effort(read([launched(), refused], tmp_path)) == effort(read([launched()], tmp_path / "alone"))


def test_rows_without_phases_change_no_share(tmp_path):
    rows = [launched(), launched(1, phase_s=None), launched(2, phase_s={})]
    spent = effort(read(rows, tmp_path))
    assert (spent.num_trials, spent.measured_share) == (1, 0.5)


@pytest.mark.parametrize("rows", [[], [launched(phase_s=None)], [row(status="unsupported", duration_s=None)]])
def test_nothing_is_claimed_where_nothing_is_known(rows, tmp_path):
    tmp_path.mkdir(exist_ok=True)
    spent = effort(read(rows, tmp_path))
    assert (spent.measured_share, spent.summary(), spent.shares) == (None, "", {})


def test_rows_as_pandas_holds_them_say_the_same(tmp_path):
    rows = [launched(), launched(1, status="oom"), row(replicate=2, status="unsupported", duration_s=None)]
    frame = store.read(commit(rows, tmp_path), ASKED)[0].to_pandas()
    assert effort(frame.to_dict("records")) == effort(read(rows, tmp_path / "again"))


def test_phases_may_overlap_the_next_trials_start_by_some_milliseconds(tmp_path):
    """A warm group's parent sees a trial end a moment after the next has begun."""
    measured = {"correctness": 5.0, "warmup": 1.0, "measure": 4.01}
    assert "starting and ending processes" not in effort(read([launched(phase_s=measured)], tmp_path)).shares
