"""Ring Attention: KV shards travel point to point around the group while each rank computes on the one it holds.

B batch, n = S/R tokens of a ring rank's shard, Hq and Hkv heads, D head size. Source: Ring Attention, arXiv 2310.01889;
zigzag and striped shards balance the causal mask (arXiv 2311.09431). KV is never expanded to all query heads.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench import ledger
from sp_bench.kernels import Kernel
from sp_bench.layouts import Block, LayoutKind, visible_block


@dataclass(frozen=True)
class Ring:
    """What all steps of one ring share."""

    kernel: Kernel
    group: dist.ProcessGroup
    layout: LayoutKind
    causal: bool
    scale: float
    dkv_dtype: torch.dtype  # what dK/dV travel in

    def blocks(self, shard_len: int) -> list[Block | None]:
        """What this rank computes at step t, when it holds the KV of rank (rank - t) mod R."""
        rank, size = self.group.rank(), self.group.size()
        return [
            visible_block(self.layout, rank, (rank - step) % size, shard_len, causal=self.causal)
            for step in range(size)
        ]

    def shift(self, tensor: Tensor) -> "InFlight":
        """Start sending `tensor` to the next rank, and receiving the previous rank's."""
        rank, size = self.group.rank(), self.group.size()
        received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(rank - 1) % size),
        ]
        with ledger.attention():
            return InFlight(tensor, received, dist.batch_isend_irecv(operations))


@dataclass(frozen=True)
class InFlight:
    """One hop under way. Keeps the sent tensor alive until it has left."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What partial results are merged in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Fold attention over more keys into (out [B,n,Hq,D], lse [B,Hq,n]) in place.

    exp(lse) are the softmax denominators, so each output is weighted by its share of their sum.
    """
    share = torch.sigmoid(part_lse - lse).transpose(1, 2).unsqueeze(-1)  # [B,Hq,n] -> [B,n,Hq,1]
    out.lerp_(part_out.to(out.dtype), share)
    torch.logaddexp(lse, part_lse, out=lse)


class RingAttention(torch.autograd.Function):
    """q [B,n,Hq,D], kv [2,B,n,Hkv,D] -> out [B,n,Hq,D] over the keys of the whole ring."""

    @staticmethod
    def forward(ctx, ring: Ring, q: Tensor, kv: Tensor) -> Tensor:  # pyright: ignore
        out = lse = None
        held, blocks = kv, ring.blocks(q.shape[1])
        for step, block in enumerate(blocks):
            last = step == len(blocks) - 1
            arriving = None if last else ring.shift(held)  # the next shard travels while this one computes
            if block is not None:
                part_out, part_lse = ring.kernel.forward(
                    q[:, block.q], held[0][:, block.kv], held[1][:, block.kv], causal=block.causal, scale=ring.scale
                )
                if out is None or lse is None:  # step 0 is the rank's own shard: every query sees at least itself
                    out, lse = part_out.to(wide_dtype(q)), part_lse.clone()
                else:
                    merge(out[:, block.q], lse[:, :, block.q], part_out, part_lse)
            if arriving:
                held = arriving.wait()
        assert out is not None
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[None, Tensor, Tensor]:  # pyright: ignore
        ring: Ring = ctx.ring
        q, kv, out, lse = ctx.saved_tensors
        wide = wide_dtype(q)
        dq = torch.zeros_like(q, dtype=wide)
        home = torch.zeros_like(kv, dtype=wide)  # the own block's dK/dV never travel: R-1 hops bring the others home
        held, blocks = kv, ring.blocks(q.shape[1])
        travelling: InFlight | None = None
        for step, block in enumerate(blocks):
            last = step == len(blocks) - 1
            arriving = None if last else ring.shift(held)
            share = torch.zeros_like(home) if step else home
            if block is not None:
                dq_part, dk_part, dv_part = ring.kernel.backward(
                    dout[:, block.q],
                    q[:, block.q],
                    held[0][:, block.kv],
                    held[1][:, block.kv],
                    out[:, block.q],
                    lse[:, :, block.q],
                    causal=block.causal,
                    scale=ring.scale,
                )
                dq[:, block.q] += dq_part
                share[0][:, block.kv] += dk_part
                share[1][:, block.kv] += dv_part
            if travelling:  # what the ranks before this one found for the same shard
                share += travelling.wait()
            if step:
                travelling = ring.shift(share.to(ring.dkv_dtype))
            if arriving:
                held = arriving.wait()
        if travelling:
            home += travelling.wait()
        return None, dq.to(q.dtype), home.to(kv.dtype)


def ring_attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B,n,Hq,D], k and v [B,n,Hkv,D] -> [B,n,Hq,D]; tokens in the order of the ring's layout."""
    # K and V travel as one message: [B,n,Hkv,D] twice -> [2,B,n,Hkv,D]
    return RingAttention.apply(ring, q, torch.stack((k, v)))  # pyright: ignore[reportReturnType]
