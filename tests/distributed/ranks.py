"""Runs a function on real ranks: gloo ranks on the CPU, or NCCL ranks with a GPU each.

Starting a group takes a second. So start one for each world size, and run many cases in it. With SP_BENCH_SHARE_GPUS=1
in the environment NCCL ranks share the GPUs where there are too few, and send through sockets.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks are forks of one process that has imported these modules, which would take each rank 5 s. That process has no
# threads and uses no device. FSDP's first use imports torch._dynamo, and pyarrow's first array imports pandas.
LIBRARIES = ["pytest", "torch.distributed.fsdp", "torch._dynamo", "pandas"]
OURS = ["trials", "sp_bench.engines.fsdp2", "sp_bench.workloads.train_step", "sp_bench.workloads.parity"]
multiprocessing.set_forkserver_preload([*LIBRARIES, *OURS])
# As the worker does: else a collection looks at a million objects that stay. The first comes while a rank imports its
# test, and would copy the memory that it shares: 0.4 s a rank.
os.register_at_fork(after_in_child=gc.freeze)
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # a thread of pyarrow's
COLLECTIVE_LIMIT = timedelta(minutes=5)  # ranks may compile kernels at different speeds; a hang must still end


def device(backend: str, rank: int) -> torch.device:
    """The device on which a rank of a group computes. Only this function decides it."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")


def local_rank() -> int:
    """Of this rank, as libraries read it from the environment: its GPU, where it has one."""
    mine = here()
    return dist.get_rank() if mine.index is None else mine.index


def here() -> torch.device:
    """The device on which this rank computes."""
    return device(dist.get_backend(), dist.get_rank())


def _share_gpus() -> bool:
    return os.environ.get("SP_BENCH_SHARE_GPUS") == "1" and torch.cuda.device_count() > 0


def worlds(*, gloo: Iterable[int] = (), nccl: Iterable[int] = ()) -> list[Any]:
    """Test parameters (backend, world_size). A world of more GPUs than this machine has is skipped with that reason,
    unless ranks share them."""
    num_gpus = torch.cuda.device_count()
    can_share = _share_gpus()
    return [
        *(pytest.param("gloo", size, id=f"gloo-{size}") for size in gloo),
        *(
            pytest.param(
                *("nccl", size),
                id=f"nccl-{size}",
                marks=pytest.mark.skipif(
                    num_gpus < size and not can_share,
                    reason=f"needs {size} CUDA device{'s' * (size > 1)}; {num_gpus} here",
                ),
            )
            for size in nccl
        ),
    ]


def _rank(
    rank: int, world_size: int, backend: str, store: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    mine = device(backend, rank)
    try:
        if mine.type == "cuda":
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast, as in every file of conf/fabric
            torch.cuda.set_device(mine)
            if _share_gpus() and world_size > torch.cuda.device_count():
                os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_NET": "Socket"}
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_LIMIT,
            device_id=mine if mine.type == "cuda" else None,
        )
        function(rank, *args)
        if mine.type == "cuda":
            torch.cuda.synchronize(mine)  # the last kernels' errors come up here
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # peers may wait in a collective, so leave at once; the parent ends them


def run(world_size: int, function: Callable[..., None], *args: Any, backend: str = "gloo") -> None:
    """Call `function(rank, *args)` in `world_size` fresh processes with an initialised group.

    Ranks on gloo get a second try if one died in malloc, of SIGSEGV or SIGABRT ("unaligned tcache chunk"): in some
    runs of the whole suite something in torch 2.13 spoils a rank's heap. A result that is wrong is no signal, and a
    crash of ours comes again.

    Raises:
        ProcessExitedException, ProcessRaisedException: a rank failed; its traceback is on stderr.
    """
    for tries_left in (1, 0):
        try:
            with tempfile.TemporaryDirectory() as folder:
                mp.start_processes(
                    *(_rank, (world_size, backend, os.path.join(folder, "store"), function, args), world_size),
                    start_method="forkserver",
                )
            return
        except mp.ProcessExitedException as error:
            if not tries_left or backend != "gloo" or error.signal_name not in ("SIGSEGV", "SIGABRT"):
                raise
            print(f"{error}; the ranks are started once more", file=sys.stderr)
