"""Records of proofs: which are believed, and what ranks may rely on."""

import json
from dataclasses import replace

import pytest

from sp_bench import handover
from sp_bench.config.parsing import ConfigError
from sp_bench.driver import proven
from sp_bench.planning import plan
from sp_bench.rows import plain_file, plans, proofs, store
from sp_bench.rows.proofs import Proof
from sp_bench.rows.row import Outcome

KEY = ("a" * 12, "b" * 8, "c" * 8)
PROOF = Proof(*KEY, "row.parquet", 1.5, {"columns": {"rel_error_output": 1e-7}}, {"comm": []})
OK = Outcome("ok", "done", measured={"flags": []})


@pytest.fixture
def record(tmp_path):
    proofs.write(PROOF, tmp_path)
    return tmp_path / proofs.FOLDER / PROOF.file_name


def problem(folder):
    believed, (line,) = proofs.read(proofs.files(folder))
    assert believed == []
    return line


def test_a_record_comes_back_as_it_was_written(record, tmp_path):
    assert proofs.read([record]) == ([PROOF], [])
    assert proofs.files(tmp_path) == [record]
    assert proofs.by_cell(tmp_path) == {KEY[0]: [record]}
    assert list(store.passed_over(tmp_path)) == []  # for no reader it is a row


@pytest.mark.parametrize("what", ["row", "seconds", "found", "digest", "machine"])
def test_an_edited_record_is_not_believed(record, tmp_path, what):
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {what: "d" * 8}))
    assert "edited" in problem(tmp_path)


def test_a_record_under_another_key_or_too_large_or_a_link_is_not_believed(record, tmp_path):
    other = record.with_name(f"{KEY[0]}-{KEY[1]}-{'d' * 8}.json")
    record.rename(other)
    assert problem(tmp_path).endswith(f"that of another key, {record.name}")
    other.rename(record)
    record.write_text(record.read_text() + " " * plain_file.MAX_BYTES)
    assert "67,109,128 bytes; at most 67,108,864" in problem(tmp_path)
    proofs.write(PROOF, tmp_path)
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    assert "not a plain file" in problem(tmp_path)


def test_a_record_is_written_once_and_over_a_damaged_one(record, tmp_path):
    proofs.write(replace(PROOF, seconds=2.5), tmp_path)
    assert proofs.read([record]) == ([PROOF], [])
    record.write_text("{}")
    proofs.write(replace(PROOF, seconds=2.5), tmp_path)
    assert proofs.read([record]) == ([replace(PROOF, seconds=2.5)], [])


def test_a_trial_relies_on_records_of_its_code(make_config, record):
    (trial,) = plan.plan([make_config()], 1, 0, None)
    notes = []
    assert proven.known(trial, KEY[1], [record], notes.append) == {KEY[2]: PROOF}
    assert proven.known(trial, "0" * 8, [], notes.append) == {}
    assert notes == []
    assert proven.known(trial, "0" * 8, [record], notes.append) == {}
    assert "was proven with other code or libraries" in notes[0]


def test_what_is_no_key_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="no key"):
        proofs.write(replace(PROOF, machine="../../x"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [proofs.FOLDER, plans.FOLDER])  # an archive has what lies in them
def test_a_folder_of_proofs_or_plans_that_leads_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "campaign").mkdir()
    (tmp_path / "campaign" / name).symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} is a link that leads out of"):
        store.require_contained(tmp_path / "campaign")


def test_a_proof_that_is_not_finite_is_not_kept_and_named(make_config, tmp_path):
    (trial,) = plan.plan([make_config()], 1, 0, None)
    row = store.RowName(trial.trial_id, KEY[1], 0, "ok")
    for number, kept in ((float("nan"), 0), (1.0, 1)):
        notes = []
        handover.write_proof(tmp_path, KEY[2], {"columns": {"rel_error_output": number}})
        proven.keep(OK, tmp_path, trial, row, tmp_path, {}, notes.append)
        assert len(proofs.files(tmp_path)) == kept
        assert len(notes) == 1 - kept


def test_ranks_rely_only_on_what_they_were_given(tmp_path):
    given = {PROOF.machine: PROOF}
    assert proven.relied_on(OK, tmp_path, "c", given) == OK  # nothing was handed over
    handover.write_proof(tmp_path, PROOF.machine, PROOF.found)
    assert proven.relied_on(OK, tmp_path, "c", given) == OK
    handover.write_proof(tmp_path, PROOF.machine, None)
    relied = proven.relied_on(OK, tmp_path, "c", given)
    assert relied.measured["proof"] == f"c/_proofs/{PROOF.file_name}"
    broken = "the record is broken: the ranks rely on a proof that they were not given"
    assert proven.relied_on(OK, tmp_path, "c", {}).reason == broken
    for said in ({"machine": "../x", "found": {"columns": {}}}, {"machine": PROOF.machine, "found": 1}, [], "text"):
        (tmp_path / handover.PROOF).write_text(json.dumps(said))
        outcome = proven.relied_on(OK, tmp_path, "c", given)
        assert (outcome.status, outcome.reason, outcome.measured) == ("error", broken, {})
