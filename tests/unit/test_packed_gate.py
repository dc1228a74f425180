"""The table of who computes packed documents right: read from rows once, for the command line, the page and papers."""

import json
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from typer.testing import CliRunner

import sp_bench.report as report
from sp_bench.cli import app
from sp_bench.report import packed_gate
from sp_bench.report.packed_gate import Line, gates
from sp_bench.report.table import Table, latex

from .rows import cells_of, commit, row

ROOT = Path(__file__).parents[2]
TENSORS = ("output", "dq", "dk", "dv")
PASSED = {
    "error_budget": dict.fromkeys(TENSORS, 1e-6) | {"dv": 1e-7},
    **{f"rel_error_{name}": 5e-8 for name in TENSORS},
    "outside_difference": dict.fromkeys(TENSORS, 0.0),
    "inside_difference": dict.fromkeys(TENSORS, 3.0),
}
TRAINED = {"rel_error_loss": 1e-7, "rel_error_grad_norm": 2e-7, "grad_error": {"error": 3e-6, "budget": 3e-5}}


def of(
    method: str = "ring",
    *,
    share: float | None = None,
    workload: str = "attention",
    packing: str = "lognormal",
    **columns: Any,
):
    options = {"name": workload, "packing": packing, "masked_label_share": share}
    config = {"hardware": {"name": "h200", "device": "cuda"}, "workload": options, "seed": 0}
    asked = {"packing": packing, "method": method, "workload": workload, "config": json.dumps(config)}
    passed = PASSED if workload == "attention" else TRAINED
    known = passed if columns.get("status", "ok") == "ok" else {}
    return row(**{**asked, **known, **columns})


def gate_of(*rows: Any) -> Table[Line]:
    (gate,) = gates(cells_of(rows))
    return gate


def words(gate: Table[Line]) -> dict[str, list[list[str]]]:
    return {group.title: [[v.words for v in line.verdicts] for line in group.lines] for group in gate.groups}


def test_the_docs_have_the_table_of_the_committed_rows():
    text = (ROOT / "docs/PACKING.md").read_text()
    written = text.partition(packed_gate.BEGIN)[2].partition(packed_gate.END)[0]
    found = [gate for name in packed_gate.DOCUMENTED for gate in gates(report.read([ROOT / name]))]
    assert written == f"\n{packed_gate.markdown(found)}\n", "write it again"


def test_a_campaign_without_packs_has_no_table():
    done = CliRunner().invoke(app, ["methods", "--packed", str(ROOT / "results/parity_engines")])
    assert "parity_engines has no rows of packed documents; sp-bench run sweep=cpu_" in str(done.exception)
    assert not gates(report.read([ROOT / "results/parity_engines"]))


def test_lines_are_in_the_order_of_methods_and_then_of_variants_layouts_and_kernels():
    lines = [
        ("ring", "contiguous", "", "flash_attn"),
        ("ring", "contiguous", "", "flash_attn_4"),
        ("ring", "zigzag", "", "flash_attn"),
        ("transformer_engine", "document_zigzag", "a2a", "cudnn"),
        ("transformer_engine", "document_zigzag", "p2p", "cudnn"),
    ]
    mixed = [lines[at] for at in (4, 1, 3, 0, 2)]
    rows = [
        of(method, layout=layout, variant=variant or None, kernel=kernel) for method, layout, variant, kernel in mixed
    ]
    (group,) = gate_of(*rows).groups
    names = [line.names for line in group.lines]
    assert [(name.method, name.layout, name.variant, name.kernel) for name in names] == lines


def test_a_step_on_a_pack_and_one_on_a_whole_sequence_have_columns_of_their_own():
    engine = {"engine": "trl_sft", "engine_implementation": "transformers==5.17.0 trl"}
    pack = of("single", workload="train_step", share=0.5, status="incorrect", reason="the loss is off", **engine)
    whole = of("single", workload="train_step", share=0.5, packing="none", **engine)
    unmasked = of("ulysses", workload="train_step", share=0.0, packing="none")
    gate = gate_of(pack, whole, unmasked)
    (line,) = gate.groups[0].lines
    assert (line.names.method, line.names.library) == ("single, trl_sft", "transformers, trl")
    assert gate.heads[-2:] == ("half of the labels masked", "half of the labels masked, whole sequence")
    right = "right: loss 1.0e-07, norm 2.0e-07, gradient 3.0e-06 of 3.0e-05"
    assert words(gate) == {"Wrong": [["-", "-", "wrong: the loss is off", right]]}


def test_a_row_that_passed_says_what_is_nearest_to_its_budget():
    assert words(gate_of(of())) == {"Right": [["right: 5.0e-08 of 1.0e-07 in dv", "right: 0 outside, 3 inside"]]}


def test_a_step_says_its_loss_and_its_worst_gradient_under_the_share_of_labels_that_were_masked():
    gate = gate_of(of(), of(workload="train_step", share=0.5), of("ulysses", workload="train_step", share=0.0))
    assert gate.heads[-2:] == ("a training step", "half of the labels masked")
    step = "right: loss 1.0e-07, norm 2.0e-07, gradient 3.0e-06 of 3.0e-05"
    ulysses, ring = words(gate)["Right"]
    assert (ring[2:], ulysses) == (["-", step], ["-", "-", step, "-"])


def test_what_is_wrong_comes_first_and_says_by_how_much():
    failures = (("double_ring", "unsupported"), ("ulysses", "incorrect"), ("usp", "oom"))
    gate = gate_of(of(), *(of(m, status=status, reason=f"{m} is off by 7e-3") for m, status in failures))
    assert [group.title for group in gate.groups] == ["Wrong", "Failed otherwise", "Right", "Refused"]
    assert gate.about == "4 lines: 1 wrong, 1 failed otherwise, 1 right, 1 refused."
    assert words(gate)["Wrong"] == [["wrong: ulysses is off by 7e-3", "-"]]
    assert "| **wrong**: ulysses is off by 7e-3 " in packed_gate.markdown([gate])
    assert r"\textbf{wrong}: ulysses is off by" in latex([gate])


def test_one_wrong_row_outweighs_those_of_the_same_line_that_are_right():
    wrong = of(status="incorrect", reason="dq leaks", replicate=1)
    assert words(gate_of(of(), wrong, of(replicate=2))) == {"Wrong": [["wrong: dq leaks; 1 of 3 rows", "-"]]}


def test_what_is_right_in_one_proof_and_wrong_in_another_is_wrong():
    gate = gate_of(of(), of(workload="train_step", share=0.5, status="incorrect", reason="the loss is off"))
    assert [group.title for group in gate.groups] == ["Wrong"]


def test_each_reason_of_a_refusal_stands_once():
    refused = {"status": "unsupported", "reason": "takes no lengths"}
    methods = ("ring", "ulysses", "usp")
    gate = gate_of(*(of(method, **refused) for method in methods), of("upipe", status="unsupported", reason="other"))
    assert sorted(gate.notes) == ["other", "takes no lengths"]
    assert [line[0] for line in words(gate)["Refused"]] == ["refuses (1)", "refuses (2)", "refuses (1)", "refuses (1)"]
    for text in (packed_gate.markdown([gate]), latex([gate])):
        assert text.count("takes no lengths") == 1


def test_each_kernel_is_a_line():
    gate = gate_of(of(kernel="math"), of(kernel="flash_attn"))
    assert [line.names.kernel for group in gate.groups if group.title == "Right" for line in group.lines] == [
        "flash_attn",
        "math",
    ]


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", r"\input{x} & | ** $"])
def test_a_reason_is_text_on_the_page_in_markdown_and_in_latex(tmp_path: Path, hostile: str):
    commit([of(status="incorrect", reason=hostile), of("usp", status="unsupported", reason=hostile)], tmp_path / "c")
    page = report.build([tmp_path / "c"], tmp_path / "out").page
    html, markdown, tex = (page.with_name(n).read_text("utf-8") for n in ("index.html", "tables.md", "tables.tex"))
    shown = html.partition('id="packed"')[2].partition('id="figures"')[0]
    assert f'<td class="wrong">wrong: {escape(hostile)}' in shown
    assert f"<li>{escape(hostile)}</li>" in shown
    assert "<script" not in shown + markdown
    assert r"\input{x}" not in tex


def test_only_a_page_of_packed_documents_has_the_section(tmp_path: Path):
    commit([row()], tmp_path / "c")
    html = report.build([tmp_path / "c"], tmp_path / "out").page.read_text("utf-8")
    assert "who computes them right" not in html
