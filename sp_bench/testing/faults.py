"""Faults that tests strike a rank with: SP_BENCH_FAULT=<kind>:<rank|all>:<phase>. Never set in a measurement.

A kind is one of this file, or MODULE.NAME: what LIES of a module of the test's own has by that name. Tests bring that
module on PYTHONPATH, so no planted lie is part of this package.
"""

import ctypes
import importlib
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

VARIABLE = "SP_BENCH_FAULT"
FLAG = "fault_injected"  # of a row whose trial lived through a fault
PHASES = ("init", "correctness", "warmup", "measure", "handover")
SLOW_S = 2.0


def strike(phase: str, rank: int, environment: Mapping[str, str] = os.environ) -> None:
    """Do to this process what the variable says for this phase and rank; nothing without the variable.

    Raises:
        ValueError: the variable has another form, or names an unknown kind.
        ImportError: there is no such module.
        Exception: the fault itself, where its kind is one that Python tells.
    """
    if VARIABLE not in environment:
        return
    fault, where, when = _parse(environment[VARIABLE])
    if when != phase or where not in ("all", str(rank)):
        return
    print(f"fault injected: {environment[VARIABLE].partition(':')[0]} in phase {phase}", flush=True)
    fault()


def _parse(text: str) -> tuple[Callable[[], None], str, str]:
    """The fault, the rank or all, and the phase."""
    kind, where, when = [*text.split(":"), "", ""][:3]
    module, _, name = kind.rpartition(".")
    known = importlib.import_module(module).LIES if module else {**KINDS, **PLANTED}
    if text.count(":") != 2 or name not in known or when not in PHASES or not (where == "all" or where.isdecimal()):
        raise ValueError(
            f"{VARIABLE}={text!r}: use <kind>:<rank or all>:<phase> with a kind of {', '.join(known)} "
            f"and a phase of {', '.join(PHASES)}"
        )
    return known[name], where, when


def _torch_oom() -> NoReturn:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (injected)")


OOM_ABOVE = 3000  # tokens


def _torch_oom_above() -> None:
    """From here on a kernel of attention that gets more than OOM_ABOVE queries runs out of memory."""
    from sp_bench import kernels

    for kernel in map(kernels.get, ("cpu_flash", "math")):

        def forward(q: Any, *args: Any, honest: Any = kernel.forward, **options: Any) -> Any:
            if q.shape[1] > OOM_ABOVE:
                _torch_oom()
            return honest(q, *args, **options)

        kernel.forward = forward


def _nccl_oom() -> NoReturn:
    import torch.distributed as dist

    raise dist.DistBackendError(  # as NCCL 2.27 and torch 2.11 word it
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    )


def _host_oom() -> None:
    import torch

    torch.empty(2**60, dtype=torch.uint8)  # more than any address space: the allocator itself refuses


def _exception() -> NoReturn:
    raise RuntimeError("injected exception")


def _hang() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a rank deep inside a driver call: only SIGKILL ends it
    while True:
        time.sleep(60)


def _segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would be litter
    ctypes.string_at(0)


def _sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _slow() -> None:
    time.sleep(SLOW_S)


def _exit() -> NoReturn:
    os._exit(0)


KINDS: Mapping[str, Callable[[], None]] = {
    "torch_oom": _torch_oom,
    "nccl_oom": _nccl_oom,
    "host_oom": _host_oom,
    "exception": _exception,
    "hang": _hang,
    "segfault": _segfault,
    "sigkill": _sigkill,
    "slow": _slow,
    "exit": _exit,
}
# Faults that strike later, where their condition holds.
PLANTED: Mapping[str, Callable[[], None]] = {"torch_oom_above_3000_tokens": _torch_oom_above}
