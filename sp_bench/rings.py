"""Ring Attention: KV shards travel point to point around the group while each rank computes on the one it holds.

B batch, n = S/R tokens of a ring rank's shard, Hq and Hkv heads, D head size. Source: Ring Attention, arXiv 2310.01889;
zigzag and striped shards balance the causal mask (arXiv 2311.09431). KV is never expanded to all query heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_bench.exchange import Message, Transport
from sp_bench.kernels import Kernel
from sp_bench.layouts import Block, LayoutKind, visible_block
from sp_bench.merging import merge


@dataclass(frozen=True)
class Ring:
    """What all steps of one ring share."""

    kernel: Kernel
    transport: Transport
    layout: LayoutKind
    causal: bool
    scale: float
    dkv_dtype: torch.dtype  # what dK/dV travel in
    merge_dtype: torch.dtype  # what partial outputs and dQ are summed in

    def blocks(self, shard_len: int) -> list[Block | None]:
        """What this rank computes at step t, when it holds the KV of rank (rank - t) mod R; step 0 is its own shard."""
        rank, size = self.transport.group.rank(), self.transport.group.size()
        return [
            visible_block(self.layout, rank, (rank - step) % size, shard_len, causal=self.causal)
            for step in range(size)
        ]

    def attend(self, q: Tensor, kv: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """out [B,rows,Hq,D] and lse [B,Hq,rows] of the block's queries over its keys."""
        k, v = kv[0][:, block.kv], kv[1][:, block.kv]
        return self.kernel.forward(q[:, block.q], k, v, causal=block.causal, scale=self.scale)

    def differentiate(
        self, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's share of dq, dk and dv; `out` and `lse` are those of all keys."""
        k, v, rows = kv[0][:, block.kv], kv[1][:, block.kv], block.q
        return self.kernel.backward(
            dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, :, rows], causal=block.causal, scale=self.scale
        )


def _countdown(blocks: Sequence[Block | None]) -> Iterator[tuple[int, Block | None]]:
    """(blocks left after this one, block)."""
    return zip(range(len(blocks) - 1, -1, -1), blocks, strict=True)


class RingAttention(torch.autograd.Function):
    """q [B,n,Hq,D], kv [2,B,n,Hkv,D] -> out [B,n,Hq,D] over the keys of the whole ring.

    At every step the next shard travels while the one at hand is computed.
    """

    @staticmethod
    def forward(ctx, ring: Ring, q: Tensor, kv: Tensor) -> Tensor:  # pyright: ignore
        own, *others = ring.blocks(q.shape[1])
        assert own is not None
        hop = ring.transport.shift(kv) if others else None
        part_out, lse = ring.attend(q, kv, own)  # every query sees at least itself, so its lse is finite from here on
        out = part_out.to(ring.merge_dtype)
        for left, block in _countdown(others):
            assert hop is not None
            held = hop.wait()
            hop = ring.transport.shift(held) if left else None
            if block is not None:
                merge(out[:, block.q], lse[:, :, block.q], *ring.attend(q, held, block))
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[None, Tensor, Tensor]:  # pyright: ignore
        ring: Ring = ctx.ring
        q, kv, out, lse = ctx.saved_tensors
        own, *others = ring.blocks(q.shape[1])
        assert own is not None
        hop = ring.transport.shift(kv) if others else None
        dq_part, *dkv = ring.differentiate(dout, q, kv, out, lse, own)
        dq = dq_part.to(ring.merge_dtype)
        home = torch.stack(dkv)  # the own block's dK/dV never travel: R-1 hops bring the others' shares home
        dkv_hop: Message | None = None
        for left, block in _countdown(others):
            assert hop is not None
            held = hop.wait()
            hop = ring.transport.shift(held) if left else None
            parts = ring.differentiate(dout, q, held, out, lse, block) if block is not None else None
            # what the ranks before this one found for the shard at hand, and this rank's share of it
            shares = dkv_hop.wait() if dkv_hop else torch.zeros_like(kv, dtype=ring.dkv_dtype)
            if parts is not None and block is not None:
                dq[:, block.q] += parts[0]
                shares[0][:, block.kv] += parts[1]
                shares[1][:, block.kv] += parts[2]
            dkv_hop = ring.transport.shift(shares)
        if dkv_hop:
            home += dkv_hop.wait()
        return None, dq.to(q.dtype), home


def ring_attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B,n,Hq,D], k and v [B,n,Hkv,D] -> [B,n,Hq,D]; tokens in the order of the ring's layout."""
    # K and V travel as one message: [B,n,Hkv,D] twice -> [2,B,n,Hkv,D]
    return RingAttention.apply(ring, q, torch.stack((k, v)))  # pyright: ignore[reportReturnType]
