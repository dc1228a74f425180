"""Products in FP8 in plain torch: factors are scaled, rounded to FP8 by a cast and scaled back, and multiplied in fp32.
It shares no code with torchao, of whose recipes it is the check.

A matrix w is [N,K], its input x [n,K]. Ranks that share a sequence quantise their own tokens, each alone; so scales
over tokens are those of a rank's, here of a `part` of the sequence.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import gathers_float8
from sp_bench.oracle.decoder import Product
from sp_bench.training import train

SMALLEST = 1e-12  # the largest element that a scale is made for; torchao's


class Recipe(NamedTuple):
    """How a product rounds its factors. The first three fields say how many elements share a scale; None: all."""

    along: int | None  # the axis that a product adds up
    across: int | None  # the other axis of an input and of a gradient
    of_weights: int | None  # and of a weight
    of_gradients: torch.dtype  # of outputs; all else is e4m3
    powers_of_2: bool  # scales


RECIPES = {
    "float8_rowwise": Recipe(None, 1, 1, torch.float8_e4m3fn, True),
    "float8_tensorwise": Recipe(None, None, None, torch.float8_e5m2, False),
    "float8_blockwise": Recipe(128, 1, 128, torch.float8_e4m3fn, True),  # TransformerEngine's, for Hopper
}


def is_quantised(config: TrialConfig, computed: torch.dtype) -> bool:
    """Whether the trial's layers multiply in FP8, where it computes in this dtype."""
    return config.workload.linear_dtype != "model" and computed == getattr(torch, config.dtype)


def product(config: TrialConfig, computed: torch.dtype, seq_len: int) -> Product:
    """What multiplies the layers' matrices of a sequence of `seq_len` tokens."""
    if not is_quantised(config, computed):
        return linear
    padded_len = train.padded_seq_len(config, seq_len)
    layout = train.layout_at(config, padded_len)
    parts = [torch.tensor(layout.global_positions(rank, padded_len)) for rank in range(layout.sp_size)]
    return partial(_product, RECIPES[config.workload.linear_dtype], parts)


def casts_weights(config: TrialConfig, computed: torch.dtype) -> bool:
    """Whether the layers' matrices are rounded to the computed dtype first: not where FP8 is made of the stored ones,
    to be gathered."""
    return not (is_quantised(config, computed) and gathers_float8(config))


def of_product(x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe | None) -> tuple[Tensor, Tensor, Tensor]:
    """y = x w', dx = dy w and dw = dy' x; None: without FP8, in fp32."""
    if recipe is None:
        x, w, dy = x.float(), w.float(), dy.float()
        return x @ w.t(), dy @ w, dy.t() @ x
    x, w = x.requires_grad_(), w.requires_grad_()
    y = _Product.apply(x, w, recipe, [torch.arange(len(x), device=x.device)])
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return y.detach(), dx, dw


def _product(recipe: Recipe, parts: Sequence[Tensor], x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = _Product.apply(x, w, recipe, [part.to(x.device) for part in parts])
    return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: Recipe, parts: Sequence[Tensor]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe, ctx.parts = recipe, parts
        y, of_rows = x.new_empty(len(x), len(w)), rounded(w, recipe, 1, is_weight=True)
        for part in parts:
            y[part] = (rounded(x[part], recipe, 1) @ of_rows.t()).to(x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), (dy,), recipe = ctx.saved_tensors, grads, ctx.recipe
        of_gradients = recipe.of_gradients
        dx, dw = torch.empty_like(x), torch.zeros_like(w, dtype=torch.float32)
        of_columns = rounded(w, recipe, 0, is_weight=True)
        for part in ctx.parts:
            dx[part] = (rounded(dy[part], recipe, 1, of_gradients) @ of_columns).to(x.dtype)
            dw += (rounded(dy[part], recipe, 0, of_gradients).t() @ rounded(x[part], recipe, 0)).to(x.dtype)
        return dx, dw.to(w.dtype), None, None


def rounded(
    x: Tensor, recipe: Recipe, axis: int, dtype: torch.dtype = torch.float8_e4m3fn, *, is_weight: bool = False
) -> Tensor:
    """x [.,.] as FP8 has it for a product that adds up along `axis`, in fp32."""
    shared = recipe.along, recipe.of_weights if is_weight else recipe.across
    rows, columns = (size or whole for size, whole in zip(shared if axis == 0 else shared[::-1], x.shape, strict=True))
    blocks = x.reshape(-1, rows, len(x[0]) // columns, columns)  # [R*r,C*c] -> [R,r,C,c]
    most = torch.finfo(dtype).max
    scale = (most / blocks.abs().amax((1, 3), keepdim=True).double().clamp(min=SMALLEST)).float()
    if recipe.powers_of_2:  # the largest below
        fraction, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.full_like(fraction, 0.5), exponent)
    return ((blocks.float() * scale).clamp(-most, most).to(dtype).float() / scale).view(x.shape)
