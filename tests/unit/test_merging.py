"""Merging by log-sum-exp: the fused kernel of GPUs against torch's ops, and the ops against attention over all keys."""

import itertools

import pytest
import torch
from torch import Tensor

from sp_bench.merging import _merge_by_ops, _merge_fused

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6}  # relative and absolute
PARTS = {  # dtype of what is merged into -> dtypes of the kernels' outputs
    torch.float64: [torch.float64],
    torch.float32: [torch.float32, torch.bfloat16, torch.float16],
}


def drawn(*size: int, device: str, dtype: torch.dtype) -> Tensor:
    """Equal on every device."""
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)


def check_fused(device: str, length: int, dim: int, wide: torch.dtype, narrow: torch.dtype, strided: bool) -> None:
    """`strided`: rows from the middle of longer tensors, heads before rows in the part, as rings and cuDNN have it."""
    batch, heads, before, after = 2, 3, (5 if strided else 0), (7 if strided else 0)
    rows = slice(before, before + length)
    out = drawn(batch, before + length + after, heads, dim, device=device, dtype=wide)
    lse = 3 * drawn(batch, heads, before + length + after, device=device, dtype=wide)
    if strided:
        part_out = drawn(batch, heads, length + after, dim, device=device, dtype=narrow).transpose(1, 2)[:, :length]
        part_lse = drawn(batch, length, heads + 1, device=device, dtype=wide).transpose(1, 2)[:, 1:]
        part_lse = 3 * part_lse
    else:
        part_out = drawn(batch, length, heads, dim, device=device, dtype=narrow)
        part_lse = 3 * drawn(batch, heads, length, device=device, dtype=wide)
    part_lse[:, 0, ::3] = float("-inf")  # rows that see none of the part's keys
    part_out[:, ::3, 0] = 0
    want_out, want_lse = out.clone(), lse.clone()
    _merge_by_ops(want_out[:, rows], want_lse[:, :, rows], part_out, part_lse)
    _merge_fused(out[:, rows], lse[:, :, rows], part_out, part_lse)
    where = f"length={length} dim={dim} {wide} {narrow} strided={strided}"
    # whole tensors: the rows beside the merged ones must be as they were
    torch.testing.assert_close(
        out, want_out, rtol=CLOSE[wide], atol=CLOSE[wide], msg=lambda text: f"out, {where}: {text}"
    )
    torch.testing.assert_close(
        lse, want_lse, rtol=CLOSE[wide], atol=CLOSE[wide], msg=lambda text: f"lse, {where}: {text}"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200], ids="length={}".format)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_the_fused_merge_agrees_with_torchs_ops(length: int, wide: torch.dtype) -> None:
    for dim, narrow, strided in itertools.product((8, 64, 80, 96, 128), PARTS[wide], (False, True)):
        check_fused("cuda", length, dim, wide, narrow, strided)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_parts_merged_in_any_order_are_attention_over_all_keys(wide: torch.dtype) -> None:
    num_parts, keys, dim = 3, 4, 8
    scores = 3 * drawn(1, 2, 5, num_parts * keys, device="cpu", dtype=wide)  # [B,H,n,keys]
    values = drawn(1, 2, num_parts * keys, dim, device="cpu", dtype=wide)
    whole, whole_lse = (scores.softmax(-1) @ values).transpose(1, 2), scores.logsumexp(-1)
    parts = [
        ((s.softmax(-1) @ v).transpose(1, 2).contiguous(), s.logsumexp(-1))
        for s, v in zip(scores.split(keys, dim=-1), values.split(keys, dim=2), strict=True)
    ]
    for first, *others in itertools.permutations(parts):
        out, lse = (x.clone() for x in first)
        for part in others:
            _merge_by_ops(out, lse, *part)
        torch.testing.assert_close(out, whole, rtol=CLOSE[wide], atol=CLOSE[wide])
        torch.testing.assert_close(lse, whole_lse, rtol=CLOSE[wide], atol=CLOSE[wide])
