"""Keys and values as one tensor, so that they travel as one message.

B batch, n tokens, H heads, D and E sizes of a key and of a value head. Of equal sizes the tensor is [2,B,n,H,D]: keys,
then values. Of different ones it is [1,B,n,H,D+E], a head's key beside its value: no rank sends what it need not.
Either may be cut along tokens and heads, as [:, :, tokens, heads].
"""

import torch
from torch import Tensor


def joined(k: Tensor, v: Tensor) -> Tensor:
    """k [B,n,H,D] and v [B,n,H,E] as one tensor, in memory of its own."""
    return torch.stack((k, v)) if k.shape == v.shape else torch.cat((k, v), dim=-1).unsqueeze(0)


def parted(kv: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """The views k and v of a joined tensor. key_dim: D."""
    if len(kv) == 2:
        return kv[0], kv[1]
    return kv[0, ..., :key_dim], kv[0, ..., key_dim:]


def add(dkv: Tensor, rows: slice, dk: Tensor, dv: Tensor) -> None:
    """Add dk and dv [B,r,H,.] of some tokens to the joined gradients `dkv`."""
    for to, found in zip(parted(dkv, dk.shape[-1]), (dk, dv), strict=True):
        to[:, rows] += found


def add_all(dk: Tensor, dv: Tensor, dkv: Tensor, rows: slice = slice(None)) -> None:
    """Add the joined gradients `dkv` to those of some tokens of dk and dv."""
    for to, found in zip((dk, dv), parted(dkv, dk.shape[-1]), strict=True):
        to[:, rows] += found
