"""The decoder: it depends on global positions and never on local order; its parameters and its recomputation."""

import math
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_bench import hardware, kernels
from sp_bench.attention.autograd import differentiable
from sp_bench.config.model import ModelConfig
from sp_bench.oracle.decoder import turn_per_token
from sp_bench.training.model import Decoder, Keeping, initialise
from sp_bench.training.model_code import EAGER, rotate
from sp_bench.training.offload import ALIGNMENT, Offload, host_memory
from sp_bench.training.rotary import frequencies, rotation

TINY = ModelConfig("tiny", 2, 32, 48, 4, 2, 8, 256, 10000.0, 1e-6, True, False, False)
VARIANTS = {
    "qwen3": TINY,
    "llama": replace(TINY, qk_norm=False),
    "qwen2.5": replace(TINY, qk_norm=False, qkv_bias=True),
    "tied": replace(TINY, tie_embeddings=True),
    "llama3.1": replace(TINY, qk_norm=False, rope_scaling="llama3", rope_factor=4.0, rope_original_seq_len=16),
    "yarn": replace(TINY, rope_scaling="yarn", rope_factor=4.0, rope_original_seq_len=16),
}
SELECTIVE = ["selective", "selective_output", "selective_mlp"]
CHECKPOINTING = ["full", *SELECTIVE]
ATTENTION = differentiable(kernels.get("math"), causal=True, scale=8**-0.5)


def decoder(
    config: ModelConfig,
    *,
    checkpointing: str = "none",
    mlp_tile_tokens: int | None = None,
    offloads: bool = False,
    seed: int = 0,
) -> Decoder:
    offload = Offload(config.num_layers) if offloads else None
    model = Decoder(config, ATTENTION, Keeping(checkpointing, mlp_tile_tokens, offload)).double()
    initialise(model, seed)
    return model


def in_order(order: Tensor):
    """Attention for tokens held in `order`: puts them back, attends, and returns to that order."""
    back = order.argsort()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTENTION(q[:, back], k[:, back], v[:, back])[:, order]

    return attend


def test_a_layer_is_as_wide_as_its_config_says() -> None:
    up = decoder(replace(TINY, intermediate_size=40)).state_dict()["blocks.0.feed_forward.up.weight"]
    assert up.shape == (40, TINY.hidden_size)


@given(offset=st.integers(0, 1_000_000), distance=st.integers(0, 1000))
def test_rotated_scores_depend_on_the_distance_of_positions_alone(offset: int, distance: int) -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> float:
        ropes = (rotation(torch.tensor([p]), TINY, torch.float64) for p in (query_position, key_position))
        q_turned, k_turned = (rotate(x, rope) for x, rope in zip((q, k), ropes, strict=True))
        return float((q_turned * k_turned).sum())

    assert score(offset + distance, offset) == pytest.approx(score(distance, 0), abs=1e-8)


LLAMA3 = replace(
    TINY, head_dim=128, rope_theta=500000.0, rope_scaling="llama3", rope_factor=8.0, rope_original_seq_len=8192
)
YARN = replace(LLAMA3, rope_theta=1e6, rope_scaling="yarn", rope_factor=4.0, rope_original_seq_len=32768)


@pytest.mark.parametrize("model", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_a_scaled_rotation_is_that_of_the_reference(model: ModelConfig) -> None:
    found = frequencies(model, torch.device("cpu")).tolist()
    assert found == pytest.approx([turn_per_token(model, pair) for pair in range(64)], rel=1e-12)
    without = replace(model, rope_scaling=None, rope_factor=None, rope_original_seq_len=None)
    unscaled = frequencies(without, torch.device("cpu")).tolist()
    assert found[0] == unscaled[0]
    assert found[-1] == pytest.approx(unscaled[-1] / (model.rope_factor or 1))


def test_yarn_lengthens_q_and_k_and_llama3_does_not() -> None:
    lengths = {}
    for model in (LLAMA3, YARN):
        cos, sin = rotation(torch.arange(5), model, torch.float64)
        (lengths[model.rope_scaling],) = set((cos**2 + sin**2).sqrt().flatten().round(decimals=12).tolist())
    assert lengths == {"llama3": 1, "yarn": pytest.approx(0.1 * math.log(4) + 1)}


@settings(max_examples=20)
@given(order=st.permutations(range(12)))
def test_logits_follow_their_tokens_when_positions_are_global(order: list[int]) -> None:
    permutation = torch.tensor(order)
    model = decoder(TINY)
    tokens = torch.arange(24).view(2, 12)
    expected = model(tokens, torch.arange(12))
    for block in model.blocks:
        block.attention.attention = in_order(permutation)
    assert torch.allclose(model(tokens[:, permutation], permutation), expected[:, permutation], atol=1e-12)


def test_logits_change_when_a_position_is_wrong() -> None:
    model, tokens = decoder(TINY), torch.arange(12).view(1, 12)
    right, local = torch.arange(12), torch.arange(12) % 6
    assert (model(tokens, right) - model(tokens, local))[:, 6:].abs().max() > 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant: str) -> None:
    model = decoder(VARIANTS[variant])
    model(torch.arange(12).view(1, 12), torch.arange(12)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputation_changes_no_gradient(variant: str, checkpointing: str) -> None:
    gradients = []
    for what in ("none", checkpointing):
        model = decoder(VARIANTS[variant], checkpointing=what)
        model(torch.arange(12).view(1, 12), torch.arange(12)).logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("checkpointing", ["full", "selective", "selective_output"])
def test_tiles_of_an_mlp_change_gradients_by_their_order_of_summing_alone(checkpointing: str) -> None:
    gradients = []
    for tile in (None, 5, 12):  # with a rest, and one tile
        model = decoder(TINY, checkpointing=checkpointing, mlp_tile_tokens=tile)
        model(torch.arange(24).view(2, 12), torch.arange(12)).logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for whole, *tiled in zip(*gradients, strict=True):
        assert all(torch.allclose(whole, each, rtol=0, atol=1e-12) for each in tiled)


class Storages(TorchDispatchMode):
    """Bytes of all memory that operations made while entered and that is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given, made = (
            [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]
            for tree in ((args, kwargs), found)
        )
        there = {storage.data_ptr() for storage in given}
        self._made |= {StorageWeakRef(s): s.nbytes() for s in made if s.data_ptr() not in there}
        return found

    @property
    def alive(self) -> int:
        return sum(size for storage, size in self._made.items() if not storage.expired())


def kept_by_a_layer(checkpointing: str, *, tile: int | None = None, offloads: bool = False) -> tuple[int, int]:
    """Bytes that one more layer keeps from its forward to its backward: on the device, and in host memory."""
    kept = []
    for num_layers in (3, 4):
        config = replace(TINY, num_layers=num_layers)
        model = decoder(config, checkpointing=checkpointing, mlp_tile_tokens=tile, offloads=offloads)
        with host_memory() as memory:
            with Storages() as storages:
                loss = model(torch.arange(12).view(1, 12), torch.arange(12)).sum()
            kept.append((storages.alive, memory.num_bytes))  # the slab is made by no operation
            loss.backward()
            assert storages.alive == loss.nbytes
        assert memory.num_bytes == 0
    (device, host), (more_device, more_host) = kept
    return more_device - device, more_host - host


def test_a_layer_keeps_what_is_said_and_one_copy_of_its_output() -> None:
    hidden, q, kv, mlp, lse = 32, 4 * 8, 2 * 8, 48, 4
    elements = {
        "full": hidden,
        "selective_output": hidden + q + lse,
        "selective": hidden + 2 * q + 2 * kv + lse,
        "selective_mlp": hidden + 2 * q + 2 * kv + lse + hidden + 2 * mlp,
    }
    sizes = {name: 12 * 8 * e for name, e in elements.items()}
    assert {name: kept_by_a_layer(name) for name in elements} == {name: (size, 0) for name, size in sizes.items()}
    for name, size in sizes.items():
        on_device, on_host = kept_by_a_layer(name, offloads=True)
        assert on_device == 0, name
        assert size <= on_host < size + 8 * ALIGNMENT, name  # 8 tensors at most
        if name != "selective_mlp":
            assert kept_by_a_layer(name, tile=5) == (size, 0), name
            assert kept_by_a_layer(name, tile=5, offloads=True) == (0, on_host), name


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_offloaded_checkpoints_change_no_bit(checkpointing: str, tile: int | None) -> None:
    """Over two backwards, each of which finds the host memory of the one before, and sums to its gradients."""
    if tile and checkpointing == "selective_mlp":
        pytest.skip("it keeps the MLP's results of all tokens")
    found = []
    for offloads in (False, True):
        config = replace(TINY, num_layers=5)
        model = decoder(config, checkpointing=checkpointing, mlp_tile_tokens=tile, offloads=offloads)
        with host_memory():
            for first in (0, 100):
                model(torch.arange(first, first + 24).view(2, 12), torch.arange(12)).logsumexp(-1).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_backward_reads_what_is_in_host_memory() -> None:
    found = []
    for wrong in (False, True):
        model = decoder(replace(TINY, num_layers=3), checkpointing="full", offloads=True)
        with host_memory() as memory:
            loss = model(torch.arange(12).view(1, 12), torch.arange(12)).logsumexp(-1).sum()
            if wrong:
                memory.slab.zero_()
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert not any(torch.equal(a, b) for a, b in zip(*(grads[1:10] for grads in found), strict=True))


def test_host_memory_that_is_not_free_is_refused_with_both_numbers() -> None:
    model = decoder(replace(TINY, num_layers=3), checkpointing="full", offloads=True)
    with (
        host_memory() as memory,
        mock.patch.object(hardware, "free_host_bytes", return_value=6000),
        pytest.raises(MemoryError, match=r"1 ranks need 0.0 GiB of host memory each, and 0.0 GiB are free"),
    ):
        model(torch.arange(12).view(1, 12), torch.arange(12))
    assert memory.num_bytes == 0


@pytest.mark.parametrize(("checkpointing", "calls"), [("full", 4), *((name, 2) for name in SELECTIVE)])
def test_only_full_checkpointing_runs_attention_again(checkpointing: str, calls: int) -> None:
    forward = mock.Mock(wraps=kernels.get("math").forward)
    model = decoder(TINY, checkpointing=checkpointing)
    kernel = mock.Mock(forward=forward, backward=kernels.get("math").backward)
    for block in model.blocks:
        block.attention.attention = differentiable(kernel, causal=True, scale=8**-0.5)
    model(torch.arange(12).view(1, 12), torch.arange(12)).sum().backward()
    assert forward.call_count == calls


def test_a_tied_head_is_the_embedding() -> None:
    assert decoder(VARIANTS["tied"]).head is None
    assert (
        sum(p.numel() for p in decoder(TINY).parameters())
        - sum(p.numel() for p in decoder(VARIANTS["tied"]).parameters())
        == 256 * 32
    )


def test_initial_values_depend_on_the_seed_alone() -> None:
    first, again, other = decoder(TINY), decoder(TINY), decoder(TINY, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_matrices_keep_the_scale_of_their_input_and_norms_begin_at_one() -> None:
    model = decoder(replace(TINY, hidden_size=256, qkv_bias=True))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert float(parameter.detach().std() * parameter.shape[1] ** 0.5) == pytest.approx(1.0, rel=0.05), name
        else:
            assert torch.all(parameter == (0.0 if "bias" in name else 1.0)), name


def test_in_fp8_no_part_that_is_compiled_rounds_what_its_own_norm_made():
    """The backward of a norm would store what it transposes one byte at a time."""
    seen: list[str] = []

    def part(called):
        def and_seen(*inputs):
            seen.append("part")
            return called(*inputs)

        return and_seen

    def multiplied_after_a_norm(*, rounds_factors: bool) -> bool:
        seen.clear()
        model = Decoder(TINY, ATTENTION, code=replace(EAGER, part=part, rounds_factors=rounds_factors)).double()
        for module in model.blocks.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.RMSNorm):
                wide = module.weight.shape[-1] == TINY.hidden_size
                name = "product" if isinstance(module, torch.nn.Linear) else "norm" if wide else "norm of a head"
                module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
        model(torch.zeros(1, 4, dtype=torch.long), torch.arange(4))
        assert seen.count("product") == 7 * TINY.num_layers
        return any(pair == ("norm", "product") for pair in pairwise(seen))

    assert multiplied_after_a_norm(rounds_factors=False)
    assert not multiplied_after_a_norm(rounds_factors=True)


@pytest.mark.parametrize("checkpointing", ["none", *CHECKPOINTING])
def test_the_parts_of_a_layer_in_fp8_compute_the_same_layer(checkpointing: str) -> None:
    tokens, found = torch.arange(12).reshape(1, 12), []
    for rounds_factors in (False, True):
        code = replace(EAGER, rounds_factors=rounds_factors)
        model = Decoder(TINY, ATTENTION, Keeping(checkpointing), code).double()
        initialise(model, 0)
        model(tokens, torch.arange(12)).square().sum().backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
