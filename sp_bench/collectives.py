"""The differentiable exchanges of sequence-parallel attention, each written once.

B batch, S tokens of the exchanged sequence, P ranks of the group, H heads, D head size. A rank holds either its tokens
of all heads, [B, S/P, H, D], or all tokens of its heads, [B, S, H/P, D].
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.exchange import all_to_all


def _to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """[B, S/P, Hi, D] each -> [B, S, Hi/P, D] each, all in one exchange."""
    size = group.size()
    heads = [t.shape[2] // size for t in tensors]
    batch, local, _, dim = tensors[0].shape
    sent = tensors[0].new_empty(size, batch, local, sum(heads), dim)
    for t, slot in zip(tensors, sent.split(heads, dim=3), strict=True):
        # [B, S/P, P*h, D] -> [P, B, S/P, h, D]: head groups first, one for each rank
        slot.copy_(t.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4))
    # [P, B, S/P, h, D] -> [B, P*S/P, h, D]: token slices side by side (a view if B = 1)
    received = all_to_all(sent, group).transpose(0, 1).flatten(1, 2)
    return list(received.split(heads, dim=2))


def _to_tokens(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """[B, S, hi, D] each -> [B, S/P, P*hi, D] each, all in one exchange: the inverse of `_to_heads`."""
    size = group.size()
    heads = [t.shape[2] for t in tensors]
    batch, length, _, dim = tensors[0].shape
    sent = tensors[0].new_empty(size, batch, length // size, sum(heads), dim)
    for t, slot in zip(tensors, sent.split(heads, dim=3), strict=True):
        # [B, P*S/P, h, D] -> [P, B, S/P, h, D]: token slices first, one for each rank
        slot.copy_(t.unflatten(1, (size, -1)).transpose(0, 1))
    # [P, B, S/P, h, D] -> [B, S/P, P, h, D]: the head groups of one token side by side
    received = all_to_all(sent, group).permute(1, 2, 0, 3, 4)
    return [part.flatten(2, 3) for part in received.split(heads, dim=3)]


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        ctx.group = group
        return tuple(_to_heads(tensors, group))

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return (None, *_to_tokens(grads, ctx.group))


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:  # pyright: ignore
        ctx.group = group
        return _to_tokens([tensor], group)[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore
        return None, _to_heads([grad], ctx.group)[0]


def tokens_to_heads(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """My tokens of all heads -> all tokens of my heads: [B, S/P, H, D] -> [B, S, H/P, D], Q, K and V in one exchange.

    With fewer KV heads than ranks, each is replicated P/Hkv times first, so that rank r gets KV head r // (P/Hkv),
    the one that its query heads read; the backward sums over the replicas.
    """
    if group.size() == 1:
        return q, k, v
    if k.shape[2] < group.size():
        replicas = group.size() // k.shape[2]
        k, v = k.repeat_interleave(replicas, dim=2), v.repeat_interleave(replicas, dim=2)
    q, k, v = _TokensToHeads.apply(group, q, k, v)  # pyright: ignore[reportAssignmentType]
    return q, k, v


def heads_to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of my heads -> my tokens of all heads: [B, S, H/P, D] -> [B, S/P, H, D]."""
    return out if group.size() == 1 else _HeadsToTokens.apply(group, out)  # pyright: ignore[reportReturnType]
