"""The grid: Ulysses or the ring by GPUs, length and what was measured, each answer with its grade."""

import json
import re
from datetime import timedelta
from typing import Any

from sp_bench.analysis.grades import code_changes
from sp_bench.analysis.grid import Grid, grid
from sp_bench.analysis.settings import settings
from sp_bench.report.answers import in_brief, legend, markdown

from .rows import cells_of
from .test_report import ULYSSES, on_gpus, replicated

LINK = re.compile(r"\[([^\[\]]+)\]\(results/made_up/_campaign\.yaml \"([^\"]+)\"\)")
SIX = [1.0] * 6
RING = {"layout": "zigzag"}


def grid_of(*rows: list[dict[str, Any]], at_least: int = 0) -> Grid:
    found = grid(settings(cells_of([row for each in rows for row in each])), at_least)
    assert found is not None
    return found


def both(ulysses: float, ring: float, ratios: list[float], **columns: Any) -> list[dict[str, Any]]:
    return [*replicated(ulysses, ratios, **ULYSSES, **columns), *replicated(ring, ratios, **RING, **columns)]


def config(seed: int = 0, **workload: Any) -> str:
    return json.dumps({"hardware": {"name": "h200", "device": "cuda"}, "workload": workload, "seed": seed})


def shown(found: Grid, brief: bool = False) -> str:
    """The table as a reader sees it: without what links hold."""
    return LINK.sub(r"\1", markdown(found, "results", brief))


def one_rank(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as of one real rank, with modelled messages."""
    made = []
    for each in rows:
        config = json.dumps({**json.loads(each["config"]), "world": "one_rank", "link": {"name": "nvlink"}})
        made.append(each | {"config": config, "evidence": "one_rank", "link": "nvlink"})
    return made


def test_a_cell_names_the_faster_one_with_ratio_interval_and_grade_and_bold_is_for_what_is_decided() -> None:
    found = grid_of(
        both(10.0, 11.0, SIX),
        both(10.0, 10.1, SIX, kernel="flash_attn_4"),
        both(11.0, 10.0, [1.0], kernel="flash_attn"),
        both(11.0, 10.0, [1.0, 1.0], fabric="channels_1"),
    )
    assert found.columns == ("attention", "attention, slower links")
    (line,) = shown(found).splitlines()[2:]
    assert line == (
        "| 2 GPUs, 1,024 | FlashAttention-4: **tie, Ulysses 1.010x [1.010, 1.010]** A<br>"
        "cuDNN: **Ulysses 1.10x [1.10, 1.10]** A<br><sub>FlashAttention-2: ring 1.10x C·once</sub> "
        "| 1 NCCL channel, undivided: ring 1.10x B·imitated |"
    )
    assert ("C·once", "the zigzag ring against Ulysses, FlashAttention-2, made_up; 1 replicate") in LINK.findall(
        markdown(found, "results")
    )
    assert found.lines[0].entries[0][1].where == "Ulysses against the zigzag ring, cuDNN, made_up; 6 replicates"


def test_runs_of_one_place_are_all_there_the_best_graded_one_first() -> None:
    flagged = both(10.0, 12.0, [1.0], isolation="group", flags=["transient"])
    ((entry,),) = grid_of(flagged, both(10.0, 11.0, SIX)).lines[0].entries
    assert (entry.difference.words, entry.more) == ("1.10x [1.10, 1.10]", "1 more: 1.200x")


def test_bold_is_nothing_that_most_other_runs_contradict() -> None:
    newest = both(10.0, 11.0, SIX)
    agreeing, other = (both(10.0, ring, [1.0], isolation="group", flags=["transient"]) for ring in (10.5, 9.0))
    for others, is_bold in ((agreeing, True), (other, False)):
        ((entry,),) = grid_of(newest, others).lines[0].entries
        assert entry.is_decided == is_bold


def test_other_runs_of_a_step_recompute_as_much() -> None:
    steps = {"workload": "train_step", "pass_kind": "step", "model": "qwen3_4b", "engine": "fsdp2"}
    kept, all_again = (
        both(10.0, ring, ratios, config=config(activation_checkpointing=each), **steps)
        for ring, ratios, each in ((11.0, SIX, "selective"), (15.0, [1.0], "full"))
    )
    ((entry,),) = [found for found in grid_of(kept, all_again).lines[0].entries if found]
    assert (entry.difference.words, entry.more) == ("1.10x [1.10, 1.10]", "")
    in_fp8 = both(10.0, 12.0, SIX, config=config(linear_dtype="float8_tensorwise"), **steps)
    labels = {each.label for each in grid_of(both(10.0, 11.0, SIX, **steps), in_fp8).lines[0].entries[0]}
    assert labels == {"Qwen3-4B", "Qwen3-4B, FP8 by tensor"}


def test_a_third_method_stands_there_where_it_is_ahead_of_both() -> None:
    gather = {"method": "all_gather", "layout": "zigzag"}
    ((entry,),) = grid_of(both(10.0, 11.0, SIX), replicated(9.0, SIX, **gather)).lines[0].entries
    assert entry.verdict == "all-gather 1.11x [1.11, 1.11]"
    ((entry,),) = grid_of(both(10.0, 11.0, SIX), replicated(9.9, SIX, **gather)).lines[0].entries
    assert entry.verdict == "Ulysses 1.10x [1.10, 1.10], all-gather alike"
    ((entry,),) = grid_of(both(10.0, 11.0, SIX), replicated(10.5, SIX, **gather)).lines[0].entries
    assert entry.verdict == "Ulysses 1.10x [1.10, 1.10]"
    ((entry,),) = grid_of(both(10.0, 10.1, SIX), replicated(10.0, SIX, **gather)).lines[0].entries
    assert entry.verdict == "tie, Ulysses 1.010x [1.010, 1.010]"


def test_lines_are_of_one_shape_from_a_length_on_and_of_gpus() -> None:
    rows = [both(10.0, 11.0, SIX, seq_len=n) for n in (1024, 2048)] + [both(10.0, 20.0, SIX, num_kv_heads=32)]
    assert [line.head for line in grid_of(*rows).lines] == ["2 GPUs, 1,024", "2 GPUs, 2,048"]
    assert [line.head for line in grid_of(*rows, at_least=2048).lines] == ["2 GPUs, 2,048"]
    assert grid(settings(cells_of([on_gpus(median_ms=1.0, **ULYSSES)]))) is None


def test_other_values_are_in_labels_and_latents_have_a_page_of_their_own() -> None:
    values = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 192, "v_head_dim": 128}
    modelled = {"sp_size": 8, "world_size": 8}
    found = grid_of(both(10.0, 11.0, SIX), one_rank(both(10.0, 12.0, [1.0], **values, **modelled)))
    assert [each.label for each in found.lines[1].entries[0]] == ["16/16 heads of 192, values of 128, cuDNN"]
    assert found.caption.startswith("32/8 heads of 128, bf16, H200,")
    latents = values | {"kv_lora_rank": 512}
    assert len(grid_of(both(10.0, 11.0, SIX), one_rank(both(10.0, 12.0, [1.0], **latents, **modelled))).lines) == 1
    assert len(settings(cells_of([*replicated(1.0, [1.0], **latents), *replicated(1.0, [1.0], **values)]))) == 2


def test_of_equal_grades_newer_code_comes_first_and_a_cuda_graph_has_an_entry_of_its_own() -> None:
    (change,) = [each for each in code_changes() if each.commit == "c1f674b"]
    older = {"started_at": change.at - timedelta(hours=1), "kernel": "flash_attn"}
    entries = grid_of(both(10.0, 11.0, SIX, **older), both(11.0, 10.0, [1.0], started_at=change.at)).lines[0].entries[0]
    assert [(each.label, each.mark) for each in entries] == [("cuDNN", "C·once"), ("FlashAttention-2", "C·aged")]
    graph = both(11.0, 10.0, SIX, config=config(launch="cuda_graph"))
    entries = grid_of(both(10.0, 11.0, SIX), graph).lines[0].entries[0]
    assert {each.label: each.verdict.partition(" ")[0] for each in entries} == {
        "cuDNN": "Ulysses",
        "cuDNN, CUDA graph": "ring",
    }


def test_an_answer_about_packs_says_how_many_there_are() -> None:
    def pack(seed: int, ring: float) -> list[dict[str, Any]]:
        drawn = config(packing="lognormal", document_len=64, seed=seed)
        return both(10.0, ring, [1.0], config=drawn, packing="lognormal")

    ((entry,),) = grid_of(pack(1, 11.0)).lines[0].entries
    assert entry.label.endswith(", undivided, 1 pack")
    ((entry,),) = grid_of(pack(1, 11.0), pack(2, 9.0)).lines[0].entries
    assert entry.label.endswith(", undivided, 1 of 2 packs")
    assert entry.more.startswith("1 more: ")


def test_ulysses_undivided_has_an_entry_of_its_own_on_slower_links() -> None:
    chunks = {"fabric": "channels_1", "head_chunks": 4, "kernel": "flash_attn"}
    found = grid_of(both(11.0, 10.0, SIX, fabric="channels_1"), both(10.5, 10.0, SIX, **chunks))
    assert [each.label for each in found.lines[0].entries[-1]] == [
        "1 NCCL channel",
        "1 NCCL channel, undivided",
    ]


def test_one_rank_has_a_mark_of_its_own_where_nothing_was_measured() -> None:
    def one(ring: float, **columns: Any) -> list[dict[str, Any]]:
        return one_rank(both(10.0, ring, [1.0], sp_size=8, world_size=8, **columns))

    rows = [both(10.0, 11.0, SIX), one_rank(both(10.0, 11.0, [1.0])), one(10.2), one(10.4, num_heads=64)]
    found = grid_of(*rows)
    assert shown(found).splitlines()[2:] == [
        "| 2 GPUs, 1,024 | cuDNN: **Ulysses 1.10x [1.10, 1.10]** A |",
        "| 8 GPUs, 1,024, modelled | \N{WHITE CIRCLE} 64/8 heads of 128, cuDNN: Ulysses 1.040x<br>"
        "\N{WHITE CIRCLE} cuDNN: within 3% |",
    ]
    brief = grid(settings(cells_of([row for each in rows for row in each])), of_one_shape=True)
    assert brief is not None
    assert shown(brief, brief=True).splitlines()[-1].count("\N{WHITE CIRCLE}") == 1
    assert "modelled by one rank" in legend(found)
    flagged = shown(grid_of(both(10.0, 11.0, SIX), one(11.0, flags=["bimodal"])))
    assert "| \N{WHITE CIRCLE}·flagged cuDNN: Ulysses 1.10x |" in flagged
    assert "one rank" not in legend(grid_of(both(10.0, 11.0, SIX)))


def test_a_grid_in_brief_has_no_weak_answer_beside_a_strong_one_and_no_ratio_of_a_tie() -> None:
    found = in_brief(
        grid_of(
            both(10.0, 11.0, SIX),
            both(10.0, 10.1, SIX, kernel="flash_attn_4"),
            both(11.0, 10.0, [1.0], kernel="flash_attn"),
            both(11.0, 10.0, [1.0, 1.0], fabric="channels_1"),
            both(10.0, 12.0, [1.0], isolation="group", flags=["transient"]),
            both(10.0, 11.0, [1.0], seq_len=2048),
        )
    )
    assert shown(found, brief=True).splitlines()[2:] == [
        "| 2 GPUs, 1,024 | FlashAttention-4: **a tie** A<br>cuDNN: **Ulysses 1.10x [1.10, 1.10]** A "
        "| 1 NCCL channel, undivided: ring 1.10x B |"
    ]
    assert "Other runs are up to 9% apart" in legend(found, brief=True)
