"""Attention by its definition, in any dtype, with the whole score matrix in memory. The oracle of all other kernels.

It accumulates in fp32 (fp64 for fp64 inputs). It rounds to the inputs' dtype where a flash kernel rounds: the weights
before they are multiplied by V, the score gradients before they are multiplied by Q and K, and the results.

B batch, Sq queries, Sk keys, Hq query and Hkv key/value heads, G = Hq/Hkv, D head size.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window
from sp_bench.kernels import same_document, seen

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PACKS = True
WINDOWS = True
CUDA_KERNELS = None  # plain matmuls and softmax
OPS = {"aten::logsumexp": (1, 0), "aten::exp": (1, 1)}  # the number of matmuls differs for single tokens


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    return None


def _accumulate_dtype(q: "Tensor") -> "torch.dtype":
    import torch

    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _scores(
    q: "Tensor", k: "Tensor", causal: bool, scale: float, documents: Sequence[int], window: Window | None
) -> "Tensor":
    """q [B,Sq,Hkv,G,D], k [B,Sk,Hkv,D] -> scores [B,Hkv,G,Sq,Sk], -inf where the causal mask hides a key, where it
    is of another document, and where it is outside the window."""
    import torch

    scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * scale
    if causal:
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if documents:
        scores = scores.masked_fill(~same_document(documents, q.device), float("-inf"))
    if window is not None:
        scores = scores.masked_fill(~seen(window, q, k), float("-inf"))
    return scores


def forward(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    *,
    causal: bool,
    scale: float,
    documents: Sequence[int] = (),
    window: Window | None = None,
) -> "tuple[Tensor, Tensor]":
    import torch

    wide = _accumulate_dtype(q)
    # [B,Sq,Hq,D] -> [B,Sq,Hkv,G,D]: query heads h*G to h*G+G-1 read KV head h
    q_grouped = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = _scores(q_grouped, k.to(wide), causal, scale, documents, window)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(q.dtype)
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights.to(wide), v.to(wide))
    return out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2)  # [B,Sq,Hkv,G,D] -> [B,Sq,Hq,D]; lse -> [B,Hq,Sq]


def backward(
    dout: "Tensor",
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    out: "Tensor",
    lse: "Tensor",
    *,
    causal: bool,
    scale: float,
    documents: Sequence[int] = (),
    window: Window | None = None,
) -> "tuple[Tensor, Tensor, Tensor]":
    import torch

    wide, heads = _accumulate_dtype(q), (k.shape[2], q.shape[2] // k.shape[2])
    dout_g, out_g, q_g = (x.to(wide).unflatten(2, heads) for x in (dout, out, q))  # [B,Sq,Hkv,G,D]
    k_w, v_w = k.to(wide), v.to(wide)
    weights = (_scores(q_g, k_w, causal, scale, documents, window) - lse.unflatten(1, heads).unsqueeze(-1)).exp()
    dv = torch.einsum("bhgqk,bqhgd->bkhd", weights.to(q.dtype).to(wide), dout_g)
    dweights = torch.einsum("bqhgd,bkhd->bhgqk", dout_g, v_w)
    # the gradient of the softmax subtracts rowsum(dO * O): [B,Sq,Hkv,G] -> [B,Hkv,G,Sq,1]
    delta = (dout_g * out_g).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
    dscores = (weights * (dweights - delta) * scale).to(q.dtype).to(wide)
    dq = torch.einsum("bhgqk,bkhd->bqhgd", dscores, k_w).flatten(2, 3)
    dk = torch.einsum("bhgqk,bqhgd->bkhd", dscores, q_g)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
