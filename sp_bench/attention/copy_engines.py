"""The primitives of exchange.py by copy engines: each rank pulls its peers' slices out of symmetric memory with
contiguous device-to-device copies, which the GPU's DMA engines carry out. Meanwhile no SM is taken from the kernels, as
NCCL does, but for a barrier of one small block. One host, peer access between all GPUs.

A message: its tensors are copied into a slot that the peers can read, and what stays on this rank to its place; a
barrier says that every rank has done so; the pulls. What is received is ordinary memory.
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

# Of each size, used in turn. Who has passed the barrier of one message knows that all peers have pulled the message
# before it, whose slot the next message may then fill.
SLOTS = 2


@dataclass
class _Slot:
    """A buffer of symmetric memory, the same on every rank of the group."""

    buffer: Tensor  # keeps the memory
    handle: Any
    views: dict[Any, list[Tensor]] = field(default_factory=dict)

    def parts(self, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The buffer on `rank`, cut into contiguous tensors like `tensors`, one after the other."""
        key = (rank, *((t.shape, t.dtype) for t in tensors))
        if key not in self.views:  # making a view of a peer's memory takes the host a while
            starts = accumulate(map(_aligned_bytes, tensors), initial=0)
            self.views[key] = [
                self.handle.get_buffer(rank, tuple(t.shape), t.dtype, start // t.element_size())
                for t, start in zip(tensors, starts, strict=False)
            ]
        return self.views[key]


def _aligned_bytes(tensor: Tensor) -> int:
    """What a tensor takes of a slot: the next one may be of any dtype."""
    return -(-ledger.payload(tensor) // 16) * 16


@dataclass(frozen=True)
class CopyEngines:
    """A Transport. Slots are made at the first message of a size, by all ranks of the group together."""

    group: dist.ProcessGroup
    lane: int = 0  # of its stream: groups of different lanes do not wait for each other's pulls
    _slots: dict[int, list[_Slot]] = field(default_factory=dict)

    def all_to_all(self, sent: Sequence[Tensor]) -> Message:
        received = [torch.empty_like(t) for t in sent]
        rank, size = self.group.rank(), self.group.size()

        def pull(slot: _Slot) -> None:
            for peer in self._peers():
                for part, to in zip(slot.parts(peer, sent), received, strict=True):
                    to[peer].copy_(part[rank])

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
        """By NCCL: copy engines cannot add."""
        return Collectives(self.group).reduce_scatter(tensor)

    def shift(self, sent: Sequence[Tensor]) -> Message:
        received = [torch.empty_like(t) for t in sent]
        previous = (self.group.rank() - 1) % self.group.size()

        def pull(slot: _Slot) -> None:
            for part, to in zip(slot.parts(previous, sent), received, strict=True):
                to.copy_(part)

        return self._start("send", sum(map(ledger.payload, sent)), sent, received, [], pull)

    def _peers(self) -> list[int]:
        """The others, one after the other, so that no two ranks pull from one at a time."""
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
        def issue() -> Message:
            ledger.count(op, off_rank_bytes)
            slot = self._next_slot(sum(map(_aligned_bytes, sent)), sent[0].device)
            stream = side_stream(sent[0].device, self.lane)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                mine = zip(slot.parts(self.group.rank(), sent), sent, strict=True)
                # copies within a device may take its SMs: all of them before the pulls, or a kernel would hold up both
                for to, tensor in (*mine, *stays):
                    to.copy_(tensor)
                packed = StreamEvent.record()
                slot.handle.barrier()
                pull(slot)
                return Message(sent, received, [StreamEvent.record()], packed)

        copies = list(zip(received, sent, strict=True))
        whole = [(to, t) if to.shape == t.shape else (to.unflatten(0, (-1, len(t))), t) for to, t in copies]
        return start(sent, received, issue, lambda: [to.copy_(t) for to, t in whole])

    def _next_slot(self, num_bytes: int, device: torch.device) -> _Slot:
        """The slots of a size take turns."""
        import torch.distributed._symmetric_memory as symmetric_memory

        slots = self._slots.setdefault(num_bytes, [])
        if len(slots) < SLOTS:
            buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
            # its signals are zeroed on the default stream: behind a kernel, that would wipe a faster peer's signal
            torch.cuda.synchronize(device)
            slots.append(_Slot(buffer, symmetric_memory.rendezvous(buffer, self.group)))
        else:
            slots.append(slots.pop(0))
        return slots[-1]


@cache  # slots are dear: one transport for all that a process opens on a group
def transport(exchange: str | None, group: dist.ProcessGroup) -> Transport:
    """What `method.exchange` asks for."""
    if exchange == "copy_engines":
        return CopyEngines(group, lane=transport.cache_info().currsize)
    return Collectives(group)
