"""Packed documents: the distributions of one campaign are one table, beside the same tokens as one document."""

import json
from pathlib import Path

import pytest

import sp_bench.report as report
from sp_bench.analysis import words
from sp_bench.analysis.cells import of_equal_steps
from sp_bench.analysis.settings import settings
from sp_bench.formats import MISSING
from sp_bench.report.setting_tables import tables

from .rows import cells_of, commit, row, selection_of

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
    (table,) = [t for t in tables(settings(cells_of(rows))) if t.title.endswith("packed documents")]
    packed, one = table.groups
    assert (packed.title, one.title) == (
        "all of 128 tokens: 8 documents, the longest has 128 tokens",
        "one document",
    )
    assert [line.cell.asked["method"] for line in packed.lines] == ["ulysses", "ring", "all_gather"]
    shown = [dict(zip(table.heads, table.texts(line), strict=True)) for line in packed.lines]
    assert [each["time, of one document's"] for each in shown] == ["0.200", "0.250", ""]
    assert [each["work, of one document's"] for each in shown] == ["0.125", "0.125", ""]
    assert [each["imbalance"] for each in shown] == ["1.50", "1.50", ""]
    assert shown[1]["ratio to the first"] == "1.67x"
    assert shown[2]["ms"] == "out of memory"


def test_a_lower_bound_leads_no_pack_and_has_no_time_of_one_document():
    def of_one_rank(method: str, packing: str, ms: float, **columns: object):
        found = of(method, packing, ms, **columns)
        config = json.dumps({**json.loads(found["config"]), "world": "one_rank", "link": {"name": "nvlink"}})
        return found | {"config": config, "evidence": "one_rank", "link": "nvlink"}

    rows = [*(of_one_rank(method, "none", 40.0) for method in ("ring", "ulysses")),
            of_one_rank("ring", "fixed", 5.0, flags=["lower_bound"]), of_one_rank("ulysses", "fixed", 6.0)]  # fmt: skip
    (table,) = [t for t in tables(settings(cells_of(rows))) if t.title.endswith("packed documents")]
    shown = {
        line.cell.asked["method"]: dict(zip(table.heads, table.texts(line), strict=True))
        for line in table.groups[0].lines
    }
    assert shown["ring"]["time, of one document's"] == shown["ring"]["ratio to the first"] == MISSING
    assert shown["ulysses"]["time, of one document's"] == "0.150"


def drawn(method: str, ms: float, seed: int, packing: str = "lognormal", **columns: object):
    workload = {"name": "attention", "packing": packing, "document_len": 128, "document_sigma": 1.0}
    config = {"hardware": {"name": "cpu", "device": "cpu"}, "workload": workload, "seed": seed}
    return of(method, packing, ms, config=json.dumps(config), **columns)


def test_packs_of_other_seeds_are_other_places_and_no_method_of_one_is_compared_with_one_of_another():
    rows = [*(drawn("ring", ms, seed, cell_id=f"r{seed}") for seed, ms in ((1, 10.0), (2, 30.0))),
            *(drawn("ulysses", ms, seed, cell_id=f"u{seed}") for seed, ms in ((1, 12.0), (2, 15.0)))]  # fmt: skip
    (setting,) = settings(cells_of(rows))
    assert [words.place(place.first) for place in setting.contests] == [
        "1,024 tokens on 2 CPU ranks, pack of seed 2",
        "1,024 tokens on 2 CPU ranks, pack of seed 1",
    ]
    assert [words.method(place.leader) for place in setting.contests] == ["Ulysses", "contiguous ring"]
    (table,) = [t for t in tables([setting]) if t.title.endswith("packed documents")]
    assert table.title.count("seed") == 0
    assert [group.title.partition(":")[0] for group in table.groups] == [
        "lognormal, median 128, sigma 1, pack of seed 1",
        "lognormal, median 128, sigma 1, pack of seed 2",
    ]
    assert [table.texts(line)[-1] for group in table.groups for line in group.lines] == ["", "1.20x", "", "2.00x"]


def test_a_single_pack_is_not_told_from_others():
    (setting,) = settings(cells_of([drawn("ring", 10.0, 3), drawn("ulysses", 12.0, 3)]))
    (place,) = setting.contests
    assert words.place(place.first) == "1,024 tokens on 2 CPU ranks"


@pytest.mark.parametrize(("packing", "cells"), [("lognormal", 2), ("fixed", 1)])
def test_packs_of_other_seeds_are_no_replicates_of_each_other(packing, cells):
    """Documents of a fixed length are the same with every seed."""
    rows = [drawn("ring", 10.0 * seed, seed, packing, cell_id=f"r{seed}", replicate=seed) for seed in (1, 2)]
    assert of_equal_steps(selection_of(rows).rows)["cell_id"].nunique() == cells


def test_each_kernel_is_a_group_of_its_own():
    rows = [of("ring", "fixed", 10.0, kernel="math"), of("ring", "fixed", 0.0, kernel="cpu_flash", status="oom")]
    (table,) = [t for t in tables(settings(cells_of(rows))) if t.title.endswith("packed documents")]
    assert len(table.groups) == 2
    assert all(group.title.endswith(words.kernel(group.lines[0].cell)) for group in table.groups)
    assert [line.ratio for group in table.groups for line in group.lines] == [None, None]


def test_beside_packs_what_is_not_packed_says_so():
    titles = [s.title for s in settings(cells_of([of("ring", "none", 40.0), of("ring", "fixed", 10.0)]))]
    assert [title.endswith(", one document") for title in titles] == ["packed" not in title for title in titles]
    (alone,) = settings(cells_of([of("ring", "none", 40.0)]))
    assert "document" not in alone.title


def test_work_is_the_same_for_a_method_that_was_not_measured_on_one_document():
    rows = [of("ring", "none", 40.0, model_flops=8e9), of("ulysses", "fixed", 6.0, model_flops=1e9, kernel="math")]
    (table,) = [t for t in tables(settings(cells_of(rows))) if t.title.endswith("packed documents")]
    shown = dict(zip(table.heads, table.texts(table.lines[0]), strict=True))
    assert shown["work, of one document's"] == "0.125"


def test_a_setting_says_what_is_packed_and_that_labels_are_masked():
    workload = {"name": "train_step", "packing": "lognormal", "document_len": 4096, "document_sigma": 1.0}
    config = {"hardware": {"name": "cpu", "device": "cpu"}, "workload": workload | {"masked_label_share": 0.5}}
    step = row(workload="train_step", pass_kind="step", packing="lognormal", config=json.dumps(config))
    (setting,) = settings(cells_of([step]))
    assert "packed documents: lognormal, median 4,096, sigma 1" in setting.parts
    assert "half of the labels masked" in setting.parts


def test_nothing_packed_is_no_such_table():
    made = tables(settings(cells_of([of("ring", "none", 40.0), of("ulysses", "none", 30.0)])))
    assert len(made) == 1
    assert "packed" not in made[0].title


@pytest.mark.parametrize("campaign", ["h100_packed", "h200_packed"])
def test_time_follows_the_work_in_the_committed_packs(campaign: str):
    (table,) = tables(settings(report.read([Path("results") / campaign])))
    *packs, one = table.groups
    assert (len(packs), one.title) == (3, "one document")
    for group in packs:
        told = dict(zip(table.heads, table.texts(group.lines[0]), strict=True))
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


def test_a_double_ring_is_named_by_its_rings_and_says_where_it_is_one():
    sizes = {2: (8, 4), 4: (8, 2), 8: (8, 1), 1: (4, 4)}  # of the inner rings -> of all ranks, of the outer ring
    rows = [
        row(method="double_ring", sp_size=ranks, inner_ring_degree=inner, outer_ring_degree=outer, cell_id=str(inner))
        for inner, (ranks, outer) in sizes.items()
    ]
    assert {cell.asked["inner_ring_degree"]: words.method(cell) for cell in cells_of(rows)} == {
        2: "contiguous double ring, 2x4",
        4: "contiguous double ring, 4x2",
        8: "contiguous double ring, 8x1 is one ring",
        1: "contiguous double ring, 1x4 is one ring",
    }
