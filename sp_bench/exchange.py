"""The collectives of sequence-parallel attention, each issued in one place and marked as attention traffic."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench import ledger

# torch 2.13 renamed both and deprecates the old names; 2.11 has only those.
_all_gather: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Slice p of the first axis goes to rank p; slice p of the result came from it."""
    received = torch.empty_like(sent)
    with ledger.attention():
        dist.all_to_all_single(received, sent, group=group)
    return received


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] on each rank -> [P*n, ...], in rank order."""
    gathered = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    with ledger.attention():
        _all_gather(gathered, tensor, group=group)
    return gathered


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[P*n, ...] on each rank -> [n, ...]: slice r summed over the ranks, on rank r."""
    received = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    with ledger.attention():
        _reduce_scatter(received, tensor, group=group)
    return received


@dataclass(frozen=True)
class Hop:
    """One message under way around the ring. Keeps the sent tensor alive until it has left."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def shift(tensor: Tensor, group: dist.ProcessGroup) -> Hop:
    """Start sending `tensor` to the next rank of the ring, and receiving the previous rank's."""
    received = torch.empty_like(tensor)
    rank, size = group.rank(), group.size()
    operations = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ]
    with ledger.attention():
        return Hop(tensor, received, dist.batch_isend_irecv(operations))
