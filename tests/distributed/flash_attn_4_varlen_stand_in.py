"""A stand-in for flash_attn.cute.interface on CPU: its functions for packed tokens, by those of flash_attn's."""

from typing import Any

import flash_attn_varlen_stand_in as flash_attn
import torch
from torch import Tensor


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    assert return_lse
    cuts: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn._flash_attn_varlen_forward(q, k, v, *cuts, 0.0, softmax_scale, causal)[:2]


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [torch.empty_like(x) for x in (q, k, v)]
    cuts: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    flash_attn._flash_attn_varlen_backward(
        *(dout, q, k, v, out, lse, *grads), *cuts, 0.0, softmax_scale, causal, -1, -1, 0.0, None, False
    )
    return grads[0], grads[1], grads[2]
