"""What a rank says of its own failure, and the threads and the memory that it gives itself and its next trial."""

import asyncio
import errno
import gc
import weakref
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_bench import hardware, worker
from sp_bench.engines import fsdp2
from sp_bench.measure.incorrect import CannotTell, Incorrect
from sp_bench.training.offload import page_locking


def raised(what) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whichever the library raises
        what()
    return caught.value


def failure(error: BaseException) -> tuple[str | None, str | None]:
    event = worker._failure(1, 5.0, error)
    assert (event.rank, event.at, event.name) == (1, 5.0, "failed")
    return event.status, event.oom_site


ENOMEM = OSError(errno.ENOMEM, "Cannot allocate memory")


def refused() -> None:
    raise ENOMEM


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**60), refused])
def test_an_allocation_that_the_host_refuses_is_out_of_host_memory(allocate):
    assert failure(raised(allocate)) == ("oom", "host")


def test_a_memory_error_of_python_is_no_edge_by_itself():
    assert failure(raised(lambda: bytearray(2**60))) == ("error", None)


@pytest.mark.parametrize(
    ("error", "site"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "torch"),
        (RuntimeError("CUDA error: out of memory"), "torch"),  # of the driver: a library's own allocation
        (RuntimeError("CUDA driver error: out of memory"), "torch"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "torch"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "torch"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "torch"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "torch"),
        (
            RuntimeError("NCCL error in: NCCLUtils.cpp:77\nLast error:\nFailed to CUDA calloc async 4194304 bytes"),
            "nccl",
        ),
        (RuntimeError("NCCL error in: NCCLUtils.cpp:77\nLast error:\nCuda failure 2 'out of memory'"), "nccl"),
    ],
)
def test_out_of_device_memory_names_whose_allocation_failed(error, site):
    assert failure(error) == ("oom", site)


OF_TORCH = (
    "CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is "
    "free. Process 7 has {other} GiB memory in use. Including non-PyTorch memory, this process has {held} GiB memory "
    "in use. {allowed}Of the allocated memory {used} GiB is allocated by PyTorch, and 512.00 MiB is reserved "
    "by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ({"asked": 2.0, "held": 78.5, "used": 70.0, "other": 0.5, "allowed": ""}, "oom"),
        ({"asked": 2.0, "held": 20.0, "used": 18.0, "other": 59.0, "allowed": ""}, "error"),
        ({"asked": 2.0, "held": 41.0, "used": 38.5, "other": 0.5, "allowed": "40.00 GiB allowed; "}, "oom"),
        ({"asked": 2.0, "held": 22.0, "used": 20.0, "other": 0.5, "allowed": "40.00 GiB allowed; "}, "error"),
    ],
)
def test_a_refusal_is_an_edge_only_if_what_is_held_and_asked_for_reach_the_size(numbers, status):
    event = worker._failure(0, 0.0, torch.OutOfMemoryError(OF_TORCH.format(**numbers)))
    assert event.status == status
    if status == "error":
        assert "no end of memory: 20.00 GiB held" in str(event.reason) or "20.50 GiB held" in str(event.reason)


def test_what_cannot_be_told_is_no_fault_of_the_method():
    event = worker._failure(0, 0.0, CannotTell("the updates are too small"))
    assert (event.status, event.reason) == ("unsupported", "the updates are too small")


def refuse(*_, **__) -> None:
    raise RuntimeError("CUDA error: out of memory")


def test_page_locked_memory_that_cuda_refuses_is_the_hosts(monkeypatch):
    monkeypatch.setattr(hardware, "free_host_bytes", lambda: 3 * 2**30)
    part = torch.zeros(2**29, device="meta")
    parameters = [SimpleNamespace(detach=lambda: SimpleNamespace(to_local=lambda: part))]
    decoder: Any = SimpleNamespace(parameters=lambda: parameters, to_empty=refuse)
    error = raised(lambda: fsdp2._to_host(decoder, torch.device("cuda")))
    assert failure(error) == ("oom", "host")
    assert "optimizer_offload=torch_adamw: CUDA cannot page-lock 4.0 GiB of host memory" in str(error)
    assert "3.0 GiB are free" in str(error)
    decoder.to_empty = lambda device: None
    monkeypatch.setattr(torch, "empty", refuse)  # of gradients
    assert failure(raised(lambda: fsdp2._to_host(decoder, torch.device("cuda")))) == ("oom", "host")
    fsdp2._to_host(decoder, torch.device("cpu"))  # where nothing is page-locked


def test_a_librarys_page_locked_memory_that_cuda_refuses_is_the_hosts():
    with closing(asyncio.new_event_loop()) as loop:
        refused = loop.create_future()  # its result raises without a frame of Python, as torch does
        refused.set_exception(RuntimeError("CUDA error: out of memory"))
    library = SimpleNamespace(pin_memory=refused.result, synchronize=refused.result)
    assert failure(raised(lambda: library.pin_memory())) == ("oom", "host")
    assert failure(raised(lambda: library.synchronize())) == ("oom", "torch")


def test_a_full_device_and_other_errors_stay_what_they_are_while_host_memory_is_page_locked():
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: no device")):
        with pytest.raises(type(error), match=str(error)), page_locking(1, "this"):
            raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error"),
        ValueError("out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_other_failures_are_errors(error):
    assert failure(error) == ("error", None)


def test_a_failure_names_its_rank_and_type_and_incorrect_speaks_for_itself():
    assert worker._failure(3, 0.0, ValueError("P=3")).reason == "rank 3: ValueError: P=3"
    assert worker._failure(3, 0.0, Incorrect("dq is 3.0e-2 off")).reason == "dq is 3.0e-2 off"
    assert worker._failure(3, 0.0, Incorrect("dq is off")).status == "incorrect"


def test_a_reason_is_at_most_2000_characters():
    assert len(worker._failure(0, 0.0, ValueError("x" * 10_000)).reason or "") == worker.MAX_REASON


def test_a_rank_on_the_cpu_computes_with_its_own_number_of_threads(make_config):
    before = torch.get_num_threads()
    try:
        for asked, has in ((3, 3), (None, 1)):
            assert worker._device(make_config(hardware__threads_per_rank=asked)) == torch.device("cpu")
            assert torch.get_num_threads() == has
    finally:
        torch.set_num_threads(before)


ONE_OF_FOUR = {"world": "one_rank", "sp_size": 4}


@pytest.mark.parametrize(
    ("cap_gib", "of", "fraction"),
    [
        *((40, {}, (40 - 6) / 80), (90, {}, 1.0), (None, {}, 1.0)),
        # NCCL's buffers, of which one rank has none
        (40, ONE_OF_FOUR | {"method": "ulysses"}, (40 - 6 - 3.923) / 80),
        (None, ONE_OF_FOUR | {"method": "ring"}, (80 - 6 - 3.193) / 80),
        (None, ONE_OF_FOUR | {"method": "all_gather"}, (80 - 6 - 2.735) / 80),
        (None, ONE_OF_FOUR | {"method": "usp", "method__ulysses_degree": 2}, (80 - 6 - 3.651) / 80),
    ],
)
def test_an_emulated_memory_is_of_all_on_the_device_and_not_of_torchs_allocator_alone(
    make_config, monkeypatch, cap_gib, of, fraction
):
    gib, device, fractions = 2**30, torch.device("cuda", 1), {}
    config = make_config(fabric="nvlink", hardware="h200", hardware__device_memory_gib=cap_gib, **of)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of: {device: (70 * gib, 80 * gib)}[of])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda of: {device: 4 * gib}[of])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, of: fractions.update({of: part}))
    worker._emulate_memory(config, device)
    assert fractions == {device: pytest.approx(fraction)}


class Knot:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_trial_left_and_is_garbage_by_now_is_freed_before_the_next_trial():
    held = Knot()
    left = weakref.ref(held)
    try:
        worker.freeze_loaded()
        del held
        gc.collect()
        assert left() is not None, "a collection freed what is frozen: this test says nothing"
        worker.freeze_loaded()
        assert left() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
