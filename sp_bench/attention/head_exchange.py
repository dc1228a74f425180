"""The all-to-alls between "my tokens of all heads" and "all tokens of my heads". Each direction is written once.

B batch, S tokens of the exchanged sequence, P ranks of the group, H heads, h heads that one rank computes of a tensor,
D head size. By tokens, a rank holds its tokens of all heads, [B, S/P, H, D]. By heads, it holds all tokens of its
heads, [B, S, H/P, D]. Source: DeepSpeed-Ulysses, arXiv 2309.14509.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_bench.attention.exchange import Message, Transport


def copy_rows(to: Tensor, source: Tensor) -> None:
    """`to.copy_(source)`, which is several times faster on GPUs where `by_rows` can widen the elements."""
    to, source = by_rows(to, source)
    to.copy_(source)


def by_rows(to: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory as tensors of 16-byte elements, for a faster `to.copy_(source)`.

    torch copies strided tensors element by element: 2 bytes at a time in bfloat16. The elements are widened where all
    rows are multiples of 16 bytes; otherwise both tensors are returned as they are. Either way they may be sliced
    before the copy, except along the last axis.
    """
    if to.dtype == source.dtype and _in_16_bytes(to) and _in_16_bytes(source):
        return to.view(torch.complex128), source.view(torch.complex128)
    return to, source


def _in_16_bytes(tensor: Tensor) -> bool:
    """Whether each row is contiguous, and begins and ends at a multiple of 16 bytes in its storage."""
    *strides, last = tensor.stride()
    # in elements: every row begins and ends at a multiple of it
    step = math.gcd(tensor.shape[-1], tensor.storage_offset(), *strides)
    return last == 1 and step * tensor.element_size() % 16 == 0


def by_rank(tensor: Tensor, size: int) -> Tensor:
    """[B, S/P, P*h, D] -> [B, S/P, P, h, D], a view: the third axis is the rank that computes the heads."""
    return tensor.unflatten(2, (size, -1))


@dataclass(frozen=True)
class HeadExchange:
    """One message under way in both directions: some tensors go from tokens to heads, others from heads to tokens."""

    message: Message
    heads: Sequence[tuple[int, int]]  # h and D of each tensor that goes to heads

    def arrive(self) -> tuple[list[Tensor], list[Tensor]]:
        """Wait; returns the tensors by heads, [B, S, h, D] each, and those by tokens, [B, S/P, P, h, D] each.

        All are strided views of what was received; if B > 1, the tensors by heads are views of a copy of it.
        """
        received = list(self.message.wait_all())
        to_heads: list[Tensor] = []
        if self.heads:
            # [P, B, S/P, sum h*D] -> [B, P*S/P, sum h*D] -> [B, S, h, D] each: the ranks' tokens one after the other
            to_heads = _slots(received.pop(0).transpose(0, 1).flatten(1, 2), self.heads)
        # [P, B, S/P, h, D] -> [B, S/P, P, h, D]: the ranks' heads of one token side by side
        return to_heads, [t.permute(1, 2, 0, 3, 4) for t in received]


def exchange_heads(to_heads: Sequence[Tensor], to_tokens: Sequence[Tensor], transport: Transport) -> HeadExchange:
    """Start one all-to-all.

    to_heads: tensors [B, S/P, P, h, D] that go from tokens to heads; they are packed into one. D may differ.
    to_tokens: tensors [B, S, h, D] that go from heads to tokens.
    """
    heads, sent = [(t.shape[3], t.shape[4]) for t in to_heads], []
    if to_heads:
        batch, local, size = to_heads[0].shape[:3]
        packed = to_heads[0].new_empty(size, batch, local, sum(h * dim for h, dim in heads))
        for t, slot in zip(to_heads, _slots(packed, heads), strict=True):
            # [B, S/P, P, h, D] -> [P, B, S/P, h, D]: rank axis first, ready for the all-to-all
            copy_rows(slot, t.permute(2, 0, 1, 3, 4))
        sent.append(packed)
    # [B, P*S/P, h, D] -> [P, B, S/P, h, D]: rank axis first, ready for the all-to-all; no copy if B = 1
    sent += [t.unflatten(1, (transport.group.size(), -1)).transpose(0, 1).contiguous() for t in to_tokens]
    return HeadExchange(transport.all_to_all(sent), heads)


def _slots(packed: Tensor, heads: Sequence[tuple[int, int]]) -> list[Tensor]:
    """[..., sum h*D] -> the view [..., h, D] of each tensor."""
    parts = packed.split_with_sizes([h * dim for h, dim in heads], dim=-1)
    return [part.unflatten(-1, each) for part, each in zip(parts, heads, strict=True)]


def replicate_kv_heads(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """k and v [B, S/P, Hkv, D] -> [B, S/P, max(Hkv, P), D]: with fewer KV heads than ranks, each becomes P/Hkv equal
    ones. Rank r then gets KV head r // (P/Hkv), the one that its query heads read.

    Differentiable: the backward sums over the replicas.
    """
    if k.shape[2] >= size:
        return k, v
    replicas = size // k.shape[2]
    return k.repeat_interleave(replicas, dim=2), v.repeat_interleave(replicas, dim=2)
