"""A world of one process: one rank of P, whose peers are a model.

`join` makes torch's process groups of such a world. A collective fills what is received with copies of what this rank
itself holds: plausible values, and wrong ones. It ends when the link model says so, on a stream of its own group, as
NCCL's would; kernels beside it go on, and whoever waits for it waits. So the schedule is not modelled: it happens.

Methods of a group that are overridden in Python bypass torch's dispatcher, where the ledger counts, so each counts its
own bytes here, by the same rules (ledger.py).

P ranks of the world, R ranks of a group.
"""
# torch's own stubs name the arguments of one method differently from version to version
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from sp_bench.config.machine import LinkConfig
from sp_bench.costs.links import MessageTime, far_share, message_time
from sp_bench.measure import ledger
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.link_clock import FAR, NEAR, Arrival, DeviceClock, HostClock, Lane

BACKEND = "one_rank"
LEAST_WAIT = 0.95  # of the busiest link's time: what the last messages of the last step may hide behind the next one
Copies = Callable[[], object]


@dataclass(frozen=True)
class World:
    """What its groups share."""

    link: LinkConfig
    ranks_per_node: int
    clock: HostClock | DeviceClock
    noise: torch.Generator
    busy_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of each link, by what the ledger counted


@dataclass
class Batch:
    """Messages that begin together, as one launch of NCCL's."""

    times: list[MessageTime] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)


_worlds: list[World] = []  # the one that was joined


def join(rank: int, size: int, ranks_per_node: int, link: LinkConfig, device: torch.device) -> None:
    """Make this process rank `rank` of a world of `size` ranks."""
    clock = DeviceClock(device) if device.type == "cuda" else HostClock()
    _worlds[:] = [World(link, ranks_per_node, clock, torch.Generator(device))]
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, rank=rank, world_size=size, store=NoStore())


def _make(common: Any, backend_options: Any) -> "OneRank":
    members = common.global_ranks_in_group or range(common.group_size)
    return OneRank(common.group_id, common.group_rank, tuple(members), _worlds[0])


def require_waits(window_ms: float, num_steps: int) -> float:
    """ms in which the messages of the counted step keep the busiest link, which serves one at a time.

    Raises:
        Incorrect: the timed steps were faster.
    """
    world = _worlds[0]
    busy_ms, world.busy_s[:] = 1e3 * max(world.busy_s), (0.0, 0.0)
    if window_ms / num_steps < LEAST_WAIT * busy_ms:
        raise Incorrect(
            f"a step took {window_ms / num_steps:.3f} ms, and its messages keep the busiest link of {world.link.name} "
            f"for {busy_ms:.3f} ms: they did not take their time"
        )
    return busy_ms


class NoStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """Where ranks would meet: nobody else comes."""


class OneRank(dist.ProcessGroup):
    """A group of R ranks, of which one is there. Names and arguments are those of torch's process groups, of torch 2.11
    and of those that 2.13 calls otherwise."""

    supports_coalescing = True
    counts_itself = True  # the ledger leaves its collectives to it

    # torch has these two as properties, which look the group up. It reads them of groups that it has forgotten, too.
    pg_name: str = ""
    group_name: str = ""

    def __init__(self, name: str, rank: int, members: tuple[int, ...], world: World) -> None:
        super().__init__(rank, len(members))  # pyright: ignore[reportCallIssue]
        self.pg_name = self.group_name = name
        self._place, self._members, self._world = rank, members, world
        self._lane: Lane = world.clock.lane()
        self._batch: Batch | None = None
        self._sent: deque[tuple[Tensor, Arrival]] = deque()  # no receive has taken them yet
        self._awaited: deque[tuple[Tensor, Arrival]] = deque()  # receives before their sends

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> "OneRank":
        return self

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self._members)

    # collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Arrival:
        return self._start("all_reduce", 2 * _bytes(tensors) * self._others, lambda: None, tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Arrival:
        return self.allreduce(tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Arrival:
        """
        Raises:
            NotImplementedError: from another rank, whose values nobody has.
        """
        if opts is not None and opts.rootRank != self._place:
            raise NotImplementedError(
                f"a broadcast from rank {opts.rootRank} of a group, and only rank {self._place} is there; use "
                "real_rank=null, or world=ranks"
            )
        return self._start("broadcast", _bytes(tensors) * self._others, lambda: None, tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Arrival:
        def copy() -> None:
            for gathered, own in zip(outputs, inputs, strict=True):
                for part in gathered:
                    part.copy_(own)

        sent = Fraction(_bytes(inputs) * (self.size() - 1))
        return self._start("all_gather", sent, copy, [*inputs, *(part for each in outputs for part in each)])

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Arrival:
        """[n, ...] -> [R*n, ...], or [R, n, ...]: R copies. `input` may be this rank's place in `output`."""
        tiles, own = output.view(self.size(), -1), input.reshape(-1)

        def copy() -> None:
            tiles[: self._place].copy_(own)
            tiles[self._place + 1 :].copy_(own)
            if tiles[self._place].data_ptr() != own.data_ptr():
                tiles[self._place].copy_(own)

        return self._start("all_gather", _bytes([output]) * self._others, copy, [output, input])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Arrival:
        works = [self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)]
        return works[-1]

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Arrival:
        own = [parts[self._place] for parts in inputs]

        def copy() -> None:
            for to, part in zip(outputs, own, strict=True):
                to.copy_(part)

        sent = Fraction(sum(_bytes(parts) for parts in inputs) - _bytes(own))
        return self._start("reduce_scatter", sent, copy, [*outputs, *(part for parts in inputs for part in parts)])

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Arrival:
        """[R*n, ...] -> [n, ...]: this rank's own slice, not summed."""
        own = input.reshape(self.size(), -1)[self._place]
        sent = _bytes([input]) * self._others
        return self._start("reduce_scatter", sent, lambda: output.view(-1).copy_(own), [output, input])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Arrival:
        works = [self._reduce_scatter_base(*pair) for pair in zip(outputs, inputs, strict=True)]
        return works[-1]

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Arrival:
        """Equal parts come back as they are; of unequal ones the received are filled with the sent, again and again."""
        parts = ledger.split_bytes(input, input_splits) if input_splits else []
        sent = Fraction(sum(parts) - parts[self._place]) if parts else _bytes([input]) * self._others
        copy = lambda: _fill(output, input)  # noqa: E731
        return self._start("all_to_all", sent, copy, [output, input], parts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Arrival:
        def copy() -> None:
            for to, part in zip(outputs, inputs, strict=True):
                _fill(to, part)

        parts = [_bytes([part]) for part in inputs]
        sent = Fraction(sum(parts) - parts[self._place])
        return self._start("all_to_all", sent, copy, [*outputs, *inputs], parts)

    def barrier(self, opts: Any = None) -> Arrival:
        """The host waits until this device has done all that came before, as at NCCL's barrier."""
        ledger.issued("barrier", Fraction(0), Fraction(0))
        self._world.clock.synchronise()
        return Arrival()

    # torch 2.13's names

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # point to point: what is received is what was sent

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Arrival:
        (tensor,) = tensors
        sent = Fraction(0 if peer == self._place else _bytes(tensors))
        far = sent if self._node(peer) != self._node(self._place) else Fraction(0)
        if self._awaited:
            received, arrival = self._awaited.popleft()
            self._start("send", sent, lambda: _fill(received, tensor), [received, tensor], far=far, arrival=arrival)
            return arrival
        arrival = self._start("send", sent, lambda: None, [tensor], far=far)
        self._lane.outlives_its_wait(tensor)
        self._sent.append((tensor, arrival))
        return arrival

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Arrival:
        """
        Raises (when it is waited for):
            RuntimeError: nothing was sent.
        """
        (received,) = tensors
        if not self._sent:
            arrival = Arrival(missing=f"a receive from rank {peer} without a send: nobody knows what would come")
            self._awaited.append((received, arrival))
            return arrival
        tensor, arrival = self._sent.popleft()
        if self._batch is not None:
            self._batch.copies.append(lambda: _fill(received, tensor))
            self._batch.held.append(received)
        else:
            self._lane.follow(arrival, lambda: _fill(received, tensor), [received, tensor])
        return arrival

    # several messages as one launch

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = Batch()

    def _end_coalescing(self, device: torch.device) -> Arrival:
        batch, self._batch = self._batch, None
        assert batch is not None, "nothing was begun"
        while self._awaited:  # they come from ranks that get nothing from this one, and take what a send of theirs does
            received, _ = self._awaited.popleft()
            batch.times.append(self._time("send", Fraction(_bytes([received]))))
            batch.copies.append(partial(received.normal_, generator=self._world.noise))  # kernels run faster on zeros
            batch.held.append(received)

        def copy() -> None:
            for each in batch.copies:
                each()

        near_s, far_s, latency_s = zip(*batch.times, strict=True) if batch.times else ((), (), ())
        time = MessageTime(sum(near_s), sum(far_s), max(latency_s, default=0.0))
        return self._lane.start(time, copy, batch.held, Arrival())

    def _start(
        self,
        op: str,
        sent: Fraction,
        copy: Copies,
        tensors: Sequence[Tensor],
        parts: Sequence[int] = (),
        far: Fraction | None = None,
        arrival: Arrival | None = None,
    ) -> Arrival:
        """Count a collective and start it. sent: bytes off-rank. parts: bytes for each rank, where they may differ.
        far: bytes to other nodes, where the collective knows better than `far_share`."""
        if far is None:
            far = self._far(op, sent, parts)
        op = ledger.issued(op, sent, far)
        arrival = arrival or Arrival()
        time = self._time(op, sent)
        if ledger.is_counting():
            self._world.busy_s[NEAR] += time.near_s
            self._world.busy_s[FAR] += time.far_s
        if self._batch is not None:
            self._batch.times.append(time)
            self._batch.copies.append(copy)
            self._batch.held += tensors
            return arrival
        return self._lane.start(time, copy, list(tensors), arrival)

    def _time(self, op: str, sent: Fraction) -> MessageTime:
        return message_time(self._world.link, op, float(sent), self._members, self._world.ranks_per_node)

    def _far(self, op: str, sent: Fraction, parts: Sequence[int]) -> Fraction:
        if not sent or self._world.ranks_per_node >= distributed_c10d._world.default_pg.size():  # pyright: ignore[reportOptionalMemberAccess]
            return Fraction(0)
        own = self._node(self._place)
        if parts:
            return Fraction(sum(size for place, size in enumerate(parts) if self._node(place) != own))
        return sent * far_share(op, self._members, self._place, self._world.ranks_per_node)

    def _node(self, place: int) -> int:
        return self._members[place] // self._world.ranks_per_node

    @property
    def _others(self) -> Fraction:
        return Fraction(self.size() - 1, self.size())


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(map(ledger.payload, tensors))


def _fill(received: Tensor, sent: Tensor) -> None:
    """Fill `received` with the elements of `sent`, from the start again where they are fewer."""
    if received.numel() == sent.numel():
        received.copy_(sent.view_as(received))
        return
    if not received.numel() or not sent.numel():
        return
    to, elements = received.view(-1), sent.reshape(-1)
    for start in range(0, len(to), len(elements)):
        to[start : start + len(elements)].copy_(elements[: len(to) - start])
