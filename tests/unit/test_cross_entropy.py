"""The loss in tiles against the loss of whole logits, and that no tensor of whole logits is made."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.engines import requirements
from sp_bench.training import cross_entropy

B, TOKENS, HIDDEN, VOCABULARY = 2, 13, 6, 37
DIVISOR = 50


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator)
    labels = torch.randint(VOCABULARY, (B, TOKENS), generator=generator)
    labels[:, -3:] = cross_entropy.IGNORED
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    each = cross_entropy.of_tokens(F.linear(hidden, weight), labels)
    return each.sum() / DIVISOR, each


def tiled(tile_tokens: int, way: cross_entropy.WithGradient | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy.tiled(*tensors, divisor=DIVISOR, tile_tokens=tile_tokens, compiled=way)


WAYS = [pytest.param(None, id="autograd"), pytest.param(cross_entropy.with_gradient, id="with_gradient")]


def everything(loss: Tensor, each: Tensor, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    return [loss.detach(), each.detach(), *torch.autograd.grad(3.0 * loss, (hidden, weight))]


@pytest.mark.parametrize("way", WAYS)
@given(tile_tokens=st.integers(1, B * TOKENS + 1))
def test_tiles_are_the_whole(way: cross_entropy.WithGradient | None, tile_tokens: int) -> None:
    hidden, weight, labels = inputs()
    expected = everything(*whole(hidden, weight, labels), hidden, weight)
    found = everything(*tiled(tile_tokens, way, hidden, weight, labels), hidden, weight)
    for tensor, reference in zip(found, expected, strict=True):
        assert torch.allclose(tensor, reference, rtol=0, atol=1e-13)
    assert not found[1][:, -3:].any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tile_tokens", [1, 8, 512])
def test_in_bf16_tiles_round_no_worse(tile_tokens: int, way: cross_entropy.WithGradient | None) -> None:
    """Each tile adds to the matrix's gradient: summed in bf16, 512 of them would be wrong by some percent."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 512, HIDDEN), (VOCABULARY, HIDDEN))
    exact = [torch.randn(size, dtype=torch.float64, generator=generator).bfloat16().double() for size in sizes]
    labels = torch.randint(VOCABULARY, (1, 512), generator=generator)

    def gradients(loss: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in exact]
        return [g.double() for g in torch.autograd.grad(loss(*leaves, labels)[0], leaves)]

    reference = gradients(whole, torch.float64)
    low, low_tiled = (gradients(loss, torch.bfloat16) for loss in (whole, partial(tiled, tile_tokens, way)))
    for exactly, once, by_tiles in zip(reference, low, low_tiled, strict=True):
        assert (by_tiles - exactly).norm() < 1.5 * (once - exactly).norm()


def test_only_some_training_steps_have_tiles_of_the_loss(make_config: Callable[..., TrialConfig]) -> None:
    with pytest.raises(ConfigError, match=r"loss_tile_tokens=4: workload attention takes no optimizer step"):
        make_config(workload__loss_tile_tokens=4)
    with pytest.raises(ConfigError, match="loss_tile_tokens=0 must be positive"):
        make_config(workload="train_step", workload__loss_tile_tokens=0)
    ours = make_config(workload="train_step", workload__loss_tile_tokens=4)
    assert requirements.unsupported_reason(ours) is None
    theirs = make_config(workload="train_step", workload__loss_tile_tokens=4, engine="hf_trainer")
    reason = "workload.loss_tile_tokens=4: engine hf_trainer has no choice of its loss's tiles; leave it out, or use"
    assert (requirements.unsupported_reason(theirs) or "").startswith(reason)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.num_elements = max([self.num_elements, *(x.numel() for x in tensors)])
        return made


def test_no_tensor_of_all_logits_is_made() -> None:
    hidden, weight, labels = inputs()
    with Largest() as by_tiles:
        tiled(4, None, hidden, weight, labels)[0].backward()
    with Largest() as at_once:
        whole(hidden, weight, labels)[0].backward()
    assert at_once.num_elements == B * TOKENS * VOCABULARY
    assert by_tiles.num_elements == max(4 * VOCABULARY, HIDDEN * VOCABULARY)
