"""The exchanges between "my tokens of all heads" and "all tokens of my heads", each written once.

B batch, S tokens of the exchanged sequence, P ranks of the group, H heads, D head size. A rank holds either its tokens
of all heads, [B, S/P, H, D], or all tokens of its heads, [B, S, H/P, D].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_bench.attention.exchange import Message, Transport


def copy_rows(to: Tensor, source: Tensor) -> None:
    """`to.copy_(source)`, several times faster on GPUs where rows allow it."""
    to, source = by_rows(to, source)
    to.copy_(source)


def by_rows(to: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory for `to.copy_(source)`, also of slices that leave the last axis whole: torch copies strided
    tensors element by element, so 16 bytes at a time, where rows allow it, instead of 2."""
    if to.dtype == source.dtype and _in_16_bytes(to) and _in_16_bytes(source):
        return to.view(torch.complex128), source.view(torch.complex128)
    return to, source


def _in_16_bytes(tensor: Tensor) -> bool:
    *strides, last = tensor.stride()
    step = math.gcd(tensor.shape[-1], tensor.storage_offset(), *strides)  # elements, of which all rows are multiples
    return last == 1 and step * tensor.element_size() % 16 == 0


def by_rank(tensor: Tensor, size: int) -> Tensor:
    """[B, S/P, P*h, D] -> [B, S/P, P, h, D]: the head groups of the P ranks; a view."""
    return tensor.unflatten(2, (size, -1))


@dataclass(frozen=True)
class HeadExchange:
    """One message both ways: tensors on their way to heads, and others on their way to tokens."""

    message: Message
    heads: Sequence[int]  # of each tensor on its way to heads

    def arrive(self) -> tuple[list[Tensor], list[Tensor]]:
        """To heads: [B, S, h, D] each, views of one tensor if B = 1. To tokens: [B, S/P, P, h, D] each, strided views,
        the ranks' heads of one token side by side."""
        received = list(self.message.wait_all())
        to_heads: list[Tensor] = []
        if self.heads:
            # [P, B, S/P, h, D] -> [B, P*S/P, h, D]: token slices side by side
            to_heads = list(received.pop(0).transpose(0, 1).flatten(1, 2).split_with_sizes(list(self.heads), dim=2))
        return to_heads, [t.permute(1, 2, 0, 3, 4) for t in received]


def exchange_heads(to_heads: Sequence[Tensor], to_tokens: Sequence[Tensor], transport: Transport) -> HeadExchange:
    """Start [B, S/P, P, h, D] each to heads, packed into one, and [B, S, h, D] each to tokens."""
    heads, sent = [t.shape[3] for t in to_heads], []
    if to_heads:
        batch, local, size, _, dim = to_heads[0].shape
        packed = to_heads[0].new_empty(size, batch, local, sum(heads), dim)
        for t, slot in zip(to_heads, packed.split_with_sizes(heads, dim=3), strict=True):
            copy_rows(slot, t.permute(2, 0, 1, 3, 4))  # [B, S/P, P, h, D] -> [P, B, S/P, h, D]: a slice for each rank
        sent.append(packed)
    # [B, P*S/P, h, D] -> [P, B, S/P, h, D]: token slices first, one for each rank; no copy if B = 1
    sent += [t.unflatten(1, (transport.group.size(), -1)).transpose(0, 1).contiguous() for t in to_tokens]
    return HeadExchange(transport.all_to_all(sent), heads)


def replicate_kv_heads(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """With fewer KV heads than ranks, each is replicated P/Hkv times, so that rank r gets KV head r // (P/Hkv), the one
    that its query heads read; the backward sums over the replicas."""
    if k.shape[2] >= size:
        return k, v
    replicas = size // k.shape[2]
    return k.repeat_interleave(replicas, dim=2), v.repeat_interleave(replicas, dim=2)
