"""Merging by log-sum-exp: the fused kernel of GPUs against torch's ops, and the ops against attention over all keys."""

import itertools

import pytest
import torch
from torch import Tensor

from sp_bench.attention.merge import Part, _merge_by_ops, _merge_fused, merge

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative and absolute
DTYPES = {  # of the kernels' outputs -> what they are merged into
    torch.float64: [torch.float64],
    torch.float32: [torch.float32],
    torch.bfloat16: [torch.float32, torch.bfloat16],
    torch.float16: [torch.float32, torch.float16],
}
BATCH, HEADS = 2, 4


def drawn(*size: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Equal on every device."""
    generator = torch.Generator().manual_seed(sum(size) + seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)


def some_parts(device: str, length: int, dim: int, dtype: torch.dtype, weighted: bool) -> list[Part]:
    """Of all queries, of late ones as a ring's, and of half of the heads; strided as rings and cuDNN have it."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = slice(None)
    regions = [(whole, whole), (slice(length // 2, None), whole), (whole, slice(HEADS // 2, None))]
    parts = []
    for seed, (rows, heads) in enumerate(regions):
        num_rows, num_heads = len(range(length)[rows]), len(range(HEADS)[heads])
        size = (BATCH, num_heads, num_rows + 7, dim) if seed else (BATCH, num_rows + 7, num_heads, dim)
        values = drawn(*size, device=device, dtype=dtype, seed=seed)
        values = (values.transpose(1, 2) if seed else values)[:, :num_rows]
        lse = 3 * drawn(BATCH, num_rows, num_heads + 1, device=device, dtype=wide, seed=seed).transpose(1, 2)[:, 1:]
        if seed == 1:
            lse[:, 0, ::3] = float("-inf")  # rows that see none of the part's keys
            values[:, ::3, 0] = 0
        parts.append(Part(values, lse if weighted else None, rows, heads))
    return parts


def check_fused(device: str, length: int, dim: int, narrow: torch.dtype, to: torch.dtype, weighted: bool) -> None:
    """Into the middle of longer tensors: the rows beside the merged ones must stay as they were."""
    wide = torch.float64 if narrow == torch.float64 else torch.float32
    parts = some_parts(device, length, dim, narrow, weighted)
    for count in (1, 2, 3):
        if narrow == to:  # into the first part's values
            first = parts[0]._replace(values=parts[0].values.clone())
            _merge_fused([first, *parts[1:count]], first.values, lse_copy(parts[0]))
            separate = torch.empty_like(first.values), lse_copy(parts[0])
            _merge_by_ops(parts[:count], *separate)
            agree(first.values, separate[0], "in place")
        results = []
        for merged in (_merge_by_ops, _merge_fused):
            out = torch.ones(BATCH, length + 5, HEADS, dim, device=device, dtype=to)
            lse = torch.ones(BATCH, HEADS, length + 5, device=device, dtype=wide) if weighted else None
            merged(parts[:count], out[:, 3:-2], None if lse is None else lse[:, :, 3:-2])
            results.append((out, lse))
        (want_out, want_lse), (out, lse) = results
        where = f"{length=} {dim=} {narrow} {to} {weighted=} {count=}"
        agree(out, want_out, f"out, {where}")
        if lse is not None:
            agree(lse, want_lse, f"lse, {where}")


def lse_copy(part: Part) -> Tensor | None:
    return None if part.lse is None else part.lse.clone()


def agree(got: Tensor, wanted: Tensor, where: str) -> None:
    close = CLOSE[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=close, atol=close, msg=lambda text: f"{where}: {text}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("narrow", DTYPES, ids=str)
def test_the_fused_merge_agrees_with_torchs_ops(narrow: torch.dtype) -> None:
    for to, weighted in itertools.product(DTYPES[narrow], (True, False)):
        for length, dim in ((2, 8), (63, 64), (64, 128), (65, 80), (200, 128)):
            check_fused("cuda", length, dim, narrow, to, weighted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_fused_merge_of_a_length_that_fills_the_device_agrees_too() -> None:
    """Threads that share a row then run far enough apart to show that they race."""
    for _ in range(10):
        check_fused("cuda", 8192, 128, torch.float32, torch.float32, weighted=True)


def test_a_part_cannot_be_merged_into_its_own_lse() -> None:
    """Threads of a row that are late would read the merged lse instead of the part's."""
    part, other = some_parts("cpu", 6, 8, torch.float32, weighted=True)[:2]
    with pytest.raises(AssertionError, match="lse is a part's own"):
        merge([part, other], torch.empty_like(part.values), part.lse)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_parts_merged_in_any_order_and_grouping_are_attention_over_all_keys(wide: torch.dtype) -> None:
    num_parts, keys, dim = 3, 4, 8
    scores = 3 * drawn(1, 2, 5, num_parts * keys, device="cpu", dtype=wide)  # [B,H,n,keys]
    values = drawn(1, 2, num_parts * keys, dim, device="cpu", dtype=wide)
    whole, whole_lse = (scores.softmax(-1) @ values).transpose(1, 2), scores.logsumexp(-1)
    parts = [
        Part((s.softmax(-1) @ v).transpose(1, 2).contiguous(), s.logsumexp(-1))
        for s, v in zip(scores.split(keys, dim=-1), values.split(keys, dim=2), strict=True)
    ]

    def merged(*parts: Part) -> Part:
        out, lse = torch.empty_like(whole), torch.empty_like(whole_lse)
        _merge_by_ops(parts, out, lse)
        return Part(out, lse)

    for first, second, third in itertools.permutations(parts):
        assert first.lse is not None
        out, lse = first.values.clone(), first.lse.clone()
        _merge_by_ops([Part(out, first.lse), second, third], out, lse)  # into the first part's values
        torch.testing.assert_close((out, lse), (whole, whole_lse), rtol=CLOSE[wide], atol=CLOSE[wide])
        for result in (merged(first, second, third), merged(merged(first, second), third)):
            torch.testing.assert_close(result.values, whole, rtol=CLOSE[wide], atol=CLOSE[wide])
            torch.testing.assert_close(result.lse, whole_lse, rtol=CLOSE[wide], atol=CLOSE[wide])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_some_rows_and_heads_are_summed_up_and_rounded_once(dtype: torch.dtype) -> None:
    parts = some_parts("cpu", 6, 8, dtype, weighted=False)
    exact = torch.zeros(BATCH, 6, HEADS, 8, dtype=torch.float64)
    for part in parts:
        exact[:, part.rows, part.heads] += part.values.double()
    out = torch.full_like(exact, 7, dtype=dtype)
    _merge_by_ops(parts, out, None)
    torch.testing.assert_close(out, exact.to(dtype), rtol=CLOSE[dtype] / 2, atol=1e-6)
