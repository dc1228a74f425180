"""One rank of `sp-bench doctor --gpus`: how fast its device computes, and exchanges messages with each of the others.

    python -m sp_bench.measure.health <folder>/trial.json

Rank 0 hands over a record with an entry for each rank.
look/health.py starts them and judges the numbers.
"""

import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sp_bench import handover, kernels
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.attention import attention_forward_flops, flash_backward
from sp_bench.measure.counters import DeviceCounters
from sp_bench.measure.meeting import meet
from sp_bench.measure.timing import time_steps


class Sizes(NamedTuple):
    rows: int  # of a square matrix
    message_bytes: int  # that one rank sends another
    settling_ms: float  # of load before a rate is taken: clocks and power settle within a second


SIZES = {"cuda": Sizes(8192, 2**28, 2000.0), "cpu": Sizes(512, 2**22, 20.0)}
REPETITIONS = 10
UNDER_LOAD = 100  # products that run while NVML is read


def main(trial: Path) -> None:
    rank, folder = int(os.environ["RANK"]), trial.parent
    try:
        _measure(handover.read_trial(trial)[0], rank, folder)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        handover.send_event(folder, handover.Event(rank, handover.now(), "failed", "error", reason))
        raise


def _measure(config: TrialConfig, rank: int, folder: Path) -> None:
    device = torch.device(config.hardware.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    def enter(name: str) -> None:
        handover.enter_phase(folder, rank, name)
        dist.barrier()

    handover.enter_phase(folder, rank, "start")
    meet(config, device)
    enter("matrix products")
    mine = _products(config, device)
    enter("attention")
    mine |= _attention(config, device)
    enter("messages between pairs")
    pairs = [_pair(pair, device) for pair in itertools.combinations(range(config.world_size), 2)]
    enter("messages between all")
    mine |= {"all_ms": _all(config, device) if config.world_size > 1 else None, "pair_ms": pairs}
    of_ranks: list[Any] = [None] * config.world_size
    dist.all_gather_object(of_ranks, mine)
    if rank == 0:
        handover.write_record(folder, {"ranks": of_ranks, "message_bytes": SIZES[device.type].message_bytes})
    dist.barrier()
    dist.destroy_process_group()


def _products(config: TrialConfig, device: torch.device) -> dict[str, Any]:
    """FLOP/s of a square matrix product, and the device's state under that load."""
    rows = SIZES[device.type].rows
    a, b = (torch.randn(rows, rows, dtype=getattr(torch, config.dtype), device=device) for _ in range(2))
    step_ms = _settled_ms(lambda: torch.mm(a, b), device)
    state: dict[str, Any] = {}
    if device.type == "cuda":
        counters = DeviceCounters(device)
        for _ in range(UNDER_LOAD):
            torch.mm(a, b)
        state = counters.state() | {
            "power_limit_w": counters.limits()[0],
            "usual_power_limit_w": counters.usual_power_limit_w(),
        }
        torch.cuda.synchronize()
    return {"products_flops_per_s": 2 * rows**3 / step_ms * 1e3, "state": state}


def _attention(config: TrialConfig, device: torch.device) -> dict[str, float]:
    """FLOP/s of the trial's kernel alone, forward and backward."""
    kernel, shape = kernels.get(config.kernel.name), config.attention_shape(config.seq_len)
    q, k, v, dout = (
        torch.randn(1, shape.seq_len, heads, dim, dtype=getattr(torch, config.dtype), device=device)
        for heads, dim in shape.heads
    )
    mask = {"causal": True, "scale": shape.head_dim**-0.5}

    def step() -> None:
        out, lse = kernel.forward(q, k, v, **mask)
        kernel.backward(dout, q, k, v, out, lse, **mask)

    flops = attention_forward_flops(shape) * float(1 + flash_backward(shape.head_dim, shape.value_dim))
    return {"attention_flops_per_s": flops / _settled_ms(step, device) * 1e3}


def _settled_ms(step: Callable[[], object], device: torch.device) -> float:
    """ms of a step once the device has been busy for a while."""
    step()
    once_ms = max(time_steps(step, 1, device)[0][0], 0.01)
    time_steps(step, max(1, round(SIZES[device.type].settling_ms / once_ms)), device)
    return statistics.median(time_steps(step, REPETITIONS, device)[0])


def _pair(pair: Sequence[int], device: torch.device) -> float | None:
    """ms in which this rank and the other of its pair send each other a message; None for all other ranks, which wait.
    One pair at a time, so that a slow link slows no other."""
    found = None
    if (rank := dist.get_rank()) in pair:
        other = sum(pair) - rank
        sent = torch.ones(SIZES[device.type].message_bytes, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        calls = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]

        def step() -> None:
            for work in dist.batch_isend_irecv(calls):
                work.wait()

        step()
        found = statistics.median(time_steps(step, REPETITIONS, device)[0])
    dist.barrier()
    return found


def _all(config: TrialConfig, device: torch.device) -> float:
    """ms of an all-to-all in which each rank sends a message in equal parts to all others."""
    size = config.world_size
    part = SIZES[device.type].message_bytes // (size - 1)
    sent = torch.ones(size * part, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def step() -> None:
        dist.all_to_all_single(received, sent)

    step()
    dist.barrier()
    return statistics.median(time_steps(step, REPETITIONS, device)[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
