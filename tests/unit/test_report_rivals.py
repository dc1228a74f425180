"""Libraries in the report: which of ours they are compared with, and their bytes beside those of their pattern."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sp_bench import methods
from sp_bench.config.trial import AttentionShape, MethodConfig
from sp_bench.report.cells import Cell, cells
from sp_bench.report.gradient_errors import options
from sp_bench.report.page import rivals
from sp_bench.report.page.parts import Section, Table, plain
from sp_bench.report.pattern_bytes import PatternBytes, pattern_bytes
from sp_bench.report.selection import MIXED
from sp_bench.report.tables import paper_tables
from sp_bench.report.tables.parts import PaperTable

from .rows import cells_of, row, selection_of

MIB = 2**20
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "seq_len": 131072}
SHAPE = AttentionShape(1, 131_072, 32, 8, 128, True, "bfloat16")
IN_FP32 = "dK/dV travel in float32: +{}; a rank's own dK/dV travel too, one hop more: +{}"


def attention(
    name: str,
    layout: str = "zigzag",
    variant: str | None = None,
    degree: int | None = None,
    *,
    sp_size: int = 8,
    shape: AttentionShape = SHAPE,
    more: float = 0.0,
    **columns: Any,
) -> dict[str, Any]:
    """A row of a method that counted the bytes of its own traffic, and `more` in the backward."""
    method = MethodConfig(name, layout, variant, degree)  # pyright: ignore[reportArgumentType]
    module = methods.get(name)
    cut = module.layout(method, sp_size)
    comm = [
        {"phase": phase, "op": op, "calls": 1, "predicted_bytes": float(size), "counted_bytes": float(size)}
        for (phase, op), size in module.traffic(method, shape, sp_size).items()
    ]
    comm.append({"phase": "backward", "op": "send", "calls": 1, "predicted_bytes": 0.0, "counted_bytes": more})
    asked = {
        "method": name,
        "implementation": module.IMPLEMENTATION.partition("==")[0],
        "layout": layout,
        "variant": variant,
        "sp_size": sp_size,
        "ulysses_degree": cut.ulysses_degree,
        "ring_degree": cut.ring_degree,
        "kernel": "flash_attn",
        "comm": comm,
        **HEADS,
    }
    return row(**(asked | columns))


def section_of(rows: Sequence[dict[str, Any]]) -> Section:
    found = rivals.section(cells_of(rows))
    assert found is not None
    return found


def lines_of(table: Table) -> list[tuple[str, ...]]:
    return [tuple(plain((text,)) for text in line.texts) for line in table.lines]


def bytes_of(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """A library's series -> its line in the table of bytes, after its name."""
    (table,) = [t for t in section_of([*rows, attention("ulysses", "contiguous")]).tables if t.name.startswith("Bytes")]
    return {line[0]: line[1:] for line in lines_of(table)}


def one(rows: Sequence[dict[str, Any]]) -> PatternBytes:
    (cell,) = cells_of(rows)
    found = pattern_bytes(cell)
    assert found is not None
    return found


def test_a_library_s_bytes_stand_beside_those_of_its_pattern_with_the_reasons() -> None:
    found = bytes_of(
        [
            attention("ring_flash_attn"),
            attention("deepspeed_ulysses_hf", "contiguous"),
            attention("deepspeed_ulysses", "contiguous"),
            attention("yunchang", "zigzag", "usp", 2),
        ]
    )
    at, doc = ("8", "131,072"), "docs/METHODS.md#"
    assert found == {
        "ring_flash_attn zigzag (ring-flash-attn)": (
            *(*at, "ring", "1.31 GiB", "1.88 GiB", "1.429", "float32", IN_FP32.format("448 MiB", "128 MiB")),
            f"{doc}ring_flash_attn",
        ),
        "deepspeed_ulysses_hf (deepspeed)": (
            *(*at, "ulysses", "560 MiB", "561 MiB", "1.002", "input"),
            *("position_ids are gathered in each call: +896 KiB", f"{doc}deepspeed_ulysses_hf"),
        ),
        "deepspeed_ulysses (deepspeed)": (
            *(*at, "ulysses", "560 MiB", "560 MiB", "1.000", "input", "the same bytes", f"{doc}deepspeed_ulysses"),
        ),
        "yunchang usp zigzag (yunchang)": (
            *(*at, "usp 2 x 4", "896 MiB", "1.19 GiB", "1.357", "float32", IN_FP32.format("192 MiB", "128 MiB")),
            f"{doc}yunchang",
        ),
    }


def test_the_section_says_how_many_libraries_send_other_bytes_than_their_pattern() -> None:
    rows = [attention("ulysses", "contiguous"), attention("deepspeed_ulysses", "contiguous")]
    (same,) = section_of(rows).words
    assert plain(same) == "In 1 cell of libraries the bytes are those of the closed form of the pattern."
    (other,) = section_of([*rows, attention("ring_flash_attn")]).words
    assert plain(other).startswith(
        "Of 2 cells of libraries 1 sent other bytes than the closed form of the pattern, up to:"
    )
    assert "ring_flash_attn zigzag (ring-flash-attn) 1.429x those of ring" in plain(other)


def test_bytes_that_nothing_declared_explains_are_said_to_be_unexplained() -> None:
    found = one([attention("ring_flash_attn", more=float(MIB))])
    assert found.reasons["not explained"] == MIB
    assert sum(found.reasons.values()) == found.counted - found.closed_form


def test_uneven_heads_are_a_reason_of_their_own() -> None:
    shape = replace(SHAPE, seq_len=3 * 1024, num_kv_heads=32)
    uneven = attention(
        "deepspeed_ulysses", "contiguous", sp_size=3, shape=shape, more=float(MIB), seq_len=3 * 1024, num_kv_heads=32
    )
    (reason,) = one([uneven]).reasons
    assert "heads do not divide evenly" in reason


def test_the_forward_alone_is_set_beside_the_forward_s_closed_form() -> None:
    forward = [e for e in attention("ring_flash_attn")["comm"] if e["phase"] == "forward"]
    found = one([attention("ring_flash_attn", pass_kind="forward", comm=forward)])
    assert found.same
    assert (found.closed_form, found.reasons) == (448 * MIB, {})


def test_of_a_training_step_attention_is_compared_with_every_layer_and_what_is_recomputed() -> None:
    per_layer = {e["phase"]: e["counted_bytes"] for e in attention("ring_flash_attn")["comm"] if e["counted_bytes"]}
    sent = {"forward": 3 * per_layer["forward"], "backward": 3 * per_layer["backward"]}
    sent |= {"recompute": sent["forward"], "parameters": 1e9}
    comm = [
        {"phase": phase, "op": "send", "calls": 1, "predicted_bytes": size, "counted_bytes": size}
        for phase, size in sent.items()
    ]
    step = {"workload": "train_step", "pass_kind": "step", "num_layers": 3, "seq_len": 131_070}
    config = json.dumps({"workload": {"activation_checkpointing": "full"}})
    found = one([attention("ring_flash_attn", comm=comm, config=config, padded_seq_len=131_072, **step)])
    assert found.closed_form == 3 * (2 * 448 + 896) * MIB
    assert found.reasons == {
        "dK/dV travel in float32": 3 * 448 * MIB,
        "a rank's own dK/dV travel too, one hop more": 3 * 128 * MIB,
    }


def test_cells_without_counted_bytes_or_of_an_unknown_method_are_set_beside_nothing() -> None:
    unknown = row(method="of_a_newer_version", implementation="theirs", **HEADS)
    for each in (unknown, attention("ring_flash_attn", comm=[]), attention("ring_flash_attn", status="oom")):
        (cell,) = cells_of([each])
        assert pattern_bytes(cell) is None


INNER = "ulysses_inner"
OURS = [
    attention("ulysses", "contiguous"),
    attention("ring"),
    attention("ring", "contiguous"),
    attention("all_gather"),
    attention("usp", degree=2, placement=INNER),
    attention("usp", degree=4, placement=INNER),
    attention("usp", degree=2, placement="ring_inner"),
]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (attention("yunchang", "zigzag", "usp", 1), "ring zigzag"),
        (attention("yunchang", "contiguous", "usp", 1), "ring contiguous"),
        (attention("yunchang", "zigzag", "usp", 8), "ulysses"),
        (attention("yunchang", "contiguous", "ulysses"), "ulysses"),
        (
            attention("yunchang", "zigzag", "usp", 2, placement=INNER),
            "usp zigzag ulysses_inner ulysses_degree=2",
        ),
        (attention("yunchang", "zigzag", "usp", 2, placement="ring_inner"), "usp zigzag ring_inner"),
        (attention("torch_context_parallel", "zigzag", "allgather"), "all_gather zigzag"),
        (attention("torch_context_parallel", "zigzag", "alltoall"), "ring zigzag"),
        (attention("transformer_engine", "zigzag", "p2p"), "ring zigzag"),
        (attention("transformer_engine", "zigzag", "all_gather"), "all_gather zigzag"),
        (attention("transformer_engine", "zigzag", "a2a"), "ulysses"),
        (attention("transformer_engine", "zigzag", "a2a+p2p", 4), f"usp zigzag {INNER} ulysses_degree=4"),
        (attention("ring_flash_attn_llama3", "contiguous"), None),  # ours of its kind ran zigzag only
    ],
)
def test_each_library_is_compared_with_ours_of_its_kind_layout_and_degrees(theirs: dict, ours: str | None) -> None:
    table = next(t for t in section_of([theirs, *OURS]).tables if not t.name.startswith("Bytes"))
    same_kernel = [line[6] for line in lines_of(table) if line[5] == "same kernel"]
    assert same_kernel == ([] if ours is None else [ours])


def communication(made: Sequence[Cell]) -> PaperTable:
    (table,) = [t for t in paper_tables(made) if t.kind == "communication"]
    return table


def test_the_communication_table_sets_all_methods_beside_their_pattern_where_there_are_libraries() -> None:
    own = [attention("ring"), attention("ulysses", "contiguous")]
    assert "of pattern" not in communication(cells_of(own)).heads
    table = communication(cells_of([*own, attention("ring_flash_attn")]))
    column = table.heads.index("of pattern")
    found = {line[0].text: line[column].text for line in table.lines}
    assert found == {"ring zigzag": "1.0000", "ulysses": "1.0000", "ring_flash_attn zigzag (ring-flash-attn)": "1.4286"}
    assert "docs/METHODS.md" in table.caption


def test_old_rows_without_the_dtype_of_dkv_are_in_the_line_of_new_ones() -> None:
    new = attention("ring_flash_attn", dkv_dtype="float32", seq_len=65_536)
    rows = [attention("ring_flash_attn"), new]
    assert len({cell.series for cell in cells_of(rows)}) == 1
    assert {options(cell) for cell in cells_of(rows)} == {(None, None)}
    # one cell, measured before and after rows said it
    both = [attention("ring_flash_attn"), attention("ring_flash_attn", replicate=1) | {"dkv_dtype": "float32"}]
    selected = selection_of(both).rows.assign(pool=MIXED)
    (cell,) = cells(selected)
    assert len(cell.rows) == 2


def test_settings_of_one_fabric_are_told_apart_by_what_differs_alone() -> None:
    def on(fabric: str, **env: str) -> dict[str, Any]:
        config = {"hardware": {"device": "cpu"}, "fabric": {"name": fabric, "env": env}}
        return attention("ring", fabric=fabric, config=json.dumps(config))

    made = cells_of(
        [on("nvlink"), on("shm", NCCL_P2P_DISABLE="1", NCCL_X="3"), on("shm", NCCL_P2P_DISABLE="1", NCCL_X="4")]
    )
    fabrics = {line[0].text for line in communication(made).lines}
    assert fabrics == {"nvlink", "shm, NCCL_X=3", "shm, NCCL_X=4"}
    plain_names = {line[0].text for line in communication(cells_of([on("nvlink"), on("shm", NCCL_X="3")])).lines}
    assert plain_names == {"nvlink", "shm"}
