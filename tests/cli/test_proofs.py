"""Proofs that later trials rely on, by the real command line: what names them, and what makes a trial prove anew."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from .conftest import sp_bench
from .console import console

SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")
ATTENTION = ("method=ring", "sp_size=1", "seq_len=96", *SMALL)
STEP = ("workload=train_step", "method=ulysses", "sp_size=2", "seq_len=96", "isolation=group", *SMALL)
PAGE = (Path(__file__).parents[2] / "docs" / "OUTSIDE.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# Right in the trial whose proof is kept, and wrong in all that rely on it.
YIELDED = "    yield SequenceParallelAttention(layout(method, P), attend)\n"
TWO_FACED = EXAMPLE.replace(
    YIELDED,
    """\
    from pathlib import Path

    factor = 1.01 if Path(__file__).with_name("results").joinpath("c", "_proofs").exists() else 1.0
    yield SequenceParallelAttention(layout(method, P), lambda *qkv: factor * attend(*qkv))
""",
)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs one more replicate of a campaign. Returns its row, and what the run printed."""
    monkeypatch.chdir(tmp_path)

    def run(number: int, *words: str) -> tuple[dict[str, Any], str]:
        before = set(Path("results", "c").glob("*.parquet"))
        _, out, errors = console(capfd, "run", *words, f"replicates={number + 1}", "campaign=c", "--no-report")
        added = set(Path("results", "c").glob("*.parquet")) - before
        assert len(added) == 1, out + errors
        return pq.read_table(added.pop()).to_pylist()[0], out

    return run


def records() -> list[Path]:
    return sorted(Path("results", "c", "_proofs").glob("*.json"))


def test_a_trial_relies_on_the_proof_of_its_key_alone(run, monkeypatch):
    first, _ = run(0, *ATTENTION)
    (record,) = records()
    assert (first["status"], first["proof"]) == ("ok", None)
    assert record.name.startswith(f"{first['cell_id']}-{first['env_id']}-")
    content = json.loads(record.read_text())
    assert content["row"] == f"{first['trial_id']}-{first['env_id']}-0-ok.parquet"
    assert content["counted"]["counted_attention_flops"] == first["counted_attention_flops"] > 0

    second, _ = run(1, *ATTENTION)
    assert (second["status"], second["proof"]) == ("ok", f"c/_proofs/{record.name}")
    for name in ("rel_error_output", "rel_error_dq", "error_budget", "kernel_rel_error", "correctness_seq_len"):
        assert second[name] == first[name] is not None
    assert 0 < second["sampled_rel_error"] != first["sampled_rel_error"]  # its own execution is checked
    assert second["identity_error"]
    assert second["timed_rel_error"]

    right = record.read_text()
    record.write_text(right.replace('"rel_error_output": ', '"rel_error_output": 1'))
    third, printed = run(2, *ATTENTION)
    assert (third["status"], third["proof"]) == ("ok", None)
    assert "the proof was edited: its digest is that of another content; its trials prove anew" in printed
    assert json.loads(record.read_text())["row"].startswith(third["trial_id"])

    run(0, *ATTENTION[1:], "method=ulysses")
    (other,) = set(records()) - {record}
    record.write_text(other.read_text())
    fourth, printed = run(3, *ATTENTION)
    assert (fourth["status"], fourth["proof"]) == ("ok", None)
    assert f"the proof is that of another key, {other.name}; its trials prove anew" in printed

    with monkeypatch.context() as patch:
        patch.setenv("NCCL_DEBUG", "WARN")  # a variable of the transport
        fifth, printed = run(4, *ATTENTION)
    assert (fifth["status"], fifth["proof"]) == ("ok", None)
    assert "(ring) was proven on other devices, drivers or settings; it proves anew" in printed
    (elsewhere,) = set(records()) - {record, other}
    assert elsewhere.name[:21] == record.name[:21]

    assert run(5, *ATTENTION)[0]["proof"] is None  # each sixth
    assert run(6, *ATTENTION, "proof=always")[0]["proof"] is None
    assert run(7, *ATTENTION)[0]["proof"] == f"c/_proofs/{record.name}"


def test_a_training_step_is_compared_with_the_recorded_runs(run):
    first, _ = run(0, *STEP, "dtype=bfloat16")
    second, _ = run(1, *STEP, "dtype=bfloat16")
    (record,) = records()
    assert (second["status"], second["proof"]) == ("ok", f"c/_proofs/{record.name}")
    for name in ("grad_error", "update_error", "fp32_proof", "fall_error", "full_loss_error", "full_update_error"):
        assert second[name] == first[name] is not None
    for name in ("timed_loss_error", "line_error", "last_update_error", "loss", "sampled_grad_error"):
        assert second[name] is not None
    content = json.loads(record.read_text())
    lengths = [each["seq_len"] for each in content["found"]["shorter"]["runs"]]
    assert lengths == [48, 72]
    del content["digest"]


def test_an_edited_method_proves_anew(tmp_path):
    words = ("method.path=mine.py", "sp_size=1", "seq_len=96", "campaign=c", "--no-report", *SMALL)
    (tmp_path / "mine.py").write_text(EXAMPLE)
    assert sp_bench(tmp_path, "run", *words).returncode == 0
    (tmp_path / "mine.py").write_text(f"{EXAMPLE}\nADDED = 1\n")
    again = sp_bench(tmp_path, "run", *words)
    assert "(mine) was proven with other code or libraries; it proves anew" in again.stdout
    rows = [pq.read_table(path).to_pylist()[0] for path in (tmp_path / "results" / "c").glob("*.parquet")]
    assert [(row["status"], row["proof"]) for row in rows] == [("ok", None)] * 2
    proven = {path.name[:21] for path in (tmp_path / "results" / "c" / "_proofs").glob("*.json")}
    assert proven == {f"{row['cell_id']}-{row['env_id']}" for row in rows}


@pytest.mark.parametrize("workload", ["attention", "train_step"])
def test_a_method_that_is_right_in_the_trial_with_the_proof_alone_is_incorrect(run, workload):
    assert YIELDED in EXAMPLE
    Path("two.py").write_text(TWO_FACED)
    words = ("method.path=two.py", f"workload={workload}", "sp_size=1", "seq_len=96", *SMALL)
    assert run(0, *words)[0]["status"] == "ok"
    row, _ = run(1, *words)
    assert row["status"] == "incorrect"
    assert re.match("(sampled rows|the last timed step) at seq_len=96: relative error of output", row["reason"])
