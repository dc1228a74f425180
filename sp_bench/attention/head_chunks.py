"""Ulysses in chunks of heads: while the kernel computes one chunk, the next one's Q, K, V and the last one's output
travel.

B batch, S tokens, P ranks, D head size; a rank computes Hq/P query and Hkv*/P key/value heads, Hkv* = max(Hkv, P). One
chunk is plain Ulysses. Source: DeepSpeed-Ulysses, arXiv 2309.14509; heads are independent, so any cut of them is exact.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from sp_bench.attention.autograd import differentiable
from sp_bench.attention.exchange import Transport
from sp_bench.attention.head_exchange import by_rank, copy_rows, exchange_heads, replicate_kv_heads
from sp_bench.attention.merge import wide_dtype
from sp_bench.kernels import Attention


@dataclass(frozen=True)
class Chunk:
    """The heads of one chunk, within those of one rank."""

    queries: slice
    kv: slice
    brings_kv: bool  # False: the chunk before reads the same key/value heads


@dataclass(frozen=True)
class HeadChunks:
    """What all calls share. `num_chunks` divides Hq/P, and it divides Hkv*/P or is a multiple of it."""

    attention: Attention  # a kernel, or the ring that the ulysses ranks are part of
    transport: Transport
    causal: bool
    scale: float
    num_chunks: int

    def parts(self, num_heads: int, num_kv_heads: int) -> list[Chunk]:
        """`num_heads` query and `num_kv_heads` key/value heads of one rank, in chunks."""
        queries = num_heads // self.num_chunks
        kv = max(num_kv_heads // self.num_chunks, 1)
        parts: list[Chunk] = []
        for chunk in range(self.num_chunks):
            first_kv = chunk * num_kv_heads // self.num_chunks
            kv_heads = slice(first_kv, first_kv + kv)
            brings_kv = not parts or parts[-1].kv != kv_heads
            parts.append(Chunk(slice(chunk * queries, (chunk + 1) * queries), kv_heads, brings_kv))
        return parts

    def computed(
        self, to_heads: Sequence[Sequence[Tensor]], compute: Callable[[list[Tensor]], Sequence[Tensor]]
    ) -> Iterator[list[Tensor]]:
        """`compute` of each chunk's tensors, by heads; gives the results, by tokens, as they come home.

        While a chunk is computed, the next one's tensors and the last one's results travel as one message: a second,
        behind it, would find the device full."""
        results: Sequence[Tensor] = []
        home: list[list[Tensor]] = []
        coming = exchange_heads(to_heads[0], [], self.transport)
        for following in [*to_heads[1:], []]:
            beside = exchange_heads(following, results, self.transport) if following or results else None
            results = []  # the message has them
            arrived, returned = coming.arrive()
            home += [returned] if returned else []
            if beside:
                beside.message.go_first()
            results = compute(arrived)
            del arrived
            coming = beside or coming
        last = exchange_heads([], results, self.transport)
        under_way = [coming, last] if len(to_heads) > 1 else [last]
        return chain(home, (exchange.arrive()[1] for exchange in under_way))


class ChunkedAttention(torch.autograd.Function):
    """q [B,S/P,Hq,D], k and v [B,S/P,Hkv*,D] -> [B,S/P,Hq,D]. What is saved is [B,S,h,D] of this rank's heads."""

    @staticmethod
    def forward(ctx, chunks: HeadChunks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore
        size = chunks.transport.group.size()
        q, k, v = (by_rank(t, size) for t in (q, k, v))
        parts = chunks.parts(q.shape[3], k.shape[3])
        saved: list[Tensor] = []
        kv_at_hand: list[Tensor] = []

        def attend(arrived: list[Tensor]) -> Sequence[Tensor]:
            q_part, *kv = arrived
            kv_at_hand[:] = kv or kv_at_hand
            part_out, lse = chunks.attention.forward(q_part, *kv_at_hand, causal=chunks.causal, scale=chunks.scale)
            saved.extend([q_part, *kv_at_hand, part_out, lse])
            return [part_out]

        to_heads = [
            [q[:, :, :, part.queries], *(t[:, :, :, part.kv] for t in (k, v) if part.brings_kv)] for part in parts
        ]
        arrivals = chunks.computed(to_heads, attend)
        out = torch.empty_like(q)
        for part, (part_out,) in zip(parts, arrivals, strict=True):
            copy_rows(out[:, :, :, part.queries], part_out)
        ctx.chunks, ctx.parts, ctx.kv_shape = chunks, parts, k.shape
        ctx.save_for_backward(*saved)
        return out.flatten(2, 3)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:  # pyright: ignore
        chunks: HeadChunks = ctx.chunks
        parts: list[Chunk] = ctx.parts
        saved, followings = iter(ctx.saved_tensors), iter([*parts[1:], None])
        shared: list[Tensor] = []  # dk and dv, in fp32, of heads that the next part reads too

        def differentiate(arrived: list[Tensor]) -> Sequence[Tensor]:
            tensors, following = islice(saved, 5), next(followings)
            dq, *dkv = chunks.attention.backward(*arrived, *tensors, causal=chunks.causal, scale=chunks.scale)
            if shared:
                dkv = [total + share for total, share in zip(shared, dkv, strict=True)]
            ends_kv = following is None or following.brings_kv
            shared[:] = [] if ends_kv else [t.to(wide_dtype(dq)) for t in dkv]
            return [dq, *(t.to(dq.dtype) for t in dkv)] if ends_kv else [dq]

        dout = by_rank(dout, chunks.transport.group.size())
        arrivals = chunks.computed([[dout[:, :, :, part.queries]] for part in parts], differentiate)
        dq, dk, dv = torch.empty_like(dout), dout.new_empty(ctx.kv_shape), dout.new_empty(ctx.kv_shape)
        for part, (dq_part, *dkv) in zip(parts, arrivals, strict=True):
            copy_rows(dq[:, :, :, part.queries], dq_part)
            for whole, share in zip((dk, dv), dkv, strict=False):
                copy_rows(whole[:, :, :, part.kv], share)
        return None, dq.flatten(2, 3), dk.flatten(2, 3), dv.flatten(2, 3)


def chunked(chunks: HeadChunks) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(q [B,S/P,Hq,D], k and v [B,S/P,Hkv,D]) -> [B,S/P,Hq,D], differentiable."""
    size = chunks.transport.group.size()
    if size == 1:
        return differentiable(chunks.attention, causal=chunks.causal, scale=chunks.scale)
    return lambda q, k, v: ChunkedAttention.apply(chunks, q, *replicate_kv_heads(k, v, size))  # pyright: ignore
