"""Ladders: rows of one method that differ in options are one table and one card."""

import json
from pathlib import Path

import sp_bench.report as report
from sp_bench.analysis.ladder import covered, ladders
from sp_bench.analysis.settings import settings
from sp_bench.report.cards import cards
from sp_bench.report.findings import findings
from sp_bench.report.setting_tables import tables

from .rows import cells_of, commit, row

STEP = {"workload": "train_step", "pass_kind": "step", "num_layers": 2, "sp_size": 2, "model": "tiny", "seq_len": 4096}
RUNGS = [("none", "compiled", 10.0), ("selective", "compiled", 12.0), ("full", "eager", 16.0)]


def rung(checkpointing: str, code: str, ms: float, **columns: object):
    workload = {"name": "train_step", "activation_checkpointing": checkpointing, "model_code": code}
    config = {"hardware": {"name": "h200", "device": "cuda"}, "workload": workload, "seed": 0}
    return row(
        **{**STEP, "config": json.dumps(config), "model_code": code, "median_ms": ms, "method": "ulysses", **columns}
    )


def test_options_of_one_method_are_rungs_from_the_fastest_to_what_failed():
    made = settings(cells_of([*(rung(*each) for each in reversed(RUNGS)), rung("full", "liger", 0.0, status="oom")]))
    (ladder,) = ladders(made)
    where_memory_runs_out, table = tables(made)
    assert [where_memory_runs_out.texts(line)[2] for line in where_memory_runs_out.lines] == ["4,096"]
    (group,) = table.groups
    assert table.heads[:4] == ("Method", "recomputed", "code", "ms")
    assert [line.cell.median_step_ms for line in group.lines] == [10.0, 12.0, 16.0, None]
    shown = [(name, "nothing" if way == "none" else "all" if way == "full" else way, code)
             for name, (way, code, _) in zip(["Ulysses"] * 3, RUNGS, strict=True)]  # fmt: skip
    assert [table.texts(line)[:3] for line in group.lines] == [*shown, ("Ulysses", "all", "liger")]
    assert table.texts(group.lines[3])[3] == "out of memory"
    assert [table.texts(line)[-1] for line in group.lines[:3]] == ["", "1.20x", "1.60x"]
    names = [ladder.names[cell.cell_id] for cell in ladder.measured]
    assert names[0] == "Ulysses, nothing recomputed, compiled"
    (card,) = cards(made)
    assert card.verdict == f"{names[0]}: 1.60x as fast as {names[2]} (no interval)."
    assert all(covered(setting, [ladder]) for setting in made)


def test_two_stacks_are_one_card_that_leads_with_equal_kernel_and_recomputation() -> None:
    ours, alike = rung("full", "compiled", 10.0), rung("full", "eager", 13.0, method="deepspeed_ulysses_hf")
    other = rung("none", "eager", 20.0, method="deepspeed_ulysses_hf", kernel="flash_attn")
    for each in (alike, other):
        config = json.loads(each["config"]) | {"engine": {"name": "hf_deepspeed"}}
        each |= {"config": json.dumps(config), "engine": "hf_deepspeed"}
        each["cell_id"] = each["trial_id"] = each["trial_id"][::-1]
    for rows in ([ours, alike], [ours, alike, other]):
        (card,) = cards(settings(cells_of(rows)))
        assert card.title.startswith("Stacks for a training step of")
        assert card.verdict.startswith("Equal kernel and recomputation. Ulysses, ")
        assert ": 1.30x as fast as DeepSpeed's UlyssesSPAttentionHF, " in card.verdict
    (unequal,) = cards(settings(cells_of([ours, other])))
    assert unequal.verdict.startswith("Ulysses, ")


def test_values_of_the_table_have_each_option_whether_or_not_lines_differ_in_it():
    """Where a step is one of several settings of one table of values, its title alone is no column."""
    offloaded = rung("selective", "compiled", 11.0, checkpoint_offload=True, optimizer_offload="torch_adamw")
    config = json.loads(offloaded["config"])
    config["workload"] |= {"checkpoint_offload": True, "loss_tile_tokens": 2048, "mlp_tile_tokens": 4096}
    config["hardware"] |= {"allocator": "expandable_segments"}
    config["engine"] = {"name": "fsdp2", "optimizer_offload": "torch_adamw"}
    offloaded |= {"config": json.dumps(config), "allocator": "expandable_segments", "cell_id": "offloaded"}
    zigzag = {"method": "ring", "layout": "zigzag"}
    others = [offloaded | zigzag | {"cell_id": "b", "trial_id": "b"}, rung(*RUNGS[0]), rung(*RUNGS[0], **zigzag)]
    found = report.records(cells_of([offloaded, *others]))
    options = ("activation_checkpointing", "loss_tile_tokens", "mlp_tile_tokens", "checkpoint_offload")
    options += ("optimizer_offload", "allocator", "engine")
    kept = [r for r in found if r["method"] == "ulysses"]
    assert {tuple(r[name] for name in options) for r in kept} == {
        ("selective", 2048, 4096, True, "torch_adamw", "expandable_segments", "fsdp2"),
        ("none", None, None, False, None, None, "fsdp2"),
    }
    assert {r["head_chunks"] for r in found if r["method"] == "ring"} == {None}  # no option of a ring


def test_a_single_step_is_called_one_step_and_its_ratio_has_no_interval():
    """Beside the same step that was timed six times, and not by what warmed it up."""

    def replicates(*rungs: dict[str, object]) -> list[dict[str, object]]:
        return [each | {"replicate": r, "trial_id": f"{each['cell_id']}{r}"} for each in rungs for r in range(6)]

    usual = [rung(*each) | {"cell_id": f"c{n}"} for n, each in enumerate(RUNGS)]
    config = json.loads(usual[1]["config"])
    config["workload"] |= {"single_step": True, "warmup_steps": 0, "timed_steps": 1}
    single = usual[1] | {"config": json.dumps(config), "single_step": True, "warmup_steps": 0, "timed_steps": 1}
    single |= {"cell_id": "single", "trial_id": "single", "step_ms": [12.5], "median_step_ms": 12.5}
    (table,) = tables(settings(cells_of([*replicates(*usual), single])))
    lines = {line.cell.cell_id: line for line in table.groups[0].lines}
    assert lines["single"].name == "Ulysses, one step"
    assert not any("warmup_steps" in line.name for line in lines.values())
    assert [table.texts(lines[name])[-1] for name in ("single", "c1")] == ["1.25x", "1.20x [1.20, 1.20]"]
    assert "One step: a single step was timed" in table.about
    (alone,) = ladders(settings(cells_of([*replicates(usual[0], usual[2]), single])))
    assert alone.names["single"] == "Ulysses, selective, compiled, one step"  # nothing else has its options


def test_two_rungs_and_rungs_of_several_campaigns_are_no_ladder(tmp_path):
    two = settings(cells_of([rung(*each) for each in RUNGS[:2]]))
    assert ladders(two) == []
    assert len(cards(two)) == 2
    nights = [commit([rung(*each)], tmp_path / f"night_{i}") for i, each in enumerate(RUNGS)]
    assert ladders(settings(report.read(nights))) == []
    assert len(ladders(settings(report.read([commit([rung(*each) for each in RUNGS], tmp_path / "one")])))) == 1


def test_the_committed_options_are_one_ladder_and_the_committed_methods_none():
    of = {
        name: settings(report.read([Path("results") / name])) for name in ("h200x2_step_options", "h200x2_step_methods")
    }
    (ladder,) = ladders(of["h200x2_step_options"])
    assert len(ladder.measured) == 9
    (table,) = [each for each in tables(of["h200x2_step_options"]) if each.title == ladder.setting.title]
    work = [table.texts(line)[table.heads.index("work")] for line in table.groups[0].lines]
    assert work == ["1.13", *["1.19"] * 4, *["1.38"] * 3, "1.41"]
    assert ladders(of["h200x2_step_methods"]) == []


def test_a_pack_is_other_work_and_so_no_rung():
    def packed(checkpointing: str, code: str, ms: float):
        of = rung(checkpointing, code, ms, packing="fixed")
        config = json.loads(of["config"])
        config["workload"] |= {"packing": "fixed", "document_len": 512}
        return of | {"config": json.dumps(config)}

    assert not ladders(settings(cells_of([rung(*RUNGS[0]), rung(*RUNGS[1]), packed(*RUNGS[2])])))


def test_stacks_of_different_allocators_are_rungs_and_the_table_says_which_has_which():
    of = rung(*RUNGS[2])
    config = json.loads(of["config"])
    config["hardware"] |= {"allocator": "expandable_segments"}
    of |= {"config": json.dumps(config), "allocator": "expandable_segments"}
    made = settings(cells_of([rung(*RUNGS[0]), rung(*RUNGS[1]), of]))
    (ladder,) = ladders(made)
    assert len(ladder.measured) == 3
    (table,) = tables(made)
    allocators = [table.texts(line)[table.heads.index("allocator")] for line in table.groups[0].lines]
    assert allocators == ["", "", "expandable_segments"]


def test_a_cell_that_two_campaigns_pool_stands_in_the_ladders_of_both():
    folders = [Path(__file__).parents[2] / "results" / name for name in ("h200x1_engines", "h200x1_step_options")]
    cells = report.read(folders)
    found = {each.setting.parts[-1]: each for each in ladders(settings(cells)) if "16,384 tokens" in each.where}
    (pooled,) = [cell for cell in found["h200x1_engines"].measured if len(cell.step_ms) == 4]
    assert round(pooled.median_step_ms or 0) == 1402
    assert pooled.cell_id in found["h200x1_step_options"].names
    told = findings(settings(cells), cells)
    assert told.count("| 1,402 | 0.456 | 65.9 | 4 replicates, code f34d27a |") == 2
