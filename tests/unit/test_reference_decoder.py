"""The reference's decoder is the function that our decoder is, and that transformers' models are."""

from dataclasses import replace

import pytest
import torch

from sp_bench import kernels
from sp_bench.attention.autograd import differentiable
from sp_bench.attention.latent import projected
from sp_bench.attention.masked import of_shape
from sp_bench.config.shape import AttentionShape
from sp_bench.hardware import package_versions
from sp_bench.oracle import decoder as reference
from sp_bench.training import cross_entropy
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.training.model import Decoder, initialise

from .test_model import VARIANTS, decoder

TOKENS = torch.arange(3, 36) * 7 % 256
LABELS = TOKENS[1:].clone()
LABELS[:5] = IGNORED


def losses_and_gradients(name, dtype):
    """Of the reference, with weights that are not as they are drawn: norms of 1 and biases of 0 would hide much."""
    ours = decoder(VARIANTS[name]).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    weights = {n: p.detach().clone().requires_grad_() for n, p in ours.named_parameters()}
    assert {n: tuple(w.shape) for n, w in weights.items()} == reference.shapes(VARIANTS[name])
    assert [*weights] == [*reference.shapes(VARIANTS[name])]
    losses = reference.token_losses(VARIANTS[name], weights, TOKENS[:-1], LABELS)
    losses.sum().backward()
    return ours, losses.detach(), {n: w.grad for n, w in weights.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_it_has_the_losses_and_gradients_of_our_decoder(name):
    ours, expected, gradients = losses_and_gradients(name, torch.float64)
    positions = torch.arange(len(TOKENS) - 1)
    losses = cross_entropy.of_tokens(ours(TOKENS[None, :-1], positions), LABELS[None])[0]
    losses.sum().backward()
    assert torch.allclose(losses, expected, rtol=1e-12, atol=0)
    for parameter, value in ours.named_parameters():
        assert torch.allclose(value.grad, gradients[parameter], rtol=1e-9, atol=1e-12), parameter


HYBRID = replace(VARIANTS["qwen2.5"], num_layers=4, layers="window+window+full", window=7, sinks=True)


def test_it_has_those_of_our_decoder_with_windows_by_layer_and_sinks():
    shape = AttentionShape(1, len(TOKENS) - 1, 4, 2, 8, True, "float64")
    kinds = {"full": shape, "window": replace(shape, window=7)}
    of_kind = {
        kind: differentiable(of_shape(kernels.get("math"), each), causal=True, scale=8**-0.5)
        for kind, each in kinds.items()
    }
    ours = Decoder(HYBRID, [of_kind[kind] for kind in ("window", "window", "full", "window")]).double()
    initialise(ours, 0)
    weights = {n: p.detach().clone().requires_grad_() for n, p in ours.named_parameters()}
    assert [*weights] == [*reference.shapes(HYBRID)]
    assert len(set(weights["blocks.0.attention.sinks"].tolist())) == 4  # equal ones would hide which head has which
    expected = reference.token_losses(HYBRID, weights, TOKENS[:-1], LABELS, 7)
    expected.sum().backward()
    losses = cross_entropy.of_tokens(ours(TOKENS[None, :-1], torch.arange(len(TOKENS) - 1)), LABELS[None])[0]
    losses.sum().backward()
    assert torch.allclose(losses, expected, rtol=1e-12, atol=0)
    for parameter, value in ours.named_parameters():
        assert torch.allclose(value.grad, weights[parameter].grad, rtol=1e-9, atol=1e-12), parameter
    for other in (6, 8, None):
        assert not torch.allclose(reference.token_losses(HYBRID, weights, TOKENS[:-1], LABELS, other), expected)


LATENTS = replace(
    VARIANTS["llama"], num_heads=4, num_kv_heads=4, head_dim=12, v_head_dim=6, kv_lora_rank=5, qk_rope_head_dim=4
)


def test_it_has_those_of_our_decoder_with_latents():
    attend = differentiable(kernels.get("math"), causal=True, scale=12**-0.5)
    ours = Decoder(LATENTS, lambda q, latent, up: attend(q, *projected(latent, up, 12))).double()
    initialise(ours, 0)
    with torch.no_grad():
        for block in ours.blocks:
            block.attention.latent_norm.weight.add_(torch.arange(5) / 5)  # of 1 would hide much
    weights = {n: p.detach().clone().requires_grad_() for n, p in ours.named_parameters()}
    assert [*weights] == [*reference.shapes(LATENTS)]
    expected = reference.token_losses(LATENTS, weights, TOKENS[:-1], LABELS)
    expected.sum().backward()
    losses = cross_entropy.of_tokens(ours(TOKENS[None, :-1], torch.arange(len(TOKENS) - 1)), LABELS[None])[0]
    losses.sum().backward()
    assert torch.allclose(losses, expected, rtol=1e-12, atol=0)
    for parameter, value in ours.named_parameters():
        assert torch.allclose(value.grad, weights[parameter].grad, rtol=1e-9, atol=1e-12), parameter


@pytest.mark.parametrize("name", VARIANTS)
def test_it_has_the_losses_and_gradients_of_transformers(name):
    missing = [package for package in ("transformers", "accelerate") if package not in package_versions()]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    from transformers import AutoModelForCausalLM

    from sp_bench.engines import hugging_face

    ours, expected, gradients = losses_and_gradients(name, torch.float64)
    config = hugging_face.model_config(VARIANTS[name], len(TOKENS))
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float64)
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for parameter, value in ours.named_parameters():
            named[hugging_face.their_name(parameter)].copy_(value)
    losses = cross_entropy.of_tokens(theirs(TOKENS[None, :-1]).logits, LABELS[None])[0]
    losses.sum().backward()
    assert torch.allclose(losses, expected, rtol=3e-6, atol=0)  # its RoPE and its norms are computed in fp32
    for parameter, gradient in gradients.items():
        got = named[hugging_face.their_name(parameter)].grad
        assert got is not None
        assert float((got - gradient).norm()) < 1e-5 * float(gradient.norm()) + 1e-6, parameter


def test_low_precision_is_rounded_where_a_flash_kernel_rounds():
    _, wide, _ = losses_and_gradients("qwen3", torch.float64)
    _, low, _ = losses_and_gradients("qwen3", torch.bfloat16)
    assert low.dtype == torch.float32
    assert 1e-4 < float((low.double() - wide).norm() / wide.norm()) < 3e-2
