import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING
from sp_bench.report.limits import limits, out_of_memory
from sp_bench.report.statistics import median_interval
from sp_bench.report.tables import paper_tables, sources
from sp_bench.report.tables.markdown import markdown
from sp_bench.report.tables.metrics import METRICS
from sp_bench.report.tables.parts import Entry, PaperTable, significant
from sp_bench.report.tables.sheet import sheet
from sp_bench.report.tables.throughput import best_cells
from sp_bench.rows.schema import SCHEMA

from .rows import cells_of, collective, hf_step, row, smoke

GIB = 2**30
ULYSSES = {"method": "ulysses", "ulysses_degree": 2, "ring_degree": 1}
QWEN = {"workload": "train_step", "pass_kind": "step", "model": "qwen3_4b", "num_layers": 36, "num_heads": 32}
ON_GPUS = QWEN | {"sp_size": 4, "ulysses_degree": 4, "ring_degree": 1, "method": "ulysses", "kernel": "cudnn"}


def tables_of(made: Sequence[Cell], kind: str) -> list[PaperTable]:
    return [table for table in paper_tables(made) if table.kind == kind]


def texts(table: PaperTable) -> dict[str, list[str]]:
    """Method -> its entries as text."""
    method = [column.name for column in table.columns].index("method")
    return {line[method].text: [entry.text for entry in line[method + 1 :]] for line in table.lines}


def replicates(times: Mapping[str, Sequence[float]], **asked: Any) -> list[dict[str, Any]]:
    """Layout of a ring -> its step times, one a replicate."""
    return [
        row(layout=layout, median_ms=ms, replicate=r, **asked)
        for layout, each in times.items()
        for r, ms in enumerate(each)
    ]


@pytest.fixture(scope="module")
def campaign() -> list[Cell]:
    rows = [*smoke(), collective("gloo", "all_to_all", 1.0)]
    for status, seq_len in (("oom", 4096), ("oom", 8192), ("timeout", 16384), ("incorrect", 32768), ("error", 65536)):
        rows.append(row(layout="zigzag", seq_len=seq_len, status=status))
    return cells_of(rows)


# limits


def test_a_limit_is_the_largest_length_that_ran_and_the_smallest_that_was_out_of_memory() -> None:
    rows = [row(seq_len=n) for n in (1024, 4096, 2048)]
    rows += [row(seq_len=n, status=s) for n, s in ((16384, "oom"), (8192, "oom"), (6144, "timeout"))]
    (limit,) = limits(cells_of(rows))
    assert limit.largest_ok is not None
    assert limit.smallest_oom is not None
    assert (limit.largest_ok.asked["seq_len"], limit.smallest_oom.asked["seq_len"]) == (4096, 8192)


def test_a_cell_of_which_one_replicate_ran_and_another_was_out_of_memory_ran() -> None:
    rows = [row(seq_len=1024), row(seq_len=2048, replicate=0), row(seq_len=2048, replicate=1, status="oom")]
    made = cells_of(rows)
    (limit,) = limits(made)
    assert limit.smallest_oom is None
    assert limit.largest_ok is made[-1]
    assert not out_of_memory(made[-1])
    assert texts(tables_of(made, "throughput")[0])["ring contiguous"][1].endswith("‡")


def test_failures_of_other_kinds_are_no_limit() -> None:
    assert limits(cells_of([row(seq_len=n, status=s) for n, s in ((1, "error"), (2, "timeout"))])) == []


def test_a_capped_device_and_an_offloaded_optimizer_have_tables_of_their_own_that_say_so() -> None:
    caps, adams = (None, 80.0), (None, "deepspeed_cpu_adam", "torch_adamw")
    ran = [
        hf_step(seq_len=n, offload=adam, device_memory_gib=cap, max_peak_allocated_bytes=(20 + n // 4096) * 2**30)
        for n in (32768, 98304) for cap in caps for adam in adams
    ]  # fmt: skip
    failed = [
        hf_step(seq_len=131072, offload=adam, device_memory_gib=cap, status="oom", oom_site="torch")
        for cap in caps for adam in adams
    ]  # fmt: skip
    made = cells_of([*ran, *failed])
    shared = {(cell.setting, cell.series, cell.asked["seq_len"]) for cell in made}
    assert len(shared) == len(made) == 18
    for kind, tables in ((kind, tables_of(made, kind)) for kind in ("throughput", "memory", "max_context")):
        assert len({table.setting for table in tables}) == 6, kind
        for table in tables:
            (line,) = table.lines
            behind = [entry.cells[0].asked for entry in line if entry.cells]
            assert len({(asked["device_memory_gib"], asked["optimizer_offload"]) for asked in behind}) == 1
            capped, adam = behind[0]["device_memory_gib"] is not None, behind[0]["optimizer_offload"]
            assert ("capped at 80 GiB a device" in table.setting) == capped
            assert (
                (f"optimizer offloaded ({adam})" in table.setting)
                == ("offloaded" in table.setting)
                == (adam is not None)
            )
            shown = [entry.text for entry in line]
            assert shown[-2:] == ["98,304", "131,072"] if kind == "max_context" else shown[-1] == "OOM"


# step times and their ratios


def test_step_times_have_the_interval_of_their_replicates() -> None:
    (table,) = tables_of(cells_of(replicates({"zigzag": [12.0, 10.0, 11.0, 13.0, 15.0, 14.0]})), "step_time")
    assert texts(table) == {"ring zigzag": ["12.50 [10.00, 15.00]"]}


def test_a_share_of_the_kernel_alone_is_paired_and_its_table_speaks_of_the_rows_of_both() -> None:
    one = {"method": "single", "sp_size": 1, "ring_degree": 1, "num_heads": 4, "num_kv_heads": 1}
    heads = {"num_heads": 8, "num_kv_heads": 2, "sp_size": 2}
    machine = 1.0, 1.1, 1.2, 1.3, 1.4, 1.5  # times as slow in each block: a ratio of medians would have an interval
    rows = [row(median_ms=90.0 * slow, replicate=r, **one) for r, slow in enumerate(machine)]
    rows += [row(layout="zigzag", median_ms=100.0 * slow, replicate=r, **heads) for r, slow in enumerate(machine)]
    rows += [row(layout="contiguous", median_ms=180.0, **heads)]
    (table,) = tables_of(cells_of(rows), "share")
    assert texts(table) == {"ring contiguous": ["0.625†"], "ring zigzag": ["0.900 [0.900, 0.900]"]}
    assert " 13 rows, " in table.provenance
    assert tables_of(cells_of(rows[6:]), "share") == []


def test_a_library_is_set_beside_ours_on_its_kernel_and_on_our_fastest() -> None:
    theirs = {
        "method": "ring_flash_attn",
        "implementation": "ring-flash-attn",
        "layout": "zigzag",
        "kernel": "flash_attn",
    }
    rows = [row(median_ms=20.0 + r, replicate=r, **theirs) for r in range(6)]
    for kernel, ms in (("flash_attn", 20.0), ("flash_attn_4", 10.0)):
        rows += [row(layout="zigzag", kernel=kernel, median_ms=ms + r * ms / 20, replicate=r) for r in range(6)]
    (table,) = tables_of(cells_of(rows), "rivals")
    assert [[entry.text for entry in line][1:] for line in table.lines] == [
        ["our fastest kernel", "2.000 [2.000, 2.000]"],
        ["same kernel", "1.000 [1.000, 1.000]"],
    ]
    assert " 18 rows, " in table.provenance
    assert tables_of(cells_of(rows[6:]), "rivals") == []


# throughput


def test_throughput_is_tokens_over_the_median_step_time_and_ranks() -> None:
    made = cells_of(replicates({"zigzag": [10.0, 30.0, 20.0]}, seq_len=2048))
    (table,) = tables_of(made, "throughput")
    assert texts(table) == {"ring zigzag": [significant(2048 / 0.020 / 2)]}
    assert table.title == "Throughput, tokens/s/rank"
    assert not any(entry.best for line in table.lines for entry in line)


def test_attention_with_known_flops_has_a_table_of_them_too() -> None:
    made = cells_of([row(median_ms=2.0, attention_flops_per_s=3e12)])
    tokens, tflops = tables_of(made, "throughput")
    assert texts(tflops) == {"ring contiguous": ["1.500"]}
    assert {tokens.title, tflops.title} == {"Throughput, tokens/s/rank", "Attention throughput, TFLOP/s/rank"}


FAST, SLOW = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0], [11.0, 12.0, 13.0, 14.0, 15.0, 16.0]


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"zigzag": FAST, "striped": SLOW}, {"ring zigzag"}),  # overlapping intervals, but every pair says the same
        ({"zigzag": FAST, "striped": FAST[::-1]}, set()),  # equal medians
        ({"zigzag": FAST, "striped": [9.0, *SLOW[1:]]}, set()),  # one pair of six says otherwise
        ({"zigzag": FAST[:5], "striped": [99.0] * 5}, set()),  # five replicates prove nothing
        ({"zigzag": FAST, "striped": [99.0] * 5}, set()),
        ({"zigzag": FAST, "striped": FAST, "contiguous": [99.0] * 6}, set()),  # not better than the next best
        ({"zigzag": FAST, "striped": SLOW, "contiguous": [99.0] * 6}, {"ring zigzag"}),
        ({"zigzag": FAST}, set()),  # no rival
    ],
)
def test_best_is_marked_exactly_where_the_paired_ratio_to_the_next_excludes_1(
    times: Mapping[str, Sequence[float]], best: set[str]
) -> None:
    made = cells_of(replicates(times))
    (table,) = tables_of(made, "throughput")
    marked = {line[0].text for line in table.lines if line[-1].best}
    assert marked == best
    assert ("Bold: best" in table.caption) == bool(best)
    assert markdown(table).count("**") == 2 + 2 * len(best)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(1, 2), st.floats(1, 2)), min_size=6, max_size=12))
def test_a_cell_is_best_exactly_if_the_interval_of_its_paired_ratio_says_so(
    campaign: list[Cell], pairs: list[tuple[float, float]]
) -> None:
    cell = next(cell for cell in campaign if cell.ok)
    a, b = (
        replace(
            cell,
            cell_id=name,
            name=replace(cell.name, series=name, series_but_kernel=name),
            step_ms={f"made_up/{r}": times[i] for r, times in enumerate(pairs)},
            median_step_ms=float(pd.Series([times[i] for times in pairs]).median()),
        )
        for i, name in enumerate("ab")
    )
    first, second = sorted((a, b), key=lambda c: (c.median_step_ms, c.series))
    interval = median_interval([second.step_ms[key] / first.step_ms[key] for key in first.step_ms])
    assert interval is not None
    expected = {(first.setting, first.cell_id)} if interval.low > 1 else set()
    assert best_cells([a, b]) == best_cells([b, a]) == expected


def test_intervals_stand_from_6_replicates_on_and_fewer_are_marked_where_both_occur() -> None:
    made = cells_of(replicates({"zigzag": [10.0] * 6, "striped": [20.0] * 5}))
    (table,) = tables_of(made, "throughput")
    assert texts(table) == {"ring striped": ["25,600†"], "ring zigzag": ["51,200 [51,200, 51,200]"]}
    assert "†: fewer than 6 replicates, or on separate devices" in table.caption
    entry = table.lines[1][1]
    assert (entry.number, entry.mark, entry.interval) == ("51,200", "", "[51,200, 51,200]")
    (few,) = tables_of(cells_of(replicates({"striped": [20.0] * 5})), "throughput")
    assert texts(few) == {"ring striped": ["25,600"]}
    assert "none has an interval (fewer than 6 replicates, or on separate devices)" in few.caption


def test_settings_that_differ_in_their_fabric_share_a_table_the_fastest_first() -> None:
    rows = [row(fabric=fabric, median_ms=ms, **m) for fabric, ms in (("a", 9.0), ("b", 5.0)) for m in (ULYSSES, {})]
    (table,) = tables_of(cells_of(rows), "throughput")
    assert [column.name for column in table.columns[:2]] == ["fabric", "method"]
    assert [line[0].text for line in table.lines] == ["b", "b", "a", "a"]


# failures are words


@pytest.mark.parametrize(
    ("status", "word"),
    [("oom", "OOM"), *((s, s) for s in ("unsupported", "timeout", "incorrect", "error", "preempted"))],
)
@pytest.mark.parametrize("kind", ["throughput", "memory"])
def test_a_cell_that_failed_is_a_word(status: str, word: str, kind: str) -> None:
    made = cells_of([row(), row(**ULYSSES), row(seq_len=2048), row(seq_len=2048, status=status, **ULYSSES)])
    (table,) = tables_of(made, kind)
    assert texts(table)["ulysses"][1] == word
    assert table.lines[1][2].number == ""


def test_a_status_of_a_newer_schema_is_shown_as_it_is() -> None:
    made = cells_of([row(), row(seq_len=2048, status="error")])
    unknown = replace(made[1], rows=tuple({**r, "status": "evicted|by_<b>"} for r in made[1].rows))
    (table,) = tables_of([made[0], unknown], "throughput")
    assert texts(table)["ring contiguous"][1] == "evicted|by_<b>"
    assert r"evicted\|by\_\<b\>" in markdown(table)


def test_no_entry_is_blank_and_no_number_belongs_to_a_cell_without_one(campaign: list[Cell]) -> None:
    made = paper_tables(campaign)
    assert {table.kind for table in made} == {"throughput", "step_time", "memory", "max_context", "communication"}
    for table in made:
        for line in table.lines:
            assert len(line) == len(table.columns)
            for entry in line:
                assert entry.text.strip()
                assert entry.text.startswith(entry.number)
                if entry.number and table.kind != "max_context":
                    assert all(cell.ok for cell in entry.cells)


def test_the_dash_of_what_was_not_asked_for_is_explained(campaign: list[Cell]) -> None:
    for table in paper_tables(campaign):
        dashes = any(entry.text == MISSING for line in table.lines for entry in line)
        assert (f"{MISSING}: not part of the campaign" in table.caption) == dashes


# memory, max_context, communication


def test_memory_is_that_of_the_largest_rank_in_gib() -> None:
    rows = [row(replicate=r, max_peak_allocated_bytes=n * GIB) for r, n in enumerate((2, 9, 3))]
    (table,) = tables_of(cells_of(rows), "memory")
    assert texts(table) == {"ring contiguous": ["3.00"]}
    assert "device memory" in table.title


def test_max_context_has_both_lengths_and_is_absent_where_nothing_was_out_of_memory() -> None:
    rows = [row(seq_len=n, **m) for n in (1024, 2048) for m in (ULYSSES, {})]
    assert tables_of(cells_of(rows), "max_context") == []
    rows += [row(seq_len=4096, **ULYSSES), row(seq_len=4096, status="oom"), row(sp_size=4, seq_len=9, status="oom")]
    (table,) = tables_of(cells_of(rows), "max_context")
    assert texts(table) == {
        "ring contiguous": ["2,048", "4,096", "none", "9"],
        "ulysses": ["4,096", "none", MISSING, MISSING],
    }


def test_communication_shows_phases_exactness_and_the_wire() -> None:
    def comm(backward: float) -> list[dict[str, Any]]:
        sides = {"forward": (2.0, 2.0), "backward": (4.0, backward), "other": (None, 9.0), "loss": (1e-4, 1e-4)}
        return [
            {"phase": p, "op": "send", "calls": 1, "counted_bytes": count * GIB}
            | {"predicted_bytes": None if predicted is None else predicted * GIB}
            for p, (predicted, count) in sides.items()
        ]

    rows = [row(comm=comm(4.0)), row(comm=comm(5.0), comm_wire_bytes=7.7 * GIB, layout="zigzag"), row(sp_size=1)]
    (table,) = tables_of(cells_of(rows), "communication")
    assert table.heads[1:] == [
        *("counted, forward", "counted, backward", "counted, total", "predicted", "exact", "wire", "of counted")
    ]
    assert texts(table) == {
        "ring contiguous": ["2.000", "4.000", "6.000", "6.000", "yes", MISSING, MISSING],
        "ring zigzag": ["2.000", "5.000", "7.000", "6.000", "no (+16.67%)", "7.700", "1.1000"],
    }
    assert "below 0.1% of it: loss" in table.caption
    assert "Phase other" in table.caption


# published figures


def test_published_figures_are_set_beside_cells_of_the_same_model_length_and_ranks() -> None:
    gpus = {"environment": {"device_names": ["NVIDIA H200"] * 4}, "max_peak_allocated_bytes": 56 * 10**9}
    rows = [row(seq_len=32768, median_ms=1000.0, **ON_GPUS, **gpus)]
    rows += [row(seq_len=32768, median_ms=800.0, **(ON_GPUS | {"method": "ring", "ring_degree": 4}), **gpus)]
    rows += [row(seq_len=131072, status="oom", **ON_GPUS), row(seq_len=32768, **(ON_GPUS | {"num_layers": 2}))]
    (table,) = tables_of(cells_of(rows), "published")
    shown = [[entry.text for entry in line[1:]] for line in table.lines]
    ours, ring = "ulysses, cudnn; 4 x NVIDIA H200, gloo", "ring contiguous, cudnn; 4 x NVIDIA H200, gloo"
    same = "engine, device, device memory, offload, micro-batches, kernel"
    other = f"{same}, method"
    tokens, peak = "tokens/s by ulysses, 32,768 tokens", "peak GB/GPU by ulysses, 32,768 tokens"
    assert shown == [
        [tokens, "7,733", "32,770", "4.24", ours, same],
        [tokens, "7,733", "40,960", "5.30", ring, other],
        [peak, "35.0", "56.00", "1.60", ours, same],
        [peak, "35.0", "56.00", "1.60", ring, other],
        ["peak GB/GPU by ulysses, 131,072 tokens", "OOM", "OOM", "both OOM", shown[4][4], same],
    ]
    assert "not a like-for-like comparison" in table.caption
    assert "DeepSpeed ZeRO-3" in table.caption


def test_each_published_figure_has_a_metric_and_asks_for_columns_that_identify_its_shape() -> None:
    found = sources.figures()
    assert len(found) == 39
    for figure in found:
        assert figure.metric in METRICS
        assert set(figure.where) <= set(SCHEMA.names)
        assert {"workload", "world_size"} <= set(figure.where)
        assert {"model", "num_heads"} & {*figure.where, *figure.waived}
        assert figure.value == "OOM" or isinstance(figure.value, (int, float))


def test_the_longest_length_that_ran_is_set_beside_published_ones() -> None:
    llama = ON_GPUS | {"model": "llama3_8b", "num_layers": 32, "sp_size": 8, "ulysses_degree": 8}
    rows = [row(seq_len=2**20, **llama), row(seq_len=2**21, **llama), row(seq_len=2**22, status="oom", **llama)]
    (table,) = tables_of(cells_of(rows), "published")
    assert [[e.text for e in line[:5]] for line in table.lines] == [
        ["ALST", "longest seq_len, tokens by ulysses", "3,700,000", "2,097,000", "0.57"],
        ["UPipe", "longest seq_len, tokens by ulysses", "5,000,000", "2,097,000", "0.42"],
    ]


# all tables


def test_no_cells_and_cells_that_all_failed_give_no_throughput() -> None:
    assert paper_tables([]) == []
    failed = cells_of([row(status=s, seq_len=n) for n, s in ((1024, "error"), (2048, "timeout"))])
    assert paper_tables(failed) == []


def test_one_row_gives_tables_of_one_line() -> None:
    made = paper_tables(cells_of([row()]))
    assert [table.kind for table in made] == ["throughput", "step_time", "memory", "communication"]
    assert all(len(table.lines) == 1 for table in made)


def test_file_names_are_plain_and_no_two_are_equal(campaign: list[Cell]) -> None:
    odd = [replace(cell, asked={**cell.asked, "workload": "a/../b c"}) for cell in campaign]
    stems = [table.stem for table in (*paper_tables(odd), *paper_tables(campaign))]
    assert all(re.fullmatch(r"[a-z_]+-[\w=-]+", stem) for stem in stems)
    for each in (odd, campaign):
        names = [table.stem for table in paper_tables(each)]
        assert len(names) == len(set(names))


def test_file_names_say_which_setting_a_table_is_of() -> None:
    made = paper_tables(cells_of([row(num_kv_heads=n) for n in (8, 16)]))
    assert [t.stem for t in made if t.kind == "memory"] == [
        f"memory-attention-forward_backward-num_kv_heads={n}" for n in (16, 8)
    ]


def test_csv_has_the_trials_behind_each_number(campaign: list[Cell]) -> None:
    known = {str(row["trial_id"]) for cell in campaign for row in cell.rows}
    for table in paper_tables(campaign):
        frame = pd.read_csv(io.StringIO(sheet(table)), dtype=str, keep_default_na=False)
        numbers = [column.is_number for column in table.columns]
        entries = [entry for line in table.lines for entry in line[numbers.index(True) :]]
        assert len(frame) == len(entries)
        assert frame["value"].tolist() == [entry.text for entry in entries]
        for ids, entry in zip(frame["trial_ids"], entries, strict=True):
            assert bool(ids) == bool(entry.cells)
            assert set(ids.split()) <= known


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (523.44, "523.4"), (160567.0, "160,600"), (4559.6, "4,560"), (0.99996, "1.000"), (9999.6, "10,000")],
)
def test_rates_have_four_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_an_entry_without_a_number_has_neither_mark_nor_interval() -> None:
    entry = Entry("a [b]†")
    assert (entry.mark, entry.interval) == ("", "")
