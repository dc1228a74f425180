"""The table of who computes packed documents right."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sp_bench.config.parsing import ConfigError
from sp_bench.driver import packed_gate

ROOT = Path(__file__).parents[2]
TENSORS = ("output", "dq", "dk", "dv")


def test_the_docs_have_the_table_of_the_committed_rows():
    text = (ROOT / "docs/PACKING.md").read_text()
    written = text.partition(packed_gate.BEGIN)[2].partition(packed_gate.END)[0]
    assert written == f"\n{packed_gate.table(ROOT / 'results/cpu_packed_gate')}\n", "write it again"


def test_a_campaign_without_packs_has_no_table():
    with pytest.raises(ConfigError, match="parity_engines has no rows of packed documents; sp-bench run sweep=cpu_"):
        packed_gate.table(ROOT / "results/parity_engines")


def test_a_step_on_a_pack_and_one_on_a_whole_sequence_have_columns_of_their_own(monkeypatch):
    step = {"workload": "train_step", "method": "single", "engine": "trl_sft", "layout": "contiguous", "variant": None}
    step |= {"sp_size": 1, "kernel": "math", "masked_label_share": 0.5, "started_at": 0}
    step["engine_implementation"] = "transformers==5.17.0 trl"
    right = {"rel_error_loss": 1e-7, "rel_error_grad_norm": 2e-7, "grad_error": {"error": 3e-6, "budget": 3e-5}}
    pack = step | {"packing": "fixed", "status": "incorrect", "reason": "loss differs by 0.1"}
    whole = step | right | {"packing": "none", "status": "ok", "reason": None}
    without_masks = whole | {"masked_label_share": 0.0, "method": "ring"}
    found = SimpleNamespace(to_pylist=lambda: [pack, whole, without_masks])
    monkeypatch.setattr(packed_gate.store, "read", lambda _: (found, []))
    line, *others = [line for line in packed_gate.table(ROOT).splitlines() if line.startswith("| ")][1:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert (cells[0], cells[5]) == ("single, trl_sft", "transformers, trl")
    assert cells[-4:] == ["-", "-", "**wrong** (1)", "right: loss 1.0e-07, norm 2.0e-07, gradient 3.0e-06 of 3.0e-05"]
    assert others == []
    assert "\n1. loss differs by 0.1\n" in packed_gate.table(ROOT)


def test_a_row_that_passed_says_what_is_nearest_to_its_budget():
    row = {"status": "ok", "error_budget": dict.fromkeys(TENSORS, 1e-6) | {"dv": 1e-7}}
    row |= {f"rel_error_{name}": 5e-8 for name in TENSORS}
    row |= {"outside_difference": dict.fromkeys(TENSORS, 0.0), "inside_difference": dict.fromkeys(TENSORS, 3.0)}
    assert packed_gate._proofs(row, []) == ("right: 5.0e-08 of 1.0e-07 in dv", "right: 0 outside, 3 inside")


def test_a_row_that_failed_points_to_its_reason():
    for status, said in (("incorrect", "**wrong** (2)"), ("unsupported", "refuses (2)"), ("oom", "oom (2)")):
        assert packed_gate._proofs({"status": status, "reason": "b"}, ["a", "b"]) == (said, "-")


def test_a_step_says_its_loss_and_its_worst_gradient():
    row = {
        "status": "ok",
        "rel_error_loss": 1e-7,
        "rel_error_grad_norm": 2e-7,
        "grad_error": {"error": 3e-6, "budget": 3e-5},
    }
    assert packed_gate._step(row, []) == "right: loss 1.0e-07, norm 2.0e-07, gradient 3.0e-06 of 3.0e-05"
    assert packed_gate._step({"status": "incorrect", "reason": "a"}, ["a"]) == "**wrong** (1)"
    assert packed_gate._step(None, []) == "-"
