"""Double ring: KV travels around small inner rings, and around an outer ring from one of them to the next.

The ranks of a ring stand in windows, of w neighbours each. While a window passes the shards that it holds around
itself, w-1 hops, its ranks send those that the turn began with to the same place in the next window. So of the R-1 hops
that a shard makes in all only R/w - 1 leave a window, and each of these has a whole turn of kernels to hide behind. The
bytes are those of one ring. Source: LoongTrain, arXiv 2406.18485.

B batch, S tokens, R ranks in R/w windows of w, n = S/R tokens of a rank's shard, Hq and Hkv heads, D head size.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sp_bench.attention.exchange import Message, Transport
from sp_bench.attention.keys import add, add_all, joined
from sp_bench.attention.layouts import Block, LayoutKind, head_groups, visible_block
from sp_bench.attention.merge import Part
from sp_bench.attention.ring import (
    Queries,
    backward_block,
    countdown,
    forward_block,
    merged,
    merged_in_between,
    start_hop,
)
from sp_bench.kernels import Attention


@dataclass
class Shares:
    """dK/dV of one shard: what this rank found, and what is on its way here from the ranks that computed it before."""

    found: Tensor  # [2,B,n,Hkv,D]
    coming: list[Message]

    def total(self) -> Tensor:
        for message in self.coming:
            for arrived in message.wait_all():
                self.found += arrived
        return self.found


@dataclass(frozen=True)
class DoubleRing:
    """An `Attention` of this rank's queries over the keys of all R ranks; tokens are in the order of `layout`."""

    kernel: Attention
    inner: Transport  # over the w ranks of a window
    outer: Transport  # over the ranks in this place of all windows
    layout: LayoutKind
    dkv_dtype: torch.dtype  # in which dK/dV travel
    merge_dtype: torch.dtype  # in which merged outputs and dQ are kept until the next merge

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q [B,n,Hq,D], k and v [B,n,Hkv,D] -> out [B,n,Hq,D] in q's dtype, lse [B,Hq,n] in fp32 (fp64 when q is)."""
        attend = partial(forward_block, self.kernel, q, scale, k.shape[-1])
        first = joined(k, v)  # with which a turn begins: [B,n,Hkv,D] twice -> [2,B,n,Hkv,D]
        parts: list[Part] = []  # the first covers all queries: each sees at least itself
        for turns_left, turn in countdown(self._turns(q.shape[1], causal)):
            next_first = start_hop(self.outer, [first] if turns_left else [])
            held = first
            for left, block in countdown(turn):
                hop = start_hop(self.inner, [held] if left else [])
                if block is not None:
                    parts.append(attend(held, block))
                if left or turns_left:
                    parts = merged_in_between(parts, q, self.merge_dtype)
                (held,) = hop.wait_all() or (held,)
            (first,) = next_first.wait_all() or (first,)
        out, lse = merged(parts, q, q.dtype)
        assert lse is not None
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B,n,Hq,D], dk and dv [B,n,Hkv,D], in the inputs' dtype.

        A turn's dK/dV gather around the window and come home to the rank that began with the shard. It sends them on to
        the next window, after its first kernel of the next turn, beside which they may still be coming home.
        """
        differentiate = partial(backward_block, self.kernel, Queries(dout, q, out, lse), scale, k.shape[-1])
        kv = first = joined(k, v)  # [B,n,Hkv,D] twice -> [2,B,n,Hkv,D]
        turns, kv_heads = self._turns(q.shape[1], causal), k.shape[2]
        own = turns[0][0]
        assert own is not None
        # Half of the own block's heads are computed first, the other half while the last dK/dV travel.
        alone = len(turns) * len(turns[0]) == 1
        early, *late = head_groups(q.shape[2], kv_heads, kv_heads if alone else -(-kv_heads // 2))
        dq_parts: list[Part] = []
        own_dkv: list[list[Tensor]] = []  # what this rank finds of its own shard, which never travels
        own_coming: list[Message] = []  # what the other ranks found of it
        before: Shares | None = None  # of the shard with which the turn before began, if it was not this rank's own
        for number, (turns_left, turn) in enumerate(countdown(turns)):
            next_first = start_hop(self.outer, [first] if turns_left else [])
            hop = start_hop(self.inner, [first] if len(turn) > 1 else [])
            found = torch.zeros_like(first, dtype=self.dkv_dtype)
            if number == 0:
                dq_part, *dkv = differentiate(first, own, *early)
                dq_parts.append(dq_part)
                own_dkv.append(dkv)
                del dq_part, dkv  # otherwise they would live on during the next kernel, where memory peaks
            elif turn[0] is not None:
                dq_parts.append(_share(found, turn[0], differentiate(first, turn[0])))
            sent_on = start_hop(self.outer, [before.total()] if before else [])
            held, travelling = list(hop.wait_all()), []  # KV at hand; dK/dV of it, summed over the ranks that had it
            for left, block in countdown(turn[1:]):
                hop = start_hop(self.inner, [*(held if left else []), *travelling])
                computed = differentiate(held[0], block) if block is not None else None
                *held, arrived = [*hop.wait_all(), *([] if travelling else [torch.zeros_like(found)])]
                if computed is not None and block is not None:
                    dq_parts.append(_share(arrived, block, computed))
                travelling = [arrived]
                del computed, arrived
                if left or turns_left or late:
                    dq_parts = merged_in_between(dq_parts, q, self.merge_dtype)
            home = start_hop(self.inner, travelling)
            if number == 0:
                own_coming.append(home)
            else:
                before = Shares(found, [home, sent_on])
            (first,) = next_first.wait_all() or (first,)
        own_coming.append(start_hop(self.outer, [before.total()] if before else []))
        for heads in late:
            dq_part, *dkv = differentiate(kv, own, *heads)
            dq_parts.append(dq_part)
            own_dkv.append(dkv)
        dq, _ = merged(dq_parts, q, q.dtype)
        dk, dv = (torch.cat(halves, dim=2) if late else halves[0] for halves in zip(*own_dkv, strict=True))
        for message in own_coming:
            for arrived in message.wait_all():
                add_all(dk, dv, arrived)
        return dq, dk, dv

    def _turns(self, shard_len: int, causal: bool) -> list[list[Block | None]]:
        """The blocks that this rank computes, of each turn. In step s of turn t it holds the shard of the rank s places
        before it in the window t places before its own; None: the causal mask hides all of that shard."""
        place, width = self.inner.group.rank(), self.inner.group.size()
        window, num_windows = self.outer.group.rank(), self.outer.group.size()
        return [
            [
                visible_block(
                    self.layout,
                    window * width + place,
                    (window - turn) % num_windows * width + (place - step) % width,
                    shard_len,
                    causal=causal,
                )
                for step in range(width)
            ]
            for turn in range(num_windows)
        ]


def _share(to: Tensor, block: Block, computed: tuple[Part, Tensor, Tensor]) -> Part:
    """Add the dK/dV of a block to those of its shard, [2,B,n,Hkv,D]; returns the block's dQ."""
    dq, *dkv = computed
    add(to, block.kv, *dkv)
    return dq
