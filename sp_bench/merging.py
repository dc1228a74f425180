"""Attention over parts of the keys becomes attention over all of them: merging by log-sum-exp, in fp32 (fp64).

exp(lse) is a part's softmax denominator, so each part's output is weighted by its share of the sum of denominators.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What partial results are merged in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Fold attention over more keys into (out [B,n,H,D], lse [B,H,n] wide) in place: in lse's dtype, rounded to that of
    `out`. D has stride 1."""
    if out.is_cuda:
        _merge_fused(out, lse, part_out, part_lse)
    else:
        _merge_by_ops(out, lse, part_out, part_lse)


def _merge_by_ops(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    share = torch.sigmoid(part_lse - lse).transpose(1, 2).unsqueeze(-1)  # [B,H,n] -> [B,n,H,1]
    out.copy_(torch.lerp(out.to(lse.dtype), part_out.to(lse.dtype), share))
    torch.logaddexp(lse, part_lse, out=lse)


def _merge_fused(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """The same in one pass: the ops above read and write the fp32 output three times."""
    batch, length, heads, dim = out.shape
    rows = 64
    grid = (-(-length // rows), heads, batch)
    strides = [s for t in (out, part_out) for s in t.stride()[:3]] + [s for t in (lse, part_lse) for s in t.stride()]
    padded = 1 << (dim - 1).bit_length()  # Triton's ranges are powers of two
    _kernel()[grid](out, part_out, lse, part_lse, length, *strides, ROWS=rows, DIM=dim, PADDED=padded, num_warps=4)


@cache
def _kernel() -> Any:
    """Compiled at first use: triton comes with CUDA builds of torch only."""
    import triton  # pyright: ignore[reportMissingImports]

    from sp_bench.merging_triton import merge_rows

    return triton.jit(merge_rows)
