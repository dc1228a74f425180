"""What programs call: the same as the command line, with the same refusals."""

from pathlib import Path

import pytest

import sp_bench

SMALL = ("kernel=math", "workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2")
WORDS = ("method=single", "sp_size=1", "seq_len=96", *SMALL)
RESULTS = Path(__file__).parents[2] / "results"


def test_a_run_gives_its_rows_and_is_then_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [trial["status"] for trial in sp_bench.plan(*WORDS)["trials"]] == [None]
    assert not list(tmp_path.iterdir())  # a plan writes nothing
    rows = sp_bench.run(*WORDS)
    assert list(rows["status"]) == ["ok"]
    assert list(rows["method"]) == ["single"]
    (trial,) = sp_bench.plan(*WORDS)["trials"]
    assert (trial["status"], trial["trial_id"]) == ("ok", rows["trial_id"][0])
    others = sp_bench.run(*WORDS[:2], "seq_len=128", *WORDS[3:])
    assert list(others["seq_len"]) == [128]
    assert list(sp_bench.run(*WORDS)["seq_len"]) == [96]


def test_a_plan_says_why_a_trial_cannot_run():
    reasons = [t["unsupported_reason"] for t in sp_bench.plan("method=ulysses", "sp_size=2,3", *SMALL)["trials"]]
    assert sorted(map(bool, reasons)) == [False, True]


def test_campaigns_are_compared_as_on_the_command_line():
    compared = sp_bench.compare(RESULTS / "h200x4_fabrics", str(RESULTS / "h200x4_fabrics_2"))
    assert compared["pairs"]
    assert all(pair["ratio"] > 0 for pair in compared["pairs"])


@pytest.mark.parametrize("call", [sp_bench.plan, sp_bench.run])
def test_refusals_are_value_errors_with_the_message_of_the_command_line(call):
    with pytest.raises(ValueError, match="ringg: did you mean ring"):
        call("method=ringg")
    with pytest.raises(ValueError, match="must be a whole number in plain digits: 32768"):
        call("seq_len=32k")
    with pytest.raises(ValueError, match="nowhere"):
        sp_bench.compare("nowhere", "nowhere")
