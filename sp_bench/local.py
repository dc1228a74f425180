"""Attention on one rank's tensors: the kernel as a differentiable function, without communication."""

import torch
from torch import Tensor

from sp_bench.kernels import Kernel


class LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel: Kernel, causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore
        out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
        ctx.kernel, ctx.causal, ctx.scale = kernel, causal, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return (None, None, None, *ctx.kernel.backward(dout, *ctx.saved_tensors, causal=ctx.causal, scale=ctx.scale))


def local_attention(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """q [B,Sq,Hq,D], k and v [B,Sk,Hkv,D] -> [B,Sq,Hq,D], differentiable."""
    return LocalAttention.apply(kernel, causal, scale, q, k, v)  # pyright: ignore[reportReturnType]
