"""Ring Attention: KV shards travel point to point around the group while each rank computes on the one it holds.

B batch, n = S/R tokens of a ring rank's shard, Hq and Hkv heads, D head size. Source: Ring Attention, arXiv 2310.01889;
zigzag and striped shards balance the causal mask (arXiv 2311.09431). KV is never expanded to all query heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_bench.exchange import Message, Transport
from sp_bench.kernels import Attention
from sp_bench.layouts import Block, LayoutKind, visible_block
from sp_bench.merging import merge


@dataclass(frozen=True)
class Ring:
    """Attention of this rank's queries over the keys of the whole ring; tokens in the order of `layout`. At every step
    the next shard travels while the one at hand is computed."""

    kernel: Attention
    transport: Transport
    layout: LayoutKind
    dkv_dtype: torch.dtype  # what dK/dV travel in
    merge_dtype: torch.dtype  # what partial outputs and dQ are summed in

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q [B,n,Hq,D], k and v [B,n,Hkv,D] -> out [B,n,Hq,D], lse [B,Hq,n]."""

        def attend(kv: Tensor, block: Block) -> tuple[Tensor, Tensor]:
            keys = kv[:, :, block.kv]
            return self.kernel.forward(q[:, block.q], keys[0], keys[1], causal=block.causal, scale=scale)

        kv = torch.stack((k, v))  # K and V travel as one message: [B,n,Hkv,D] twice -> [2,B,n,Hkv,D]
        own, others = self._blocks(q.shape[1], causal)
        hop = self.transport.shift(kv) if others else None
        part_out, lse = attend(kv, own)  # every query sees at least itself, so its lse is finite from here on
        out = part_out.to(self.merge_dtype)
        del part_out
        for left, block in _countdown(others):
            assert hop is not None
            held = hop.wait()
            hop = self.transport.shift(held) if left else None
            if block is not None:
                merge(out[:, block.q], lse[:, :, block.q], *attend(held, block))
        return out.to(q.dtype), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B,n,Hq,D], dk and dv [B,n,Hkv,D]."""

        def differentiate(kv: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
            keys, rows = kv[:, :, block.kv], block.q
            given = (dout[:, rows], q[:, rows], keys[0], keys[1], out[:, rows], lse[:, :, rows])
            return self.kernel.backward(*given, causal=block.causal, scale=scale)

        kv = torch.stack((k, v))
        own, others = self._blocks(q.shape[1], causal)
        hop = self.transport.shift(kv) if others else None
        dq_part, *dkv = differentiate(kv, own)
        dq = dq_part.to(self.merge_dtype)
        home = torch.stack(dkv)  # the own block's dK/dV never travel: R-1 hops bring the others' shares home
        del dq_part, dkv  # names would keep them during the next kernel, where memory peaks; so below
        dkv_hop: Message | None = None
        for left, block in _countdown(others):
            assert hop is not None
            held = hop.wait()
            hop = self.transport.shift(held) if left else None
            parts = differentiate(held, block) if block is not None else None
            # what the ranks before this one found for the shard at hand, and this rank's share of it
            shares = dkv_hop.wait() if dkv_hop else torch.zeros_like(kv, dtype=self.dkv_dtype)
            if parts is not None and block is not None:
                dq[:, block.q] += parts[0]
                shares[0][:, block.kv] += parts[1]
                shares[1][:, block.kv] += parts[2]
            dkv_hop = self.transport.shift(shares)
            del held, parts, shares
        if dkv_hop:
            home += dkv_hop.wait()
        return dq.to(q.dtype), home[0], home[1]

    def _blocks(self, shard_len: int, causal: bool) -> tuple[Block, list[Block | None]]:
        """What this rank computes of its own shard, and at each step t of that of rank (rank - t) mod R."""
        rank, size = self.transport.group.rank(), self.transport.group.size()
        own, *others = (
            visible_block(self.layout, rank, (rank - step) % size, shard_len, causal=causal) for step in range(size)
        )
        assert own is not None
        return own, others


def _countdown(blocks: Sequence[Block | None]) -> Iterator[tuple[int, Block | None]]:
    """(blocks left after this one, block)."""
    return zip(range(len(blocks) - 1, -1, -1), blocks, strict=True)
