"""KV all-gather attention: every rank gathers all KV, and computes its own queries against it.

B batch, s = S/P tokens a rank, Hq and Hkv heads, D head size. Source: the context parallelism of Llama 3
(arXiv 2407.21783, section 3.3.2). KV is gathered again in the backward, and dK/dV are reduce-scattered.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sp_bench.exchange import Transport
from sp_bench.kernels import Kernel
from sp_bench.layouts import SequenceLayout
from sp_bench.merging import merge, wide_dtype


@dataclass(frozen=True)
class Gather:
    """What all calls share. `head_stride` KV heads are resident at a time."""

    kernel: Kernel
    transport: Transport
    layout: SequenceLayout  # contiguous or zigzag: runs of consecutive tokens
    causal: bool
    scale: float
    head_stride: int
    dkv_dtype: torch.dtype

    def order(self, seq_len: int) -> list[slice]:
        """Where each run of consecutive global tokens sits in the gathered [P * s] axis, in global order."""
        local, places = seq_len // self.transport.group.size(), []
        for rank in range(self.transport.group.size()):
            start = rank * local
            for run in self.layout.runs(rank, seq_len):
                places.append((run.start, slice(start, start + len(run))))
                start += len(run)
        return [place for _, place in sorted(places, key=lambda item: item[0])]

    def blocks(self, seq_len: int) -> list[tuple[slice, list[tuple[slice, bool]]]]:
        """For each run of local queries, the (global keys, causal) it sees: itself, then its whole prefix."""
        blocks, start = [], 0
        for run in self.layout.runs(self.transport.group.rank(), seq_len):
            queries = slice(start, start + len(run))
            start += len(run)
            if not self.causal:
                blocks.append((queries, [(slice(0, seq_len), False)]))
            elif run.start == 0:
                blocks.append((queries, [(slice(0, run.stop), True)]))
            else:
                blocks.append((queries, [(slice(run.start, run.stop), True), (slice(0, run.start), False)]))
        return blocks

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: slice, causal: bool) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(q, k[:, keys], v[:, keys], causal=causal, scale=self.scale)

    def gather(self, kv: Tensor) -> Tensor:
        """[2,B,s,h,D] -> [2,B,S,h,D], tokens in global order."""
        gathered = self.transport.all_gather(kv).wait()
        # [P*2,B,s,h,D] -> [P,2,B,s,h,D] -> [2,B,P*s,h,D]: ranks' tokens side by side, then into global order
        side_by_side = gathered.unflatten(0, (-1, 2)).permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        return torch.cat([side_by_side[:, :, place] for place in self.order(side_by_side.shape[2])], dim=2)

    def reduce_scatter(self, dkv: Tensor) -> Tensor:
        """[2,B,S,h,D] in global order, this rank's share -> [2,B,s,h,D], summed over ranks."""
        size = self.transport.group.size()
        order = self.order(dkv.shape[2])
        side_by_side = torch.empty_like(dkv)
        for place, part in zip(order, dkv.split([p.stop - p.start for p in order], dim=2), strict=True):
            side_by_side[:, :, place] = part
        # [2,B,P*s,h,D] -> [P,2,B,s,h,D] -> [P*2,B,s,h,D]: one contiguous slice for each rank
        sent = side_by_side.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4, 5).flatten(0, 1).contiguous()
        return self.transport.reduce_scatter(sent).wait()


def _head_groups(q: Tensor, kv: Tensor, stride: int) -> list[tuple[slice, slice]]:
    """(query heads, KV heads) of each group of `stride` KV heads."""
    per_kv_head = q.shape[2] // kv.shape[3]
    starts = range(0, kv.shape[3], stride)
    return [
        (slice(h * per_kv_head, min(h + stride, kv.shape[3]) * per_kv_head), slice(h, min(h + stride, kv.shape[3])))
        for h in starts
    ]


class GatherAttention(torch.autograd.Function):
    """q [B,s,Hq,D], kv [2,B,s,Hkv,D] -> out [B,s,Hq,D]."""

    @staticmethod
    def forward(ctx, gather: Gather, q: Tensor, kv: Tensor) -> Tensor:  # pyright: ignore
        seq_len = q.shape[1] * gather.transport.group.size()
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide_dtype(q))
        for q_heads, kv_heads in _head_groups(q, kv, gather.head_stride):
            k, v = gather.gather(kv[:, :, :, kv_heads].contiguous())
            for rows, (first, *others) in gather.blocks(seq_len):
                run_out, run_lse = gather.attend(q[:, rows, q_heads], k, v, *first)
                run_out = run_out.to(wide_dtype(q))
                for block in others:
                    merge(run_out, run_lse, *gather.attend(q[:, rows, q_heads], k, v, *block))
                out[:, rows, q_heads], lse[:, q_heads, rows] = run_out.to(q.dtype), run_lse
        ctx.gather = gather
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[None, Tensor, Tensor]:  # pyright: ignore
        gather: Gather = ctx.gather
        q, kv, out, lse = ctx.saved_tensors
        seq_len = q.shape[1] * gather.transport.group.size()
        dq, dkv = torch.zeros_like(q, dtype=wide_dtype(q)), torch.empty_like(kv)
        for q_heads, kv_heads in _head_groups(q, kv, gather.head_stride):
            k, v = gather.gather(kv[:, :, :, kv_heads].contiguous())
            dk_all, dv_all = all_dkv = torch.zeros(2, *k.shape, dtype=wide_dtype(q), device=q.device)
            for rows, (keys, causal) in [(rows, block) for rows, seen in gather.blocks(seq_len) for block in seen]:
                dq_part, dk_part, dv_part = gather.kernel.backward(
                    dout[:, rows, q_heads],
                    q[:, rows, q_heads],
                    k[:, keys],
                    v[:, keys],
                    out[:, rows, q_heads],
                    lse[:, q_heads, rows],
                    causal=causal,
                    scale=gather.scale,
                )
                dq[:, rows, q_heads] += dq_part
                dk_all[:, keys] += dk_part
                dv_all[:, keys] += dv_part
            dkv[:, :, :, kv_heads] = gather.reduce_scatter(all_dkv.to(gather.dkv_dtype)).to(kv.dtype)
        return None, dq.to(q.dtype), dkv


def gather_attention(gather: Gather, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B,s,Hq,D], k and v [B,s,Hkv,D] -> [B,s,Hq,D]; tokens in the order of the layout."""
    return GatherAttention.apply(gather, q, torch.stack((k, v)))  # pyright: ignore[reportReturnType]
