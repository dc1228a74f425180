"""Checkpoint offload: what a layer keeps for its backward waits in host memory from its forward until then.

L layers. The copies of layer i leave the device during the forward of layer i+1, and come back during the backward of
layer i+1, on a stream for each direction. So two layers' are on the device at a time, and layer L-1's stay there, as
its backward comes at once.
"""

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sp_bench import hardware

CPU = torch.device("cpu")
ALIGNMENT = 512  # bytes at which each tensor begins in host memory, as on a device


class OutOfHostMemory(MemoryError):
    """The host has not as much memory as is asked for, or does not page-lock it."""


class HostMemory:
    """One slab of host memory that all layers share, page-locked where tensors are on a GPU.

    CUDA registers it, because torch's pinned allocator would round it up to a power of two. A trial makes it before
    its timed steps, because page-locking a few GiB takes a second.
    """

    def __init__(self) -> None:
        self.slab = torch.empty(0, dtype=torch.uint8)  # [bytes]
        self._is_registered = False
        self.layer_bytes = 0  # that a layer of the last forward kept

    @property
    def num_bytes(self) -> int:
        return self.slab.nbytes

    def require(self, num_layers: int, layer_bytes: int, device: torch.device) -> None:
        """Have `layer_bytes` for each layer in the slab. What it held is lost if it must grow.

        Raises:
            OutOfHostMemory: this machine has not as much free memory for all its ranks; or it cannot be page-locked.
        """
        needed = num_layers * layer_bytes
        if needed <= self.num_bytes:
            return
        self.release()
        ranks = _ranks_here(device)
        _require_free(needed, ranks)
        self.slab = _touched(needed, len(os.sched_getaffinity(0)) // ranks or 1)
        if device.type == "cuda" and needed:
            if error := int(_cudart().cudaHostRegister(self.slab.data_ptr(), needed, 0)):
                self.slab = torch.empty(0, dtype=torch.uint8)
                raise OutOfHostMemory(
                    f"workload.checkpoint_offload=true: CUDA cannot page-lock {needed / 2**30:.1f} GiB of host memory "
                    f"(cudaHostRegister: error {error}); {hardware.free_host_bytes() / 2**30:.1f} GiB more are free; "
                    "use a smaller seq_len, or checkpoint_offload=false"
                )
            self._is_registered = True

    def release(self) -> None:
        """Give it back to the machine."""
        if self._is_registered:
            torch.cuda.synchronize()  # no copy may be under way
            if error := int(_cudart().cudaHostUnregister(self.slab.data_ptr())):
                raise RuntimeError(f"cudaHostUnregister: error {error}")
        self.slab, self._is_registered = torch.empty(0, dtype=torch.uint8), False


def _cudart() -> Any:
    return torch.cuda.cudart()


memory = HostMemory()  # of this process


@contextmanager
def host_memory() -> Iterator[HostMemory]:
    """The slab of a trial, which is given back when the trial ends."""
    try:
        yield memory
    finally:
        memory.release()


@contextmanager
def page_locking(num_bytes: int, what: str) -> Iterator[None]:
    """Inside, torch page-locks `num_bytes` of host memory for `what`, and allocates nothing on a device. CUDA's own
    error says `out of memory`, and not whose.

    Raises:
        OutOfHostMemory: it was refused.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" not in str(error).lower():
            raise
        free = hardware.free_host_bytes() / 2**30
        raise OutOfHostMemory(
            f"{what}: CUDA cannot page-lock {num_bytes / 2**30:.1f} GiB of host memory for this rank, and torch rounds "
            f"each tensor up to a power of two; {free:.1f} GiB are free. Use more ranks, or keep it on the device"
        ) from error


def release_page_locked(device: torch.device) -> None:
    """Give back the host memory that torch page-locked and that no tensor holds. The device must have done its copies.

    torch.compile puts some there. While it tries variants of a kernel of the backward that writes over its input, it
    may keep a copy of the input in page-locked memory, rounded up to a power of two: 16 GiB for a whole MLP of Qwen3-4B
    and 450,560 tokens. Torch's allocator would keep them. Source: `copy_args_to_cpu_if_needed` in
    torch/_inductor/runtime/triton_heuristics.py.
    """
    if device.type == "cuda":
        torch._C._host_emptyCache()  # torch 2.13 has it as torch.accelerator.empty_host_cache


def _ranks_here(device: torch.device) -> int:
    """Ranks on this machine, which ask for memory at the same moment. On a CPU all are here."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if device.type == "cuda":
        return int(os.environ.get("LOCAL_WORLD_SIZE", min(ranks, torch.cuda.device_count())))
    return ranks


def _touched(num_bytes: int, num_threads: int) -> Tensor:
    """Memory [bytes] that is there, in large pages where the machine has them. CUDA page-locks memory that is not there
    yet page after page in one thread, which took minutes for 100 GiB."""
    slab = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        slab.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(slab, dtype=torch.uint8)
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(Tensor.zero_, tensor.chunk(num_threads)))
    return tensor


def _require_free(num_bytes: int, ranks: int) -> None:
    if (free := hardware.free_host_bytes()) < ranks * num_bytes:
        raise OutOfHostMemory(
            f"workload.checkpoint_offload=true: {ranks} ranks need {num_bytes / 2**30:.1f} GiB of host memory each, "
            f"and {free / 2**30:.1f} GiB are free; use a smaller seq_len, or checkpoint_offload=false"
        )


@cache  # torch takes new streams from a small pool, so that many would share with others
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Direction:
    """Copies one way: on CUDA on a stream of their own, after all that the current stream has been given so far."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._stream = _stream(device, name) if device.type == "cuda" else None

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy each (destination, source). Both must stay until the returned event, which is None on a CPU."""
        if self._stream is None:
            for destination, source in pairs:
                destination.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            return event


def _wait(event: torch.cuda.Event | None) -> None:
    """The current stream goes on when the copies are done; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


@dataclass
class _Layer:
    """What one layer keeps: tensors on the device, and where each is on the host."""

    tensors: list[Tensor] = field(default_factory=list)  # on the device, while they are there
    places: list[Tensor] = field(default_factory=list)  # in host memory, each of the shape and strides of its tensor
    copied: torch.cuda.Event | None = None  # the end of the last copies, out or back
    num_left: int = 0  # how often they will still be asked for
    device: torch.device = CPU  # theirs

    def index_of(self, tensor: Tensor) -> int:
        """The index of the kept tensor with the same elements in the same memory, in any shape, or -1. Two checkpoints
        keep the same input, and an attention its output."""
        where = _memory_of(tensor)
        return next((i for i, known in enumerate(self.tensors) if _memory_of(known) == where), -1)


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    view = () if _strides_on_host(tensor) == tensor.stride() else (tensor.shape, tensor.stride())  # () has no gaps
    return tensor.data_ptr(), tensor.dtype, tensor.numel(), view


def _strides_on_host(tensor: Tensor) -> tuple[int, ...]:
    """In the order in which its elements lie, without gaps between them."""
    return torch.empty_like(tensor, device="meta").stride()


@dataclass(frozen=True)
class _Handle:
    """What autograd keeps in the place of a tensor: which it is of a layer's. A tensor that stays is in it."""

    layer: int
    index: int
    shape: torch.Size
    strides: tuple[int, ...]
    tensor: Tensor | None = None


class Offload:
    """The offloaded inputs of a decoder with `num_layers` layers. A backward must follow each forward."""

    def __init__(self, num_layers: int) -> None:
        self._layers = [_Layer() for _ in range(num_layers)]
        self._stays: set[int] = set()  # memory of what no layer keeps for itself
        self._current = -1

    @contextmanager
    def layer(self, index: int, block: nn.Module, *shared: Tensor) -> Iterator[None]:
        """Inside, layer `index` runs its forward. Its parameters, and `shared` tensors, stay on the device."""
        self._current, self._layers[index], self._stays = index, _Layer(), set()
        shared_memory = {t.untyped_storage().data_ptr() for t in shared}

        def pack(tensor: Tensor) -> Any:
            if not self._stays:  # by now FSDP has gathered the parameters
                self._stays = shared_memory | {p.untyped_storage().data_ptr() for p in block.parameters()}
            return self.pack(tensor)

        with saved_tensors_hooks(pack, self.unpack):
            yield
        if index > 0:
            self._let_go(self._layers[index - 1])
        if index < len(self._layers) - 1:
            self._send(index)

    def pack(self, tensor: Tensor) -> Any:
        """What is kept in the place of `tensor`, which the current layer has made."""
        if tensor.untyped_storage().data_ptr() in self._stays or tensor.numel() == 0:
            return tensor
        if self._current == len(self._layers) - 1:
            return _Handle(self._current, -1, tensor.shape, tensor.stride(), tensor)
        layer = self._layers[self._current]
        index = layer.index_of(tensor)
        if index < 0:
            index = len(layer.tensors)
            layer.tensors.append(tensor.detach())
        layer.num_left += 1
        return _Handle(self._current, index, tensor.shape, _strides_on_host(tensor))

    def unpack(self, kept: Any) -> Tensor:
        """The tensor of what `pack` gave. The layer below begins to come back."""
        if isinstance(kept, Tensor):
            return kept
        layer = self._layers[kept.layer]
        self._fetch(layer)
        if kept.layer > 0:
            self._fetch(self._layers[kept.layer - 1])
        if kept.tensor is not None:
            return kept.tensor
        _wait(layer.copied)
        layer.num_left -= 1
        tensor = layer.tensors[kept.index].as_strided(kept.shape, kept.strides)
        if layer.num_left == 0:
            # The current stream waits for the copies, and what it is given from now on may have their memory.
            layer.tensors = []
        return tensor

    def _send(self, index: int) -> None:
        layer = self._layers[index]
        if not layer.tensors:  # no gradient is asked for
            return
        layer.device = layer.tensors[0].device
        sizes = [-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in layer.tensors]
        if index == 0:
            memory.layer_bytes = sum(sizes)
            memory.require(len(self._layers) - 1, sum(sizes), layer.device)
        start = index * memory.layer_bytes
        if sum(sizes) > memory.layer_bytes:
            raise RuntimeError(f"layer {index} keeps {sum(sizes)} bytes, and layer 0 keeps {memory.layer_bytes}")
        for tensor, size in zip(layer.tensors, sizes, strict=True):
            layer.places.append(_place(memory.slab[start : start + tensor.nbytes], tensor))
            start += size
        # Host memory may still be read for the backward before this one. The current stream has waited for that.
        layer.copied = _Direction(layer.device, "out").copy(list(zip(layer.places, layer.tensors, strict=True)))

    @staticmethod
    def _let_go(layer: _Layer) -> None:
        """End its time on the device. Its memory goes to what the current stream is given after the copies."""
        _wait(layer.copied)
        layer.tensors = []

    @staticmethod
    def _fetch(layer: _Layer) -> None:
        if layer.tensors or layer.num_left == 0:
            return
        device = layer.device
        layer.tensors = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device) for p in layer.places]
        layer.copied = _Direction(device, "back").copy(list(zip(layer.tensors, layer.places, strict=True)))


def _place(memory_of_tensor: Tensor, tensor: Tensor) -> Tensor:
    """Host memory [n bytes] as a tensor like `tensor`."""
    return memory_of_tensor.view(tensor.dtype).as_strided(tensor.shape, _strides_on_host(tensor))
