"""A stand-in for flash_attn 2.8.3 on CPU: its functions for packed tokens, computed by our math kernel.

T packed tokens: sequences lie one after the other, cut at cu_seqlens. The last query of a sequence sees all its keys.
So with fewer queries than keys the causal mask is aligned to the bottom right.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from sp_bench.config.windows import Window
from sp_bench.kernels import math


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [Tq,Hq,D], k and v [Tk,Hkv,D] -> out [Tq,Hq,D], lse [Hq,Tq], and two tensors that nobody reads."""
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    window = _window(window_size_left, window_size_right, causal)
    assert (return_softmax, block_table, leftpad_k, seqused_k, zero_tensors) == (False, None, None, None, False)
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        length = len(k[keys]) if causal else len(q[queries])  # without a mask nothing is aligned
        part, part_lse = math.forward(
            _at_the_end(q[queries], length),
            *(k[keys][None], v[keys][None]),
            causal=causal,
            scale=softmax_scale,
            window=window,
        )
        own = slice(length - len(q[queries]), None)
        out[queries], lse[:, queries] = part[0, own], part_lse[0, :, own]
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Fills dq, dk, dv, which may be views."""
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    window = _window(window_size_left, window_size_right, causal)
    assert not zero_tensors
    for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        length = len(k[keys]) if causal else len(q[queries])
        # padded queries have dout = 0 and out = 0: they give no gradient, whatever their lse
        padded_lse = pad(softmax_lse[:, queries], (length - len(q[queries]), 0))
        grads = math.backward(
            *(_at_the_end(dout[queries], length), _at_the_end(q[queries], length), k[keys][None], v[keys][None]),
            *(_at_the_end(out[queries], length), padded_lse[None]),
            causal=causal,
            scale=softmax_scale,
            window=window,
        )
        dq[queries] = grads[0][0, length - len(q[queries]) :]
        dk[keys], dv[keys] = grads[1][0], grads[2][0]
    return torch.empty_like(softmax_lse)


def _window(left: int, right: int, causal: bool) -> Window | None:
    """The window of each sequence; without one both sides are -1."""
    if (left, right) == (-1, -1):
        return None
    assert min(left, right) >= 0
    assert not causal
    return Window(left, right)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Where the queries and the keys of each sequence lie among the packed tokens."""
    spans = (itertools.pairwise(ends.tolist()) for ends in (cu_seqlens_q, cu_seqlens_k))
    return ((slice(*queries), slice(*keys)) for queries, keys in zip(*spans, strict=True))


def _at_the_end(rows: Tensor, length: int) -> Tensor:
    """[n,H,D] -> [1,length,H,D], with zeros before the rows. A causal mask over equal lengths is then aligned to the
    bottom right for the rows."""
    return pad(rows, (0, 0, 0, 0, length - len(rows), 0))[None]
