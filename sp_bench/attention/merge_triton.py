"""The Triton kernel of sp_bench/attention/merge.py. One program merges a block of rows of one head.

B batch, n rows (queries) and H heads in all; r rows and h heads of one part; D head size. Strides are in elements.
"""

import triton.language as tl  # pyright: ignore[reportMissingImports]


def merge_rows(
    out,  # [B,n,H,D]
    lse,  # [B,H,n] fp32 (fp64)
    # five tuples with an entry for each part:
    parts,  # [B,r,h,D]
    part_lses,  # [B,h,r] fp32 (fp64)
    bounds,  # (first row, row after the last, first head, head after the last): the part's place in `out`
    part_strides,  # of the axes (B, r, h)
    part_lse_strides,  # of the axes (B, h, r)
    length,  # n
    out_b,  # strides of `out` and `lse`
    out_n,
    out_h,
    lse_b,
    lse_h,
    lse_n,
    WEIGHTED: tl.constexpr,  # True: merge outputs by lse; False: add up gradients, and touch no lse
    ROWS: tl.constexpr,  # of one program
    DIM: tl.constexpr,  # D
    PADDED: tl.constexpr,  # the power of two that is DIM or above it
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)  # 64-bit offsets: 512K tokens x 32 heads x 128 pass 2^31 elements
    wide = tl.float64 if part_lses[0].dtype.element_ty == tl.float64 else tl.float32
    dim = tl.arange(0, PADDED)
    # the largest lse of each row: subtracted before exp, so that nothing overflows
    top = tl.full((ROWS,), float("-inf"), wide)
    if WEIGHTED:
        for i in tl.static_range(len(parts)):
            first_row, end_row, first_head, end_head = bounds[i]
            lse_step_b, lse_step_h, lse_step_n = part_lse_strides[i]
            inside = (row >= first_row) & (row < end_row) & (head >= first_head) & (head < end_head)
            at = batch * lse_step_b + (head - first_head) * lse_step_h + (row - first_row).to(tl.int64) * lse_step_n
            top = tl.maximum(top, tl.load(part_lses[i] + at, mask=inside, other=float("-inf")))
    denominator = tl.zeros((ROWS,), wide)
    total = tl.zeros((ROWS, PADDED), wide)
    for i in tl.static_range(len(parts)):
        first_row, end_row, first_head, end_head = bounds[i]
        step_b, step_n, step_h = part_strides[i]
        inside = (row >= first_row) & (row < end_row) & (head >= first_head) & (head < end_head)
        part_row, part_head = (row - first_row).to(tl.int64), head - first_head
        present = inside[:, None]
        if PADDED > DIM:  # decided at compile time: where DIM is a power of two, the mask stays a plain one
            present &= (dim < DIM)[None, :]
        at = batch * step_b + part_head * step_h + part_row[:, None] * step_n + dim[None, :]
        values = tl.load(parts[i] + at, mask=present, other=0.0).to(wide)
        if WEIGHTED:
            lse_step_b, lse_step_h, lse_step_n = part_lse_strides[i]
            at = batch * lse_step_b + part_head * lse_step_h + part_row * lse_step_n
            weight = tl.exp(tl.load(part_lses[i] + at, mask=inside, other=float("-inf")) - top)
            denominator += weight
            values *= weight[:, None]
        total += values
    inside = row < length
    row = row.to(tl.int64)
    if WEIGHTED:
        total /= denominator[:, None]
        tl.store(lse + batch * lse_b + head * lse_h + row * lse_n, top + tl.log(denominator), mask=inside)
    present = inside[:, None]
    if PADDED > DIM:
        present &= (dim < DIM)[None, :]
    tl.store(out + batch * out_b + head * out_h + row[:, None] * out_n + dim[None, :], total, mask=present)
