"""Sliding windows: what a config refuses, which keys are seen, what is computed and sent by closed form."""

import itertools
import re
import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import kernels
from sp_bench.attention.layouts import (
    SequenceLayout,
    borders,
    causal_pairs_of_ranks,
    num_blocks,
    shares_of_ranks,
    striped_window_blocks,
)
from sp_bench.config.documents import spans
from sp_bench.config.method import MethodConfig
from sp_bench.config.options import canonical
from sp_bench.config.parsing import ConfigError
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window, visible_pairs, whole
from sp_bench.costs.attention import border_tokens, score_pairs
from sp_bench.costs.training import attended_layers, train_step_traffic
from sp_bench.kernels import math as by_definition
from sp_bench.methods import closed_forms, real_rank
from sp_bench.planning import plan

KINDS = ("contiguous", "zigzag", "striped")


def seen_by(position: int, window: int, documents: tuple[int, ...] = ()) -> set[int]:
    """The definition: a token sees `window` tokens of its document, of which it is the last."""
    first = next((whole.start for whole in spans(documents) if position in whole), 0)
    return {key for key in range(first, position + 1) if position - key < window}


def of_block(block, q_at: list[int], k_at: list[int]) -> set[tuple[int, int]]:
    """The pairs that a kernel computes in a block of these global positions."""
    queries, keys = q_at[block.q], k_at[block.kv]
    if block.documents:
        alone, at = replace(block, documents=(), q=slice(None), kv=slice(None)), list(spans(block.documents))
        assert len(queries) == len(keys) == at[-1].stop
        return set().union(*(of_block(alone, *(x[of.start : of.stop] for x in (queries, keys))) for of in at))
    if block.causal:
        assert len(queries) == len(keys)
    window = block.window or (
        whole(len(keys)) if block.causal else Window(len(keys) + len(queries), len(keys) + len(queries))
    )
    place = len(keys) - len(queries)
    return {
        (q, k)
        for i, q in enumerate(queries)
        for j, k in enumerate(keys)
        if i + place - window.left <= j <= i + place + window.right
    }


@st.composite
def cuts(draw, kinds=KINDS):
    kind, ring_degree = draw(st.sampled_from(kinds)), draw(st.integers(1, 6))
    seq_len = 2 * ring_degree * draw(st.integers(1, 6))
    ends = sorted(draw(st.sets(st.integers(1, seq_len - 1), max_size=6))) if kind != "striped" else []
    documents = tuple(end - start for start, end in itertools.pairwise([0, *ends, seq_len])) if ends else ()
    return kind, ring_degree, seq_len, draw(st.integers(2, max(seq_len - 1, 2))), documents


@given(cuts())
def test_the_ranks_blocks_hold_each_visible_pair_exactly_once(cut):
    kind, ring_degree, seq_len, window, documents = cut
    layout, found = SequenceLayout(kind, ring_degree), []
    for rank in range(ring_degree):
        mine = layout.global_positions(rank, seq_len)
        if kind == "striped":
            blocks = striped_window_blocks(rank, ring_degree, seq_len // ring_degree, window)
            shards = (layout.global_positions((rank - step) % ring_degree, seq_len) for step in range(len(blocks)))
            found += [of_block(block, mine, shard) for block, shard in zip(blocks, shards, strict=True) if block]
            continue
        of_rank = borders(kind, rank, ring_degree, seq_len, window, documents)
        keys = [-1] * of_rank.num_keys
        for piece in of_rank.pieces:
            keys[piece.at] = layout.global_positions(piece.rank, seq_len)[piece.rows]
        assert -1 not in keys
        found += [of_block(block, mine, mine) for block in of_rank.own]
        found += [of_block(block, mine, keys) for block in of_rank.before]
        for block in of_rank.before:  # FlashAttention-2 lowers a right side to the number of keys, and hides some
            assert block.window is None or 0 <= block.window.right < block.kv.stop - block.kv.start
    pairs = [pair for block in found for pair in block]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(q, k) for q in range(seq_len) for k in seen_by(q, window, documents)}


@given(cuts())
def test_every_key_of_a_border_is_seen_and_no_hop_is_made_for_nothing(cut):
    kind, ring_degree, seq_len, window, documents = cut
    layout = SequenceLayout(kind, ring_degree)
    for rank in range(ring_degree):
        queries = layout.global_positions(rank, seq_len)
        visible = {key for query in queries for key in seen_by(query, window, documents)}
        if kind == "striped":
            hops = len(striped_window_blocks(rank, ring_degree, seq_len // ring_degree, window)) - 1
            beyond = [layout.global_positions((rank - step) % ring_degree, seq_len) for step in range(1, ring_degree)]
            assert not any(visible & set(shard) for shard in beyond[hops:])
            continue
        for piece in borders(kind, rank, ring_degree, seq_len, window, documents).pieces:
            assert set(layout.global_positions(piece.rank, seq_len)[piece.rows]) <= visible


@given(cuts(("contiguous", "zigzag")))
def test_the_closed_form_of_a_border_is_what_the_layout_sends(cut):
    kind, ring_degree, seq_len, window, documents = cut
    shape = AttentionShape(1, seq_len, 1, 1, 2, True, "float64", documents, window)
    for mine, theirs in itertools.permutations(range(ring_degree), 2):
        pieces = borders(kind, mine, ring_degree, seq_len, window, documents).pieces
        sent = sum(piece.rows.stop - piece.rows.start for piece in pieces if piece.rank == theirs)
        assert border_tokens(kind, mine, theirs, ring_degree, shape) == sent


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_pairs_of_a_part_are_those_that_the_kernel_sees(queries, keys, left, right):
    window = Window(left, right)
    q, k = torch.zeros(1, queries, 1, 1, 1), torch.zeros(1, keys, 1, 1)
    seen = by_definition._scores(q, k, False, 1.0, (), window)[0, 0, 0] == 0
    assert visible_pairs(queries, keys, window) == int(seen.sum())
    place = keys - queries
    assert seen.tolist() == [[i + place - left <= j <= i + place + right for j in range(keys)] for i in range(queries)]


@given(st.integers(3, 40), st.integers(2, 39))
def test_pairs_of_a_sequence_are_exact(seq_len, window):
    window = min(window, seq_len - 1)
    shape = AttentionShape(2, seq_len, 1, 1, 2, True, "float64", window=window)
    assert score_pairs(shape) == 2 * sum(len(seen_by(query, window)) for query in range(seq_len))
    assert score_pairs(shape) == 2 * visible_pairs(seq_len, seq_len, whole(window))
    assert score_pairs(replace(shape, window=seq_len - 1)) == score_pairs(replace(shape, window=None)) - 2


@given(cuts())
def test_the_parts_of_the_ranks_are_the_whole(cut):
    kind, ring_degree, seq_len, window, documents = cut
    layout = SequenceLayout(kind, ring_degree)
    packed = AttentionShape(1, seq_len, 1, 1, 2, True, "float64", documents, window)
    visible = [seen_by(query, window, documents) for query in range(seq_len)]
    assert score_pairs(packed) == sum(map(len, visible))
    if documents:
        held = [layout.global_positions(rank, seq_len) for rank in range(ring_degree)]
        of_ranks = [sum(len(visible[query]) for query in mine) for mine in held]
        assert causal_pairs_of_ranks(layout, documents, window) == of_ranks
    shape = AttentionShape(1, seq_len, 1, 1, 2, True, "float64", window=min(window, seq_len - 1) or None)
    for each in (shape, replace(shape, window=None), packed):
        seen = [len(seen_by(query, each.window or seq_len, each.documents)) for query in range(seq_len)]
        held = (layout.global_positions(rank, seq_len) for rank in range(ring_degree))
        assert [*shares_of_ranks(layout, each)] == [
            Fraction(sum(map(seen.__getitem__, mine)), sum(seen)) for mine in held
        ]


@pytest.mark.parametrize("name", ["math", "cpu_flash"])
def test_kernels_see_the_window_and_nothing_else(name):
    """Against each query by itself, over the keys that it sees: a border block, whose window is to the left alone, and
    a whole sequence."""
    kernel, generator = kernels.get(name), torch.Generator().manual_seed(0)
    for queries, keys, window in (
        (40, 40, whole(7)),
        (7, 12, Window(3, 6)),
        (130, 130, whole(64)),
        (3, 9, Window(0, 2)),
    ):
        q, dout = (torch.randn(2, queries, 6, 16, generator=generator, dtype=torch.float64) for _ in range(2))
        k, v = (torch.randn(2, keys, 2, 16, generator=generator, dtype=torch.float64) for _ in range(2))
        out, lse = kernel.forward(q, k, v, causal=False, scale=0.25, window=window)
        got = kernel.backward(dout, q, k, v, out, lse, causal=False, scale=0.25, window=window)
        sums = [torch.zeros_like(k), torch.zeros_like(v)]
        for i in range(queries):
            place = i + keys - queries
            at = slice(max(place - window.left, 0), min(place + window.right, keys - 1) + 1)
            given_ = (q[:, i : i + 1], k[:, at], v[:, at])
            one, one_lse = kernels.get("math").forward(*given_, causal=False, scale=0.25)
            torch.testing.assert_close(out[:, i : i + 1], one)
            torch.testing.assert_close(lse[:, :, i : i + 1], one_lse)
            dq, *dkv = kernels.get("math").backward(dout[:, i : i + 1], *given_, one, one_lse, causal=False, scale=0.25)
            torch.testing.assert_close(got[0][:, i : i + 1], dq)
            for total, share in zip(sums, dkv, strict=True):
                total[:, at] += share
        torch.testing.assert_close(list(got[1:]), sums)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flash_attn_4", "sdpa_flash"])
def test_flash_kernels_get_both_sides_of_the_window_forward_and_backward(name, monkeypatch):
    """Each by its library's arguments, and without a window what they got before."""
    seen: list[tuple[object, object]] = []

    def operation(*args, **options):
        seen.append((options.get("window_size_left"), options.get("window_size_right")))
        return (args[0], torch.zeros(1, 2, 8), args[0], args[0])

    names = ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
    library = SimpleNamespace(
        fwd=operation,
        bwd=operation,
        _flash_attn_fwd=operation,
        _flash_attn_bwd=operation,
        **dict.fromkeys(names, operation),
    )
    kernel: Any = kernels.get(name)
    if name == "flash_attn":
        monkeypatch.setitem(sys.modules, "flash_attn", library)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", library)
    elif name == "sdpa_flash":
        aten = SimpleNamespace(_flash_attention_forward=operation, _flash_attention_backward=operation)
        monkeypatch.setattr(torch.ops, "aten", aten)
    else:
        monkeypatch.setattr(kernel, "_operations" if name == "flash_attn_3" else "_library", lambda: library)
    q, lse = torch.zeros(1, 8, 2, 16), torch.zeros(1, 2, 8)
    for window in [Window(3, 6)] if name == "sdpa_flash" else [Window(3, 6), None]:
        kernel.forward(q, q, q, causal=False, scale=1.0, window=window)
        kernel.backward(q, q, q, q, q, lse, causal=False, scale=1.0, window=window)
    none = {"flash_attn": [(-1, -1)] * 2, "sdpa_flash": []}.get(name, [(None, None)] * 2)
    assert seen == [(3, 6)] * 2 + none


def test_the_border_of_gpt_oss_on_8_ranks_is_a_quarter_of_a_mebibyte():
    shape = AttentionShape(1, 131_072, 64, 8, 64, True, "bfloat16", window=128)

    def forward(method: MethodConfig) -> float:
        traffic = closed_forms.traffic(method.name)(method, shape, 8)
        return float(sum(size for (phase, _), size in traffic.items() if phase == "forward")) / 2**20

    assert forward(MethodConfig("ring", "contiguous", dkv_dtype="input")) == pytest.approx(0.248, abs=1e-3)
    assert forward(MethodConfig("ring", "zigzag", dkv_dtype="input")) == pytest.approx(0.496, abs=1e-3)
    assert forward(MethodConfig("ulysses")) == 252
    assert forward(MethodConfig("all_gather", "contiguous", dkv_dtype="input")) == pytest.approx(7 * 0.248, abs=1e-2)
    full = replace(shape, window=None)
    assert score_pairs(full) / score_pairs(shape) == pytest.approx(512, rel=1e-2)


def test_a_window_of_the_neighbour_alone_is_one_border_and_a_wide_one_is_all_shards():
    for window, ranks in ((2, 1), (33, 1), (34, 2), (127, 3)):
        of_last = borders("contiguous", 3, 4, 128, window)
        assert {piece.rank for piece in of_last.pieces} == set(range(3 - ranks, 3)), window
        assert of_last.num_keys == min(window - 1, 96)
    shape = AttentionShape(1, 128, 2, 2, 8, True, "float32", window=10)
    assert num_blocks("contiguous", 0, 4, shape) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload__window": 1}, "workload.window=1 is less than 2"),
        ({"workload__window": 96}, "workload.window=96 hides nothing of seq_len=96; use 95 or less"),
        ({"workload__window": 8, "workload__causal": False}, "use workload.causal=true"),
        ({"workload__window": 8, "workload__launch": "eager", "workload": "train_step"}, "use model.window"),
        (
            {"workload__window": 32, "workload__packing": "fixed", "workload__document_len": 32},
            "workload.window=32 hides nothing of documents of 32 tokens or less; use 31 or less",
        ),
    ],
)
def test_a_window_that_means_nothing_is_refused(make_config, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(seq_len=96, **changes)


def test_a_cell_without_a_window_keeps_its_id(make_config):
    assert plan.cell_id(make_config(seq_len=96)) == plan.cell_id(make_config(seq_len=96, workload__window=None))
    assert plan.cell_id(make_config(seq_len=96)) != plan.cell_id(make_config(seq_len=96, workload__window=8))


def test_a_short_proof_has_a_window_that_is_shorter_by_as_much(make_config):
    config = make_config(seq_len=131_072, workload__window=4096)
    assert [config.attention_shape(length).window for length in (131_072, 512, 33)] == [4096, 16, 2]
    assert make_config(seq_len=96, workload__window=95).window(48) == 47
    packed = make_config(seq_len=4096, workload__window=250, workload__packing="fixed", workload__document_len=260)
    assert (packed.documents(512)[:2], packed.window(512)) == ((32, 32), 31)
    assert make_config(**{**HYBRID, "workload__packing": "fixed", "workload__document_len": 128}).window(2048) is None


def test_a_plan_names_the_methods_and_kernels_that_see_windows(make_config):
    def reason(**changes):
        return plan.unsupported_reason(make_config(seq_len=96, sp_size=2, workload__window=8, **changes), None)

    assert reason(method="ring", kernel="math") is None
    assert str(reason(method="double_ring", kernel="math")) == (
        "method double_ring computes no windows here; use method=single, ulysses, upipe, ring, all_gather, usp"
    )
    assert "takes no windows; use kernel=math, cpu_flash, " in str(reason(method="ring", kernel="cudnn"))


HYBRID = {"workload": "train_step", "model__layers": "window+window+full", "model__window": 128, "model__num_layers": 5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__layers": "window+half", "model__window": 8}, "'half' is no kind of attention; use full, window"),
        ({"model__layers": "window+full"}, "layers of kind window need a model.window"),
        ({"model__window": 8}, "model.layers=None, model.window=8: layers of kind window need"),
        ({"model__layers": "window", "model__window": 1}, "window=1 is less than 2"),
    ],
)
def test_layers_that_mean_nothing_are_refused(make_config, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(seq_len=2048, **changes)


def test_a_model_of_one_kind_keeps_its_id(make_config):
    plain = make_config(workload="train_step")
    assert plan.cell_id(plain) == plan.cell_id(
        make_config(workload="train_step", model__layers=None, model__sinks=False)
    )
    assert not {"layers", "sinks", "window"} & set(re.findall('"([a-z_]+)":', canonical(plain)))
    others = [{"model__sinks": True}, {"model__layers": "window", "model__window": 8}, HYBRID]
    ids = [plan.cell_id(make_config(**{"workload": "train_step", **other})) for other in others]
    assert len({plan.cell_id(plain), *ids}) == 4


def test_a_model_has_kinds_over_and_over_and_a_shorter_one_has_each(make_config):
    model = make_config(**HYBRID).model
    assert model.kinds == ("window", "window", "full", "window", "window")
    assert model.shorter(2).kinds == model.shorter(1).kinds == ("window", "full")
    assert model.shorter(3).kinds == ("window", "full", "window")
    for layers, kind in (("window+full", "window"), ("full+window", "full")):
        one = make_config(**{**HYBRID, "model__layers": layers, "model__num_layers": 1}).model
        assert one.shorter(2).kinds == one.kinds == (kind,)
    assert make_config().model.shorter(1).kinds == ("full",)
    gpt_oss, gemma, mistral = (
        make_config(model=name, workload="train_step") for name in ("gpt_oss_20b_dense", "gemma3_27b", "mistral_7b")
    )
    assert gpt_oss.kinds == {"window": 12, "full": 12}
    assert gemma.kinds == {"window": 52, "full": 10}
    assert [index for index, kind in enumerate(gemma.model.kinds) if kind == "full"] == [*range(5, 62, 6)]
    assert mistral.kinds == {"window": 32}
    assert mistral.attention_shape(2048).window is None  # it hides nothing
    assert make_config(model="gpt_oss_20b_dense").attention_shape(2048).window is None  # attention alone has its own


def test_a_step_computes_and_sends_what_its_layers_do(make_config):
    """Layers of each kind cost what a model of that kind alone costs a layer."""

    def costs(layers: str | None, number: int, method: str = "ring", layout: str = "zigzag") -> list[Any]:
        model = {"model__layers": layers, "model__window": layers and 128, "model__num_layers": number}
        at = {"kernel": "math", "method": method, "method__layout": layout, "sp_size": 4}
        config = make_config(workload="train_step", workload__activation_checkpointing="full", **model, **at)
        sent = train_step_traffic(config, closed_forms.attention_traffic(config, 2048, 1) or {})
        forward = sum(size for (phase, _), size in sent.items() if phase in ("forward", "recompute", "backward"))
        work = closed_forms.expected_work(config, 2048, 1)
        assert work.kernel_calls is not None
        return [forward, work.attention_flops, *work.kernel_calls]

    for method, layout in (("ring", "zigzag"), ("ulysses", "contiguous"), ("all_gather", "zigzag")):
        hybrid = costs("window+window+full", 5, method, layout)
        window, full = costs("window", 1, method, layout), costs(None, 1, method, layout)
        assert hybrid == [4 * one + other for one, other in zip(window, full, strict=True)]
        assert window[1] < 0.15 * full[1]


def test_a_layout_by_kind_converts_the_layers_with_a_window(make_config):
    """One layer of gpt-oss at 131,072 tokens on 8 ranks: converting sends hundreds of times what it saves."""
    shape = AttentionShape(1, 131_072, 64, 8, 64, True, "bfloat16", window=128)

    def sent(layout: str) -> float:
        traffic = closed_forms.traffic("ring")(MethodConfig("ring", layout, dkv_dtype="input"), shape, 8)
        return float(sum(traffic.values())) / 2**20

    converting = sent("zigzag_by_kind") - sent("contiguous")
    assert converting == 2 * 131_072 / 8 * 144 * 64 * 2 / 2**20  # all tokens of the busiest rank
    assert converting > 700 * (sent("zigzag") - sent("contiguous"))
    assert closed_forms.traffic("ring")(
        MethodConfig("ring", "zigzag_by_kind", dkv_dtype="input"), replace(shape, window=None), 8
    ) == (
        closed_forms.traffic("ring")(MethodConfig("ring", "zigzag", dkv_dtype="input"), replace(shape, window=None), 8)
    )
    at = {"kernel": "math", "method__layout": "zigzag_by_kind", "sp_size": 4}
    assert plan.unsupported_reason(make_config(method="ring", **at, **HYBRID), None) is None
    assert "there is none; use method.layout=zigzag" in str(
        plan.unsupported_reason(make_config(method="ring", **at), None)
    )
    assert "all_gather does not convert; use method=ring, or zigzag" in str(
        plan.unsupported_reason(make_config(method="all_gather", **at, **HYBRID), None)
    )
    with pytest.raises(ConfigError, match="the closed form lacks; use selective or full"):
        make_config(method="ring", **at, **HYBRID, workload__activation_checkpointing="selective_output")


@pytest.mark.parametrize("layout", ["zigzag", "zigzag_by_kind"])
def test_one_real_rank_of_a_hybrid_step_computes_its_own_part(make_config, layout):
    def work(rank: int | None, world: str = "one_rank"):
        at = {"kernel": "math", "method": "ring", "method__layout": layout, "sp_size": 4, "world": world}
        config = make_config(**{**HYBRID, **at}, real_rank=rank)
        return closed_forms.expected_work(config, 2048, real_rank.real_place(config) or 0).attention_flops

    ranks = [work(rank) for rank in range(4)]
    assert sum(ranks) == work(None, "ranks")
    assert work(None) == ranks[2]


def test_fit_computes_the_first_and_last_layers_of_each_kind(make_config):
    config = make_config(**{**HYBRID, "model__num_layers": 9}, workload__single_step=True, workload__fit=True,
                         workload__timed_steps=1)  # fmt: skip
    assert attended_layers(config) == {0, 1, 2, 5, 7, 8}


def test_engines_but_ours_train_no_layers_of_several_kinds(make_config):
    with_delta = {"workload": "train_step", "model": "qwen3_next_dense"}
    for changes in (HYBRID, {"workload": "train_step", "model__sinks": True}, with_delta):
        config = make_config(engine="deepspeed", method="single", sp_size=1, kernel="math", **changes)
        assert "trains layers of one kind without sinks here; use engine=fsdp2" in str(
            plan.unsupported_reason(config, None)
        )
