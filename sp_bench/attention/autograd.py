"""Makes the forward and the backward of an attention one differentiable function."""

from collections.abc import Callable

import torch
from torch import Tensor

from sp_bench.kernels import Attention


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attention: Attention, causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore
        out, lse = attention.forward(q, k, v, causal=causal, scale=scale)
        ctx.attention, ctx.causal, ctx.scale = attention, causal, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return (None, None, None, *ctx.attention.backward(dout, *ctx.saved_tensors, causal=ctx.causal, scale=ctx.scale))


def differentiable(attention: Attention, *, causal: bool, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A differentiable function: q [B,Sq,Hq,D], k and v [B,Sk,Hkv,D] -> output [B,Sq,Hq,D].

    `attention` is a kernel, or a ring or a gather over several ranks. Saved for the backward: q, k, v, output and lse.
    """
    return lambda q, k, v: _Differentiable.apply(attention, causal, scale, q, k, v)  # pyright: ignore[reportReturnType]
