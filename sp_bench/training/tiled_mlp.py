"""A layer's MLP for one tile of its tokens at a time, forward and backward, so that only a tile has the MLP's width.

Its backward computes the hidden values of a tile, and at once their gradients. So it keeps its input and nothing else.
Under a checkpoint around it not even that is kept: recomputation makes the input again, and stops there, before any
product of the MLP. Source: Arctic Long Sequence Training, arXiv 2506.13996, section 3.1.

B sequences, s local tokens of each, t tokens of a tile, h hidden size, I width of the MLP.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_bench.measure import ledger


class Mlp(NamedTuple):
    """What is computed of each token. `parameters` gives what the layer has when it is called: between forward and
    backward FSDP frees its parameters, and gathers them again."""

    hidden_of: Callable[[Tensor], Tensor]  # [B,t,h] -> what the last product takes [B,t,I]
    parameters: Callable[[], Sequence[Tensor]]  # of `hidden_of`, and the matrix of the last product [h,I]


def in_tiles(x: Tensor, mlp: Mlp, tile_tokens: int) -> Tensor:
    """x [B,s,h] + the MLP of x, [B,s,h], for `tile_tokens` of each sequence at a time.

    Gradients of parameters are summed over the tiles in float32, or in the trial's dtype if that is wider.
    """
    x = _Keep.apply(x)
    return _InTiles.apply(x, x.grad_fn, mlp, tile_tokens, *mlp.parameters())


class _Keep(torch.autograd.Function):
    """x, kept for the backward of another function. What a function keeps, it keeps after it ran. So a checkpoint whose
    last kept tensor is this one stops before the tiles when it computes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keeper: Any, mlp: Mlp, tile_tokens: int, *parameters: Tensor) -> Tensor:
        ctx.keeper, ctx.mlp, ctx.tile_tokens = keeper, mlp, tile_tokens
        out, (*_, down) = torch.empty_like(x), parameters
        for tile, of_out in zip(x.detach().split(tile_tokens, dim=1), out.split(tile_tokens, dim=1), strict=True):
            torch.add(tile, mlp.hidden_of(tile) @ down.t(), out=of_out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,), (x,) = grads, ctx.keeper.saved_tensors
        mlp, dx = ctx.mlp, torch.empty_like(x)
        *of_hidden, down = mlp.parameters()
        sums: list[Tensor] = []
        for tile, dtile, of_dx in zip(*(each.split(ctx.tile_tokens, dim=1) for each in (x, dout, dx)), strict=True):
            with torch.enable_grad(), ledger.phase("recompute"):
                leaf = tile.detach().requires_grad_()
                hidden = mlp.hidden_of(leaf.view_as(leaf))  # hooks of modules, as FlopCounterMode's, take no leaf here
            ddown = dtile.flatten(0, 1).t() @ hidden.detach().flatten(0, 1)  # [h,B*t] @ [B*t,I] -> [h,I]
            dleaf, *others = torch.autograd.grad(hidden, [leaf, *of_hidden], dtile @ down)
            torch.add(dtile, dleaf, out=of_dx)
            sums = _added(sums, [*others, ddown])
        return dx, None, None, None, *(each.to(down.dtype) for each in sums)


def _added(sums: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    if not sums:
        return [each.to(torch.promote_types(each.dtype, torch.float32)) for each in gradients]
    return [of.add_(each) for of, each in zip(sums, gradients, strict=True)]
