"""A stand-in for torch.ops.flash_attn_3 on CPU: its operations for packed tokens, by flash-attn's."""

import flash_attn_varlen_stand_in as flash_attn
from torch import Tensor


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    num_splits: int,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, Tensor]:
    assert num_splits == 1
    cuts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn._flash_attn_varlen_forward(
        *(q, k, v, *cuts, 0.0, softmax_scale, is_causal, window_size_left, window_size_right)
    )[:2]


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> None:
    cuts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sides = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    plain = sides | {"softcap": 0.0, "alibi_slopes": None}
    options = {"dropout_p": 0.0, "softmax_scale": softmax_scale, "causal": is_causal, "deterministic": False} | plain
    tensors = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
    flash_attn._flash_attn_varlen_backward(*tensors, *cuts, **options)  # pyright: ignore
