"""What the untimed step is made of: the time of its phases, and on CUDA that of its kernels by class.

A phase lasts from the moment at which its first work could begin on the compute stream to the end of its last. The
forward is all of a step that is in no other phase.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile

from sp_bench.kernels import LOOKS_LIKE_ATTENTION

PARTS = ("forward", "recompute", "backward", "optimizer")
OF_PART = {"other": "optimizer"}  # the gradient's norm, and clipping
# The first that a CUDA kernel's name fits is its class.
CLASSES = {
    "messages": r"(?i)nccl|Memcpy PtoP|one_rank_message",
    "host_copies": r"Memcpy (DtoH|HtoD)",
    "attention": LOOKS_LIKE_ATTENTION,
    "matmul": r"(?i)gemm|gemv|nvjet|cublas|cutlass|wgmma|splitk|matmul",
    "other": "",
}
KERNEL_PARTS = (*CLASSES, "exposed_messages", "exposed_host_copies", "idle")
Columns = dict[str, float]


class PhaseTimes:
    """The phases of one step. On CUDA they are marked by events on the current stream, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._bytes: dict[str, tuple[int, int]] = {}  # as a phase began for the first time, and as it last ended

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        start, before = self._mark(), self._allocated()
        try:
            yield
        finally:
            self._spans.append((phase, start, self._mark()))
            if self._cuda:
                self._bytes.setdefault(phase, (before, 0))
                self._bytes[phase] = (self._bytes[phase][0], self._allocated())

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _allocated(self) -> int:
        """By torch's allocator as the host sees it, which is ahead of the device; its accounting is the same."""
        return torch.cuda.memory_allocated() if self._cuda else 0

    def end_bytes(self) -> dict[str, int] | None:
        """Allocated as each of the forward, the backward and the optimizer ended; None: not known."""
        if not {"backward", "optimizer"} <= self._bytes.keys():
            return None
        (forward, backward), (_, optimizer) = self._bytes["backward"], self._bytes["optimizer"]
        return {"forward": forward, "backward": backward, "optimizer": optimizer}

    def ms(self) -> Columns | None:
        """ms of each of PARTS; None: the step does not say where its backward is. On CUDA only after the step's end."""
        total: dict[str, float] = defaultdict(float)
        for phase, start, end in self._spans:
            total[OF_PART.get(phase, phase)] += start.elapsed_time(end) if self._cuda else 1e3 * (end - start)
        if not total["backward"]:
            return None
        backward = total["backward"] - total["recompute"]  # the second run of a layer is inside its backward
        forward = total["step"] - total["backward"] - total["optimizer"]
        return {
            "forward": forward,
            "recompute": total["recompute"],
            "backward": backward,
            "optimizer": total["optimizer"],
        }


class Kernel(NamedTuple):
    """What ran on the device, and when."""

    name: str
    start_ns: int
    end_ns: int


def ran_on(profiler: profile, device_type: DeviceType) -> list[Kernel]:
    """All that ran on a kind of device. It is read from the raw events, because `profiler.events()` makes objects and a
    tree of them. For the 100,000 events of a training step that takes longer than the step."""
    recorder = profiler.profiler
    assert recorder is not None
    assert recorder.kineto_results is not None, "the profiler has not run"
    events = recorder.kineto_results.events()
    # an annotation is the name of a range of the program, and not of something that ran
    on_device = (e for e in events if e.device_type() == device_type and not e.is_user_annotation())
    return [Kernel(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device]


def by_class(kernels: Iterable[Kernel]) -> Columns:
    """ms of each of KERNEL_PARTS. Kernels of one class may overlap, and are then counted twice.

    exposed_messages: some message runs, and no kernel. exposed_host_copies: some copy from or to host memory runs, and
    nothing else. idle: nothing runs, between the first and the last kernel.
    """
    busy: dict[str, list[tuple[int, int]]] = {name: [] for name in CLASSES}
    for kernel in kernels:
        name = next(c for c, pattern in CLASSES.items() if re.search(pattern, kernel.name))
        busy[name].append(kernel[1:])
    computing = [span for name in ("attention", "matmul", "other") for span in busy[name]]
    on_device = computing + busy["messages"]
    every = on_device + busy["host_copies"]
    found = {name: sum(end - start for start, end in spans) for name, spans in busy.items()}
    found["exposed_messages"] = _covered(on_device) - _covered(computing)
    found["exposed_host_copies"] = _covered(every) - _covered(on_device)
    found["idle"] = max(e for _, e in every) - min(s for s, _ in every) - _covered(every) if every else 0
    return {name: ns / 1e6 for name, ns in found.items()}


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """ns in which at least one of the spans runs."""
    total, until = 0, 0
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total
