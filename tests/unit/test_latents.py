"""Latents and values of another size than keys, without ranks: closed forms, plans and what is refused."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from sp_bench import kernels
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import training
from sp_bench.costs.attention import OF_METHODS, attention_forward_flops, flash_backward
from sp_bench.costs.flops import step_flops
from sp_bench.costs.work import projected_tokens, projection_flops
from sp_bench.kernels import flash_attn_4
from sp_bench.methods import closed_forms, real_rank
from sp_bench.planning import plan
from sp_bench.report import templates
from sp_bench.training.model import Decoder

from .rows import commit, row

PAGE = Path(__file__).parents[2] / "docs/LATENT.md.jinja"
V3 = AttentionShape(
    *(1, 131_072, 128, 128, 192, True, "bfloat16"), v_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64
)


def test_deepseek_v3_on_8_ranks_sends_504_elements_a_token_of_latents_and_70_times_as_many_of_keys_and_values():
    def elements(method: MethodConfig) -> float:
        traffic = OF_METHODS[method.name](method, V3, 8)
        return float(sum(size for (phase, _), size in traffic.items() if phase == "forward")) / 2 / V3.seq_len

    assert elements(MethodConfig("ring", "zigzag")) == 35_840
    assert elements(MethodConfig("ulysses")) == 8_960
    assert elements(MethodConfig("ring", "zigzag", sends="latent")) == 504
    assert elements(MethodConfig("all_gather", "zigzag", sends="latent")) == 504


def test_flops_are_of_keys_for_scores_and_of_values_for_the_output():
    even = replace(V3, v_head_dim=None)
    assert attention_forward_flops(V3) * 384 == attention_forward_flops(even) * 320
    assert flash_backward(192, 192) == 2.5
    assert flash_backward(192, 128) * 320 == 3 * 192 + 2 * 128


def test_a_ring_projects_the_shards_it_sees_and_a_gather_the_keys_before_each_run():
    def tokens(name: str, layout: Literal["contiguous", "zigzag"], **changes: object) -> list[int]:
        method, shape = MethodConfig(name, layout, sends="latent"), replace(V3, seq_len=64, **changes)
        return [projected_tokens(method, shape, 4, rank) for rank in range(4)]

    assert tokens("ring", "contiguous") == tokens("all_gather", "contiguous") == [16, 32, 48, 64]
    assert tokens("ring", "zigzag") == [64, 56, 48, 40]
    assert tokens("all_gather", "zigzag") == [16 + 7 * 8] * 4
    assert tokens("ring", "zigzag", causal=False) == [64] * 4
    ulysses = MethodConfig("ulysses")
    of_all = projection_flops(ulysses, V3, 8, range(8), backward=False)
    assert of_all == 2 * V3.seq_len * 512 * 128 * (128 + 128)
    assert projection_flops(ulysses, V3, 8, range(8), backward=True) == 3 * of_all
    assert projection_flops(ulysses, replace(V3, kv_lora_rank=None), 8, range(8), backward=True) == 0


def test_cells_without_latents_keep_their_ids_and_each_option_makes_another(make_config):
    latent = {"model": "deepseek_v2_lite", "kernel": "math", "method": "ring"}
    made = [
        make_config(),
        make_config(model__v_head_dim=8),
        make_config(**latent),
        make_config(**latent, method__sends="latent"),
    ]
    ids = [plan.cell_id(config) for config in made]
    assert ids[0] == plan.cell_id(make_config(model__v_head_dim=None, model__kv_lora_rank=None))
    assert len(set(ids)) == 4


STEP = {"model": "deepseek_v2_lite_dense", "workload": "train_step"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__v_head_dim": 16}, "values have anyway; use null"),
        ({"model__kv_lora_rank": 8}, "a latent has both parts; use both, or neither"),
        ({"model__kv_lora_rank": 8, "model__qk_rope_head_dim": 16}, "use less than model.head_dim=16"),
        ({"model__kv_lora_rank": 8, "model__qk_rope_head_dim": 4}, "use model.num_kv_heads=8, not 2"),
        ({"method": "ring", "method__sends": "latent"}, "model=tiny has no latent"),
        ({"model": "deepseek_v3", "workload__window": 8}, "workload.window=8: model=deepseek_v3 has latents"),
        ({"model__v_head_dim": 16, "model__head_dim": 8, "workload": "train_step"}, "v_head_dim=16: no decoder here"),
        (STEP | {"model": "deepseek_v3"}, "model=deepseek_v3 has experts, which no decoder here has"),
        (STEP | {"workload__model_code": "liger"}, "model_code=liger: layers with latents"),
        (STEP | {"engine": "hf_fsdp2"}, "engine=hf_fsdp2: layers with latents"),
        (STEP | {"workload__linear_dtype": "float8_rowwise"}, "linear_dtype=float8_rowwise: layers with latents"),
        (STEP | {"workload__activation_checkpointing": "selective_output"}, "=selective_output: layers with latents"),
        (STEP | {"model__sinks": True}, "model.sinks=True: layers with latents"),
        (STEP | {"model__qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
    ],
)
def test_what_means_nothing_is_refused(make_config, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(**changes)


def test_a_plan_names_the_methods_and_kernels_that_take_them(make_config):
    def reason(**changes: object) -> str:
        config = make_config(**{"model": "deepseek_v2_lite", "kernel": "math", "seq_len": 4096} | changes)
        return str(plan.unsupported_reason(config, None))

    assert reason() == reason(method="ring", method__sends="latent") == "None"
    assert reason(method__sends="latent") == (
        "method ulysses sends no latents; use method=ring, all_gather, or method.sends=null"
    )
    assert "takes values of the size of keys, not head_dim=192 with v_head_dim=128" in reason(kernel="cpu_flash")
    assert "use these, and method.head_stride=null" in reason(
        method="all_gather", method__sends="latent", method__head_stride=1
    )
    assert "latents are proven with contiguous or zigzag" in reason(
        method="ring", method__layout="striped", method__sends="latent"
    )
    assert "was not tried with latents; use method=single, ulysses" in reason(method="torch_context_parallel")


@pytest.mark.parametrize(("name", "takes"), [("cudnn", True), ("flash_attn_4", True), ("sdpa_flash", False)])
def test_kernels_of_hopper_take_deepseeks_heads_or_say_that_they_do_not(name, takes, monkeypatch):
    monkeypatch.setattr(flash_attn_4, "missing_packages", lambda *_: [])
    reason = kernels.get(name).unsupported_reason(V3, "cuda")
    assert (reason is None) is takes, reason
    other = kernels.get(name).unsupported_reason(replace(V3, v_head_dim=64), "cuda")
    assert "not head_dim=192 with v_head_dim=64; use kernel=math" in str(other)


@pytest.mark.parametrize("recomputes", ["none", "full"])
@pytest.mark.parametrize("sends", [None, "latent"])
def test_a_step_projects_up_once_more_for_what_is_computed_again_and_where_latents_travel(
    make_config, sends, recomputes
):
    options = {"workload__activation_checkpointing": recomputes, "method__sends": sends, "sp_size": 4, "seq_len": 4096}
    config = make_config(**STEP, method="ring", kernel="math", **options)
    shape = config.attention_shape(4096)
    method, ranks = config.method, range(4)
    projections = 27 * projection_flops(method, shape, 4, ranks, backward=True)
    if recomputes == "full":
        projections += 27 * projection_flops(method, shape, 4, ranks, backward=False)
    layers = 2048 * (16 * 192 + 512 + 64 + 16 * 128 + 3 * 10944)
    again = layers - 2048 * 10944 if recomputes == "full" else 0
    products = 2 * 4096 * (27 * (3 * layers + again) + 3 * 2048 * 102400)
    assert training.matmul_flops(config, 4096) == products + projections
    own = 27 * projection_flops(MethodConfig("single"), shape, 1, [0], backward=False)
    attention = 27 * attention_forward_flops(shape)
    assert training.model_flops(config) == 3 * (2 * 4096 * (27 * layers + 2048 * 102400) + own + attention)
    uneven = [replace(config, seq_len=1031, sp_size=size, method=MethodConfig("single")) for size in (1, 8)]
    assert training.model_flops(uneven[0]) == training.model_flops(uneven[1])


def test_a_step_with_latents_has_the_parameters_of_its_decoder(make_config):
    model = make_config(**STEP).model
    small = replace(model, num_layers=2, hidden_size=32, intermediate_size=48, vocab_size=256)
    made = {name: tuple(each.shape) for name, each in Decoder(small, lambda *read: read[0]).named_parameters()}
    of_layers = {f"blocks.{n}.{name}": shape for n in range(2) for name, shape in training.block_shapes(small).items()}
    assert made == {**training.root_shapes(small), **of_layers}


@pytest.mark.parametrize("method", ["ulysses", "ring", "all_gather"])
def test_hardware_flops_are_those_of_the_kernel_and_of_the_up_projections(make_config, method):
    sends = {} if method == "ulysses" else {"method__sends": "latent"}
    config = make_config(model="deepseek_v2_lite", kernel="math", method=method, sp_size=4, seq_len=4096, **sends)
    found, work = step_flops(config, 4096), closed_forms.expected_work(config, 4096, 0)
    assert work.attention_flops is not None
    assert work.matmul_flops is not None
    assert found["hardware_flops"] == work.attention_flops + work.matmul_flops["float32"]
    own = projection_flops(MethodConfig("ulysses"), config.attention_shape(4096), 4, range(4), backward=True)
    assert found["model_flops"] == 3 * attention_forward_flops(config.attention_shape(4096)) + own
    assert (work.matmul_flops["float32"] == own) is (method == "ulysses")


def test_the_rank_that_projects_up_most_stands_for_all_of_a_ring_of_latents(make_config):
    ring = {"model": "deepseek_v2_lite", "kernel": "math", "method": "ring", "method__sends": "latent", "sp_size": 4}
    configs = [make_config(world="one_rank", real_rank=n, **ring) for n in (None, 0, 3)]
    assert [plan.unsupported_reason(config, None) for config in configs] == [None] * 3
    assert [real_rank.is_lower_bound(config) for config in configs] == [False, False, True]


@pytest.mark.parametrize(
    ("latent_ms", "words"),
    [
        (1.0, "over 5.3 times as fast as Ulysses in places"),
        (4.0, "faster than Ulysses, nowhere 5.3 times"),
        (6.0, "depending on the place"),
        (9.0, "nowhere faster than Ulysses or USP"),
    ],
)
def test_the_page_says_of_a_ring_of_latents_what_rows_say(latent_ms, words, tmp_path):
    heads = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 192, "v_head_dim": 128, "kv_lora_rank": 512}
    config = {"hardware": {"name": "h200", "device": "cuda"}, "world": "one_rank", "link": {"name": "nodes_400g_short"}}
    place = {"model": "deepseek_v2_lite", "link": "nodes_400g_short", "sp_size": 8, "world_size": 8, "proof": "a row"}
    place["kernel"] = "cudnn"
    of_one = ("rank_step_ms", "window_ms", "peak_host_bytes")
    rows = []
    for seq_len, factor in ((32_768, 1.0), (131_072, 1.2)):
        for method, sends, ms in (("ulysses", None, 6.0 * factor), ("ring", "latent", latent_ms)):
            asked = {"method": method, "sends": sends, "seq_len": seq_len, "config": json.dumps(config)}
            made = row(median_ms=ms, evidence="one_rank", **asked, **heads, **place)
            rows.append(made | {name: made[name][:1] for name in of_one})
    page = templates.rendered(PAGE, templates.Rows([commit(rows, tmp_path / "h200x1_one_rank_latent")]))
    (verdict,) = (line for line in page.splitlines() if line.startswith("- **A ring of latents"))
    assert words in verdict
    assert "No rows yet" in templates.rendered(PAGE, templates.Rows([]))
    assert len(page.split()) < 800


def test_the_page_has_whole_steps_by_the_line_through_two_depths(tmp_path):
    """In brackets the work of the GPU, where steps of one of the methods wait for the host half of their time."""
    config = {"hardware": {"name": "h200", "device": "cuda"}, "world": "one_rank", "link": {"name": "nodes_400g_short"}}
    place = {"model": "deepseek_v2_lite_dense", "link": "nodes_400g_short", "kernel": "flash_attn_4", "proof": "a row"}
    place |= {"workload": "train_step", "pass_kind": "step", "config": json.dumps(config), "evidence": "one_rank"}
    heads = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 192, "v_head_dim": 128, "kv_lora_rank": 512}
    shares = {"attention": 0.6, "matmul": 0.2, "other": 0.1, "exposed_messages": 0.1}
    shares |= dict.fromkeys(("messages", "host_copies", "exposed_host_copies", "idle"), 0.0)
    rows = []
    for ranks, seq_len, num_layers in itertools.product((8, 64), (32_768, 131_072), (2, 4)):
        at = {"sp_size": ranks, "world_size": ranks, "seq_len": seq_len, "num_layers": num_layers}
        of_heads, of_kv = ("ulysses", 110.0) if ranks == 8 else ("usp", 300.0)
        for method, sends, ms in ((of_heads, None, 100.0), ("ring", None, of_kv), ("ring", "latent", 120.0)):
            works = 0.5 if ranks == 64 and sends else 1.0
            step_ms = ms * (1 + num_layers) / works
            traced = [{part: share * works * step_ms for part, share in shares.items()}]
            made = row(median_ms=step_ms, method=method, sends=sends, kernel_ms=traced, **at, **heads, **place)
            rows.append(made | {name: made[name][:1] for name in ("rank_step_ms", "window_ms", "peak_host_bytes")})
    page = templates.rendered(PAGE, templates.Rows([commit(rows, tmp_path / "h200x1_one_rank_latent_steps")]))
    assert "| 8 | 131,072 | 2.80 | 3.08 | 3.36 | 1.20x | 0.917x |" in page
    assert "| 64 | 131,072 | (2.80) | (8.40) | (3.36) | 1.20x | 2.50x |" in page
