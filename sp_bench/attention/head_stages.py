"""Ulysses in stages, one after the other, that share one stage's buffers: UPipe.

Each stage exchanges some heads, computes them, and exchanges the output back before the next stage begins. Nothing by
heads outlives its stage, but for KV heads that the next stage reads too, which are exchanged once. What is kept for the
backward lies by tokens, and the backward exchanges it again.

Source: Untied Ulysses (UPipe), arXiv 2602.21196, whose stages have one query head of each rank. There a stage also
projects its own Q, K and V from the layer's input; here the projections are the layer's, and all heads of q, k and v
are there by tokens. Letters, and what "by heads" and "by tokens" mean: head_chunks.py, where the parts overlap instead.
"""

import torch
from torch import Tensor

from sp_bench.attention.autograd import Attend, Kept, differentiable
from sp_bench.attention.head_chunks import Chunk, HeadChunks
from sp_bench.attention.head_exchange import by_rank, copy_rows, exchange_heads, replicate_kv_heads
from sp_bench.attention.merge import wide_dtype
from sp_bench.attention.sinks import merge_sinks, sink_gradients


class StagedAttention(torch.autograd.Function):
    """q [B,S/P,Hq,D], k and v [B,S/P,Hkv*,D] -> output [B,S/P,Hq,D].

    Saved for the backward: q, k, v and output by tokens, as they are, and lse [B,h,S] of each stage. What is `kept` for
    a second call is the output and lse, and then nothing is exchanged before the backward.
    """

    @staticmethod
    def forward(  # pyright: ignore
        ctx, stages: HeadChunks, kept: Kept | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        size = stages.transport.group.size()
        ctx.stages, ctx.parts = stages, stages.parts(q.shape[2] // size, k.shape[2] // size)
        ctx.of_parts = stages.sinks_of_parts(sinks, ctx.parts)
        held = kept.take() if kept else ()
        out, *lses = held or _forward(stages, ctx.parts, q, k, v, ctx.of_parts)
        if kept and not held:
            kept.put(out, *lses)
        ctx.save_for_backward(q, k, v, out, *lses)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor, Tensor | None]:  # pyright: ignore
        return None, None, *_backward(ctx.stages, ctx.parts, ctx.of_parts, dout, *ctx.saved_tensors)


Sinks = list[Tensor | None]  # of this rank's heads in each stage


def _forward(stages: HeadChunks, parts: list[Chunk], q: Tensor, k: Tensor, v: Tensor, sinks: Sinks) -> list[Tensor]:
    """The output by tokens, [B,S/P,Hq,D], and the lse of each stage."""
    size = stages.transport.group.size()
    whole = q.new_empty(*q.shape[:-1], v.shape[-1])
    q, k, v, out = (by_rank(t, size) for t in (q, k, v, whole))  # [B,S/P,H,D] -> [B,S/P,P,H/P,D]
    lses: list[Tensor] = []
    kv_at_hand: list[Tensor] = []  # of the last stage that brought any
    for part, of_part in zip(parts, sinks, strict=True):
        if part.brings_kv:
            kv_at_hand.clear()  # before the new ones come
            kv_at_hand += _to_heads(stages, [t[:, :, :, part.kv] for t in (k, v)])
        (q_part,) = _to_heads(stages, [q[:, :, :, part.queries]])
        computed = stages.attention.forward(q_part, *kv_at_hand, causal=stages.causal, scale=stages.scale)
        part_out, lse = merge_sinks(*computed, of_part)
        del computed
        del q_part  # otherwise it would live on during the next stage; likewise below
        lses.append(lse)
        (part_out,) = _to_tokens(stages, [part_out])
        copy_rows(out[:, :, :, part.queries], part_out)
        del part_out
    return [whole, *lses]


def _backward(
    stages: HeadChunks,
    parts: list[Chunk],
    sinks: Sinks,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *lses: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq [B,S/P,Hq,D], dk and dv [B,S/P,Hkv*,D], and the gradients of the sinks [Hq]."""
    size = stages.transport.group.size()
    grads = [torch.empty_like(t) for t in (q, k, v)]
    dq, dk, dv = (by_rank(t, size) for t in grads)
    dout, q, k, v, out = (by_rank(t, size) for t in (dout, q, k, v, out))
    kv_at_hand: list[Tensor] = []
    shared: list[Tensor] = []  # dk and dv so far, in fp32 (fp64), of KV heads that the next stage reads too
    dsinks: Sinks = []
    for part, following, lse, of_part in zip(parts, [*parts[1:], None], lses, sinks, strict=True):
        if part.brings_kv:
            kv_at_hand.clear()
            kv_at_hand += _to_heads(stages, [t[:, :, :, part.kv] for t in (k, v)])
        q_part, dout_part = _to_heads(stages, [t[:, :, :, part.queries] for t in (q, dout)])
        # a message of its own, so that the output comes in memory of its own, as a kernel leaves it
        (out_part,) = _to_heads(stages, [out[:, :, :, part.queries]])
        dq_part, *dkv = stages.attention.backward(
            dout_part, q_part, *kv_at_hand, out_part, lse, causal=stages.causal, scale=stages.scale
        )
        dsinks.append(None if of_part is None else sink_gradients(dout_part, out_part, lse, of_part))
        del q_part, dout_part, out_part
        if shared:
            dkv = [total + share for total, share in zip(shared, dkv, strict=True)]
        ends_kv = following is None or following.brings_kv  # no later stage reads these KV heads
        shared = [] if ends_kv else [t.to(wide_dtype(dq)) for t in dkv]
        dkv = [t.to(dq.dtype) for t in dkv] if ends_kv else []
        dq_part, *dkv = _to_tokens(stages, [dq_part, *dkv])
        copy_rows(dq[:, :, :, part.queries], dq_part)
        if dkv:
            copy_rows(dk[:, :, :, part.kv], dkv[0])
            copy_rows(dv[:, :, :, part.kv], dkv[1])
        del dq_part, dkv
    dq_whole, dk_whole, dv_whole = grads
    return dq_whole, dk_whole, dv_whole, stages.sink_gradients_of_all(dsinks)


def _to_heads(stages: HeadChunks, tensors: list[Tensor]) -> list[Tensor]:
    """[B,S/P,P,h,D] each -> [B,S,h,D] each, in one message that is waited for."""
    return exchange_heads(tensors, [], stages.transport).arrive()[0]


def _to_tokens(stages: HeadChunks, tensors: list[Tensor]) -> list[Tensor]:
    """[B,S,h,D] each -> [B,S/P,P,h,D] each, in one message that is waited for."""
    return exchange_heads([], tensors, stages.transport).arrive()[1]


def staged(stages: HeadChunks) -> Attend:
    """A differentiable function: q [B,S/P,Hq,D], k and v [B,S/P,Hkv,D], sinks [Hq] -> output [B,S/P,Hq,D]."""
    size = stages.transport.group.size()
    if size == 1:
        return differentiable(stages.attention, causal=stages.causal, scale=stages.scale)

    def attend(q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, sinks: Tensor | None = None) -> Tensor:
        return StagedAttention.apply(stages, kept, q, *replicate_kv_heads(k, v, size), sinks)  # pyright: ignore

    return attend
