"""When the messages of a modelled link arrive: by the host's clock, or on a CUDA device by its own.

The links of the host and the network card serve messages in turn: one that wants a link while another has it waits for
it. So two equal messages at once take the time of both. Each group has a lane, in which its messages follow each other,
as in the stream that NCCL has for each communicator.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter, sleep
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sp_bench.costs.links import MessageTime

NEAR, FAR = 0, 1  # the links inside a host, and the network card


class Arrival(dist.Work):
    """A message under way. On CUDA `wait` makes the current stream wait, on a CPU the host. It keeps the message's
    tensors alive until then."""

    def __init__(self, missing: str = "") -> None:
        super().__init__()
        self._missing = missing  # what it waits for, if nothing is under way yet
        self._await: Callable[[], object] = lambda: None
        self._held: Sequence[Tensor] = ()
        self._has_come: Callable[[], bool] = lambda: True

    def begins(self, wait: Callable[[], object], has_come: Callable[[], bool], held: Sequence[Tensor]) -> None:
        self._missing, self._await, self._has_come, self._held = "", wait, has_come, held

    def wait(self, timeout: Any = None) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """
        Raises:
            RuntimeError: it is a receive, and nothing was sent.
        """
        if self._missing:
            raise RuntimeError(self._missing)
        self._await()
        self._held = ()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return not self._missing and self._has_come()

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return list(self._held)

    def get_future(self) -> Future[list[Tensor]]:
        done: Future[list[Tensor]] = Future()
        tensors = list(self._held)
        self.wait()
        done.set_result(tensors)
        return done


class Lane(Protocol):
    """The messages of one group, one after the other."""

    def start(self, time: MessageTime, copy: Callable[[], object], held: Sequence[Tensor], arrival: Arrival) -> Arrival:
        """Start a message behind what the current stream has been given until now. `copy` makes what is received."""
        ...

    def follow(self, arrival: Arrival, copy: Callable[[], object], held: Sequence[Tensor]) -> None:
        """A copy that belongs to a message which has been started."""
        ...

    def outlives_its_wait(self, sent: Tensor) -> None:
        """Keep the memory of a sent tensor until the message has ended, as torch does for NCCL's sends."""
        ...


class HostClock:
    """For worlds without a GPU: copies are made at once, and `wait` sleeps until the message would have come."""

    def __init__(self) -> None:
        self._free_at = [0.0, 0.0]  # of each link; perf_counter

    def reserve(self, message: MessageTime, earliest: float) -> float:
        """When a message arrives that begins now, or at `earliest` if that is later."""
        begin = max(perf_counter(), earliest)
        ends = [begin]
        for link, busy_s in ((NEAR, message.near_s), (FAR, message.far_s)):
            if busy_s:
                self._free_at[link] = max(self._free_at[link], begin) + busy_s
                ends.append(self._free_at[link])
        return max(ends) + message.latency_s

    def lane(self) -> "HostLane":
        return HostLane(self)

    def synchronise(self) -> None:
        """Nothing runs beside the host."""


class HostLane:
    def __init__(self, clock: HostClock) -> None:
        self._clock, self._last = clock, 0.0

    def start(self, time: MessageTime, copy: Callable[[], object], held: Sequence[Tensor], arrival: Arrival) -> Arrival:
        at = perf_counter() if not any(time) else self._clock.reserve(time, self._last)
        self._last = max(self._last, at)
        copy()
        arrival.begins(lambda: _sleep_until(at), lambda: perf_counter() >= at, held)
        return arrival

    def follow(self, arrival: Arrival, copy: Callable[[], object], held: Sequence[Tensor]) -> None:
        copy()

    def outlives_its_wait(self, sent: Tensor) -> None:
        """No stream has it."""


def _sleep_until(at: float) -> None:
    while (left := at - perf_counter()) > 0:
        sleep(left)


class DeviceClock:
    """Messages on CUDA streams. A kernel takes the links when the message really begins and writes down when it ends;
    the copies run; another kernel waits until then. Both read the device's global timer, in ns: cycles are not time,
    for the clock moves with power."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free_at = torch.zeros(2, dtype=torch.int64, device=device)  # of each link, ns

    def lane(self) -> "DeviceLane":
        return DeviceLane(self)

    def synchronise(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


class DeviceLane:
    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock

    @cached_property  # most groups send nothing
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._clock.device, priority=-1)  # as exchange.go_first asks of NCCL

    @cached_property
    def ends_at(self) -> Tensor:
        """When the message ends that the stream is at, ns."""
        made = torch.zeros(1, dtype=torch.int64, device=self._clock.device)
        torch.cuda.current_stream(self._clock.device).synchronize()  # it is there for all streams
        return made

    def start(self, time: MessageTime, copy: Callable[[], object], held: Sequence[Tensor], arrival: Arrival) -> Arrival:
        stream, event = self.stream, torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(self._clock.device))
        with torch.cuda.stream(stream):
            if any(time):
                from sp_bench.measure import link_kernels  # triton, which worlds without a GPU lack

                link_kernels.take_links(self._clock.free_at, self.ends_at, time)
                copy()
                link_kernels.wait_for_end(self.ends_at)
            else:
                copy()
            event.record(stream)
        arrival.begins(lambda: torch.cuda.current_stream(self._clock.device).wait_event(event), event.query, held)
        return arrival

    def follow(self, arrival: Arrival, copy: Callable[[], object], held: Sequence[Tensor]) -> None:
        self.start(MessageTime(0.0, 0.0, 0.0), copy, held, arrival)

    def outlives_its_wait(self, sent: Tensor) -> None:
        if sent.is_cuda:
            sent.record_stream(self.stream)
