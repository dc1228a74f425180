"""Closed forms of the training step against the decoder itself, published sizes and torch's FLOP counter."""

from dataclasses import replace
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.costs import attention as attention_costs
from sp_bench.costs import training as training_costs
from sp_bench.costs.attention import Traffic
from sp_bench.training.model import Decoder, Keeping

CONF = Path(__file__).parents[2] / "conf" / "model"
# Published by the model cards' safetensors headers; the two smallest have the tied head twice there.
PARAMETERS = {
    "qwen3_0_6b": 751_632_384 - 151936 * 1024,
    "qwen3_1_7b": 2_031_739_904 - 151936 * 2048,
    "llama3_8b": 8_030_261_248,
    "llama2_7b": 6_738_415_616,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen2_5_7b": 7_615_616_512,
}
TINY = ModelConfig("tiny", 2, 32, 48, 4, 2, 8, 256, 10000.0, 1e-6, True, False, False)


def published(name: str) -> ModelConfig:
    return parse(ModelConfig, yaml.safe_load((CONF / f"{name}.yaml").read_text()))


def trial(**fields) -> TrialConfig:
    default = TrialConfig(
        MethodConfig("ulysses"),
        KernelConfig("math"),
        TINY,
        WorkloadConfig("train_step", "step", True, 0, 1, 16, "adamw", 1e-3, None, "none"),
        FabricConfig("gloo", "gloo"),
        HardwareConfig("cpu", "cpu"),
        batch_size=2,
        seq_len=16,
        sp_size=2,
        dp_replicate_size=1,
        dp_shard_size=1,
        dtype="float32",
        seed=0,
    )
    return replace(default, **fields)


def checkpointed(config: TrialConfig, what: str = "full") -> TrialConfig:
    return replace(config, workload=replace(config.workload, activation_checkpointing=what))


@pytest.mark.parametrize("name", PARAMETERS)
def test_configured_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert training_costs.num_parameters(published(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_shapes_are_those_of_the_decoder(name: str) -> None:
    config = published(name)
    assert config.name == name
    with torch.device("meta"):
        model = Decoder(config, lambda q, k, v: q)
    blocks = {
        f"blocks.{i}.{n}": s
        for i, kind in enumerate(config.kinds)
        for n, s in training_costs.block_shapes(config, kind).items()
    }
    expected = blocks | dict(training_costs.root_shapes(config))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected


CHECKPOINTING = ["none", "full", "selective", "selective_output", "selective_mlp"]


def without_matmul(q: Tensor, k: Tensor, v: Tensor, kept: object = None) -> Tensor:
    """Attention that costs no matmul and passes a gradient to q, k and v."""
    group = q.shape[2] // k.shape[2]
    return q * (k * v).repeat_interleave(group, dim=2)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("tied", [False, True])
def test_matmul_flops_are_what_torch_counts(checkpointing: str, tied: bool, qk_norm: bool) -> None:
    config = checkpointed(trial(model=replace(TINY, tie_embeddings=tied, qk_norm=qk_norm)), checkpointing)
    check_flops(config)
    if checkpointing in ("full", "selective", "selective_output"):
        check_flops(replace(config, workload=replace(config.workload, mlp_tile_tokens=7)))


def check_flops(config: TrialConfig) -> None:
    checkpointing = config.workload.activation_checkpointing or "none"
    model = Decoder(config.model, without_matmul, Keeping(checkpointing, config.workload.mlp_tile_tokens))
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(32).view(2, 16), torch.arange(16)).logsumexp(-1).sum().backward()
    attention = config.model.num_layers * attention_costs.attention_forward_flops(config.attention_shape(16))
    attention_passes = Fraction(7, 2) + (1 if checkpointing == "full" else 0)
    assert counter.get_total_flops() == training_costs.hardware_flops(config, 16) - attention_passes * attention


def test_model_flops_are_six_a_parameter_a_token_and_three_attention_forwards() -> None:
    config = trial(model=published("qwen3_8b"), seq_len=4096, dp_shard_size=2)
    tokens = 2 * 2 * 4096
    embedding, norms = 151936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096
    matrices = PARAMETERS["qwen3_8b"] - embedding - norms
    attention = 36 * 2 * 2 * 4 * (4096 * 4097 // 2) * 32 * 128
    assert training_costs.model_flops(config) == 6 * matrices * tokens + 3 * attention


def test_padding_and_recomputation_cost_hardware_flops_and_no_model_flops() -> None:
    config = trial(seq_len=13)
    assert training_costs.model_flops(config) == training_costs.model_flops(checkpointed(config))
    assert training_costs.hardware_flops(config, 13) < training_costs.hardware_flops(config, 16)
    assert training_costs.hardware_flops(config, 16) < training_costs.hardware_flops(checkpointed(config), 16)


def test_one_rank_sends_nothing() -> None:
    assert training_costs.train_step_traffic(trial(sp_size=1), {}) == {}


@given(num_shards=st.integers(1, 16), replicas=st.integers(1, 4), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_sharding_moves_each_parameter_at_least_once_and_padding_at_most_one_row_a_rank(
    num_shards: int, replicas: int, dtype: str
) -> None:
    config = trial(sp_size=1, dp_shard_size=num_shards, dp_replicate_size=replicas, dtype=dtype)
    traffic = training_costs.sharding_traffic(config)
    sent = traffic.get(("gradients", "reduce_scatter"), Fraction(0))
    exact = Fraction(4 * (num_shards - 1) * training_costs.num_parameters(TINY), num_shards)
    rows = {**training_costs.root_shapes(TINY)}
    widths = sum(prod(shape[1:]) for shape in rows.values()) + TINY.num_layers * sum(
        prod(shape[1:]) for shape in training_costs.block_shapes(TINY).values()
    )
    assert exact <= sent < exact + 4 * num_shards * widths
    # gradients travel in fp32, parameters in the trial's dtype
    held = Fraction(sent, 4 * (num_shards - 1)) if num_shards > 1 else training_costs.num_parameters(TINY)
    assert traffic.get(("gradients", "all_reduce"), 0) == 2 * Fraction(replicas - 1, replicas) * 4 * held
    gathered = traffic.get(("parameters", "all_gather"), Fraction(0))
    assert gathered <= 2 * sent * (1 if dtype == "float32" else Fraction(1, 2))


@pytest.mark.parametrize(
    ("checkpointing", "again"),
    [
        ("none", {}),
        ("full", {("recompute", "all_to_all"): 20, ("recompute", "send"): 6}),
        ("selective", {}),
        ("selective_mlp", {}),
        ("selective_output", {("recompute", "all_to_all"): 20}),
    ],
)
def test_checkpointing_repeats_what_it_says_of_the_forward_and_nothing_else(checkpointing: str, again: Traffic) -> None:
    """Of the KV that travels only whoever runs the kernel again needs any."""
    attention = {("forward", "all_to_all"): Fraction(10), ("forward", "send"): Fraction(3)}
    attention |= {("backward", "all_to_all"): Fraction(12), ("backward", "send"): Fraction(5)}
    plain = training_costs.train_step_traffic(trial(), attention)
    assert plain["forward", "all_to_all"] == 20
    assert plain["backward", "send"] == 10
    assert (
        dict(training_costs.train_step_traffic(checkpointed(trial(), checkpointing), attention)) == dict(plain) | again
    )


def test_the_loss_is_one_scalar_all_reduce() -> None:
    assert training_costs.train_step_traffic(trial(sp_size=3), {})["loss", "all_reduce"] == Fraction(16, 3)


@pytest.mark.parametrize(
    ("engine", "sizes", "num_layers", "checkpoint_offload", "attended"),
    [
        (EngineConfig(), {"sp_size": 1}, 36, False, {0, 35}),
        (EngineConfig(), {"sp_size": 1}, 36, True, {0, 1, 35}),
        (EngineConfig(), {"sp_size": 1, "dp_replicate_size": 2}, 36, False, {0, 35}),
        (EngineConfig(), {"sp_size": 1, "dp_shard_size": 2}, 36, False, {0, 1, 35}),
        (EngineConfig(), {"sp_size": 2}, 36, False, {0, 1, 35}),
        (EngineConfig(backward_prefetch=3), {"sp_size": 2}, 36, False, {0, 1, 2, 3, 35}),
        (EngineConfig(), {"sp_size": 2}, 2, True, {0, 1}),
        (EngineConfig(), {"sp_size": 1}, 1, True, {0}),
        (EngineConfig("hf_deepspeed"), {"sp_size": 2}, 36, False, {35}),
    ],
)
def test_a_step_that_asks_if_it_fits_computes_attention_where_its_peak_may_be(
    engine: EngineConfig, sizes: dict[str, int], num_layers: int, checkpoint_offload: bool, attended: set[int]
) -> None:
    config = checkpointed(trial(**sizes, engine=engine, model=replace(TINY, num_layers=num_layers)))
    workload = replace(config.workload, fit=True, single_step=True, checkpoint_offload=checkpoint_offload)
    assert training_costs.attended_layers(replace(config, workload=workload)) == attended
    assert training_costs.attended_layers(config) == set(range(num_layers))
