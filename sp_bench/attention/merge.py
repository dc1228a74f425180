"""Merges attention over parts of the keys into attention over all of them, by log-sum-exp.

exp(lse) is the softmax denominator of a part. So the merged output is the sum of the parts' outputs, each weighted by
its share of the sum of all denominators. A gradient of the queries is the plain sum of its parts. Source: the online
softmax of FlashAttention, arXiv 2205.14135, section 3.1.

B batch, n queries and H heads in all; r queries and h heads of one part; D head size. "Wide" is fp32, or fp64 for fp64.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_bench.attention.layouts import ALL


class Part(NamedTuple):
    """What some queries get from some keys: an output with its lse, or a query gradient without one."""

    values: Tensor  # [B,r,h,D], with stride 1 along D
    lse: Tensor | None = None  # [B,h,r], wide; None: `values` is a gradient
    rows: slice = ALL  # which of the n queries
    heads: slice = ALL  # which of the H heads


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which partial results of `tensor`'s dtype are merged: fp32, or fp64 for fp64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def merge(parts: Sequence[Part], out: Tensor, lse: Tensor | None = None) -> None:
    """Merge `parts` into `out` [B,n,H,D], with stride 1 along D, and `lse` [B,H,n], wide. The result is computed wide
    and rounded once, to the dtype of `out`. `out` may be the first part's own tensor; `lse` shares no part's memory.

    Outputs: each query must see a key in at least one part. Gradients: `lse` is None, and `out` is 0 where no part is.
    """
    assert lse is None or not any(_share_memory(part.lse, lse) for part in parts if part.lse is not None), (
        "lse is a part's own: it would be overwritten while other threads weigh that part by it"
    )
    if out.is_cuda:
        _merge_fused(parts, out, lse)
    else:
        _merge_by_ops(parts, out, lse)


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _merge_by_ops(parts: Sequence[Part], out: Tensor, lse: Tensor | None) -> None:
    total = torch.zeros_like(out, dtype=wide_dtype(out))
    total_lse = None if lse is None else torch.full_like(lse, float("-inf"))
    for part in parts:
        if total_lse is not None and part.lse is not None:
            seen = total_lse[:, part.heads, part.rows]
            seen.copy_(torch.logaddexp(seen, part.lse))
    for part in parts:
        values = part.values.to(total.dtype)
        if total_lse is not None and part.lse is not None:
            share = torch.exp(part.lse - total_lse[:, part.heads, part.rows])
            values = values * share.transpose(1, 2).unsqueeze(-1)  # share: [B,h,r] -> [B,r,h,1]
        total[:, part.rows, part.heads] += values
    out.copy_(total)
    if lse is not None and total_lse is not None:
        lse.copy_(total_lse)


def _merge_fused(parts: Sequence[Part], out: Tensor, lse: Tensor | None) -> None:
    """The same in one Triton kernel, where `_merge_by_ops` reads and writes the wide output once for each part.

    `out` may be a part's own tensor, because the thread that writes an element has read it. All threads of a row read
    its lse, and one of them writes it: so that is written elsewhere.
    """
    batch, length, heads, dim = out.shape
    rows = 64
    grid = (-(-length // rows), heads, batch)
    bounds = [(*part.rows.indices(length)[:2], *part.heads.indices(heads)[:2]) for part in parts]
    lses = [out if part.lse is None else part.lse for part in parts]
    given = (
        tuple(part.values for part in parts),
        tuple(lses),
        tuple(bounds),
        tuple(part.values.stride()[:3] for part in parts),
        tuple(part_lse.stride()[:3] for part_lse in lses),
    )
    total_lse = out if lse is None else lse
    strides = (*out.stride()[:3], *total_lse.stride()[:3])
    padded = 1 << (dim - 1).bit_length()  # Triton's ranges are powers of two
    _kernel()[grid](
        out, total_lse, *given, length, *strides, WEIGHTED=lse is not None, ROWS=rows, DIM=dim, PADDED=padded
    )


@cache
def _kernel() -> Any:
    """The Triton kernel. It is imported at its first use, because only CUDA builds of torch come with triton."""
    import triton  # pyright: ignore[reportMissingImports]

    from sp_bench.attention.merge_triton import merge_rows

    return triton.jit(merge_rows)
