"""Whole steps from steps of few layers, and what others published beside one real rank."""

import json

import pytest

from sp_bench.analysis.metrics import memory_gib, tokens_per_s_per_gpu
from sp_bench.analysis.over_depth import over_depth
from sp_bench.analysis.settings import settings
from sp_bench.report import held_tables
from sp_bench.report.cards import cards
from sp_bench.report.published import beside, beside_one_rank, steps_like

from .rows import cells_of, row

STEP = {"workload": "train_step", "pass_kind": "step", "hardware": "h200", "fabric": "nvlink", "kernel": "cudnn",
        "method": "all_gather", "layout": "zigzag", "dtype": "bfloat16", "model": "qwen3_8b", "sp_size": 8,
        "seq_len": 1048576, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}  # fmt: skip
GIB = 2**30


def step(layers: int, ms: float, gib: int, *, world: str = "one_rank", **columns):
    of = {"world": world, "link": {"name": "nodes_400g"}} if world == "one_rank" else {}
    config = {"hardware": {"name": "h200", "device": "cuda"}, "seed": 0, "model": {"num_layers": layers}, **of}
    config["workload"] = {"checkpoint_offload": True}
    made = row(**{**STEP, "num_layers": layers, "config": json.dumps(config), "median_ms": ms, **columns})
    peaks = {"max_peak_allocated_bytes": gib * GIB, "checkpoint_offload": True}
    return made | peaks | ({"evidence": world, "link": "nodes_400g"} if of else {})


def test_a_line_through_two_depths_gives_the_step_of_all_layers():
    (of,) = over_depth(cells_of([step(2, 20_000.0, 12), step(4, 40_000.0, 14)]))
    assert of.num_layers == 36
    assert of.step_ms == pytest.approx(360_000.0)
    assert of.peak_gib == pytest.approx(46.0)
    assert of.check is None


def test_a_line_is_of_whole_patterns_of_layers():
    gemma = {"model": "gemma3_27b", "layer_kinds": "+".join(["window"] * 5 + ["full"]), "layer_window": 1024}
    at = {layers: step(layers, 1000.0 * layers, 12, **gemma) for layers in (2, 4, 6, 12)}
    assert over_depth(cells_of([at[2], at[4]])) == []
    (of,) = over_depth(cells_of([*at.values()]))
    assert of.num_layers_run == (6, 12)


def test_the_whole_step_checks_the_line():
    rows = [step(2, 20_000.0, 12), step(4, 40_000.0, 14), step(36, 400_000.0, 46)]
    (of,) = over_depth(cells_of(rows))
    assert of.check == (pytest.approx(0.9), pytest.approx(1.0))
    assert "0.900, 1.000" in held_tables.markdown(cells_of(rows))


def test_settings_have_the_whole_step_and_neither_of_its_depths():
    parts = [step(2, 20_000.0, 12), step(4, 40_000.0, 14)]
    ring = {"method": "ring"}
    found = settings(cells_of([*parts, step(2, 20_000.0, 12, **ring), step(4, 41_000.0, 14, **ring)]))
    ((place,),) = [setting.contests for setting in found]
    assert [(cell.median_step_ms, cell.asked["num_layers"]) for cell in place.best] == [(360e3, 36), (377e3, 36)]
    assert [memory_gib(cell) for cell in place.best] == [46.0, 46.0]
    assert tokens_per_s_per_gpu(place.leader) == pytest.approx(1048576 / 360 / 8)
    assert place.difference is not None
    assert place.difference.grade.mark == "one_rank"
    assert place.leader.rows[0]["part_ms"] is None
    assert "one real rank of 8, by the line through 2 and 4 layers" in cards(found)[0].where
    whole = settings(cells_of([*parts, step(36, 400_000.0, 46)]))
    assert [cell.median_step_ms for setting in whole for cell in setting.cells] == [400_000.0]


def test_no_line_is_of_measured_steps_of_one_depth_or_of_two_links():
    assert over_depth(cells_of([step(2, 20.0, 12, world="ranks"), step(4, 40.0, 14, world="ranks")])) == []
    assert over_depth(cells_of([step(2, 20.0, 12), step(36, 40.0, 14)])) == []
    other = step(4, 40.0, 14)
    other["config"] = other["config"].replace("nodes_400g", "nodes_200g")
    assert over_depth(cells_of([step(2, 20.0, 12), other | {"link": "nodes_200g"}])) == []


def test_a_published_step_stands_beside_the_line_and_never_as_measured():
    cells = cells_of([step(2, 20_000.0, 12), step(4, 40_000.0, 14)])
    found = {(of.published.source, of.published.metric): of for of in beside_one_rank(cells).lines}
    time, peak = found["TRL #6846", "step_s"], found["TRL #6846", "peak_memory_gb"]
    assert time.one_rank == pytest.approx(360.0)
    assert time.ratio == pytest.approx(360 / 380)
    assert "2 and 4 layers, by their line" in time.how
    assert peak.one_rank == pytest.approx(46 * GIB / 1e9)
    assert time.is_within is None  # no row of all ranks says how near one rank comes
    assert beside(cells).lines == []


def test_a_ratio_is_within_the_error_that_rows_of_all_ranks_show():
    short = {"sp_size": 4, "seq_len": 32768, "link": "nodes_400g"}
    near = [step(36, 95.0, 20, **short) | {"evidence": "one_rank"}, step(36, 100.0, 20, world="ranks", **short)]
    cells = cells_of([step(2, 20_000.0, 12), step(4, 40_000.0, 14), *near])
    by_metric = {of.published.metric: of for of in beside_one_rank(cells).lines}
    assert by_metric["step_s"].error == pytest.approx(0.05)
    assert by_metric["step_s"].is_within is False  # 0.947 of theirs
    assert by_metric["peak_memory_gb"].is_within is None


def test_a_line_has_the_published_step_of_its_model_length_ranks_method_and_options_beside_it():
    (line,) = over_depth(cells_of([step(2, 20_000.0, 12), step(4, 40_000.0, 14)]))
    assert [(each.source, each.value) for each in steps_like(line.few)] == [("TRL #6846", 380)]
    assert "380 (TRL #6846: all-gather," in held_tables.markdown([line.few, line.more])
    for of in ({"sp_size": 4}, {"kernel": "flash_attn_4"}):
        (other,) = over_depth(cells_of([step(2, 20_000.0, 12, **of), step(4, 40_000.0, 14, **of)]))
        assert steps_like(other.few) == []
