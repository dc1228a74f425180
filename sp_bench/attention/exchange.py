"""The messages of sequence-parallel attention. Each primitive is issued in one place, which marks it as attention
traffic for the ledger.

A primitive starts its message at once and returns a `Message`; the caller waits for it where it needs the result.
`Collectives` issues the process group's collectives; copy_engines.py has the same primitives over symmetric memory.
Inside `local_copies` nothing travels: every message becomes a copy of the same shape on this device. That is how a step
is timed without communication.

P ranks in the group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sp_bench.measure import ledger, one_rank

# torch 2.13 renamed both functions and deprecates the old names; torch 2.11 has only the old names.
_all_gather: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HEAD_START_CYCLES = 20_000  # about 10 us; a message that waits for an event starts within 5 us of it

_ON_NCCLS_STREAM = dist.AllToAllOptions()
_ON_NCCLS_STREAM.asyncOp = True  # otherwise NCCL's kernel would run on the attention kernels' stream, behind them


class Waitable(Protocol):
    def wait(self) -> object: ...


@dataclass
class Message:
    """A message under way, to be waited for once. It keeps its tensors alive until then and no longer: a message that
    has arrived holds no memory."""

    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    works: Sequence[Waitable]
    packed: Waitable | None = None  # its copies on this device, which may run as kernels; None: it needs none

    def wait_all(self) -> Sequence[Tensor]:
        """Wait, and return the received tensors. On CUDA the current stream waits and the host goes on."""
        for work in self.works:
            work.wait()
        received, self.sent, self.received, self.works = self.received, (), (), ()
        return received

    def wait(self) -> Tensor:
        """`wait_all` for a message of one tensor, which it returns."""
        (received,) = self.wait_all()
        return received

    def go_first(self) -> None:
        """Let this message start before the kernels that are launched from here on. It cannot if it has to wait for
        another message first.

        An attention kernel fills the device until it ends. A message that became ready at the same moment would travel
        after the kernel and not beside it.
        """
        if self.packed is not None:
            self.packed.wait()
        if any(tensor.is_cuda for tensor in self.sent):
            torch.cuda._sleep(HEAD_START_CYCLES)


Backends = dict[int | str, str | Backend.Options | tuple[str, Backend.Options]]


def go_first(device: str, *axes: str) -> Backends | None:
    """The backends of a mesh on whose `axes` attention travels. NCCL's kernels there go first: behind a kernel that
    fills the device they would start too late to overlap with it. In a world of one rank they have lanes of their own,
    as they have communicators."""
    if dist.get_backend() == one_rank.BACKEND:
        return dict.fromkeys(axes, one_rank.BACKEND)
    if device != "cuda":
        return None
    from torch.distributed import ProcessGroupNCCL

    return {axis: ("nccl", ProcessGroupNCCL.Options(is_high_priority_stream=True)) for axis in axes}


@cache  # communicators take time and device memory: one mesh for all trials of this process
def rings_within(ring: dist.ProcessGroup, inner_degree: int, device: str) -> DeviceMesh:
    """Axes `outer` and `inner` in place of `ring`, a group of neighbours. `inner` has `inner_degree` neighbours. Every
    rank of the world must call this, with a ring of the same size."""
    sizes = (dist.get_world_size() // ring.size(), ring.size() // inner_degree, inner_degree)
    backends = go_first(device, "outer", "inner")
    return init_device_mesh(device, sizes, mesh_dim_names=("ring", "outer", "inner"), backend_override=backends)


class Transport(Protocol):
    """The primitives over one group of P ranks. Each starts a message and returns at once."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def all_to_all(self, sent: Sequence[Tensor]) -> Message:
        """[P, ...] each -> [P, ...] each: slice p goes to rank p; slice p of the result came from rank p."""
        ...

    def all_gather(self, tensor: Tensor) -> Message:
        """[n, ...] on each rank -> [P*n, ...], in rank order."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Message:
        """[P*n, ...] on each rank -> [n, ...]: rank r receives slice r, summed over the ranks."""
        ...

    def shift(self, sent: Sequence[Tensor], hops: int = 1) -> Message:
        """The tensors, contiguous, go to the next rank of the ring, or `hops` ranks on; the results came from as far
        behind."""
        ...


@dataclass(frozen=True)
class Collectives:
    """A `Transport` by the process group's own collectives (NCCL or gloo)."""

    group: dist.ProcessGroup

    def all_to_all(self, sent: Sequence[Tensor]) -> Message:
        """NCCL moves all tensors in one launch."""
        received = [torch.empty_like(t) for t in sent]
        pairs = list(zip(received, sent, strict=True))
        calls = [partial(self.group.alltoall_base, to, t, [], [], _ON_NCCLS_STREAM) for to, t in pairs]
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
            lambda: gathered.unflatten(0, (self.group.size(), -1)).copy_(tensor),  # [P*n, ...] -> [P, n, ...]
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

    def shift(self, sent: Sequence[Tensor], hops: int = 1) -> Message:
        """NCCL moves all tensors in one launch."""
        received = [torch.empty_like(t) for t in sent]
        pairs = list(zip(received, sent, strict=True))
        hop = self._swap if self.group.size() == 2 else partial(self._hop, hops)
        calls = [call for to, tensor in pairs for call in hop(to, tensor)]

        def issue() -> Message:
            with ledger.counted_as("send"):
                return Message(sent, received, self._issue(calls, sent[0]))

        return start(sent, received, issue, lambda: [to.copy_(t) for to, t in pairs])

    def between(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Message:
        """Each tensor of `sent` goes to the rank of its key, and each of `received` comes from the rank of its key.
        Sizes may differ, and a rank may have nothing to send or to receive. NCCL moves all tensors in one launch."""
        mine, others = [*sent.values()], [*received.values()]
        if not mine + others:
            return Message((), (), ())
        calls = [partial(self.group.send, [tensor], peer, 0) for peer, tensor in sent.items()]
        calls += [partial(self.group.recv, [tensor], peer, 0) for peer, tensor in received.items()]

        def issue() -> Message:
            with ledger.counted_as("send"):
                # One call is a batch, too: NCCL would carry it over a communicator of the two ranks alone, where the
                # other rank, which has several calls, would not look for it.
                return Message(mine, others, self._issue(calls, (mine + others)[0], always=True))

        # noise, since a rank may receive more than it sends, and kernels are faster on zeros
        return start(mine or others, others, issue, lambda: [to.normal_() for to in others])

    def _hop(self, hops: int, received: Tensor, sent: Tensor) -> list[Callable[[], Any]]:
        rank, size = self.group.rank(), self.group.size()
        return [
            partial(self.group.send, [sent], (rank + hops) % size, 0),
            partial(self.group.recv, [received], (rank - hops) % size, 0),
        ]

    def _swap(self, received: Tensor, sent: Tensor) -> list[Callable[[], Any]]:
        """A hop between two ranks, as an all-to-all with nothing for oneself. NCCL carries both alike.

        After a send torch keeps the memory until the host finds that the message has ended, and allocates anew
        meanwhile: docs/METHODS.md, "What torch reserves for its messages". Among more ranks an all-to-all would also
        send each of the others an empty message, and wait for it.
        """
        rows = [0 if peer == self.group.rank() else sent.shape[0] for peer in range(2)]
        return [partial(self.group.alltoall_base, received, sent, rows, rows, _ON_NCCLS_STREAM)]

    def _issue(self, calls: Sequence[Callable[[], Any]], like: Tensor, *, always: bool = False) -> Sequence[Any]:
        """Issue the calls, in one launch where the backend can coalesce them. `always`: a single one as well.

        torch's own functions also check each operation. In a short step the device would wait for the host to do so.
        """
        if (len(calls) == 1 and not always) or not self._coalesces(like):
            return [call() for call in calls]
        self.group._start_coalescing(like.device)
        for call in calls:
            call()
        return [self.group._end_coalescing(like.device)]

    def _coalesces(self, tensor: Tensor) -> bool:
        group = self.group
        return isinstance(group, dist.ProcessGroup) and group._get_backend(tensor.device).supports_coalescing


# Process-wide and not thread-local, because autograd runs a CUDA backward in a thread of its own.
_local = {"copies": False}


@contextmanager
def local_copies() -> Iterator[None]:
    """Inside, each message is a local copy of what this rank itself sends, or noise where it may receive more
    (`between`): same shapes, no traffic, wrong values."""
    before = _local["copies"]
    _local["copies"] = True
    try:
        yield
    finally:
        _local["copies"] = before


def are_local() -> bool:
    """Whether messages are local copies now."""
    return _local["copies"]


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over the ranks, in place. Inside `local_copies` it stays as it is."""
    if not _local["copies"]:
        dist.all_reduce(tensor, group=group)


def start(
    sent: Sequence[Tensor], received: Sequence[Tensor], issue: Callable[[], Message], copy: Callable[[], object]
) -> Message:
    """Start a message of `sent` that fills `received`: by `issue`, or by `copy` inside `local_copies`."""
    if not _local["copies"]:
        with ledger.attention():
            return issue()
    if not sent[0].is_cuda:
        copy()
        return Message(sent, received, [])
    stream = side_stream(sent[0].device)  # so that the copy runs beside the kernels, as the real message would
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy()
        return Message(sent, received, [StreamEvent.record()])


@cache  # torch takes new streams from a small pool that NCCL uses too: sooner or later a new one would be NCCL's
def side_stream(device: torch.device, lane: int = 0) -> torch.cuda.Stream:
    """The stream for messages that are copies. Its priority is high, because kernels wait for what it brings."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True)
class StreamEvent:
    """The work that the recording stream had been given until then. `wait` makes the current stream wait for it."""

    event: torch.cuda.Event

    @staticmethod
    def record() -> "StreamEvent":
        event = torch.cuda.Event()
        event.record()
        return StreamEvent(event)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
