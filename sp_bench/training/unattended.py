"""Attention without its arithmetic, for `workload.fit`: what a step allocates and sends, and not what it computes."""

from typing import TYPE_CHECKING

import torch

from sp_bench.config.trial import AttentionShape

if TYPE_CHECKING:
    from torch import Tensor

CUDA_KERNELS: tuple[str, str] | None = None


def unsupported_reason(shape: AttentionShape, device: str) -> str | None:
    return None


def forward(q: "Tensor", k: "Tensor", v: "Tensor", *, causal: bool, scale: float) -> "tuple[Tensor, Tensor]":
    """Zeros in the shapes and dtypes of a kernel's output and log-sum-exp."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, tokens, heads, _ = q.shape
    return q.new_zeros(q.shape), q.new_zeros(batch, heads, tokens, dtype=wide)


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
) -> "tuple[Tensor, Tensor, Tensor]":
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
