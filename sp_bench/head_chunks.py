"""Ulysses in chunks of heads: while the kernel computes one chunk, the next one's Q, K, V and the last one's output
travel.

B batch, S tokens, P ranks, D head size; a rank computes Hq/P query and Hkv*/P key/value heads, Hkv* = max(Hkv, P). One
chunk is plain Ulysses. Source: DeepSpeed-Ulysses, arXiv 2309.14509; heads are independent, so any cut of them is exact.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_bench.collectives import (
    by_rank,
    copy_rows,
    replicate_kv_heads,
    send_to_heads,
    send_to_tokens,
)
from sp_bench.differentiable import differentiable
from sp_bench.exchange import Arrival, Transport, one_ahead
from sp_bench.kernels import Attention
from sp_bench.merging import wide_dtype


@dataclass(frozen=True)
class Part:
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

    def parts(self, num_heads: int, num_kv_heads: int) -> list[Part]:
        """`num_heads` query and `num_kv_heads` key/value heads of one rank, in chunks."""
        queries = num_heads // self.num_chunks
        kv = max(num_kv_heads // self.num_chunks, 1)
        parts: list[Part] = []
        for chunk in range(self.num_chunks):
            first_kv = chunk * num_kv_heads // self.num_chunks
            kv_heads = slice(first_kv, first_kv + kv)
            brings_kv = not parts or parts[-1].kv != kv_heads
            parts.append(Part(slice(chunk * queries, (chunk + 1) * queries), kv_heads, brings_kv))
        return parts


class ChunkedAttention(torch.autograd.Function):
    """q [B,S/P,Hq,D], k and v [B,S/P,Hkv*,D] -> [B,S/P,Hq,D]. What is saved is [B,S,h,D] of this rank's heads."""

    @staticmethod
    def forward(ctx, chunks: HeadChunks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore
        size, transport = chunks.transport.group.size(), chunks.transport
        q, k, v = (by_rank(t, size) for t in (q, k, v))
        parts = chunks.parts(q.shape[3], k.shape[3])

        def send(part: Part) -> Arrival:
            wanted = [q[:, :, :, part.queries]]
            if part.brings_kv:
                wanted += [k[:, :, :, part.kv], v[:, :, :, part.kv]]
            return send_to_heads(wanted, transport)

        out = torch.empty_like(q)
        saved: list[Tensor] = []
        leaving: list[Arrival] = []
        k_part = v_part = q
        for q_part, *kv in one_ahead(map(send, parts)):
            k_part, v_part = kv or (k_part, v_part)
            part_out, lse = chunks.attention.forward(q_part, k_part, v_part, causal=chunks.causal, scale=chunks.scale)
            leaving.append(send_to_tokens([part_out], transport))
            saved += [q_part, k_part, v_part, part_out, lse]
        for part, arrival in zip(parts, leaving, strict=True):
            copy_rows(out[:, :, :, part.queries], *arrival())
        ctx.chunks, ctx.parts, ctx.kv_shape = chunks, parts, k.shape
        ctx.save_for_backward(*saved)
        return out.flatten(2, 3)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:  # pyright: ignore
        chunks: HeadChunks = ctx.chunks
        parts: list[Part] = ctx.parts
        transport, saved = chunks.transport, iter(ctx.saved_tensors)
        dout = by_rank(dout, transport.group.size())
        leaving: list[Arrival] = []
        shared: list[Tensor] = []  # dk and dv, in fp32, of heads that the next part reads too
        arrivals = one_ahead(send_to_heads([dout[:, :, :, part.queries]], transport) for part in parts)
        for following, (dout_part,) in zip([*parts[1:], None], arrivals, strict=True):
            tensors = itertools.islice(saved, 5)
            dq, *dkv = chunks.attention.backward(dout_part, *tensors, causal=chunks.causal, scale=chunks.scale)
            if shared:
                dkv = [total + share for total, share in zip(shared, dkv, strict=True)]
            ends_kv = following is None or following.brings_kv
            shared = [] if ends_kv else [t.to(wide_dtype(dq)) for t in dkv]
            leaving.append(send_to_tokens([dq, *(t.to(dq.dtype) for t in dkv)] if ends_kv else [dq], transport))
        dq, dk, dv = torch.empty_like(dout), dout.new_empty(ctx.kv_shape), dout.new_empty(ctx.kv_shape)
        for part, arrival in zip(parts, leaving, strict=True):
            dq_part, *dkv = arrival()
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
