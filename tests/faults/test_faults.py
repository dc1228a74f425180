"""Faults struck into real trials of two gloo ranks: the row says what came first, and nothing else is left."""

from dataclasses import replace
from typing import Any

import pytest
from expected import MATRIX, ONE_OF_EACH, Cell
from stage import DEADLINES, Stage, ended_at, fault, struck_at

from sp_bench import handover
from sp_bench.testing import faults

MARGIN_S = 10.0


def check(stage: Stage, cell: Cell, record_property: Any, seed: int) -> None:
    """Strike, and hold the row, its time and what is left against what the cell must end in."""
    row, deadline_s = stage.strike(cell, seed)
    folder = stage.trial_folder(row)
    logs = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
    after_s = ended_at(row) - struck_at(folder, cell)
    for name, value in (("status", row["status"]), ("reason", row["reason"]), ("after_s", after_s)):
        record_property(name, value)
    assert f"fault injected: {cell.kind} in phase {cell.phase}" in logs
    assert (row["status"], row["oom_site"]) == (cell.expected.status, cell.expected.oom_site), row["reason"]
    assert cell.explains(row["reason"], deadline_s), row["reason"]
    assert row["phase"] == (cell.phase if row["status"] != "ok" else "done")
    if row["status"] == "ok":
        check_pace(row, cell)
    else:
        assert after_s <= deadline_s + MARGIN_S
    assert stage.left() == []


def check_pace(row: dict[str, Any], cell: Cell) -> None:
    """A slow rank holds up its peers, and the phase lasts as long as it sleeps; no step does: they enter together, so
    the phase has room for the sleep beside all steps."""
    assert row["flags"] is not None
    assert faults.FLAG in row["flags"]
    assert dict(row["phase_s"])[cell.phase] >= 0.9 * faults.SLOW_S
    if cell.phase == "measure":
        assert sum(row["step_ms"]) / 1e3 + 0.9 * faults.SLOW_S <= dict(row["phase_s"])["measure"]


@pytest.mark.parametrize(("seed", "cell"), [*enumerate(ONE_OF_EACH)], ids=map(str, ONE_OF_EACH))
def test_one_fault_of_each_kind_ends_as_written_down(stage, seed, cell, record_property):
    check(stage, cell, record_property, seed)


def test_the_trial_after_all_of_them_is_ok(stage):
    [row] = stage.launch(stage.two_ranks(len(ONE_OF_EACH)))
    assert (row["status"], row["reason"]) == ("ok", None)
    assert faults.FLAG not in row["flags"]
    assert stage.left() == []


@pytest.mark.faults
@pytest.mark.parametrize(("seed", "cell"), [*enumerate(MATRIX)], ids=map(str, MATRIX))
def test_every_fault_ends_as_written_down_and_the_next_trial_is_ok(stage, seed, cell, record_property):
    check(stage, cell, record_property, 1000 + seed)
    [row] = stage.launch(stage.one_rank(1000 + seed))
    record_property("next", row["status"])
    assert (row["status"], row["reason"]) == ("ok", None)
    assert stage.left() == []


@pytest.mark.faults
def test_a_rank_that_is_slower_than_its_deadline_is_a_timeout(stage):
    with fault("slow:1:measure"):
        [row] = stage.launch(stage.two_ranks(2000), deadlines=replace(DEADLINES, measure=faults.SLOW_S / 4))
    assert row["status"] == "timeout"
    assert "phase measure passed its deadline of 0.5 s" in row["reason"]
    assert stage.left() == []


@pytest.mark.faults
def test_a_fault_ends_its_group_and_the_trials_it_did_not_come_to_have_no_row(stage):
    group = [stage.two_ranks(seed, isolation="group") for seed in (3000, 3001)]
    with fault("sigkill:1:measure"):
        rows = stage.launch(*group)
    assert [row["status"] for row in rows] == ["error"]
    assert stage.left() == []


@pytest.mark.parametrize("text", ["", "hang", "hang:0", "melt:0:init", "hang:x:init", "hang:0:ledger", "a:0:init:b"])
def test_a_fault_of_another_form_is_an_error_and_not_silently_none(text):
    with pytest.raises(ValueError, match=r"use <kind>:<rank or all>:<phase>"):
        faults.strike("init", 0, {faults.VARIABLE: text})


def test_a_fault_strikes_its_phase_and_its_ranks_only():
    environment = {faults.VARIABLE: "exception:1:measure"}
    faults.strike("warmup", 1, environment)
    faults.strike("measure", 0, environment)
    with pytest.raises(RuntimeError, match="injected exception"):
        faults.strike("measure", 1, environment)


def test_every_phase_of_the_matrix_is_one_that_ranks_enter():
    assert set(faults.PHASES) < set(handover.PHASES)
