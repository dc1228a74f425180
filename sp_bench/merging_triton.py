"""The fused merge of sp_bench/merging.py as a Triton kernel: one program a block of rows of one head."""

import triton.language as tl  # pyright: ignore[reportMissingImports]


def merge_rows(
    out,  # [B,n,H,D] fp32 (fp64), in place
    part_out,  # [B,n,H,D]
    lse,  # [B,H,n] fp32 (fp64), in place
    part_lse,  # [B,H,n] fp32 (fp64)
    length,
    out_b,
    out_n,
    out_h,
    part_b,
    part_n,
    part_h,
    lse_b,
    lse_h,
    lse_n,
    part_lse_b,
    part_lse_h,
    part_lse_n,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,  # DIM or the power of two above
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)  # 64-bit offsets: 512K tokens x 32 heads x 128 pass 2^31 elements
    inside = row < length
    row = row.to(tl.int64)
    dim = tl.arange(0, PADDED)
    present = inside[:, None]
    if PADDED > DIM:  # known to the compiler: whole rows keep their plain mask
        present &= (dim < DIM)[None, :]
    lse_at = lse + batch * lse_b + head * lse_h + row * lse_n
    old = tl.load(lse_at, mask=inside, other=0.0)
    new = tl.load(part_lse + batch * part_lse_b + head * part_lse_h + row * part_lse_n, mask=inside, other=0.0)
    top = tl.maximum(old, new)
    old_weight, new_weight = tl.exp(old - top), tl.exp(new - top)
    total = old_weight + new_weight
    share = (new_weight / total)[:, None]
    out_at = out + batch * out_b + head * out_h + row[:, None] * out_n + dim[None, :]
    part_at = part_out + batch * part_b + head * part_h + row[:, None] * part_n + dim[None, :]
    mine = tl.load(out_at, mask=present, other=0.0).to(share.dtype)
    theirs = tl.load(part_at, mask=present, other=0.0).to(share.dtype)
    tl.store(out_at, mine + (theirs - mine) * share, mask=present)
    tl.store(lse_at, top + tl.log(total), mask=inside)
