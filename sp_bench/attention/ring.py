"""Ring Attention: KV shards travel point to point around the group, while each rank computes on the one that it holds.

B batch, S tokens, R ring ranks, n = S/R tokens of a ring rank's shard, Hq and Hkv heads, D head size. Source: Ring
Attention, arXiv 2310.01889. Zigzag and striped shards balance the causal mask (striped: arXiv 2311.09431). KV is never
expanded to all query heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sp_bench.attention.exchange import Message, Transport
from sp_bench.attention.keys import add, add_all, joined, parted
from sp_bench.attention.layouts import (
    ALL,
    Block,
    LayoutKind,
    head_groups,
    packed_blocks,
    striped_window_blocks,
    visible_block,
)
from sp_bench.attention.merge import Part, merge
from sp_bench.kernels import Attention

T = TypeVar("T")
# Partial results are merged once they take this many times the memory of the queries. In bfloat16 a wide sum takes 2 of
# it, and the part that is next added to it 1.
UNMERGED = 3


@dataclass(frozen=True)
class Ring:
    """An `Attention` of this rank's queries over the keys of the whole ring; tokens are in the order of `layout`. At
    each step the next shard travels while the one at hand is computed."""

    kernel: Attention
    transport: Transport
    layout: LayoutKind
    dkv_dtype: torch.dtype  # in which dK/dV travel
    merge_dtype: torch.dtype  # in which merged outputs and dQ are kept until the next merge
    documents: tuple[int, ...] = ()  # packed tokens of each; empty: one document
    window: int | None = None  # striped only: no rank sends a shard further than the window reaches

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q [B,n,Hq,D], k and v [B,n,Hkv,D] -> out [B,n,Hq,D] in q's dtype, lse [B,Hq,n] in fp32 (fp64 when q is)."""

        attend = partial(forward_block, self.kernel, q, scale, k.shape[-1])
        held = joined(k, v)  # [B,n,Hkv,D] twice -> [2,B,n,Hkv,D]: K and V travel as one message
        own, others = self._blocks(q.shape[1], causal)
        hop = start_hop(self.transport, [held] if others else [])
        parts = [attend(held, block) for block in own]  # the first covers all queries: each sees at least itself
        for left, blocks in countdown(others):
            (held,) = hop.wait_all()
            hop = start_hop(self.transport, [held] if left else [])
            parts += [attend(held, block) for block in blocks]
            if left:
                parts = merged_in_between(parts, q, self.merge_dtype)
        out, lse = merged(parts, q, q.dtype)
        assert lse is not None
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B,n,Hq,D], dk and dv [B,n,Hkv,D], in the inputs' dtype."""

        differentiate = partial(backward_block, self.kernel, Queries(dout, q, out, lse), scale, k.shape[-1])
        kv = joined(k, v)  # [B,n,Hkv,D] twice -> [2,B,n,Hkv,D]
        own, others = self._blocks(q.shape[1], causal)

        def of_own(heads: slice, kv_heads: slice) -> tuple[list[Part], Tensor, Tensor]:
            """dq, dk and dv of some heads over this rank's own keys, all of which the first block covers."""
            first, dk, dv = differentiate(kv, own[0], heads, kv_heads)
            parts = [first]
            for block in own[1:]:
                part, *dkv = differentiate(kv, block, heads, kv_heads)
                dk[:, block.kv] += dkv[0]
                dv[:, block.kv] += dkv[1]
                parts.append(part)
            return parts, dk, dv

        hop = start_hop(self.transport, [kv] if others else [])
        # Half of the own block's heads are computed while the first KV travels, the other half while the last dK/dV do.
        kv_heads = k.shape[2]
        early, *late = head_groups(q.shape[2], kv_heads, -(-kv_heads // 2) if others else kv_heads)
        dq_parts, *dkv = of_own(*early)
        own_dkv = [dkv]
        del dkv  # otherwise it would live on during the next kernel, where memory peaks; likewise below
        held = list(hop.wait_all())
        shares: list[Tensor] = []  # dK/dV of the shard at hand [2,B,n,Hkv,D]: the sum over the ranks that computed it
        for left, blocks in countdown(others):
            # KV and dK/dV travel as one message: a second one would find the device filled by the kernel
            hop = start_hop(self.transport, [*(held if left else []), *shares])
            found = [(block.kv, *differentiate(held[0], block)) for block in blocks]
            *held, arrived = [*hop.wait_all(), *([] if shares else [torch.zeros_like(kv, dtype=self.dkv_dtype)])]
            for at, part, *dkv in found:
                add(arrived, at, *dkv)
                dq_parts.append(part)
                del part, dkv
            shares = [arrived]
            del found, arrived
            if left or late:
                dq_parts = merged_in_between(dq_parts, q, self.merge_dtype)
        # on to where the shard came from: the next rank, unless a window ended the hops
        hop = start_hop(self.transport, shares, hops=self.transport.group.size() - len(others))
        for heads in late:
            more, *dkv = of_own(*heads)
            dq_parts += more
            own_dkv.append(dkv)
        dq, _ = merged(dq_parts, q, q.dtype)
        # The own block's dK/dV never travel: R-1 hops bring the others' shares home.
        dk, dv = (torch.cat(shares, dim=2) if late else shares[0] for shares in zip(*own_dkv, strict=True))
        for arrived in hop.wait_all():
            add_all(dk, dv, arrived)
        return dq, dk, dv

    def _blocks(self, shard_len: int, causal: bool) -> tuple[list[Block], list[list[Block]]]:
        """The blocks that this rank computes against its own KV shard, and those against the others' shards. At step t
        it holds the shard of rank (rank - t) mod R; no blocks: the mask hides all of that shard."""
        rank, size = self.transport.group.rank(), self.transport.group.size()
        if self.documents:
            own, *others = (
                packed_blocks(self.layout, rank, (rank - step) % size, size, self.documents) for step in range(size)
            )
            return own, others
        if self.window is not None:
            own, *others = striped_window_blocks(rank, size, shard_len, self.window)
            assert own is not None
            return [own], [[] if block is None else [block] for block in others]
        own, *others = (
            visible_block(self.layout, rank, (rank - step) % size, shard_len, causal=causal) for step in range(size)
        )
        assert own is not None
        return [own], [[] if block is None else [block] for block in others]


class Queries(NamedTuple):
    """What a backward knows of this rank's queries."""

    dout: Tensor  # [B,n,Hq,D]
    q: Tensor
    out: Tensor
    lse: Tensor  # [B,Hq,n]


def forward_block(kernel: Attention, q: Tensor, scale: float, key_dim: int, kv: Tensor, block: Block) -> Part:
    """The output of one block. q [B,n,Hq,D]; kv [2,B,n,Hkv,D]: K and V of one shard; key_dim: the size of a key."""
    keys = parted(kv[:, :, block.kv], key_dim)
    part = kernel.forward(q[:, block.q], keys[0], keys[1], causal=block.causal, scale=scale, **block.mask)
    return Part(*part, rows=block.q)


def backward_block(
    kernel: Attention,
    queries: Queries,
    scale: float,
    key_dim: int,
    kv: Tensor,
    block: Block,
    heads: slice = ALL,
    kv_heads: slice = ALL,
) -> tuple[Part, Tensor, Tensor]:
    """dq, dk and dv of one block, or of some of its heads."""
    keys, at = parted(kv[:, :, block.kv, kv_heads], key_dim), (slice(None), block.q, heads)
    given = (queries.dout[at], queries.q[at], keys[0], keys[1], queries.out[at], queries.lse[:, heads, block.q])
    dq, dk, dv = kernel.backward(*given, causal=block.causal, scale=scale, **block.mask)
    return Part(dq, rows=block.q, heads=heads), dk, dv


def start_hop(transport: Transport, tensors: list[Tensor], hops: int = 1) -> Message:
    """Start to send `tensors` to the next rank, or `hops` ranks on, before the kernel that is launched next. No
    tensors, no message."""
    if not tensors:
        return Message((), (), ())
    hop = transport.shift(tensors, hops)
    hop.go_first()
    return hop


def countdown(blocks: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Each block with the number of blocks after it, which comes first."""
    return zip(range(len(blocks) - 1, -1, -1), blocks, strict=True)


def merged_in_between(parts: list[Part], like: Tensor, dtype: torch.dtype) -> list[Part]:
    """The parts, merged into one in `dtype` if they take UNMERGED times the memory of `like`."""
    held = sum(part.values.nbytes for part in parts)
    return [Part(*merged(parts, like, dtype))] if held >= UNMERGED * like.nbytes else parts


def merged(parts: Sequence[Part], like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The parts merged into values for all rows and heads of `like` [B,n,H,D], in `dtype`, and their lse. Uses the
    first part's values where they have this shape and dtype already. Their size may be another than D."""
    first, *others = parts
    shape = (*like.shape[:-1], first.values.shape[-1])
    whole = first.values.dtype == dtype and first.values.shape == shape
    out = first.values if whole else like.new_empty(shape, dtype=dtype)
    if whole and not others:
        return out, first.lse
    # the first part's keys are this rank's own: each query sees one, so its lse covers all queries
    lse = None if first.lse is None else torch.empty_like(first.lse)
    merge(parts, out, lse)
    return out, lse
