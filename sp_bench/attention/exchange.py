"""The messages of sequence-parallel attention: each primitive issued in one place and marked as attention traffic.

Each starts at once and returns a `Message`; the caller waits for it where it needs the result. `Collectives` issues the
process group's collectives; copy_engines.py has the same primitives over symmetric memory. Inside `local_copies`
nothing travels: every message is a copy of the same shape on this device, which leaves the compute-only arm of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.measure import ledger

# torch 2.13 renamed both and deprecates the old names; 2.11 has only those.
_all_gather: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HEAD_START_CYCLES = 20_000  # 10 us: a message behind an event starts within 5

_BESIDE = dist.AllToAllOptions()
_BESIDE.asyncOp = True  # else NCCL's kernel would go behind the attention kernels, on their stream


class Waitable(Protocol):
    def wait(self) -> object: ...


@dataclass
class Message:
    """What is under way, to be waited for once. Keeps its tensors alive until then, and no longer: who holds on to a
    message that has arrived does not hold memory."""

    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    works: Sequence[Waitable]
    packed: Waitable | None = None  # when its own copies on this device are done, which kernels make; None: it has none

    def wait_all(self) -> Sequence[Tensor]:
        """On CUDA the current stream waits and the host goes on."""
        for work in self.works:
            work.wait()
        received, self.sent, self.received, self.works = self.received, (), (), ()
        return received

    def wait(self) -> Tensor:
        """The same for a message of one tensor."""
        (received,) = self.wait_all()
        return received

    def go_first(self) -> None:
        """What is launched from here on starts behind this message, unless that waits for another. An attention kernel
        fills the device and stays to its end: what is ready at the same moment would travel after it, not beside."""
        if self.packed is not None:
            self.packed.wait()
        if any(tensor.is_cuda for tensor in self.sent):
            torch.cuda._sleep(HEAD_START_CYCLES)


class Transport(Protocol):
    """The primitives over one group of ranks."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def all_to_all(self, sent: Sequence[Tensor]) -> Message:
        """Slice p of each tensor's first axis goes to rank p; slice p of each result came from it."""
        ...

    def all_gather(self, tensor: Tensor) -> Message:
        """[n, ...] on each rank -> [P*n, ...], in rank order."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Message:
        """[P*n, ...] on each rank -> [n, ...]: slice r summed over the ranks, on rank r."""
        ...

    def shift(self, sent: Sequence[Tensor]) -> Message:
        """The tensors go to the next rank of the ring; the results are the previous rank's."""
        ...


@dataclass(frozen=True)
class Collectives:
    """The process group's own collectives: NCCL, gloo."""

    group: dist.ProcessGroup

    def all_to_all(self, sent: Sequence[Tensor]) -> Message:
        """NCCL moves all tensors in one launch."""
        received = [torch.empty_like(t) for t in sent]
        pairs = list(zip(received, sent, strict=True))
        calls = [partial(self.group.alltoall_base, to, t, [], [], _BESIDE) for to, t in pairs]
        return start(
            sent,
            received,
            lambda: Message(sent, received, self._issue(calls, sent[0])),
            lambda: [to.copy_(t) for to, t in pairs],
        )

    def all_gather(self, tensor: Tensor) -> Message:
        gathered = tensor.new_empty(self.group.size() * tensor.shape[0], *tensor.shape[1:])
        return start(
            [tensor],
            [gathered],
            lambda: Message([tensor], [gathered], [_all_gather(gathered, tensor, group=self.group, async_op=True)]),
            lambda: gathered.unflatten(0, (self.group.size(), -1)).copy_(tensor),
        )

    def reduce_scatter(self, tensor: Tensor) -> Message:
        size = self.group.size()
        received = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
        return start(
            [tensor],
            [received],
            lambda: Message([tensor], [received], [_reduce_scatter(received, tensor, group=self.group, async_op=True)]),
            lambda: received.copy_(tensor.chunk(size)[self.group.rank()]),
        )

    def shift(self, sent: Sequence[Tensor]) -> Message:
        """NCCL moves all tensors in one launch."""
        received = [torch.empty_like(t) for t in sent]
        rank, size = self.group.rank(), self.group.size()
        pairs = list(zip(received, sent, strict=True))
        calls = [
            call
            for to, tensor in pairs
            for call in (
                partial(self.group.send, [tensor], (rank + 1) % size, 0),
                partial(self.group.recv, [to], (rank - 1) % size, 0),
            )
        ]
        return start(
            sent,
            received,
            lambda: Message(sent, received, self._issue(calls, sent[0])),
            lambda: [to.copy_(t) for to, t in pairs],
        )

    def _issue(self, calls: Sequence[Callable[[], Any]], like: Tensor) -> Sequence[Any]:
        """In one launch where the backend can. As torch's own functions do it, but for their checks of each operation:
        a short step waits for the host."""
        if len(calls) == 1 or not self._coalesces(like):
            return [call() for call in calls]
        self.group._start_coalescing(like.device)
        for call in calls:
            call()
        return [self.group._end_coalescing(like.device)]

    def _coalesces(self, tensor: Tensor) -> bool:
        group = self.group
        return type(group) is dist.ProcessGroup and group._get_backend(tensor.device).supports_coalescing


# Process-wide and not thread-local: autograd runs a CUDA backward in a thread of its own.
_local = {"copies": False}


@contextmanager
def local_copies() -> Iterator[None]:
    """Messages inside are local copies of what this rank itself sends: same shapes, no traffic, wrong values."""
    before = _local["copies"]
    _local["copies"] = True
    try:
        yield
    finally:
        _local["copies"] = before


def start(
    sent: Sequence[Tensor],
    received: Sequence[Tensor],
    issue: Callable[[], Message],
    copy: Callable[[], object],
) -> Message:
    """`issue` the message, or make its local `copy` inside `local_copies`."""
    if not _local["copies"]:
        with ledger.attention():
            return issue()
    if not sent[0].is_cuda:
        copy()
        return Message(sent, received, [])
    stream = side_stream(sent[0].device)  # beside the kernels, as the real message would be
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy()
        return Message(sent, received, [StreamEvent.record()])


@cache  # torch hands out a few in turn, NCCL's among them: a new one each time would sooner or later be one of those
def side_stream(device: torch.device, lane: int = 0) -> torch.cuda.Stream:
    """For messages that are copies: urgent, as what they bring is waited for."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True)
class StreamEvent:
    """All that the stream it was recorded on had to do until then."""

    event: torch.cuda.Event

    @staticmethod
    def record() -> "StreamEvent":
        event = torch.cuda.Event()
        event.record()
        return StreamEvent(event)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
