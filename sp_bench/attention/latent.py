"""Attention over latents (MLA): of each token a small latent travels, and a rank projects it up to keys and values
where it computes with them.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. B batch, n tokens, H heads, D and E sizes of a key and of a value
head. Of a latent C elements are projected (kv_lora_rank), and R are not (qk_rope_head_dim): they end every head's key.
A latent is [B,n,1,C+R]. Both up-projections are one tensor `up` [C,H,D-R+E]: of keys, then of values.

For what sends keys and values, a latent is a key of one head, whose value has no elements. So a ring or a gather over a
kernel that takes latents is one over latents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sp_bench.attention.merge import wide_dtype
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.kernels import Attention

Over = Callable[[Attention], Attention]  # a ring or a gather that calls this kernel


def projected(latent: Tensor, up: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """k [B,n,H,D] and v [B,n,H,E] of latents; differentiable. head_dim: D."""
    rank, heads, _ = up.shape
    compressed, rope = latent[:, :, 0].split([rank, latent.shape[-1] - rank], dim=-1)
    both = (compressed @ up.flatten(1)).unflatten(-1, (heads, -1))  # [B,n,C] x [C,H*(D-R+E)] -> [B,n,H,D-R+E]
    own = head_dim - rope.shape[-1]
    return torch.cat((both[..., :own], rope.unsqueeze(2).expand(-1, -1, heads, -1)), dim=-1), both[..., own:]


class _NothingProjected(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore
        ctx, kernel: NoKernel, latent: Tensor, up: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        ctx.kernel = kernel
        ctx.save_for_backward(latent, up)
        rope, (_, heads, width) = latent.shape[-1] - len(up), up.shape
        sizes = head_dim, width - (head_dim - rope)
        k, v = (kernel.like(latent[..., :1].expand(-1, -1, heads, size)) for size in sizes)
        return k, v

    @staticmethod
    def backward(ctx, dk: Tensor, dv: Tensor) -> tuple[None, Tensor, Tensor, None]:  # pyright: ignore
        latent, up = ctx.saved_tensors
        return None, ctx.kernel.like(latent), ctx.kernel.like(up), None


def projection(kernel: Attention) -> Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]:
    """`projected`; beside a kernel that computes nothing, a function that computes nothing either."""
    if isinstance(kernel, NoKernel):
        return partial(_NothingProjected.apply, kernel)  # pyright: ignore
    return projected


@dataclass(frozen=True)
class OverLatents:
    """A kernel that takes latents in the place of keys, and of values nothing: [B,n,1,0]. Each call projects up."""

    kernel: Attention
    up: Tensor
    gradient: Tensor | None = None  # of `up`, wide: each backward adds its share

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        kv = projection(self.kernel)(k, self.up, q.shape[-1])
        return self.kernel.forward(q, *kv, causal=causal, scale=scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.gradient is not None
        kv = projection(self.kernel)(k, self.up, q.shape[-1])
        dq, dk, dv = self.kernel.backward(dout, q, *kv, out, lse, causal=causal, scale=scale)
        del kv
        if isinstance(self.kernel, NoKernel):
            return dq, self.kernel.like(k), v
        rank = self.up.shape[0]
        own = q.shape[-1] - (k.shape[-1] - rank)
        dboth = torch.cat((dk[..., :own], dv), dim=-1).flatten(2)  # [B,n,H*(D-R+E)]
        drope = dk[..., own:].sum(2)
        del dk, dv
        share = k[:, :, 0, :rank].flatten(0, 1).T @ dboth.flatten(0, 1)
        self.gradient.add_(share.view_as(self.gradient))
        return dq, torch.cat((dboth @ self.up.flatten(1).T, drope), dim=-1).unsqueeze(2), v


class _OverLatents(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore
        ctx, over: Over, kernel: Attention, causal: bool, scale: float, q: Tensor, latent: Tensor, up: Tensor
    ) -> Tensor:
        attention = over(OverLatents(kernel, up))
        out, lse = attention.forward(q, latent, latent[..., :0], causal=causal, scale=scale)
        ctx.given = over, kernel, causal, scale
        ctx.save_for_backward(q, latent, up, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        over, kernel, causal, scale = ctx.given
        q, latent, up, out, lse = ctx.saved_tensors
        with_gradient = OverLatents(kernel, up, torch.zeros_like(up, dtype=wide_dtype(up)))
        given = (dout, q, latent, latent[..., :0], out, lse)
        dq, dlatent, _ = over(with_gradient).backward(*given, causal=causal, scale=scale)
        assert with_gradient.gradient is not None
        return None, None, None, None, dq, dlatent, with_gradient.gradient.to(up.dtype)


def over_latents(over: Over, kernel: Attention, *, causal: bool, scale: float) -> Callable[..., Tensor]:
    """A differentiable function: q [B,n,H,D], latent [B,n,1,C+R], up [C,H,D-R+E] -> output [B,n,H,E]. The gradient of
    `up` is this rank's share: of its queries. Saved for the backward: q, latent, up, output and lse."""
    return lambda q, latent, up: _OverLatents.apply(over, kernel, causal, scale, q, latent, up)  # pyright: ignore
