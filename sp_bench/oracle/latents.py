"""What the proofs know of attention over latents. There the columns of dk are of latents, and those of dv of both
up-projections.

Keys and values are made by the definition and differentiated by torch, not by the code that is proven. Letters:
sp_bench/attention/latent.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sp_bench.config.shape import AttentionShape

CHUNK = 512  # tokens that are widened at a time, to bound the memory
Run = Callable[[Sequence[Tensor]], list[Tensor]]  # q, k, v, dout -> output, dq, dk, dv


def keys_and_values(latent: Tensor, up: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """k [B,n,H,D] and v [B,n,H,E], in the inputs' dtype."""
    rank, own = len(up), head_dim - (latent.shape[-1] - len(up))
    k, v = (torch.einsum("bnc,chd->bnhd", latent[:, :, 0, :rank], w) for w in (up[..., :own], up[..., own:]))
    return torch.cat([k, latent[..., rank:].expand(*k.shape[:-1], -1)], dim=-1), v


def of_latents(run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
    """q, latent, up, dout -> output, dq, and the gradients of latent and up. `run` computes with keys and values."""
    q, latent, up, dout = inputs
    latent, up = leaves = [x.detach().requires_grad_() for x in (latent, up)]
    kv = keys_and_values(latent, up, q.shape[-1])
    out, dq, *dkv = run([q, *(x.detach() for x in kv), dout])
    return [out, dq, *torch.autograd.grad(kv, leaves, dkv)]


def error_of_up(got: Tensor, want: Tensor, shape: AttentionShape) -> float:
    """The larger relative error of the two up-projections' gradients [C,H,D-R+E]."""
    own = shape.head_dim - (shape.qk_rope_head_dim or 0)
    parts = zip(got.to(want.dtype).tensor_split([own], dim=-1), want.tensor_split([own], dim=-1), strict=True)
    return max(float((x - y).norm() / y.norm()) for x, y in parts)


def products(inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Tensor:
    """Both sides of two identities, and the squares of their terms, of this rank [2,3] in fp64. Scores and outputs are
    linear in keys and values, and these in latents: sum <q,dq> + <out,dout> = sum <latent,dlatent>. What is projected
    is linear in both factors: sum <up,dup> = sum <latent,dlatent> over it."""
    (q, latent, up, dout), (out, dq, dlatent, dup) = inputs, results
    rank = len(up)

    def of_tokens(*pairs: tuple[Tensor, Tensor]) -> Tensor:
        chunks = (zip(x.split(CHUNK, dim=1), y.split(CHUNK, dim=1), strict=True) for x, y in pairs)
        sums = [torch.cat([(x.double() * y.double()).sum((0, 2, 3)) for x, y in of_pair]) for of_pair in chunks]
        return torch.stack(sums)

    queries = of_tokens((q, dq), (out, dout))
    whole = of_tokens((latent, dlatent))
    compressed = of_tokens((latent[..., :rank], dlatent[..., :rank]))
    weights = (up.double() * dup.double()).sum().view(1, 1)
    return torch.stack(
        [
            torch.stack([left.sum(), right.sum(), left.square().sum() + right.square().sum()])
            for left, right in ((queries, whole), (weights, compressed))
        ]
    )
