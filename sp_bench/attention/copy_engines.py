"""The primitives of exchange.py, carried by the GPU's copy engines instead of NCCL.

Each rank pulls its peers' slices out of symmetric memory with contiguous device-to-device copies. The GPU's DMA engines
carry these out, so that the attention kernels keep all SMs; NCCL's kernels would take some of them. Only a barrier runs
on an SM, as one small block. All ranks must be on one host, with peer access between all GPUs.

A message has three parts:
1. The rank copies its tensors into a slot that its peers can read, and copies what stays on this rank to its place.
2. A barrier waits until every rank has done so.
3. The rank pulls what is meant for it out of its peers' slots, into ordinary memory.

P ranks in the group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.attention.exchange import Collectives, Message, StreamEvent, Transport, side_stream, start
from sp_bench.measure import ledger

# Slots of each size, used in turn. A rank that has passed the barrier of one message knows that all peers have pulled
# the message before it. So the next message may overwrite the slot of that earlier one.
SLOTS = 2


@dataclass
class _Slot:
    """A buffer of symmetric memory. Every rank of the group has one of this size and can read the others'."""

    buffer: Tensor  # this rank's; held so that its memory is not freed
    handle: Any  # of torch's symmetric memory: gives the peers' buffers, and the barrier
    views: dict[Any, list[Tensor]] = field(default_factory=dict)  # what `parts` has returned

    def parts(self, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The buffer of `rank`, cut into contiguous tensors that have the shapes and dtypes of `tensors`."""
        key = (rank, *((t.shape, t.dtype) for t in tensors))
        if key not in self.views:  # kept, because the host takes a while to make a view of a peer's memory
            starts = accumulate(map(_aligned_bytes, tensors), initial=0)
            self.views[key] = [
                self.handle.get_buffer(rank, tuple(t.shape), t.dtype, start // t.element_size())
                for t, start in zip(tensors, starts, strict=False)
            ]
        return self.views[key]


def _aligned_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a slot: rounded up to 16, since the tensor behind it may have any dtype."""
    return -(-ledger.payload(tensor) // 16) * 16


@dataclass(frozen=True)
class CopyEngines:
    """A `Transport`. All ranks of the group together make the slots of a size, at the first messages of that size."""

    group: dist.ProcessGroup
    lane: int = 0  # each lane has its own stream: groups of different lanes do not wait for each other's pulls
    _slots: dict[int, list[_Slot]] = field(default_factory=dict)  # by bytes

    def all_to_all(self, sent: Sequence[Tensor]) -> Message:
        received = [torch.empty_like(t) for t in sent]
        rank, size = self.group.rank(), self.group.size()

        def pull(slot: _Slot) -> None:
            for peer in self._peers():
                for part, to in zip(slot.parts(peer, sent), received, strict=True):
                    to[peer].copy_(part[rank])  # of the peer's P slices, the one for this rank

        off_rank = sum(map(ledger.payload, sent)) // size * (size - 1)
        stays = [(to[rank], t[rank]) for to, t in zip(received, sent, strict=True)]
        return self._start("all_to_all", off_rank, sent, received, stays, pull)

    def all_gather(self, tensor: Tensor) -> Message:
        size = self.group.size()
        gathered = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
        received = gathered.chunk(size)

        def pull(slot: _Slot) -> None:
            for peer in self._peers():
                received[peer].copy_(slot.parts(peer, [tensor])[0])

        stays = [(received[self.group.rank()], tensor)]
        return self._start("all_gather", ledger.payload(tensor) * (size - 1), [tensor], [gathered], stays, pull)

    def reduce_scatter(self, tensor: Tensor) -> Message:
        """Carried by NCCL, because copy engines cannot add."""
        return Collectives(self.group).reduce_scatter(tensor)

    def shift(self, sent: Sequence[Tensor], hops: int = 1) -> Message:
        received = [torch.empty_like(t) for t in sent]
        previous = (self.group.rank() - hops) % self.group.size()

        def pull(slot: _Slot) -> None:
            for part, to in zip(slot.parts(previous, sent), received, strict=True):
                to.copy_(part)

        return self._start("send", sum(map(ledger.payload, sent)), sent, received, [], pull)

    def _peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that no two ranks pull from the same peer at once."""
        rank, size = self.group.rank(), self.group.size()
        return [(rank + step) % size for step in range(1, size)]

    def _start(
        self,
        op: str,
        off_rank_bytes: int,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        stays: Sequence[tuple[Tensor, Tensor]],
        pull: Callable[[_Slot], None],
    ) -> Message:
        """Start a message of `sent` that fills `received`.

        stays: (destination, source) of what does not leave this rank.
        pull: copies what is meant for this rank out of the peers' slots into `received`.
        """

        def issue() -> Message:
            ledger.count(op, off_rank_bytes)
            slot = self._next_slot(sum(map(_aligned_bytes, sent)), sent[0].device)
            stream = side_stream(sent[0].device, self.lane)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                mine = zip(slot.parts(self.group.rank(), sent), sent, strict=True)
                # Copies within a device may run on its SMs, where a kernel can hold them up. All of them come before
                # the pulls, which would otherwise have to wait as well.
                for to, tensor in (*mine, *stays):
                    to.copy_(tensor)
                packed = StreamEvent.record()
                slot.handle.barrier()
                pull(slot)
                return Message(sent, received, [StreamEvent.record()], packed)

        copies = list(zip(received, sent, strict=True))
        # what an all-gather receives: [P*n, ...] -> [P, n, ...], so that a local copy fills every rank's place
        whole = [(to, t) if to.shape == t.shape else (to.unflatten(0, (-1, len(t))), t) for to, t in copies]
        return start(sent, received, issue, lambda: [to.copy_(t) for to, t in whole])

    def _next_slot(self, num_bytes: int, device: torch.device) -> _Slot:
        """The next slot of this size; the slots of a size take turns."""
        import torch.distributed._symmetric_memory as symmetric_memory

        slots = self._slots.setdefault(num_bytes, [])
        if len(slots) < SLOTS:
            buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
            # `empty` zeroes the barrier's signals on the default stream. If a kernel delayed that, the zeroing would
            # wipe the signal of a faster peer. So wait for it before the peers learn of the buffer.
            torch.cuda.synchronize(device)
            slots.append(_Slot(buffer, symmetric_memory.rendezvous(buffer, self.group)))
        else:
            slots.append(slots.pop(0))
        return slots[-1]


@cache  # slots take device memory: whatever a process opens on a group shares one transport
def transport(exchange: str | None, group: dist.ProcessGroup) -> Transport:
    """The transport that `method.exchange` asks for; the group's collectives unless it is "copy_engines"."""
    if exchange == "copy_engines":
        return CopyEngines(group, lane=transport.cache_info().currsize)
    return Collectives(group)
