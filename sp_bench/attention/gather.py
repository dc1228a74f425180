"""KV all-gather attention: every rank gathers all keys and values, and computes its own queries against them.

B batch, S tokens, P ranks, s = S/P tokens a rank, Hq and Hkv heads, h KV heads gathered at a time, D head size.
Source: the context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2). The backward gathers KV again, and
reduce-scatters dK/dV.

Messages overlap kernels. While the others' KV travels, a rank computes the part that needs only its own KV. While it
computes one group of heads, the KV of the next group arrives and the dK/dV of the last group leave.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from sp_bench.attention.exchange import Message, Transport
from sp_bench.attention.head_exchange import by_rows
from sp_bench.attention.keys import joined, parted
from sp_bench.attention.layouts import SequenceLayout, cut_by, head_groups, seen_across
from sp_bench.attention.merge import Part, merge, wide_dtype
from sp_bench.config.documents import spans
from sp_bench.kernels import Attention


@dataclass(frozen=True)
class Run:
    """Consecutive tokens that this rank holds, and the keys that they see."""

    rows: slice  # where they are among the local tokens
    diagonal: bool  # True: they see each other, causally; this needs only the rank's own KV
    gathered: slice | None  # global positions of further keys, all of which `seeing` see; None: no such keys
    seeing: slice  # where the tokens that see them are among the local tokens: all of the run, unless documents end
    documents: tuple[int, ...] = ()  # packed: how many tokens of the run each document has, in order

    def call(self, causal: bool) -> tuple[slice, dict[str, tuple[int, ...]]]:
        """The local queries of the run's diagonal block (`causal`), or of that against the keys before it, and the
        kernel's arguments besides its tensors."""
        if not causal:
            return self.seeing, {}
        return self.rows, {"documents": self.documents} if self.documents else {}


@dataclass(frozen=True)
class Place:
    """Consecutive tokens that one rank holds."""

    tokens: slice  # global positions
    rank: int
    rows: slice  # where they are among that rank's tokens


@dataclass(frozen=True)
class Gather:
    """An `Attention` of this rank's queries over the keys of all ranks; tokens are in the order of `layout`."""

    kernel: Attention
    transport: Transport
    layout: SequenceLayout  # contiguous or zigzag: each rank holds runs of consecutive tokens
    head_stride: int  # KV heads gathered at a time
    dkv_dtype: torch.dtype  # in which dK/dV travel
    documents: tuple[int, ...] = ()  # packed tokens of each; empty: one document

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q [B,s,Hq,D], k and v [B,s,Hkv,D] -> out [B,s,Hq,D] in q's dtype, lse [B,Hq,s] in fp32 (fp64 when q is)."""

        def attend(run: Run, heads: slice, keys: Tensor, causal: bool) -> Part:
            rows, packed = run.call(causal)
            kv_seen = parted(keys, k.shape[-1])
            part = self.kernel.forward(q[:, rows, heads], *kv_seen, causal=causal, scale=scale, **packed)
            return Part(*part, rows=rows)

        # [B,s,Hkv,D] twice -> [2,B,s,Hkv,D]: K and V travel as one message
        kv, runs = joined(k, v), self.runs(q.shape[1] * self.transport.group.size(), causal)
        out: Tensor | None = None
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide_dtype(q))
        groups = head_groups(q.shape[2], k.shape[2], self.head_stride)
        coming = self.start(kv[:, :, :, groups[0][1]])
        for (q_heads, kv_heads), following in zip(groups, [*groups[1:], None], strict=True):
            own = kv[:, :, :, kv_heads]
            parts = [attend(run, q_heads, own[:, :, run.rows], True) for run in runs if run.diagonal]
            whole = coming()
            coming = self.start(kv[:, :, :, following[1]]) if following else coming
            parts += [attend(run, q_heads, whole[:, :, run.gathered], False) for run in runs if run.gathered]
            out = q.new_empty(*q.shape[:-1], parts[0].values.shape[-1]) if out is None else out
            merge(parts, out[:, :, q_heads], lse[:, q_heads])
            del parts, whole  # otherwise they would live on during the next group's kernels; likewise below
        assert out is not None
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B,s,Hq,D], dk and dv [B,s,Hkv,D], in the inputs' dtype."""
        kv, runs = joined(k, v), self.runs(q.shape[1] * self.transport.group.size(), causal)
        dq, dkv = None, torch.zeros_like(kv)

        def differentiate(run: Run, heads: slice, keys: Tensor, causal: bool) -> tuple[Part, Tensor, Tensor]:
            rows, packed = run.call(causal)
            at = (slice(None), rows, heads)
            given = (dout[at], q[at], *parted(keys, k.shape[-1]), out[at], lse[:, heads, rows])
            dq_part, dk, dv = self.kernel.backward(*given, causal=causal, scale=scale, **packed)
            return Part(dq_part, rows=rows), dk, dv

        def in_own(run: Run, heads: slice, kv_heads: slice) -> Part:
            """The run's dq from this rank's own keys. Its dk and dv stay on this rank, so they are stored at once."""
            part, *own = differentiate(run, heads, kv[:, :, run.rows, kv_heads], True)
            for to, found in zip(parted(dkv, k.shape[-1]), own, strict=True):
                to[:, run.rows, kv_heads] = found
            return part

        diagonals = [run for run in runs if run.diagonal]
        leaving: tuple[slice, Message] | None = None

        def bring_home() -> None:
            """Add what the message that is under way brings to this rank's own dk and dv."""
            if leaving is not None:
                dkv[:, :, :, leaving[0]] += leaving[1].wait()

        groups = head_groups(q.shape[2], k.shape[2], self.head_stride)
        coming = self.start(kv[:, :, :, groups[0][1]])
        for (q_heads, kv_heads), following in zip(groups, [*groups[1:], None], strict=True):
            # the first run's diagonal block is computed while KV travels, those of the others while dK/dV travel
            parts = [in_own(run, q_heads, kv_heads) for run in diagonals[:1]]
            whole = coming()
            coming = self.start(kv[:, :, :, following[1]]) if following else coming
            found = [
                (run.gathered, *differentiate(run, q_heads, whole[:, :, run.gathered], False))
                for run in reversed(runs)  # the last run sees most keys, and `_reduce` takes the longest first
                if run.gathered
            ]
            parts += [part for _, part, *_ in found]
            shares = [(tokens, dk, dv) for tokens, _, dk, dv in found]
            bring_home()
            leaving = kv_heads, self._reduce(shares, kv[:, :, :, kv_heads], k.shape[-1])
            del whole, found, shares
            parts += [in_own(run, q_heads, kv_heads) for run in diagonals[1:]]
            dq = torch.empty_like(q) if dq is None else dq
            merge(parts, dq[:, :, q_heads])
            del parts
        bring_home()
        assert dq is not None
        return dq, *parted(dkv, k.shape[-1])

    def places(self, seq_len: int) -> list[Place]:
        """Which rank holds which tokens, as one entry for each run of each rank."""
        return [
            Place(slice(run.start, run.stop), rank, rows)
            for rank in range(self.transport.group.size())
            for rows, run in _runs(self.layout, rank, seq_len)
        ]

    def runs(self, seq_len: int, causal: bool) -> list[Run]:
        """The runs of tokens that this rank holds, in order, with the keys that they see."""
        mine = _runs(self.layout, self.transport.group.rank(), seq_len)
        if not causal:
            return [Run(rows, False, slice(0, seq_len), rows) for rows, _ in mine]
        if self.documents:
            return packed_runs(self.layout, self.transport.group.rank(), self.documents)
        return [Run(rows, True, slice(0, run.start) if run.start else None, rows) for rows, run in mine]

    def start(self, kv: Tensor) -> Callable[[], Tensor]:
        """Start to gather kv [2,B,s,h,D]. Returns a function that waits and gives [2,B,S,h,D] in global token order."""
        message = self.transport.all_gather(kv.contiguous())
        message.go_first()

        def arrive() -> Tensor:
            by_rank = message.wait().unflatten(0, (-1, len(kv)))  # [P*2,B,s,h,D] -> [P,2,B,s,h,D]
            seq_len = by_rank.shape[0] * kv.shape[2]
            whole = kv.new_empty(*kv.shape[:2], seq_len, *kv.shape[3:])
            to, source = by_rows(whole, by_rank)
            # [P,2,B,s,h,D] -> [2,B,S,h,D]: each run of tokens to its global positions
            for place in self.places(seq_len):
                to[:, :, place.tokens].copy_(source[place.rank, :, :, place.rows])
            return whole

        return arrive

    def _reduce(self, shares: list[tuple[slice, Tensor, Tensor]], like: Tensor, key_dim: int) -> Message:
        """Start to sum over the ranks, in `dkv_dtype`, the dk and dv that each found for the keys of all ranks.

        shares: (tokens, dk [B,n,h,D], dv [B,n,h,D]), where `tokens` is the global slice 0..n; the longest share first.
            Of packed documents it is a slice m..m+n.
        The message gives each rank the sums for its own tokens, [2,B,s,h,D] as `like`.
        """
        size, local = self.transport.group.size(), like.shape[2]
        sent = like.new_empty(size, *like.shape, dtype=self.dkv_dtype)
        # sums of [B,n,h,D] -> [P,2,B,s,h,D]: each run of tokens to the rank that holds it; rank axis first
        for place in self.places(size * local):
            if self.documents:
                add_shares(sent[place.rank, :, :, place.rows], place.tokens, shares, key_dim)
                continue
            found = [dkv for tokens, *dkv in shares if place.tokens.stop <= tokens.stop]
            for which, slot in enumerate(parted(sent[place.rank, :, :, place.rows], key_dim)):
                parts = [dkv[which][:, place.tokens] for dkv in found]
                slot.copy_(parts[0]) if parts else slot.zero_()
                for other in parts[1:]:
                    slot += other
        # [P,2,B,s,h,D] -> [P*2,B,s,h,D]: rank p receives slices 2p and 2p+1, its dk and dv
        message = self.transport.reduce_scatter(sent.flatten(0, 1))
        message.go_first()
        return message


@cache
def packed_runs(layout: SequenceLayout, rank: int, documents: tuple[int, ...]) -> list[Run]:
    """The runs of tokens that `rank` holds, where documents of these lengths are packed: what each sees of itself, and
    of the keys before it, which at most one document shares with it. Cached as `_runs` is."""
    return [_packed_run(rows, run, documents) for rows, run in _runs(layout, rank, sum(documents))]


def _packed_run(rows: slice, run: range, documents: tuple[int, ...]) -> Run:
    inside = cut_by(spans(documents), run)
    seen = seen_across(run, range(run.start), documents)
    if seen is None:
        return Run(rows, True, None, rows, inside)
    queries, keys = seen
    return Run(rows, True, slice(keys.start, keys.stop), slice(rows.start, rows.start + len(queries)), inside)


def add_shares(to: Tensor, tokens: slice, shares: list[tuple[slice, Tensor, Tensor]], key_dim: int) -> None:
    """Set `to` [2,B,n,h,D] to the sum of what the shares have of the keys at the global positions `tokens`."""
    to.zero_()
    for at, *dkv in shares:
        first, end = max(at.start, tokens.start), min(at.stop, tokens.stop)
        if first < end:
            for into, found in zip(parted(to, key_dim), dkv, strict=True):
                into[:, first - tokens.start : end - tokens.start] += found[:, first - at.start : end - at.start]


@cache
def _runs(layout: SequenceLayout, rank: int, seq_len: int) -> list[tuple[slice, range]]:
    """(where among the rank's tokens, global tokens) of each run of `rank`.

    Cached, because in a short step the device waits for the host.
    """
    runs = layout.runs(rank, seq_len)
    stops = list(accumulate(map(len, runs)))
    return [(slice(stop - len(run), stop), run) for stop, run in zip(stops, runs, strict=True)]
