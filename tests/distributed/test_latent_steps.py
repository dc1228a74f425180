"""Whole training steps of layers with latents (MLA) on real gloo ranks, where keys and values travel and where latents
do; and lies about latents, which the proof must refuse."""

from dataclasses import replace
from unittest import mock

import pytest
from ranks import run
from test_train_step import check_counted_bytes, check_parameters_after_a_step
from trials import PARITY, TINY, TRAIN, job, trial

from sp_bench.attention import latent
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.measure.incorrect import Incorrect
from sp_bench.training.model import LatentAttention
from sp_bench.workloads import parity, train_step

SIZES = {"head_dim": 12, "v_head_dim": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
LATENTS = replace(TINY, num_layers=2, num_heads=4, num_kv_heads=4, qk_norm=False, **SIZES)
UNEVEN = replace(LATENTS, num_heads=6, num_kv_heads=6, kv_lora_rank=7, v_head_dim=5)
ULYSSES, RING, GATHER = (MethodConfig(name) for name in ("ulysses", "ring", "all_gather"))
LATENT_RING, LATENT_GATHER = (
    replace(each, sends="latent", layout="zigzag", dkv_dtype="input") for each in (RING, GATHER)
)
SELECTIVE = replace(TRAIN, activation_checkpointing="selective", micro_batches=2)
KEEPS_MLP = replace(TRAIN, activation_checkpointing="selective_mlp")
FULL = replace(TRAIN, activation_checkpointing="full")
COMPILED = replace(FULL, model_code="compiled", warmup_steps=1)


def cases(world_size: int) -> list[TrialConfig]:
    return {
        1: [trial(MethodConfig("single"), 1, model=LATENTS)],
        2: [
            trial(LATENT_RING, 2, seq_len=45, model=LATENTS, workload=SELECTIVE),
            trial(ULYSSES, 2, model=LATENTS, dtype="bfloat16"),
            trial(LATENT_GATHER, 2, model=LATENTS, workload=COMPILED),
            trial(replace(RING, layout="zigzag", dkv_dtype="input"), 2, model=LATENTS, workload=FULL),
        ],
        3: [
            trial(LATENT_RING, 3, seq_len=43, model=UNEVEN, workload=FULL),
            trial(replace(LATENT_GATHER, layout="contiguous"), 3, seq_len=43, model=UNEVEN, dtype="bfloat16"),
            trial(ULYSSES, 3, seq_len=43, model=UNEVEN, workload=KEEPS_MLP),
        ],
        4: [
            trial(LATENT_RING, 4, model=LATENTS, dtype="bfloat16"),
            trial(MethodConfig("usp", "zigzag", None, 2, "ulysses_inner", "input"), 4, seq_len=90, model=LATENTS),
        ],
    }[world_size]


def check_world(rank: int, world_size: int) -> None:
    for number, config in enumerate(cases(world_size)):
        check_counted_bytes(config)
        if number == 0:
            check_parameters_after_a_step(config)
    if world_size == 2:
        check_lies_are_refused()
        measurement = parity.run(job(trial(LATENT_RING, 2, model=LATENTS, workload=PARITY)))
        assert 0 < measurement.columns["max_nll_difference"] <= parity.NLL_TOLERANCE


def check_lies_are_refused() -> None:
    """Keys that have lost their place, and a gradient of up-projections that lacks this rank's share."""
    inputs, backward = LatentAttention.inputs, latent.OverLatents.backward

    def unturned(self, x, rope, code):
        q, found, up = inputs(self, x, rope, code)
        still = self.down(x)[:, :, None, -self.rope_dim :]
        return q, found.clone().index_copy(3, found.new_tensor(range(16, 20)).long(), still), up

    def without_share(self, *given, **mask):
        return backward(replace(self, gradient=self.gradient.clone()), *given, **mask)

    config = trial(LATENT_RING, 2, model=LATENTS)
    with mock.patch.object(LatentAttention, "inputs", unturned), pytest.raises(Incorrect, match="differ"):
        train_step.run(job(config))
    with mock.patch.object(latent.OverLatents, "backward", without_share), pytest.raises(Incorrect, match="error of"):
        train_step.run(job(config))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_steps_with_latents_are_proven_and_send_the_closed_form(world_size: int) -> None:
    run(world_size, check_world, world_size)
