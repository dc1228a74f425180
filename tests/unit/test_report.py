"""The report as a whole: from rows to the page and the files beside it. Most pages here are made without figures."""

import csv
import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import sp_bench.report as report
from sp_bench.analysis.cells import cells, of_equal_steps
from sp_bench.analysis.metrics import attention_tflops, tokens_per_s
from sp_bench.analysis.selection import select
from sp_bench.analysis.settings import AHEAD, BEHIND, CLOSE, TIE, UNDECIDED, UNPROVEN, Difference, settings
from sp_bench.analysis.signs import counts
from sp_bench.config.parsing import ConfigError
from sp_bench.formats import csv_value, in_bytes, number
from sp_bench.measure.memory_parts import PARTS
from sp_bench.report import Look, Options, build, export, folder
from sp_bench.report.cards import card
from sp_bench.report.figures import NAMES, draw, panels, traffic
from sp_bench.report.findings import findings
from sp_bench.report.setting_tables import tables
from sp_bench.rows import plans, store
from sp_bench.rows.plans import PlannedTrial

from ..cli.console import console
from .pages import Page, page_of
from .rows import ENVIRONMENT, cells_of, commit, row, selection_of, smoke

ULYSSES = {"method": "ulysses", "ulysses_degree": 2, "ring_degree": 1}
GATHER = {"method": "all_gather"}
GPU = {
    "config": json.dumps({"hardware": {"name": "h200", "device": "cuda"}}), "hardware": "h200", "fabric": "nvlink",
    "kernel": "cudnn", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
    "environment": ENVIRONMENT | {"device_names": ["NVIDIA H200"] * 2},
}  # fmt: skip


def on_gpus(**columns: Any) -> dict[str, Any]:
    """As ok rows of H200s are: with FLOP/s, memory and NVLink's counters."""
    asked = GPU | columns
    known = {"attention_flops_per_s": 1e15, "max_peak_allocated_bytes": 3 * 2**30, "comm_wire_bytes": 2.0e7,
             "peak_reserved_bytes": [4 * 2**30] * 2, "device_used_bytes": [6 * 2**30] * 2}  # fmt: skip
    return row(**(known if asked.get("status", "ok") == "ok" else {}) | asked)


def replicated(ms: float, ratios: list[float], **columns: Any) -> list[dict[str, Any]]:
    return [on_gpus(median_ms=ms * ratio, replicate=r, **columns) for r, ratio in enumerate(ratios)]


EQUAL, AROUND = [1.0] * 6, [0.97, 0.98, 1.0, 1.0, 1.02, 1.05]
WIDE = [0.9, 0.95, 1.0, 1.0, 1.05, 1.1]


def first_card(rows: list[dict[str, Any]], smallest: float = 0.02) -> Any:
    return card(settings(cells_of(rows), smallest)[0])


# ties


@pytest.mark.parametrize(
    ("ratios", "outcome"),
    [
        ([1.05] * 6, AHEAD),
        ([0.95] * 6, BEHIND),
        ([1.019] * 6, TIE),  # all of its interval is below the smallest effect
        ([1.013, 1.019, 1.019, 1.019, 1.02, 1.026], UNDECIDED),  # excludes 1, below the smallest effect, reaches above
        ([1.0, 1.02, 1.03, 1.04, 1.05, 0.99], UNDECIDED),  # above it, but the interval holds 1
        ([0.97, 1.0, 1.0, 1.0, 1.0, 1.03], UNDECIDED),  # an interval that holds 1 proves no tie
        ([1.05] * 5, UNPROVEN),
        ([1.019] * 2, CLOSE),  # no interval, no tie
        ([391 / 450, 393 / 450, 513 / 450], UNDECIDED),  # replicates of one cell differ by 1.31x
    ],
)
def test_a_difference_is_claimed_where_its_interval_excludes_1_and_a_tie_where_it_is_inside_2_percent(
    ratios, outcome
) -> None:
    fast, slow = replicated(10.0, [1.0] * len(ratios), **ULYSSES), replicated(10.0, ratios)
    ring, ulysses = cells_of([*fast, *slow])
    assert Difference(ulysses, ring, 0.02).outcome == outcome


def test_the_smallest_effect_is_the_readers_choice() -> None:
    rows = [*replicated(10.0, EQUAL, **ULYSSES), *replicated(10.3, EQUAL)]
    assert first_card(rows).proven
    assert first_card(rows, smallest=0.05).verdict == "A tie: Ulysses and the contiguous ring."


def test_a_card_names_what_the_leader_beats_and_what_it_ties_with() -> None:
    rows = [*replicated(10.0, EQUAL, **ULYSSES), *replicated(10.5, EQUAL), *replicated(10.01, EQUAL, **GATHER)]
    told = first_card(rows)
    assert told.verdict == (
        "Ulysses is 1.05x [1.05, 1.05] as fast as the contiguous ring and ties with the contiguous all-gather."
    )
    assert told.proven
    rows = [*replicated(10.0, EQUAL, **ULYSSES), *replicated(10.5, EQUAL), *replicated(9.9, WIDE, **GATHER)]
    assert first_card(rows).verdict == (
        "Undecided: the contiguous all-gather is 1.010x [0.918, 1.122] as fast as Ulysses. Undecided: the contiguous "
        "all-gather is 1.06x [0.96, 1.18] as fast as the contiguous ring. Ulysses is 1.05x [1.05, 1.05] as fast as the "
        "contiguous ring."
    )
    assert told.title == "Attention, forward and backward, 32/8 heads of 128, bf16, H200"
    assert told.where == "1,024 tokens on 2 GPUs, NVLink, cuDNN"
    assert told.numbers.startswith(
        "Ulysses against contiguous ring: 51.2k against 48.8k tokens/s a GPU, 500 TFLOP/s, 3.0 GiB, "
    )
    assert told.memory == "Nothing ran out of memory up to 1,024 tokens."


def test_a_card_of_cpus_says_what_was_proven_and_compares_nothing() -> None:
    told = first_card([row(median_ms=10.0, **ULYSSES), row(median_ms=20.0), row(status="unsupported", seq_len=7)])
    assert told.verdict == "Right on CPUs: ring and Ulysses."
    assert told.numbers.startswith("2 cells passed the checks.")
    assert told.also == ("1 unsupported.",)
    assert "as fast" not in " ".join((told.verdict, told.numbers, *told.also))


def test_one_replicate_is_never_bold() -> None:
    told = first_card([on_gpus(median_ms=10.0, **ULYSSES), on_gpus(median_ms=20.0)])
    assert told.verdict == "By medians, without intervals, Ulysses is 2.00x as fast as the contiguous ring."
    assert not told.proven
    assert told.grade.mark == "C"
    again = [on_gpus(median_ms=11.5, replicate=1, **ULYSSES), on_gpus(median_ms=11.4, replicate=1)]
    told = first_card([on_gpus(median_ms=10.0, **ULYSSES), on_gpus(median_ms=13.4), *again])
    assert told.verdict == (
        "Undecided: Ulysses is 1.15x as fast as the contiguous ring by medians, but replicates of one of them differ "
        "by 1.18x."
    )
    ulysses, ring = replicated(10.0, [1.0, 1.0, 1.13], **ULYSSES), replicated(12.0, [1.0, 1.0, 0.93])
    told = first_card([*ulysses, *ring])
    assert told.verdict.endswith("as fast as the contiguous ring (their replicates overlap).")
    page = page_of([on_gpus(median_ms=10.0, **ULYSSES), on_gpus(median_ms=20.0)])
    assert "<b>" not in page.html
    assert 'class="best"' not in page.html


def test_methods_are_compared_on_one_kernel_and_libraries_with_ours_of_their_kind_on_theirs() -> None:
    library = {"method": "ring_flash_attn", "implementation": "ring-flash-attn==0.1.8", "kernel": "flash_attn"}
    rows = [on_gpus(median_ms=5.0, kernel="flash_attn_4", **ULYSSES), on_gpus(median_ms=6.0, kernel="flash_attn_4")]
    rows += [on_gpus(median_ms=10.0, kernel="flash_attn"), on_gpus(median_ms=10.1, **library)]
    told = first_card(rows)
    assert "FlashAttention-4" in told.where
    assert "Ulysses is 1.20x as fast as the contiguous ring" in told.verdict
    assert told.also[0].startswith("Our contiguous ring is 1.010x as fast as ring-flash-attn on FlashAttention-2")
    assert told.also[0].endswith("(within 2%, no interval).")
    assert first_card(rows, smallest=0.005).also[0].startswith("Our contiguous ring is 1.010x as fast as ring-flash")


def test_memory_is_a_bracket_where_it_ran_out() -> None:
    rows = [on_gpus(seq_len=n, **m) for n in (1024, 2048) for m in (ULYSSES, {})]
    rows += [on_gpus(seq_len=4096, status="oom"), on_gpus(seq_len=4096, **ULYSSES)]
    assert first_card(rows).memory == "Out of memory: the contiguous ring on 2 GPUs at 4,096 tokens (2,048 ran)."


def test_where_only_a_fit_was_asked_the_card_says_so() -> None:
    told = first_card([on_gpus(seq_len=2048, median_step_ms=None), on_gpus(seq_len=4096, status="oom")])
    longest = "The longest that fits, tested without a time: the contiguous ring on 2 GPUs 2,048 tokens "
    longest += "(not 4,096: out of device memory)."
    assert (told.verdict, told.memory) == (longest, "")


def test_a_failure_alone_gives_a_card_without_numbers() -> None:
    told = first_card([on_gpus(status="error")])
    assert told.verdict == "Nothing was measured (1 error)."
    assert told.numbers == ""


def test_bytes_of_two_batch_sizes_have_a_panel_each() -> None:
    """Twice the batch sends twice as much: beside one closed form, one of two right counts would look wrong."""
    found = cells_of([on_gpus(layout="zigzag", method="ring", batch_size=size) for size in (1, 2)])
    (plot,) = traffic.draw(settings(found), Look())
    titles = [axis.get_title(loc="left") for axis in plot.figure.axes]
    assert ["2 x" in title for title in titles] == [False, True]


def test_text_of_others_is_text_in_the_findings(tmp_path: Path) -> None:
    rows = [on_gpus(median_ms=ms, model="a\\|b <img src=x> *x*", **m) for ms, m in ((10.0, ULYSSES), (12.0, {}))]
    rows = [r | {"workload": "train_step", "pass_kind": "step", "engine": "fsdp2"} for r in rows]
    found = cells_of(rows)
    page = findings(settings(found), found)
    assert "a\\\\\\|b &lt;img src=x> \\*x\\*" in page
    assert "<img" not in page


# pooling


def test_how_a_step_is_measured_splits_no_cell_and_is_in_no_name(tmp_path: Path) -> None:
    """Three replicates with arms and three without are one cell with an interval."""
    plain = {"hardware": {"device": "cpu"}, "workload": {"name": "attention", "attribution": False}}
    arms = {"hardware": {"device": "cpu"}, "workload": {"name": "attention", "attribution": True}}
    measured = [row(replicate=r, config=json.dumps(arms if r < 3 else plain)) for r in range(6)]
    rows = select([commit(measured, tmp_path)]).rows
    assert len(cells(rows)) == 2
    (cell,) = cells(of_equal_steps(rows))
    assert len(cell.step_ms) == 6
    assert cell.interval_ms is not None
    assert "attribution" not in cell.series


def test_two_ways_to_measure_in_one_launch_are_no_replicates_of_each_other() -> None:
    configs = [json.dumps({"workload": {"attribution": arms}}) for arms in (False, True)]
    rows = selection_of([row(replicate=r, config=c) for c in configs for r in range(3)]).rows
    assert [len(cell.step_ms) for cell in cells(of_equal_steps(rows))] == [3, 3]


def both(folder: Path, machine: str, ratio: float | None, **asked: Any) -> Path:
    """A campaign on one machine with Ulysses, and with a ring that takes `ratio` as long; None: without a ring."""
    used = GPU["environment"] | {"device_uuids": [f"{machine}-0", f"{machine}-1"]}
    asked |= {"environment": used, "env_id": machine * 8}
    steps = [(10.0, ULYSSES), *([(10.0 * ratio, {})] if ratio else [])]
    return commit([on_gpus(median_ms=ms, **{**method, **asked}) for ms, method in steps], folder)


def test_campaigns_count_by_sign_over_machines(tmp_path: Path) -> None:
    """A machine that ran Ulysses alone is none of them."""
    ratios = (1.05, 1.03, 0.99, None)
    folders = [both(tmp_path / f"campaign_{i}", f"{i}", ratio) for i, ratio in enumerate(ratios)]
    (count,) = counts(settings(cells(select(folders).rows)))
    assert count.words == "Ulysses ahead of the ring in 2 of 3 campaigns on 3 machines, 0.990x to 1.050x"
    assert count.where == (
        "Attention, forward and backward, 32/8 heads of 128, bf16, H200, 1,024 tokens on 2 GPUs, NVLink, cuDNN"
    )


def test_only_campaigns_of_equal_work_and_devices_are_counted_together(tmp_path: Path) -> None:
    def step(model: str, checkpointing: str) -> dict[str, Any]:
        workload = {"name": "train_step", "activation_checkpointing": checkpointing}
        config = {"hardware": {"name": "h200", "device": "cuda"}, "workload": workload, "model": {"name": model}}
        asked = {"workload": "train_step", "pass_kind": "step", "model": model, "engine": "fsdp2"}
        return asked | {"config": json.dumps(config)}

    h100 = {"hardware": "h100", "config": json.dumps({"hardware": {"name": "h100", "device": "cuda"}})}
    kinds = [({}, 1.01), (h100, 1.02), (step("qwen3_4b", "full"), 1.03), (step("qwen3_4b", "selective"), 1.04)]
    kinds.append((step("llama3_8b", "full"), 1.05))
    each = [(kind, ratio, machine) for i, (kind, ratio) in enumerate(kinds) for machine in (f"{2 * i}", f"{2 * i + 1}")]
    folders = [both(tmp_path / f"campaign_{machine}", machine, ratio, **kind) for kind, ratio, machine in each]
    found = settings(cells(select(folders).rows))
    assert sorted(count.tally for count in counts(found)) == [
        f"2 of 2 campaigns on 2 machines, {ratio:.3f}x to {ratio:.3f}x" for _, ratio in kinds
    ]
    written = [line for line in findings(found, found[0].cells).splitlines() if "campaigns on 2 machines" in line]
    assert len({line.split("|")[1] for line in written}) == len(kinds)


@pytest.mark.parametrize(
    ("flags", "replicates", "verdict"),
    [
        (["short_window"], 1, "No verdict: each method has one replicate, timed for less than 0.2 s."),
        (["short_window"], 2, "By medians"),
        (["transient"], 1, "By medians"),
    ],
)
def test_one_replicate_of_a_moment_is_no_finding(flags: list[str], replicates: int, verdict: str) -> None:
    rows = [
        on_gpus(median_ms=ms, replicate=r, flags=flags, **m)
        for r in range(replicates) for ms, m in ((10.0, ULYSSES), (12.0, {}))
    ]  # fmt: skip
    found = cells_of(rows)
    assert verdict in findings(settings(found), found)


@pytest.mark.parametrize("uuids", [("a", "a"), ("a", "b")])
def test_a_finding_over_rows_of_separate_devices_says_so(uuids: tuple[str, str]) -> None:
    rows = [
        on_gpus(median_ms=ms, replicate=r, environment=GPU["environment"] | {"device_uuids": [uuid]}, **m)
        for r in range(3) for uuid, (ms, m) in zip(uuids, ((10.0, ULYSSES), (12.0, {})), strict=True)
    ]  # fmt: skip
    found = cells_of(rows)
    page = findings(settings(found), found)
    assert "| 3 replicates" in page
    assert ("| 3 replicates, on 2 separate sets of devices" in page) == (uuids == ("a", "b"))


# figures


def campaign() -> list[dict[str, Any]]:
    """Three lengths, a fabric of which the bandwidth is known, the kernel alone and one out of memory."""
    arms = {"compute_only_step_ms": [9.0], "exposed_comm_ms": 1.0, "imbalance_ms": 0.1}
    rows = [on_gpus(seq_len=n, median_ms=n / 100 * k, **m, **arms)
            for n in (1024, 2048, 4096) for k, m in ((1.0, ULYSSES), (1.1, {}), (1.2, GATHER))]  # fmt: skip
    rows += [on_gpus(seq_len=4096, median_ms=40.0, method="single", sp_size=1, ring_degree=1, num_heads=16,
                     num_kv_heads=4), on_gpus(seq_len=8192, status="oom")]  # fmt: skip
    return [*rows, *map(trained, (("full", 0.6), ("selective", 0.8)))]


def trained(step: tuple[str, float], **changes: Any) -> dict[str, Any]:
    checkpointing, share_of_limit = step
    parts = {"attention": 50.0, "matmul": 30.0, "other": 10.0, "messages": 9.0, "exposed_messages": 5.0, "idle": 4.0}
    parts |= {"host_copies": 8.0, "exposed_host_copies": 1.0}
    recompute = 5.0 if checkpointing == "full" else 1.0
    config = {"hardware": {"name": "h200", "device": "cuda"}, "workload": {"activation_checkpointing": checkpointing}}
    asked = {"workload": "train_step", "pass_kind": "step", "model": "qwen3_4b", "engine": "fsdp2"}
    return on_gpus(
        **{**ULYSSES, **asked},
        config=json.dumps(config),
        kernel_ms=[parts, parts],
        part_ms=[{"forward": 30.0, "recompute": recompute, "backward": 60.0, "optimizer": 10.0 - recompute}] * 2,
        peak_parts_bytes=[dict.fromkeys(PARTS, 2**30)] * 2,
        share_of_limit=share_of_limit,
        **changes,
    )


def test_rates_of_attention_are_of_what_ran_and_of_the_delta_rule_of_the_model() -> None:
    """A backward of softmax runs the scores again, and passing states doubles the values."""
    flops = {"model_flops": 3e12, "attention_flops_per_s": 3.5e15, "median_ms": 1.0}
    rates = [attention_tflops(*cells_of([on_gpus(**flops, attention_kind=kind)])) for kind in (None, "gated_delta")]
    assert rates[0] == pytest.approx(rates[1] * 3.5 / 3)


def one_of(sp_size: int, **columns: Any) -> dict[str, Any]:
    """One real rank of so many."""
    world = {"world": "one_rank", "link": {"name": "nvlink"}}
    config = json.dumps({"hardware": {"name": "h200", "device": "cuda"}, **world})
    return on_gpus(sp_size=sp_size, config=config, **columns) | {"evidence": "one_rank", "link": "nvlink"}


def test_all_figures_are_drawn_at_both_widths_and_alone() -> None:
    under_windows = [one_of(8, **method, window=window) for method in ({}, ULYSSES) for window in (128, 4096)]
    work = [dict.fromkeys(("attention", "matmul", "other", "messages", "exposed_messages"), 1.0)]
    delta = [on_gpus(**method, attention_kind="gated_delta", kernel_ms=work) for method in ({}, ULYSSES)]
    over_ranks = [one_of(size, **method) for method in ({}, ULYSSES) for size in (8, 64)]
    found = cells_of([*campaign(), *over_ranks, *under_windows, *delta])
    made = settings(found)
    for column in (1, 2):
        drawings = draw(made, found, Look(column=column))
        assert {d.name for d in drawings} == {*NAMES} - {"plans"}  # of drawn batches: test_streams draws it
        assert {d.width for d in drawings} == {312 if column == 1 else 648}
        assert all(d.files.keys() == {"png", "pdf", "csv", "tex"} for d in drawings)
        assert "memory-parts" in {d.stem for d in drawings}
    assert {d.name for d in draw(made, found, Look(height_in=2.0), ["ratios"])} == {"ratios"}
    again = draw(made, found, Look(height_in=2.0), ["ratios"])
    assert again == draw(made, found, Look(height_in=2.0), ["ratios"])  # equal rows, equal bytes


@pytest.mark.parametrize("column", [1, 2])
def test_a_figure_of_one_step_leaves_room_for_its_bar_above_the_legend(column: int) -> None:
    ends = dict.fromkeys(("forward", "backward", "optimizer"), 2**30)
    found = cells_of([trained(("full", 0.7), phase_end_bytes=[ends, ends])])
    drawings = draw(settings(found), found, Look(column=column))  # matplotlib warns where no room is left
    assert "memory-parts" in {d.stem for d in drawings}


def test_nothing_is_drawn_of_times_of_a_cpu() -> None:
    phases = [{"forward": 30.0, "recompute": 0.0, "backward": 60.0, "optimizer": 10.0}] * 2
    step = row(**{**ULYSSES, "workload": "train_step", "pass_kind": "step", "part_ms": phases})
    found = cells_of([row(), row(**ULYSSES), step])
    assert {d.name for d in draw(settings(found), found)} == {"bytes"}


@pytest.mark.parametrize("seq_len", [None, 8192])
def test_the_parts_of_steps_that_do_the_same_are_in_ms_and_of_others_shares(seq_len: int | None) -> None:
    longer = [trained(("full", 0.7), seq_len=seq_len)] if seq_len else []
    found = cells_of([*campaign(), *longer])
    steps, phases = draw(settings(found), found, only=["steps"])
    assert phases.stem == "steps-phases"
    of_kernels, of_phases = (list(csv.DictReader(each.files["csv"].decode().splitlines())) for each in (steps, phases))
    assert len(of_kernels) == len(of_phases) == (3 if seq_len else 2)
    unit = 0.01 if seq_len else 1.0
    kernels = {"attention": 50, "matmul": 30, "other": 10, "exposed_messages": 5, "exposed_host_copies": 1, "idle": 4}
    if seq_len:  # timed steps were shorter than the work of the traced ones
        kernels = {name: part / 96 for name, part in kernels.items()} | {"idle": 0}
    for line in of_kernels:
        assert {name: float(line[name]) for name in kernels} == pytest.approx(kernels)
    assert [float(line["recompute"]) for line in of_phases[-2:]] == pytest.approx([5 * unit, unit])
    assert all(float(line["forward"]) == pytest.approx(30 * unit) for line in of_phases)
    if seq_len:
        assert [line["share_of_limit"] for line in of_kernels] == ["0.7", "0.6", "0.8"]
    else:  # of the timed step, which has a mark
        assert [float(line["limit_ms"]) for line in of_kernels] == pytest.approx(
            [share * float(line["the timed step"]) for share, line in zip((0.6, 0.8), of_kernels, strict=True)]
        )


def test_a_step_whose_optimizer_is_on_the_host_has_a_part_for_it() -> None:
    found = cells_of([trained(("selective", 0.8)), trained(("full", 0.6), optimizer_ms=25.0)])
    steps, _ = draw(settings(found), found, only=["steps"])
    lines = list(csv.DictReader(steps.files["csv"].decode().splitlines()))
    assert sorted(float(line["optimizer_ms"]) for line in lines) == [0, 25]
    assert "AdamW's time on the host is of the timed steps." in steps.caption


def test_steps_that_each_add_an_option_are_drawn_from_the_plainest_and_others_from_the_fastest() -> None:
    def step(checkpointing: str, code: str, ms: float) -> dict[str, Any]:
        workload = {"name": "train_step", "activation_checkpointing": checkpointing, "model_code": code}
        config = {"hardware": {"name": "h200", "device": "cuda"}, "workload": workload}
        made = trained((checkpointing, 0.7), median_ms=ms, model_code=code)
        return made | {"config": json.dumps(config), "cell_id": f"{checkpointing} {code}", "trial_id": f"{ms}"}

    def drawn(*steps: dict[str, Any]) -> tuple[list[float], str]:
        found = cells_of(list(steps))
        kernels, _ = draw(settings(found), found, only=["steps"])
        lines = csv.DictReader(kernels.files["csv"].decode().splitlines())
        return [float(line["step_ms"]) for line in lines], kernels.caption

    climb = [step("full", "compiled", 14.0), step("none", "compiled", 10.0), step("none", "eager", 12.0)]
    order, caption = drawn(*climb, step("selective", "compiled", 11.0))
    assert order == [12.0, 10.0, 11.0, 14.0]
    assert "The plainest step is at the top" in caption
    order, caption = drawn(climb[0], climb[2])  # two options apart
    assert order == [12.0, 14.0]
    assert "plainest" not in caption
    ring = climb[0] | {"method": "ring", "cell_id": "ring", "trial_id": "ring", "median_step_ms": 9.0}
    order, caption = drawn(*climb, ring)
    assert order == [9.0, 10.0, 12.0, 14.0]
    assert "plainest" not in caption


def test_a_figure_that_leaves_the_slowest_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cells_of([on_gpus(median_ms=ms, **m) for ms, m in ((10.0, ULYSSES), (11.0, {}), (12.0, GATHER))])
    (whole,) = draw(settings(found), found, only=["throughput"])
    assert "Slower ones" not in whole.caption
    monkeypatch.setattr(panels, "MOST_DOTS", 2)
    (cut,) = draw(settings(found), found, only=["throughput"])
    assert "Slower ones that only the table has (2 GPUs, cuDNN): 1." in cut.caption
    drawn = [each.files["csv"].decode().splitlines()[1:] for each in (whole, cut)]
    assert [len(lines) for lines in drawn] == [3, 2]


def test_a_figure_of_dots_has_a_panel_for_each_length_and_says_what_only_the_table_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [on_gpus(seq_len=n, **m) for n in (1024, 2048) for m in (ULYSSES, {})]
    rows += [on_gpus(kernel="flash_attn", **m) for m in (ULYSSES, {})]
    found = cells_of(rows)
    (whole,) = draw(settings(found), found, only=["throughput"])
    lines = list(csv.DictReader(whole.files["csv"].decode().splitlines()))
    assert sorted((line["kernel"], line["seq_len"]) for line in lines) == 2 * [("cudnn", "1024")] + 2 * [
        ("cudnn", "2048")
    ] + 2 * [("flash_attn", "1024")]
    assert "Panels that only" not in whole.caption
    monkeypatch.setattr(panels, "MOST_DOTTED", 1)
    (cut,) = draw(settings(found), found, only=["throughput"])
    assert "Panels that only the table has: 2." in cut.caption


@pytest.mark.parametrize(("slower", "shared"), [(2.0, True), (5.0, False)])
def test_panels_over_the_length_share_their_y_axis_unless_their_values_are_far_apart(slower: float, shared: bool):
    of_two = (("cudnn", 1e15), ("flash_attn", 1e15 / slower))
    rows = [on_gpus(seq_len=n, kernel=k, attention_flops_per_s=v) for n in (1024, 2048, 4096) for k, v in of_two]
    found = panels.panels(settings(cells_of(rows)), lambda cell: cell.middle("attention_flops_per_s"))
    (plot,) = panels.over_length("any", found, lambda cell: cell.middle("attention_flops_per_s"), "", Look(), "")
    first, second = (axis.get_ylim() for axis in plot.figure.axes)
    assert (first == second) == shared
    assert ("The panels' y axes differ." in plot.caption) == (not shared)


def test_a_mark_of_bytes_stands_at_its_number_of_ranks_and_equal_ones_beside_it() -> None:
    def at(ulysses: float, ring: float) -> list[float]:
        rows = [on_gpus(comm_counted_bytes=ulysses, **ULYSSES), on_gpus(comm_counted_bytes=ring)]
        (plot,) = traffic.draw(settings(cells_of(rows)), Look())
        (axis,) = plot.figure.axes
        return sorted({float(line.get_xdata()[0]) for line in axis.get_lines() if len(line.get_xdata()) == 1})

    assert at(2**30, 2**31) == [2.0]
    left, right = at(2**30, 2**30)
    assert left < 2.0 < right


@pytest.mark.parametrize(("counted_bytes", "unit"), [(2**20, "MiB"), (2**30, "GiB")])
def test_sent_bytes_are_drawn_in_a_unit_of_their_size_and_kept_in_gib(counted_bytes: float, unit: str) -> None:
    found = cells_of([on_gpus(comm_counted_bytes=counted_bytes, **ULYSSES)])
    (plot,) = traffic.draw(settings(found), Look())
    (axis,) = plot.figure.axes
    assert axis.get_ylabel() == f"{unit} sent a rank"
    assert [1.0] in [list(line.get_ydata()) for line in axis.get_lines()]
    assert set(plot.data[plot.data.what == "counted"].gib) == {counted_bytes / 2**30}


def test_a_figure_holds_what_its_rows_say() -> None:
    found = cells_of(campaign())
    (ratios,) = draw(settings(found), found, only=["ratios"])
    data = [line.split(",") for line in ratios.files["csv"].decode().splitlines()[1:]]
    assert {float(line[-3]) for line in data} == {1.1, 1.2}


def test_throughput_falls_to_the_shortest_length_that_was_out_of_memory() -> None:
    found = cells_of(campaign())
    (drawing,) = [
        d for d in draw(settings(found), found, only=["throughput"]) if d.stem == "throughput-attention-length"
    ]
    lines = list(csv.DictReader(drawing.files["csv"].decode().splitlines()))
    assert [line["value"] == "" for line in lines if line["seq_len"] == "8192"] == [True]
    assert "out of memory" in drawing.caption


# the folder


@pytest.fixture(scope="module")
def small_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [row(seq_len=n, **m) for n in (1024, 2048) for m in ({}, ULYSSES)]
    rows.append(row(status="oom", oom_site="torch", seq_len=4096))
    return build([commit(rows, tmp_path_factory.mktemp("results") / "small")]).page


@pytest.fixture(scope="module")
def smoke_page() -> Page:
    return page_of(smoke())


def test_a_report_is_a_page_with_its_figures_and_tables_beside_it(small_report: Path) -> None:
    made = {p.relative_to(small_report.parent).as_posix() for p in small_report.parent.rglob("*") if p.is_file()}
    tables_made = {f"tables.{suffix}" for suffix in ("csv", "json", "md", "tex")}
    suffixes = ("png", "pdf", "csv", "tex")
    figures = {f"figures/{name}.{suffix}" for name in ("bytes", "memory-longest") for suffix in suffixes}
    assert made == {"index.html", folder.MANIFEST, *tables_made, *figures}


def test_report_leaves_only_rows_beside_its_work_folder(small_report: Path) -> None:
    campaign = small_report.parents[2]
    assert {path.name for path in campaign.iterdir() if path.suffix != ".parquet"} == {"_work"}
    assert len(pd.read_parquet(campaign, columns=["status"])) == 5


def test_a_folder_that_cannot_be_written_or_read_raises_os_error(tmp_path: Path) -> None:
    folder = commit([row(status="error")], tmp_path / "rows")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        build([folder], tmp_path / "file" / "report")
    with pytest.raises(FileNotFoundError, match="absent"):
        build([tmp_path / "absent"])


def test_figures_do_not_touch_global_matplotlib_state(tmp_path: Path) -> None:
    commit([row()], tmp_path / "rows")
    program = (
        "import json, sys, pathlib, matplotlib; before = matplotlib.rcParams.copy()\n"
        "from sp_bench.report import build; build([pathlib.Path(sys.argv[1])])\n"
        # past its own lookup, which would import pyplot to settle the backend
        "changed = [n for n, value in dict.items(matplotlib.rcParams.copy()) if value != dict.get(before, n)]\n"
        "imported = sorted({'torch', 'matplotlib.pyplot'} & set(sys.modules))\n"
        "print(json.dumps({'changed': changed, 'imported': imported}))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rows")]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout.splitlines()[-1]) == {"changed": [], "imported": []}
    assert list((tmp_path / "rows").rglob("*.png")), "no figure was drawn"


def test_the_export_is_the_table_as_csv_or_json(tmp_path: Path) -> None:
    campaign = commit([row(median_ms=12.5), row(median_ms=10.0, **ULYSSES)], tmp_path / "c")
    lines = json.loads(export([campaign], "json"))
    assert [(line["method"], line["median_step_ms"], line["ratio_to_first"]) for line in lines] == [
        ("ulysses", 10.0, None),
        ("ring", 12.5, 1.25),
    ]
    assert pd.read_csv(pd.io.common.StringIO(export([campaign], "csv")))["median_step_ms"].tolist() == [10.0, 12.5]


FORMULAS = ("=HYPERLINK(0)", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\n=1")


def test_no_text_of_a_csv_is_a_formula_and_numbers_stay_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [row(status="error", reason=text, replicate=i) for i, text in enumerate(FORMULAS)]
    rows.append(row(median_ms=1.5, replicate=len(rows)))
    out = tmp_path / "rows.csv"
    assert console(capfd, "export", str(commit(rows, tmp_path / "c")), "--out", str(out))[0] == 0
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["reason"] for line in lines} == {"", *(f"'{text}" for text in FORMULAS)}
    assert {line["median_step_ms"] for line in lines} == {"", "1.5"}

    values = [csv_value(value) for value in (*FORMULAS, -1.5, -3, None, "ring", "1-2", "")]
    assert values == [*(f"'{text}" for text in FORMULAS), -1.5, -3, None, "ring", "1-2", ""]
    assert csv_value("\r=1\r\n") == "'\n=1\n"


# the page


def test_the_page_loads_nothing_and_links_only_within_itself(small_report: Path) -> None:
    page = Page(small_report.read_text("utf-8"))
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert {source[1:] for source in page.sources if source.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "default-src 'none'; img-src data:; style-src 'sha256-" in unescape(page.html)
    assert "unsafe-inline" not in page.html


def test_every_row_is_in_the_appendix_with_its_trial_file_and_status(smoke_page: Page) -> None:
    appendix = smoke_page.text[len(smoke_page.before_the_appendix) :]
    for made in smoke():
        name = store.RowName(made["trial_id"], made["env_id"], made["attempt"], made["status"])
        assert f"made_up/{name.file_name}" in appendix
        assert made["trial_id"] in appendix.replace(name.file_name, "")


def test_every_line_of_a_table_links_once_to_the_rows_of_its_cell(smoke_page: Page) -> None:
    numbers = [i for i in smoke_page.ids if re.fullmatch(r"c\d+", i)]
    assert len(numbers) == len(cells_of(smoke()))
    lines = re.findall(r'<tr[^>]*><th scope="row"><a href="#(c\d+)">', smoke_page.html)
    assert set(lines) <= set(numbers)
    assert len(re.findall(r"<a ", smoke_page.html)) == len(lines) + 4  # the menu, and the way past it


def test_a_page_is_short_outside_its_appendix(smoke_page: Page) -> None:
    assert len(smoke_page.before_the_appendix.split()) < 2500


def test_identifiers_are_in_the_appendix_alone(smoke_page: Page) -> None:
    told = smoke_page.before_the_appendix
    assert not re.search(r"all_gather|sp_size|seq_len|cpu_flash|forward_backward", told)


@pytest.mark.parametrize("status", ["error", "oom", "unsupported", "incorrect"])
def test_a_campaign_in_which_all_failed_still_gives_a_page(status: str) -> None:
    page = page_of([row(status=status)])
    assert f"1 trial: 1 {status}." in page.text
    assert f"made up: {status}" in page.text


def test_a_campaign_without_rows_gives_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "sp-bench: no rows" in build([tmp_path / "empty"], tmp_path / "out").page.read_text("utf-8")


def test_markup_in_a_reason_or_name_stays_text() -> None:
    evil = "<script>alert(1)</script>"
    page = page_of([row(status="error", reason=evil), row(method=evil, layout=evil), row(kernel=evil, seq_len=2048)])
    assert page.html.count("<script>") == 1
    assert page.text.count(evil) >= 3


def test_a_page_says_which_planned_trials_are_missing(tmp_path: Path) -> None:
    """Over all runs of all campaigns. Of the runs of other folders nothing is assumed."""

    def said() -> str:
        page = build(folders, tmp_path / "page").page.read_text()
        (line,) = re.findall(r"<li>(.*(?:missing).*)</li>", page)
        return unescape(line)

    ran, other = row(method="ulysses"), row(method="ring")
    folders = [commit([ran], tmp_path / "one"), commit([other], tmp_path / "two")]
    left = [PlannedTrial(digit * 12, "e" * 8, "ring") for digit in "cd"]
    assert said() == "Plan unknown, so missing trials are unknown."
    plans.write(folders[0], [PlannedTrial(ran["trial_id"], ran["env_id"], "ulysses")])
    assert said() == "Plan unknown, so missing trials are unknown."
    plans.write(folders[1], [PlannedTrial(other["trial_id"], other["env_id"], "ring")])
    assert said() == "No planned trial is missing."
    plans.write(folders[1], left)
    assert said() == "2 of 4 planned trials are missing: ring (2)."
    (folders[1] / plans.FOLDER / "damaged.json").write_text("{")
    assert said() == "2 of 4 planned trials are missing: ring (2)."


def test_files_that_are_not_rows_are_named_as_problems(tmp_path: Path) -> None:
    campaign = commit([row()], tmp_path / "c")
    (campaign / "notes.txt").write_text("mine")
    built = build([campaign], tmp_path / "out")
    assert any("notes.txt" in problem for problem in built.problems)
    assert "notes.txt" in built.page.read_text("utf-8")


def test_one_figure_is_made_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    campaign = commit([row(**ULYSSES, replicate=r) for r in range(2)], tmp_path / "c")
    for made in ("cards", "caveats", "tables", "render"):
        monkeypatch.setattr(report, made, lambda *_, made=made: pytest.fail(f"{made} was called"))
    built = build([campaign], tmp_path / "out", Options(only=("bytes",)))
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name[0] != "."]
    assert {path.name for path in files} == {"bytes.png", "bytes.pdf", "bytes.csv", "bytes.tex"}
    assert built.page == tmp_path / "out" / "figures"
    with pytest.raises(ConfigError, match="--only fabrics: these rows have nothing to draw"):
        build([campaign], tmp_path / "out", Options(only=("fabrics",)))


# the table


def test_the_first_of_a_group_is_bold_where_it_is_proven_faster_than_every_other_method() -> None:
    rows = [*replicated(10.0, EQUAL, **ULYSSES), *replicated(10.5, EQUAL)]
    table = tables(settings(cells_of(rows)))[0]
    (group,) = table.groups
    assert [line.bold for line in group.lines] == [True, False]
    assert table.texts(group.lines[1])[-1] == "1.05x [1.05, 1.05]"
    (group,) = tables(settings(cells_of([*rows, *replicated(10.01, AROUND, **GATHER)])))[0].groups
    assert not any(line.bold for line in group.lines)


def test_a_table_of_one_line_is_none_and_columns_nobody_knows_are_left_out() -> None:
    assert tables(settings(cells_of([row()]))) == []
    (table,) = tables(settings(cells_of([row(), row(**ULYSSES)])))
    assert table.heads == ("Method", "ms", "tokens/s/rank", "peak GiB", "GiB sent", "ratio to the first")


def test_bytes_of_a_cell_are_equal_only_if_those_of_every_replicate_are() -> None:
    wrong = row(replicate=1, comm_counted_bytes=1.0)
    (cell,) = cells_of([row(), wrong])
    assert cell.communication.equal is False


def test_rate_comes_from_the_median_time_and_not_from_a_mean_of_rates() -> None:
    (cell,) = cells_of([row(median_ms=ms, replicate=r) for r, ms in enumerate((10.0, 20.0, 60.0))])
    assert tokens_per_s(cell) == pytest.approx(1024 / 0.02)


def test_the_last_attempt_of_a_trial_counts(tmp_path: Path) -> None:
    commit([row(status="error", attempt=0), row(attempt=1)], tmp_path)
    selection = select([tmp_path])
    assert (list(selection.rows["status"]), selection.num_superseded) == (["ok"], 1)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.00123, "0.00123"), (12.0, "12.0"), (1234567.0, "1,234,567"), (None, "\N{EN DASH}")]
)
def test_numbers_have_three_significant_digits_and_no_more(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("size", "text"), [(1376256, "1.31 MiB"), (512, "512 B"), (None, "\N{EN DASH}")])
def test_bytes_have_binary_units(size: float | None, text: str) -> None:
    assert in_bytes(size) == text


def test_searches_that_did_not_end_have_their_brackets(tmp_path: Path) -> None:
    campaign = commit([row()], tmp_path / "one")
    plans.write(campaign, [], {"ulysses": True, "ring": False})
    assert "One search for the longest sequence did not end: 1 without a bracket." in build([campaign]).page.read_text(
        "utf-8"
    )
    plans.write(campaign, [], {"ulysses": True, "ring": True})
    assert "did not end" not in build([campaign]).page.read_text("utf-8")
    plans.write(campaign, [], {"ring": False, "upipe": False})  # another run, of which one had ended before
    assert plans.open_searches(plans.read(campaign)) == {"upipe": ""}
    plans.write(campaign, [], {"ring": False, "upipe": False}, brackets={"upipe": "[8 tokens fit, 16 do not]"})
    plans.write(campaign, [], {"ring": False, "upipe": False})  # killed before it comes to the search
    assert "did not end: [8 tokens fit, 16 do not]." in build([campaign]).page.read_text("utf-8")
