"""Published figures beside cells of ours: which cells, under which names, and what is said to differ."""

from collections.abc import Iterable, Mapping
from typing import Any

from sp_bench.report.tables import paper_tables
from sp_bench.report.tables.latex import latex
from sp_bench.report.tables.markdown import markdown
from sp_bench.report.tables.parts import PaperTable

from .rows import cells_of, hf_step, row

CAP = {"device_memory_gib": 80.0}
ADAM, TORCH = "deepspeed_cpu_adam", "torch_adamw"
ONE_GPU = {"sp_size": 1, "seq_len": 8192}
DATA_PARALLEL = ONE_GPU | {"dp_shard_size": 4}


def table_of(rows: Iterable[Mapping[str, Any]]) -> PaperTable:
    (table,) = (table for table in paper_tables(cells_of(rows)) if table.kind == "published")
    return table


def lines(rows: Iterable[Mapping[str, Any]], figure: str) -> list[list[str]]:
    """Published, measured, ratio, measured with, differs in: of the lines whose figure begins so."""
    shown = [[entry.text for entry in line] for line in table_of(rows).lines]
    return [line[2:] for line in shown if line[1].startswith(figure)]


def four_ways(median_ms: float, **asked: Any) -> list[dict[str, Any]]:
    return [hf_step(median_ms=median_ms, offload=o, **asked, **cap) for o in (None, ADAM) for cap in ({}, CAP)]


def test_the_sources_own_stack_stands_beside_it_each_way_to_have_memory_as_published_first() -> None:
    rows = four_ways(6553.6, seq_len=65536)
    rows.append(hf_step(seq_len=65536, median_ms=1.0, offload=TORCH))  # not whose Adam the source had
    rows.append(hf_step(seq_len=65536, median_ms=1.0, offload=ADAM, device_memory_gib=40.0))  # nobody's memory
    rows.append(hf_step(seq_len=65536, median_ms=1.0, kernel="cudnn"))  # faster, but another kernel
    found = lines(rows, "tokens/s")
    assert [line[:3] for line in found] == [["13,396", "10,000", "0.75"]] * 4
    named = "deepspeed_ulysses_hf (deepspeed 0.19.8) flash_attn; hf_deepspeed"
    offloaded, plain = f"optimizer offloaded ({ADAM})", "no offload"
    capped, whole = "4 x NVIDIA H200 capped at 80 GiB, nvlink", "4 x NVIDIA H200, nvlink"
    assert [line[3] for line in found] == [
        *(f"{named}, {offloaded}; {capped}", f"{named}, {offloaded}; {whole}"),
        *(f"{named}, {plain}; {capped}", f"{named}, {plain}; {whole}"),
    ]
    batches = "micro-batches"
    assert [line[4] for line in found] == [
        *(f"engine, device, {batches}", f"engine, device, device memory, {batches}"),
        *(f"engine, device, offload, {batches}", f"engine, device, device memory, offload, {batches}"),
    ]


def test_only_the_sources_own_engine_is_not_said_to_differ() -> None:
    rows = four_ways(6553.6, seq_len=65536, engine="trl_sft")
    assert not any("engine" in line[4] for line in lines(rows, "tokens/s"))
    assert "ours of the same engine: trl_sft" in table_of(rows).caption


def test_of_memory_the_engine_goes_before_the_number_of_micro_batches_and_of_speed_after_it() -> None:
    as_published: dict[str, Any] = {"seq_len": 65536, "offload": ADAM, **CAP}
    rows = [
        hf_step(engine="trl_sft", max_peak_allocated_bytes=12 * 10**9, **as_published),
        hf_step(micro_batches=8, median_ms=9e3, max_peak_allocated_bytes=37 * 10**9, **as_published),
    ]
    (memory,), (speed,) = lines(rows, "peak GB/GPU"), lines(rows, "tokens/s")
    assert ("; trl_sft, " in memory[3], memory[1:3], memory[4]) == (True, ["12.00", "0.24"], "device, micro-batches")
    assert ("; hf_deepspeed, " in speed[3], speed[4]) == (True, "engine, device")


def test_of_several_engines_of_the_stack_the_closest_is_shown_and_of_others_one() -> None:
    rows = [hf_step(seq_len=32768, engine=engine) for engine in ("hf_deepspeed", "hf_trainer", "deepspeed", "fsdp2")]
    found = lines(rows, "tokens/s")
    assert ["hf_trainer, no offload" in line[3] for line in found] == [True, False]
    assert found[1][4].startswith("engine, device, ")


def test_a_failure_is_shown_only_where_no_cell_ran_or_was_out_of_memory() -> None:
    failed = hf_step(seq_len=32768, engine="hf_trainer", status="error")
    assert [line[1] for line in lines([failed], "tokens/s")] == ["error"]
    (line,) = lines([failed, hf_step(seq_len=32768)], "tokens/s")
    assert "hf_deepspeed" in line[3]


def test_out_of_memory_in_both_agrees_and_in_one_says_in_which() -> None:
    rows = [hf_step(seq_len=131072, offload=ADAM, status="oom", oom_site="torch", **CAP)]
    rows += [hf_step(seq_len=131072, offload=ADAM, max_peak_allocated_bytes=82 * 10**9)]
    rows += [hf_step(seq_len=98304, offload=o, status="oom", oom_site="torch", **CAP) for o in (None, ADAM)]
    assert [line[:3] for line in lines(rows, "peak GB/GPU")] == [
        *(["66.0", "OOM", "OOM here only"],) * 2,
        ["OOM", "OOM", "both OOM"],
        ["OOM", "82.00", "OOM there only"],
    ]


def test_the_baseline_at_8k_stands_beside_one_gpu_and_beside_four_with_a_sequence_each() -> None:
    rows = [
        hf_step(median_ms=2048.0, offload=ADAM, **ONE_GPU),
        hf_step(median_ms=2048.0, offload=ADAM, **DATA_PARALLEL),
    ]
    (alone,) = lines(rows, "tokens/s by single, 8,192 tokens, on 1 GPU")
    (together,) = lines(rows, "tokens/s by single, 8,192 tokens, if DP=4")
    assert (alone[1], together[1]) == ("4,000", "16,000")
    assert ("; 1 x NVIDIA H200" in alone[3], "; 4 x NVIDIA H200" in together[3]) == (True, True)
    assert "1 GPU as the baseline" in table_of(rows).caption


def test_mean_is_set_beside_mean_and_largest_beside_largest_with_what_each_is_against() -> None:
    differences = {"mean_nll_difference": 1e-6, "max_nll_difference": 4e-6}
    parity = {"workload": "parity", "pass_kind": "step", "num_layers": 2, "sp_size": 4, "model": "tiny"}
    rows = [
        row(**parity, **differences),
        row(**parity, layout="zigzag", mean_nll_difference=3e-6, max_nll_difference=1e-6),
    ]
    mean, largest = lines(rows, "mean NLL difference"), lines(rows, "largest NLL difference")
    assert [line[:3] for line in mean] == [["4e-06", "0.000003000", "0.75"]]
    assert [line[:3] for line in largest] == [["5e-06", "0.000004000", "0.80"]]
    against = "reference (data parallelism on 4 GPUs, ours one process in float32)"
    assert mean[0][4] == f"engine, device, kernel, method, model, num_layers, {against}"
    for engine, same in (("trl_sft", True), ("hf_deepspeed", False)):
        (line,) = lines([row(**parity, **differences, engine=engine, method="deepspeed_ulysses_hf")], "mean")
        assert ("engine" not in line[4].split(", ")) == same


def test_an_offload_that_a_source_does_not_speak_of_is_said_to_be_so() -> None:
    llama = {"model": "llama3_8b", "num_layers": 32, "sp_size": 2, "dp_shard_size": 4, "engine": "deepspeed"}
    (line,) = lines([hf_step(seq_len=65536, offload=ADAM, **llama)], "tokens/s/GPU")
    assert "offload (not said)" in line[4]


def test_each_figure_has_a_handful_of_lines_in_every_format() -> None:
    rows = [
        *(
            r
            for n in (8192, 32768, 65536)
            for e in ("hf_deepspeed", "fsdp2")
            for r in four_ways(9e3, seq_len=n, engine=e)
        ),
        *four_ways(9e3, **ONE_GPU),
        *four_ways(9e3, **DATA_PARALLEL),
    ]
    table = table_of(rows)
    figures = [line[1].text for line in table.lines]
    assert max(figures.count(figure) for figure in figures) == 5
    assert all("tokens/s by single, 8,192 tokens, if DP=4" in text for text in (latex(table), markdown(table)))
