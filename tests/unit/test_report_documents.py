"""Packed documents: the distributions of one campaign are one table, beside the same tokens as one document."""

import json
from pathlib import Path

import pytest

import sp_bench.report as report
from sp_bench.report import words
from sp_bench.report.settings import settings
from sp_bench.report.table import tables

from .rows import cells_of, commit, row

PACKED = {"num_documents": 8, "longest_document": 128, "flops_imbalance": 1.5}


def of(method: str, packing: str, ms: float, **columns: object):
    workload = {"name": "attention", "packing": packing, "document_len": None if packing == "none" else 128}
    config = {"hardware": {"name": "cpu", "device": "cpu"}, "workload": workload, "seed": 0}
    known = PACKED if packing != "none" else {}
    named = {"packing": packing, "method": method, "median_ms": ms, "config": json.dumps(config)}
    return row(**{**named, **known, **columns})


def test_each_distribution_is_a_group_and_times_are_of_the_same_method_on_one_document():
    rows = [
        *(of("ring", "none", 40.0, model_flops=8e9), of("ulysses", "none", 30.0, model_flops=8e9)),
        *(of("ring", "fixed", 10.0, model_flops=1e9), of("ulysses", "fixed", 6.0, model_flops=1e9)),
        of("all_gather", "fixed", 0.0, status="oom"),
    ]
    (table,) = [t for t in tables(settings(cells_of(rows))) if "packed documents" in t.setting.title]
    packed, one = table.groups
    assert (packed.title, one.title) == (
        "all of 128 tokens: 8 documents, the longest has 128 tokens",
        "one document",
    )
    assert [line.cell.asked["method"] for line in packed.lines] == ["ulysses", "ring", "all_gather"]
    shown = [dict(zip(table.heads, line.texts, strict=True)) for line in packed.lines]
    assert [each["time, of one document's"] for each in shown] == ["0.200", "0.250", ""]
    assert [each["work, of one document's"] for each in shown] == ["0.125", "0.125", ""]
    assert [each["imbalance"] for each in shown] == ["1.50", "1.50", ""]
    assert shown[1]["ratio to the first"] == "1.67x"
    assert shown[2]["ms"] == "out of memory"


def test_where_kernels_differ_each_line_names_its_own_also_what_failed():
    rows = [of("ring", "fixed", 10.0, kernel="math"), of("ring", "fixed", 0.0, kernel="cpu_flash", status="oom")]
    (table,) = [t for t in tables(settings(cells_of(rows))) if "packed documents" in t.setting.title]
    names = [line.texts[0] for line in table.groups[0].lines]
    assert len(set(names)) == 2
    assert all(name.endswith(words.kernel(line.cell)) for name, line in zip(names, table.groups[0].lines, strict=True))


def test_nothing_packed_is_no_such_table():
    made = tables(settings(cells_of([of("ring", "none", 40.0), of("ulysses", "none", 30.0)])))
    assert len(made) == 1
    assert "packed" not in made[0].setting.title


@pytest.mark.parametrize("campaign", ["h100_packed", "h200_packed"])
def test_time_follows_the_work_in_the_committed_packs(campaign: str):
    (table,) = tables(settings(report.read([Path("results") / campaign])))
    *packs, one = table.groups
    assert (len(packs), one.title) == (3, "one document")
    for group in packs:
        told = dict(zip(table.heads, group.lines[0].texts, strict=True))
        assert 1 <= float(told["time, of one document's"]) / float(told["work, of one document's"]) < 1.3


def test_lines_of_the_ratios_say_which_documents_they_are_of(tmp_path: Path):
    rows = [
        of(method, packing, ms, config=json.dumps(config))
        for packing in ("none", "fixed")
        for method, ms in (("ring", 10.0), ("ulysses", 6.0))
        for config in [json.loads(of(method, packing, ms)["config"]) | {"hardware": {"name": "h200", "device": "cuda"}}]
    ]
    page = report.build([commit(rows, tmp_path / "c")], tmp_path / "out").page
    ratios = page.with_name("figures").joinpath("ratios.csv").read_text()
    assert "one document" in ratios
    assert "all of 128 tokens" in ratios
