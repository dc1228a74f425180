"""One rank's whole life. `torchrun -m sp_bench.worker <trial folder>/trial.json ...` starts it; nothing else
initialises torch.distributed.

A trial ends in one of two ways: rank 0 hands over a record, or a rank says how it failed and leaves at once, because
after one rank has failed its peers may wait in a collective for ever.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sp_bench import handover
from sp_bench.config import TrialConfig

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend
    from torch.distributed.device_mesh import DeviceMesh

    Options = Backend.Options


def main(trials: Sequence[Path]) -> None:
    """Run the trials one after another in this process; the first that fails ends it."""
    rank = int(os.environ["RANK"])
    for trial in trials:
        _prove_and_measure(trial, rank)
    import torch.distributed as dist

    dist.destroy_process_group()
    _leave(0)


def _prove_and_measure(trial: Path, rank: int) -> None:
    folder = trial.parent
    _log_to(handover.log_path(folder, rank))
    handover.enter_phase(folder, rank, "init")
    try:
        record = _run(handover.read_trial(trial), folder, rank)
    except BaseException as error:
        traceback.print_exc()
        handover.send_event(folder, _failure(rank, error))
        _leave(1)
    if rank == 0:
        handover.write_record(folder, record)
    handover.enter_phase(folder, rank, "done")


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


def _run(config: TrialConfig, folder: Path, rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    from sp_bench import copy_engines, environment, library_state, methods, record, workloads

    device = _device(config)
    if not dist.is_initialized():
        dist.init_process_group(config.fabric.backend, device_id=device if device.type == "cuda" else None)
    dist.barrier()  # an unreachable peer fails here, in init, and not in a measured phase
    _emulate_memory(config, device)
    job = workloads.Job(config, _mesh(config), device, partial(handover.enter_phase, folder, rank))
    with library_state.of_one_trial(device):
        measurement = workloads.get(config.workload.name).run(job)
    copy_engines.transport.cache_clear()  # its memory is of this trial's message sizes
    gathered: list[Any] = [None] * config.world_size
    dist.all_gather_object(gathered, measurement)
    captured = environment.capture(device)
    own = methods.get(config.method.name).IMPLEMENTATION == "sp_bench"
    columns = record.assemble(config, gathered, environment.device_name(device), own=own)
    return columns | {"environment": captured}


def _device(config: TrialConfig) -> "torch.device":
    import torch

    if config.hardware.device == "cpu":
        torch.set_num_threads(config.hardware.threads_per_rank or 1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _emulate_memory(config: TrialConfig, device: "torch.device") -> None:
    """Cap torch's allocator so that it and all else on the device together have `device_memory_gib`."""
    if device.type != "cuda":
        return
    import torch

    if config.hardware.device_memory_gib is None:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)  # the context and NCCL's buffers
    allowed = config.hardware.device_memory_gib * 2**30 - outside
    torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0), device)


def _mesh(config: TrialConfig) -> "DeviceMesh":
    from sp_bench import methods

    layout = methods.get(config.method.name).layout(config.method, config.sp_size)
    inner = {"ring": layout.ring_degree, "ulysses": layout.ulysses_degree}
    if not layout.ulysses_inner:
        inner = dict(reversed(inner.items()))  # the last axis holds adjacent ranks
    axes = {"dp_replicate": config.dp_replicate_size, "dp_shard": config.dp_shard_size, **inner}
    return _cached_mesh(config.hardware.device, tuple(axes.items()))


@cache  # a mesh has communicators, which take time and device memory: one for all trials of this process
def _cached_mesh(device: str, axes: tuple[tuple[str, int], ...]) -> "DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    names, sizes = zip(*axes, strict=True)
    return init_device_mesh(device, sizes, mesh_dim_names=names, backend_override=_backends(device))


def _backends(device: str) -> "dict[int | str, str | Options | tuple[str, Options]] | None":
    """NCCL's kernels of the attention's axes go first: behind a kernel that fills the device they would start too late
    to overlap with it."""
    if device != "cuda":
        return None
    from torch.distributed import ProcessGroupNCCL

    return {axis: ("nccl", ProcessGroupNCCL.Options(is_high_priority_stream=True)) for axis in ("ring", "ulysses")}


def _failure(rank: int, error: BaseException) -> handover.Event:
    import torch

    from sp_bench.workloads import Incorrect

    status, site, text = "error", None, str(error).strip() or "no message"
    if isinstance(error, Incorrect):
        status = "incorrect"
    elif isinstance(error, torch.OutOfMemoryError):
        status, site = "oom", "torch"
    elif isinstance(error, MemoryError):
        status, site = "oom", "host"
    elif isinstance(error, RuntimeError) and "NCCL" in text and "out of memory" in text.lower():
        status, site = "oom", "nccl"
    reason = text if status == "incorrect" else f"rank {rank}: {type(error).__name__}: {text}"
    return handover.Event(rank, time.time(), "failed", status, reason[:2000], site)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
