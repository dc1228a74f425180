"""Attention over parts of the keys becomes attention over all of them: merged by log-sum-exp, in fp32 (fp64).

exp(lse) is a part's softmax denominator, so each part's output is weighted by its share of the sum of denominators. A
gradient of the queries is the plain sum of its parts.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_bench.attention.layouts import ALL


class Part(NamedTuple):
    """What some queries have of some keys: an output with its lse, or a gradient without."""

    values: Tensor  # [B,r,h,D], D of stride 1
    lse: Tensor | None = None  # [B,h,r], wide
    rows: slice = ALL  # which of all n queries
    heads: slice = ALL  # which of all H heads


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What partial results are merged in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def merge(parts: Sequence[Part], out: Tensor, lse: Tensor | None = None) -> None:
    """Into `out` [B,n,H,D], D of stride 1, and `lse` [B,H,n] wide, which may be the first part's; rounded once. Each
    query needs a part that it sees a key of. A gradient has no lse, and is 0 where no part has it."""
    if out.is_cuda:
        _merge_fused(parts, out, lse)
    else:
        _merge_by_ops(parts, out, lse)


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
            values = values * share.transpose(1, 2).unsqueeze(-1)  # [B,h,r] -> [B,r,h,1]
        total[:, part.rows, part.heads] += values
    out.copy_(total)
    if lse is not None and total_lse is not None:
        lse.copy_(total_lse)


def _merge_fused(parts: Sequence[Part], out: Tensor, lse: Tensor | None) -> None:
    """The same in one pass: the ops above read and write the wide output for each part. A program reads what it merges
    before it writes."""
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
    """Compiled at first use: triton comes with CUDA builds of torch only."""
    import triton  # pyright: ignore[reportMissingImports]

    from sp_bench.attention.merge_triton import merge_rows

    return triton.jit(merge_rows)
