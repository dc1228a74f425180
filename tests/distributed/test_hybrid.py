"""Whole training steps of layers with the gated delta rule beside full ones on real gloo ranks, by heads and by states;
and lies about states, which the proof must refuse."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run
from test_train_step import check_counted_bytes, check_parameters_after_a_step
from trials import TINY, TRAIN, job, trial

from sp_bench.attention import delta
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import attention_flops, num_parameters
from sp_bench.measure.incorrect import Incorrect
from sp_bench.training.model import DeltaAttention
from sp_bench.training.train import padded_seq_len
from sp_bench.workloads import train_step

SIZES = {"delta_heads": 8, "delta_kv_heads": 4, "delta_head_dim": 8}
HYBRID = replace(TINY, num_layers=4, layers="delta+delta+delta+full", **SIZES)
ODD_SIZES = {"delta_heads": 12, "delta_kv_heads": 6, "delta_head_dim": 5}
SHALLOW = replace(TINY, num_layers=2, layers="delta+full", **SIZES)
UNEVEN = replace(TINY, num_layers=3, num_heads=6, num_kv_heads=3, layers="delta+full", **ODD_SIZES)
ULYSSES = MethodConfig("ulysses")
GATHER, CHAIN = (MethodConfig("ulysses", states=states) for states in ("gather", "chain"))
RING_GATHER, RING_CHAIN = (
    MethodConfig("ring", "zigzag_by_kind", dkv_dtype="input", states=states) for states in ("gather", "chain")
)
SELECTIVE = replace(TRAIN, activation_checkpointing="selective", micro_batches=2)


def cases(world_size: int) -> list[TrialConfig]:
    bf16 = {"dtype": "bfloat16"}
    return {
        1: [trial(MethodConfig("single"), 1, model=HYBRID)],
        2: [
            trial(ULYSSES, 2, seq_len=45, model=HYBRID, workload=SELECTIVE),
            trial(GATHER, 2, model=HYBRID, **bf16),
            trial(CHAIN, 2, seq_len=45, model=HYBRID, workload=SELECTIVE),
            trial(ULYSSES, 2, model=HYBRID, **bf16),
            trial(RING_GATHER, 2, seq_len=45, model=SHALLOW, workload=SELECTIVE),
            trial(replace(RING_CHAIN, layout="contiguous"), 2, model=SHALLOW, **bf16),
        ],
        3: [
            trial(ULYSSES, 3, seq_len=43, model=UNEVEN),
            trial(CHAIN, 3, seq_len=43, model=UNEVEN, **bf16),
            trial(RING_CHAIN, 3, seq_len=43, model=UNEVEN),
        ],
        4: [
            trial(GATHER, 4, seq_len=90, model=replace(SHALLOW, num_kv_heads=4)),
            trial(ULYSSES, 4, model=SHALLOW, **bf16),
            trial(RING_GATHER, 4, model=replace(SHALLOW, num_kv_heads=4), **bf16),
        ],
    }[world_size]


def check_world(rank: int, world_size: int) -> None:
    """Products that put states together have no closed form, so that none are counted."""
    for number, config in enumerate(cases(world_size)):
        counts_products = config.method.states is None
        with nullcontext() if counts_products else mock.patch("test_train_step.check_counted_work", check_attention):
            check_counted_bytes(config)
        if number == 0:
            check_parameters_after_a_step(config)
    if world_size == 2:
        check_lies_are_refused()


def check_attention(config: TrialConfig, columns: dict[str, Any]) -> None:
    assert columns["counted_matmul_flops"] is None
    assert columns["counted_attention_flops"] == attention_flops(config, padded_seq_len(config, config.seq_len))
    assert columns["counted_parameters"] == num_parameters(config.model)


def check_lies_are_refused() -> None:
    """States that do not pass, tokens in zigzag order that are not converted, and layers of the decoder that
    forget unlike the reference."""
    honest, inputs = delta.by_states, DeltaAttention.inputs

    def not_passed(rule: delta.Rule, transport: object, variant: str) -> delta.Attend:
        return lambda *read: rule(*read, None)[0]

    def slower(self, *read):
        q, k, v, g, beta = inputs(self, *read)
        return q, k, v, 0.9 * g, beta

    for dtype in ("float32", "bfloat16"):
        config = trial(GATHER, 2, model=SHALLOW, dtype=dtype)
        with mock.patch.object(delta, "by_states", not_passed), pytest.raises(Incorrect, match="relative error of"):
            train_step.run(job(config))
        with mock.patch.object(DeltaAttention, "inputs", slower), pytest.raises(Incorrect, match="differ"):
            train_step.run(job(config))
    assert delta.by_states is honest
    not_converted = mock.patch.object(delta, "converted", lambda attend, group: attend)
    with not_converted, pytest.raises(Incorrect, match="relative error of"):
        train_step.run(job(trial(RING_GATHER, 2, model=HYBRID)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_steps_with_the_gated_delta_rule_are_proven_and_send_the_closed_form(world_size: int) -> None:
    run(world_size, check_world, world_size)


def test_states_of_the_initial_weights_reach_over_a_shard() -> None:
    """Otherwise no proof would see what passes from rank to rank."""
    torch.manual_seed(0)
    layer = DeltaAttention(HYBRID, lambda *read: read[2])
    with torch.no_grad():
        layer.log_rate.fill_(-5.0)
        decay = layer.inputs(torch.randn(1, 256, 64), None, None)[3].sum(1).exp()  # pyright: ignore[reportArgumentType]
    assert decay.min() > 0.05
