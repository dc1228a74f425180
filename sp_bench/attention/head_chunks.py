"""Ulysses in chunks of heads: while the kernel computes one chunk, the next chunk's Q, K and V and the last chunk's
output travel.

B batch, S tokens, P ranks, Hq and Hkv heads, h heads of a rank in one chunk, D head size. A rank computes Hq/P query
and Hkv*/P key/value heads, where Hkv* = max(Hkv, P) counts replicated ones. Heads are independent, so any cut of them
is exact; one chunk is plain Ulysses. Source: DeepSpeed-Ulysses, arXiv 2309.14509.

"By heads" a tensor has all tokens of this rank's heads, [B,S,h,D]. "By tokens" it has this rank's tokens of all heads,
[B,S/P,P,h,D].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from sp_bench.attention.autograd import Attend, Kept, differentiable
from sp_bench.attention.exchange import Transport
from sp_bench.attention.head_exchange import by_rank, copy_rows, exchange_heads, replicate_kv_heads
from sp_bench.attention.merge import wide_dtype
from sp_bench.attention.sinks import merge_sinks, sink_gradients
from sp_bench.kernels import Attention


@dataclass(frozen=True)
class Chunk:
    """The heads of one chunk, as slices of the heads that one rank computes."""

    queries: slice
    kv: slice
    brings_kv: bool  # False: it reads the same key/value heads as the chunk before, which are here already


@dataclass(frozen=True)
class HeadChunks:
    """How Ulysses attention is computed in chunks. `num_chunks` must divide Hq/P. It must also divide Hkv*/P, or be a
    multiple of it; chunks then share KV heads."""

    attention: Attention  # on all tokens of some heads: a kernel, or a ring of such ranks
    transport: Transport
    causal: bool
    scale: float
    num_chunks: int

    def parts(self, num_heads: int, num_kv_heads: int) -> list[Chunk]:
        """The chunks of one rank's `num_heads` query heads and `num_kv_heads` key/value heads."""
        queries = num_heads // self.num_chunks
        kv = max(num_kv_heads // self.num_chunks, 1)
        parts: list[Chunk] = []
        for chunk in range(self.num_chunks):
            first_kv = chunk * num_kv_heads // self.num_chunks
            kv_heads = slice(first_kv, first_kv + kv)
            brings_kv = not parts or parts[-1].kv != kv_heads
            parts.append(Chunk(slice(chunk * queries, (chunk + 1) * queries), kv_heads, brings_kv))
        return parts

    def sinks_of_parts(self, sinks: Tensor | None, parts: Sequence[Chunk]) -> list[Tensor | None]:
        """The sinks [Hq] of this rank's heads in each chunk, [h]."""
        if sinks is None:
            return [None] * len(parts)
        mine = sinks.chunk(self.transport.group.size())[self.transport.group.rank()]
        return [mine[part.queries] for part in parts]

    def sink_gradients_of_all(self, of_parts: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients of the chunks' sinks [h], in their order, at this rank's heads of [Hq]; 0 at others'."""
        found = [each for each in of_parts if each is not None]
        if not found:
            return None
        mine, size = torch.cat(found), self.transport.group.size()
        whole = mine.new_zeros(size, len(mine))
        whole[self.transport.group.rank()] = mine
        return whole.flatten()

    def computed(
        self, to_heads: Sequence[Sequence[Tensor]], compute: Callable[[list[Tensor]], Sequence[Tensor]]
    ) -> Iterator[list[Tensor]]:
        """Exchange and compute one chunk after the other; yields each chunk's results.

        to_heads: the tensors of each chunk, by tokens. `compute` takes them by heads and returns its results by heads.
        The yielded results are by tokens.

        While a chunk is computed, the next chunk's tensors and the last chunk's results travel as one message. A second
        message, behind the first, would find the device filled by the kernel.
        """
        results: Sequence[Tensor] = []
        home: list[list[Tensor]] = []
        coming = exchange_heads(to_heads[0], [], self.transport)
        for following in [*to_heads[1:], []]:
            beside = exchange_heads(following, results, self.transport) if following or results else None
            results = []  # from here on the message holds them, and lets go of them when they have arrived
            arrived, returned = coming.arrive()
            home += [returned] if returned else []
            if beside:
                beside.message.go_first()
            results = compute(arrived)
            del arrived
            coming = beside or coming
        last = exchange_heads([], results, self.transport)
        under_way = [coming, last] if len(to_heads) > 1 else [last]  # they bring the results of the last two chunks
        return chain(home, (exchange.arrive()[1] for exchange in under_way))

    def exchanged_again(
        self, to_heads: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], lses: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """q, k, v and output by heads, and lse, of one chunk after the other, without a kernel. `to_heads` as in
        `computed`; `outs` are the chunks' outputs by tokens."""
        kv_at_hand: list[Tensor] = []
        for tensors, out, lse in zip(to_heads, outs, lses, strict=True):
            # two messages, so that the output comes in memory of its own, as a kernel leaves it
            coming = [exchange_heads(sent, [], self.transport) for sent in (tensors, [out])]
            (q_part, *kv), (out_part,) = (exchange.arrive()[0] for exchange in coming)
            kv_at_hand = kv or kv_at_hand
            yield from (q_part, *kv_at_hand, out_part, lse)


class ChunkedAttention(torch.autograd.Function):
    """q [B,S/P,Hq,D], k and v [B,S/P,Hkv*,D] -> output [B,S/P,Hq,D].

    Saved for the backward, of each chunk: q, k, v and output by heads [B,S,h,D], and lse [B,h,S]. What is `kept` for a
    second call is the output by tokens, because the layer needs that one too, and lse.
    """

    @staticmethod
    def forward(  # pyright: ignore
        ctx, chunks: HeadChunks, kept: Kept | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        size = chunks.transport.group.size()
        q, k, v = (by_rank(t, size) for t in (q, k, v))  # [B,S/P,H,D] -> [B,S/P,P,H/P,D]
        parts = chunks.parts(q.shape[3], k.shape[3])
        saved: list[Tensor] = []
        kv_at_hand: list[Tensor] = []  # of the last chunk that brought any
        of_parts = chunks.sinks_of_parts(sinks, parts)

        def attend(arrived: list[Tensor]) -> Sequence[Tensor]:
            q_part, *kv = arrived
            kv_at_hand[:] = kv or kv_at_hand
            computed = chunks.attention.forward(q_part, *kv_at_hand, causal=chunks.causal, scale=chunks.scale)
            part_out, lse = merge_sinks(*computed, of_parts[len(saved) // 5])
            saved.extend([q_part, *kv_at_hand, part_out, lse])
            return [part_out]

        to_heads = [
            [q[:, :, :, part.queries], *(t[:, :, :, part.kv] for t in (k, v) if part.brings_kv)] for part in parts
        ]
        held = kept.take() if kept else ()
        if held:
            out, *lses = held
            saved += chunks.exchanged_again(to_heads, [out[:, :, :, part.queries] for part in parts], lses)
        else:
            arrivals = chunks.computed(to_heads, attend)
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
            for part, (part_out,) in zip(parts, arrivals, strict=True):
                copy_rows(out[:, :, :, part.queries], part_out)
            if kept:
                kept.put(out, *saved[4::5])
        ctx.chunks, ctx.parts, ctx.shapes, ctx.of_parts = chunks, parts, (q.shape, k.shape, v.shape), of_parts
        ctx.save_for_backward(*saved)
        return out.flatten(2, 3)  # [B,S/P,P,Hq/P,D] -> [B,S/P,Hq,D]

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor, Tensor | None]:  # pyright: ignore
        chunks: HeadChunks = ctx.chunks
        parts: list[Chunk] = ctx.parts
        saved, followings = iter(ctx.saved_tensors), iter([*parts[1:], None])
        of_parts, dsinks = iter(ctx.of_parts), []
        shared: list[Tensor] = []  # dk and dv so far, in fp32 (fp64), of KV heads that the next chunk reads too

        def differentiate(arrived: list[Tensor]) -> Sequence[Tensor]:
            tensors, following = list(islice(saved, 5)), next(followings)
            dq, *dkv = chunks.attention.backward(*arrived, *tensors, causal=chunks.causal, scale=chunks.scale)
            if (sinks := next(of_parts)) is not None:
                dsinks.append(sink_gradients(arrived[0], tensors[3], tensors[4], sinks))
            if shared:
                dkv = [total + share for total, share in zip(shared, dkv, strict=True)]
            ends_kv = following is None or following.brings_kv  # no later chunk reads these KV heads
            shared[:] = [] if ends_kv else [t.to(wide_dtype(dq)) for t in dkv]
            return [dq, *(t.to(dq.dtype) for t in dkv)] if ends_kv else [dq]

        dout = by_rank(dout, chunks.transport.group.size())
        arrivals = chunks.computed([[dout[:, :, :, part.queries]] for part in parts], differentiate)
        dq, dk, dv = map(dout.new_empty, ctx.shapes)
        for part, (dq_part, *dkv) in zip(parts, arrivals, strict=True):
            copy_rows(dq[:, :, :, part.queries], dq_part)
            for whole, share in zip((dk, dv), dkv, strict=False):
                copy_rows(whole[:, :, :, part.kv], share)
        # [B,S/P,P,H/P,D] -> [B,S/P,H,D]
        grads = (dq.flatten(2, 3), dk.flatten(2, 3), dv.flatten(2, 3))
        return None, None, *grads, chunks.sink_gradients_of_all(dsinks)


def chunked(chunks: HeadChunks) -> Attend:
    """A differentiable function: q [B,S/P,Hq,D], k and v [B,S/P,Hkv,D], sinks [Hq] -> output [B,S/P,Hq,D]."""
    size = chunks.transport.group.size()
    if size == 1:
        return differentiable(chunks.attention, causal=chunks.causal, scale=chunks.scale)

    def attend(q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, sinks: Tensor | None = None) -> Tensor:
        return ChunkedAttention.apply(chunks, kept, q, *replicate_kv_heads(k, v, size), sinks)  # pyright: ignore

    return attend
