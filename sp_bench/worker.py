"""One rank's whole life: `python -m sp_bench.worker <trial folder>/trial.json ...`.

Whoever starts it - the driver, or its agent on another host - says who it is by RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Nothing else initialises torch.distributed.

A trial ends in one of two ways: rank 0 hands over a record, or a rank says how it failed and leaves at once, because
after one rank has failed its peers may wait in a collective for ever. Whoever started a rank sees its exit code, which
tells of a rank that can say nothing any more: killed, or gone with a library's exit().
"""

import errno
import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from sp_bench import handover, hardware, methods, workloads
from sp_bench.attention import copy_engines
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import nccl
from sp_bench.measure import ledger, one_rank, record
from sp_bench.measure.incorrect import CannotTell, Incorrect
from sp_bench.measure.meeting import meet
from sp_bench.methods import closed_forms, real_rank
from sp_bench.testing import faults
from sp_bench.training.offload import OutOfHostMemory


def main(trials: Sequence[Path]) -> NoReturn:
    """Run the trials one after another in this process; the first that fails ends it."""
    rank = int(os.environ["RANK"])
    _offer_to_the_kernels_killer()
    for trial in trials:
        freeze_loaded()
        _prove_and_measure(trial, rank)
    _part()
    _leave(0)


def _offer_to_the_kernels_killer() -> None:
    """Where the host's memory runs out, Linux ends a rank, and not the driver, which has all others to tell of."""
    with suppress(OSError):  # other systems have no such file, and a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


def freeze_loaded() -> None:
    """Takes what is loaded by now out of garbage collection: it stays, and is a million objects that each collection of
    a trial would look at. It takes 0.4 s with all of Hugging Face's libraries loaded (one core of a server, 2026).

    What an earlier trial had in memory when it was frozen may be garbage by now, which nothing else would ever collect.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _prove_and_measure(trial: Path, rank: int) -> None:
    folder = trial.parent
    _log_to(handover.log_path(folder, rank))
    try:
        _enter_phase(folder, rank, "init")
        columns = _run(*handover.read_trial(trial), folder, rank)
    except BaseException as error:
        failed_at = handover.now()
        traceback.print_exc()
        handover.send_event(folder, _failure(rank, failed_at, error))
        _leave(1)
    if rank == 0:
        handover.write_record(folder, columns)
    handover.enter_phase(folder, rank, "done")


def _part() -> None:
    """Return on every rank once the messages of all have come, and on rank 0, which has the store by which they meet,
    as the last. NCCL's communicators end with the process: to take them down first took 2 s of a launch, and 11 s with
    Megatron's (H200, 2026)."""
    if dist.get_backend() == one_rank.BACKEND:
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    store, size = _get_default_store(), dist.get_world_size()
    for meeting, waits in (("done", True), ("left", dist.get_rank() == 0)):
        if store.add(f"sp_bench {meeting}", 1) == size:
            store.set(f"sp_bench all {meeting}", "")
        if waits:
            store.wait([f"sp_bench all {meeting}"])


def _leave(exit_code: int) -> NoReturn:
    """End at once: after a failure peers may hang, and after success there is nothing left to tidy for seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _log_to(path: Path) -> None:
    """Everything this process prints, C libraries included, goes to its own file. Appending lets the parent trim it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _run(config: TrialConfig, replicate: int, folder: Path, rank: int) -> dict[str, Any]:
    device = _device(config)
    if not dist.is_initialized():
        _join(config, device)
    dist.barrier()  # an unreachable peer fails here, in init, and not in a measured phase
    _emulate_memory(config, device)

    def enter_phase(name: str) -> None:
        if name in ("warmup", "measure"):  # proof or warm-up has made the communicators, whose buffers count as well
            _emulate_memory(config, device)
        _enter_phase(folder, rank, name)

    machine, known = record.machine_id(device), handover.read_proofs(folder)
    if known and machine not in known:
        print(f"machine {machine} has other devices, drivers or settings than {', '.join(known)}: it proves anew")
    proof = known.get(machine)
    mesh = methods.mesh_of(config)
    job = workloads.Job(config, mesh, device, enter_phase, handover.traces(folder), replicate, proof)
    with _library_state_restored(device):
        measurement = workloads.get(config.workload.name).run(job)
    if config.world == "one_rank":
        busy_ms = one_rank.require_waits(measurement.window_ms, len(measurement.rank_step_ms))
        measurement.columns["link_busy_ms"] = busy_ms
    copy_engines.transport.cache_clear()  # its memory is of this trial's message sizes
    _enter_phase(folder, rank, "handover")
    if rank == 0 and (proof or measurement.proof):
        handover.write_proof(folder, machine, measurement.proof)
    measurement.proof = None  # it has all ranks' gradients, and is not sent round
    gathered = record.of_all_ranks(measurement)
    captured = record.environment(device)
    is_mean = closed_forms.traffic_is_mean(config.method.name)
    columns = record.assemble(config, gathered, traffic_is_mean=is_mean)
    flags = [faults.FLAG] if faults.VARIABLE in os.environ else []
    return columns | {"flags": flags, "environment": captured}


def _join(config: TrialConfig, device: torch.device) -> None:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT, or have a model of them."""
    if config.world == "one_rank":
        one_rank.join(real_rank.real_place(config) or 0, config.world_size, config.ranks_per_node, config.link, device)
        return
    meet(config, device)


def _enter_phase(folder: Path, rank: int, name: str) -> None:
    handover.enter_phase(folder, rank, name)
    faults.strike(name, rank)


def _device(config: TrialConfig) -> torch.device:
    if config.hardware.device == "cpu":
        torch.set_num_threads(config.hardware.threads_per_rank or 1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if config.hardware.allocator is not None:
        _require_allocator(config.hardware.allocator)
    return device


def _require_allocator(asked: str) -> None:
    """What the driver set in the environment must be how torch allocates."""
    torch.cuda.init()
    settings: dict[str, Any] = dict(torch.cuda.memory._snapshot())["allocator_settings"]
    if not settings.get(asked):
        raise RuntimeError(f"hardware.allocator={asked}, but torch's allocator says {asked}={settings.get(asked)}")


def _emulate_memory(config: TrialConfig, device: torch.device) -> None:
    """Cap torch's allocator so that it and all else on the device together have `device_memory_gib`. Ranks that share
    a GPU have that much each; without it, equal parts of the GPU. One rank of a world has what NCCL would leave it."""
    if device.type != "cuda":
        return
    asked_gib, sharing = config.hardware.device_memory_gib, config.hardware.ranks_per_gpu
    missing = 0  # what NCCL would hold if the others of the world were there
    if config.world == "one_rank":
        missing = nccl.outside_bytes(closed_forms.outside_allocator(config)._replace(process=0))
    if asked_gib is None and sharing == 1 and not missing:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    reserved = torch.cuda.memory_reserved(device)
    if sharing > 1:
        dist.barrier()  # what the others hold must not change meanwhile
        of_ranks: list[tuple[int | None, int]] = [(None, 0)] * config.world_size
        dist.all_gather_object(of_ranks, (device.index, reserved))
        reserved = sum(size for index, size in of_ranks if index == device.index)
    free, total = torch.cuda.mem_get_info(device)
    outside = (total - free - reserved) / sharing + missing  # the context and NCCL's buffers
    allowed = (total / sharing if asked_gib is None else asked_gib * 2**30) - outside
    torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0), device)


class Setting(NamedTuple):
    """A setting of the whole process that any library may change."""

    name: Prose  # in the rank's log
    read: Callable[[], Any]
    write: Callable[[Any], object]


SETTINGS = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    # restored to None and not to the device that was read: setting any device slows down every call of torch
    Setting("default device", torch.get_default_device, lambda device: torch.set_default_device(None)),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting("deterministic mode", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    Setting("ledger attribution", lambda: dict(ledger._current), ledger._current.update),
)


@contextmanager
def _library_state_restored(device: torch.device) -> Iterator[None]:
    """Restores the random states and SETTINGS. A setting that the trial had changed is named in the rank's log.

    The allocator's statistics are not restored here; each trial resets them before its timed steps.
    """
    before = [(setting, setting.read()) for setting in SETTINGS]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for setting, value in before:
        if (left := setting.read()) != value:
            print(f"the trial left the {setting.name} at {left}; restored to {value}", flush=True)
            setting.write(value)


MAX_REASON = 2000  # characters
HOST_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"  # torch's MemoryError on the host is a RuntimeError
# What a library says when its memory ran out, by whose memory it was. NCCL's texts name CUDA, too.
OUT_OF_MEMORY = (
    (r"NCCL.*(out of memory|Cannot allocate memory|Failed to CUDA (host )?(m|c)alloc)", "nccl"),
    (rf"{HOST_ALLOCATOR}", "host"),
    (r"CUDA( driver)? error: out of memory", "torch"),  # of CUDA itself, for what torch's allocator did not ask for
    (r"Triton Error \[CUDA\]: out of memory", "torch"),
    (r"CUBLAS_STATUS_ALLOC_FAILED", "torch"),
    (r"CUDNN_STATUS(_INTERNAL_ERROR_DEVICE)?_ALLOC(ATION)?_FAILED", "torch"),
)
FULL = 0.9  # of a memory: contexts, and pages that are never free, are in no message
GIB = 2**30


def _failure(rank: int, at: float, error: BaseException) -> handover.Event:
    text = str(error).strip() or "no message"
    if isinstance(error, Incorrect):
        return handover.Event(rank, at, "failed", "incorrect", text[:MAX_REASON])
    if isinstance(error, CannotTell):
        return handover.Event(rank, at, "failed", "unsupported", text[:MAX_REASON])
    site = _oom_site(error, text)
    if site and (room := _room_left(error, text)):
        site, text = None, f"{room}; {text}"
    reason = f"rank {rank}: {type(error).__name__}: {text}"[:MAX_REASON]
    return handover.Event(rank, at, "failed", "oom" if site else "error", reason, site)


def _oom_site(error: BaseException, text: str) -> str | None:
    """Whose memory ran out, or None: it did not, or Python's MemoryError does not say how much was asked for."""
    if isinstance(error, OutOfHostMemory) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if isinstance(error, torch.OutOfMemoryError):
        return "torch"
    if not isinstance(error, RuntimeError):
        return None
    site = next((site for pattern, site in OUT_OF_MEMORY if re.search(pattern, text, re.DOTALL)), None)
    return "host" if site == "torch" and _was_page_locking(error) else site


def _room_left(error: BaseException, text: str) -> str | None:
    """Why a refusal is not the end of a memory: what was held and what was asked for are less than it has. None: they
    reach it, or the message does not say."""
    if isinstance(error, torch.OutOfMemoryError):
        asked, total, allowed = (
            _gib(rf"{before}([\d.]+) (\w+){after}", text)
            for before, after in (("Tried to allocate ", ""), ("total capacity of ", ""), ("", " allowed;"))
        )
        of_torch = [
            _gib(rf"([\d.]+) (\w+) is {what}", text) for what in ("allocated by PyTorch", "reserved by PyTorch")
        ]
        held = sum(each or 0.0 for each in of_torch)
        if allowed is None:  # then all that the process has counts, CUDA's context and NCCL's buffers, too
            held, allowed = _gib(r"this process has ([\d.]+) (\w+) memory in use", text) or held, total
    elif HOST_ALLOCATOR in text and (size := re.search(r"tried to allocate (\d+) bytes", text)):
        asked, allowed, held = int(size[1]) / GIB, hardware.free_host_bytes() / GIB, 0.0
    else:
        return None
    if asked is None or allowed is None or held + asked >= FULL * allowed:
        return None
    return f"no end of memory: {held:.2f} GiB held and {asked:.2f} GiB asked for, of {allowed:.2f} GiB"


def _gib(pattern: str, text: str) -> float | None:
    """A size in a message of torch: a number and its unit."""
    if not (found := re.search(pattern, text)):
        return None
    return float(found[1]) * {"bytes": 1 / GIB, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}[found[2]]


def _was_page_locking(error: BaseException) -> bool:
    """Whether torch failed in a call of pin_memory, perhaps a library's: CUDA refused host memory, and says the same of
    the device's."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "pin_memory" in (frames[-1].line or "")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
