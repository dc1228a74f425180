"""A stand-in for flash_attn.cute.interface on CPU: its functions for packed tokens, by those of flash_attn's."""

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
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, Tensor]:
    assert return_lse
    cuts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn._flash_attn_varlen_forward(
        *(q, k, v, *cuts, 0.0, softmax_scale, causal, window_size_left, window_size_right)
    )[:2]


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
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    cuts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sides = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    plain = sides | {"softcap": 0.0, "alibi_slopes": None}
    options = {"dropout_p": 0.0, "softmax_scale": softmax_scale, "causal": causal, "deterministic": False} | plain
    flash_attn._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *cuts, **options)  # pyright: ignore
    return grads
