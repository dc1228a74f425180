"""From the ranks' measurements to the columns of one row: every reduction over ranks and steps is here."""

import os
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.distributed_c10d import _get_default_group

from sp_bench import hardware, kernels
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.attention import Traffic
from sp_bench.costs.flags import flags_of_memory, flags_of_steps
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.ledger import Counts
from sp_bench.measure.timing import Measurement

HOST_BOUND_SHARE = 0.9  # of a step: what the host may take to issue it
MIN_WINDOW_MS = 200.0  # shorter windows are within the noise of the clocks and the scheduler
MAX_CLOCK_MISMATCH = 0.02  # sum of step times against the wall clock of the window
UNTAGGED = (
    ". What a method sends outside `with ledger.attention():` counts as parameters and gradients; put its collectives "
    "into that, forward and backward (from sp_bench.measure import ledger), or declare traffic = None in its file if "
    "its bytes have no closed form"
)


def assemble(
    config: TrialConfig, measurements: Sequence[Measurement], device_name: str | None, *, traffic_is_mean: bool = False
) -> dict[str, Any]:
    """Row columns from all ranks' measurements, in rank order. Each rank must have sent the predicted bytes; with
    `traffic_is_mean`, the ranks must have sent them in the mean.

    Raises:
        Incorrect: bytes differ from the closed form, a rate is above the device's peak, or the step launched another
            attention kernel than the trial's.
    """
    first = measurements[0]
    per_rank = {
        name: _all_or_none([getattr(m, name) for m in measurements])
        for name in (
            *("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes"),
            *("device_used_bytes", "allocator_retries", "energy_j", "host_launch_us", "host_step_ms"),
        )
    }
    row: dict[str, Any] = (
        first.columns | per_rank | _times(config, measurements) | _communication(measurements, traffic_is_mean)
    )
    for name in ("peak_allocated_bytes", "peak_host_bytes"):
        row[f"max_{name}"] = max(per_rank[name] or [], default=None)
    row |= _attribution(measurements, row["median_step_ms"]) | _device(config, measurements)
    return row | _utilisation(config, row, device_name)


def _all_or_none(values: Sequence[Any]) -> list[Any] | None:
    return None if None in values else list(values)


def _times(config: TrialConfig, measurements: Sequence[Measurement]) -> dict[str, Any]:
    rank_step_ms = [m.step_ms for m in measurements]
    step_ms = _slowest(rank_step_ms)
    median_ms = statistics.median(step_ms)
    tokens_per_s = 1e3 * config.num_sequences * config.seq_len / median_ms
    if config.workload.name == "collective":
        tokens_per_s = None  # messages are not tokens
    flags = []
    if min(m.window_ms for m in measurements) < MIN_WINDOW_MS:
        flags.append("short_window")
    if any(abs(sum(m.step_ms) - m.window_ms) > MAX_CLOCK_MISMATCH * m.window_ms for m in measurements):
        flags.append("clock_mismatch")
    flags += flags_of_steps(step_ms)
    issued_ms = [m.host_step_ms or 0.0 for m in measurements]
    if config.workload.name == "attention" and max(issued_ms) > HOST_BOUND_SHARE * median_ms:
        flags.append("host_bound")
    used, retries = zip(*((m.device_used_bytes, m.allocator_retries) for m in measurements), strict=True)
    flags += flags_of_memory(config.hardware.device_memory_gib, used, retries)
    return {
        "rank_step_ms": rank_step_ms,
        "step_ms": step_ms,
        "window_ms": [m.window_ms for m in measurements],
        "median_step_ms": median_ms,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": None if tokens_per_s is None else tokens_per_s / config.world_size,
        "flags": flags,
    }


def _slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    """Of each step, the max over ranks."""
    return [max(step) for step in zip(*samples, strict=True)]


def _attribution(measurements: Sequence[Measurement], median_step_ms: float) -> dict[str, Any]:
    if not measurements[0].arms_ms:
        return {}
    compute_only, comm_only = (
        _slowest([m.arms_ms[arm] for m in measurements]) for arm in ("compute_only", "comm_only")
    )
    rank_ms = [statistics.median(m.arms_ms["compute_only"]) for m in measurements]
    exposed_ms = median_step_ms - statistics.median(compute_only)
    return {
        "compute_only_step_ms": compute_only,
        "compute_only_rank_ms": rank_ms,
        "imbalance_ms": statistics.median(compute_only) - statistics.mean(rank_ms),
        "comm_only_step_ms": comm_only,
        "exposed_comm_ms": exposed_ms,
        "overlap_efficiency": 1 - exposed_ms / statistics.median(comm_only),
    }


def _device(config: TrialConfig, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """What NVML and the profiler saw.

    Raises:
        Incorrect: the step launched another attention kernel than the trial's, or not all of it.
    """
    launched = sorted({name for m in measurements for name in m.cuda_kernels or []})
    wire = _all_or_none([m.wire_bytes for m in measurements])
    by_nvlink = "NCCL_P2P_DISABLE" not in config.fabric.env  # without peer access NCCL goes through host memory
    return {
        "comm_wire_bytes": max(wire) if wire and by_nvlink else None,
        "device_state": _all_or_none([m.device_state for m in measurements]),
        "launched_kernels": None if measurements[0].cuda_kernels is None else _require_launched(config, launched),
    }


def _require_launched(config: TrialConfig, cuda_kernels: Sequence[str]) -> list[str]:
    """Those of `cuda_kernels` that compute attention: the trial's kernel, forward and backward, and no other's."""
    found = kernels.launched(cuda_kernels, config.kernel.name)
    if others := found.keys() - {config.kernel.name}:
        raise Incorrect(f"kernel {config.kernel.name} was asked for, and {', '.join(sorted(others))} was launched")
    if kernels.get(config.kernel.name).CUDA_KERNELS is None or config.workload.name == "collective":
        return []
    forward, backward = found.get(config.kernel.name, ([], []))
    if not forward or not (backward or config.workload.pass_kind == "forward"):
        missing = "backward" if forward else "forward"
        raise Incorrect(f"no CUDA kernel of {config.kernel.name}'s {missing} was launched: {', '.join(cuda_kernels)}")
    return [*forward, *backward]


def _communication(measurements: Sequence[Measurement], traffic_is_mean: bool) -> dict[str, Any]:
    predicted = measurements[0].predicted
    if traffic_is_mean:
        sent = [_sent(m) for m in measurements]
        keys = {key for each in sent for key in each}
        mean = {key: sum((each.get(key, Fraction(0)) for each in sent), Fraction(0)) / len(sent) for key in keys}
        _require_equal("the ranks in the mean", mean, predicted)
    else:
        for rank, m in enumerate(measurements):
            _require_equal(f"rank {rank}", _sent(m), predicted)
    counted = max((m.counts for m in measurements), key=_total_counted)
    keys = sorted(counted.keys() | predicted.keys())
    unpredicted = measurements[0].unpredicted
    total = None if unpredicted else float(sum(predicted.values(), Fraction(0)))
    return {
        "comm_predicted_bytes": total,
        "comm_counted_bytes": float(_total_counted(counted)),
        "comm": [
            {
                "phase": phase,
                "op": op,
                "calls": counted.get((phase, op), (0, 0))[0],
                "predicted_bytes": None if phase in ("other", *unpredicted) else float(predicted.get((phase, op), 0)),
                "counted_bytes": float(counted.get((phase, op), (0, 0))[1]),
            }
            for phase, op in keys
        ],
    }


def _total_counted(counts: Counts) -> Fraction:
    """`other` (gradient clipping and the like) differs by torch version and is outside the comparison."""
    return sum((size for (phase, _), (_, size) in counts.items() if phase != "other"), Fraction(0))


def _sent(measurement: Measurement) -> Traffic:
    """Bytes of the phases that have a closed form."""
    left_out = ("other", *measurement.unpredicted)
    return {key: size for key, (_, size) in measurement.counts.items() if size and key[0] not in left_out}


def _require_equal(who: str, sent: Traffic, predicted: Traffic) -> None:
    wrong, untagged = [], False
    for key in sorted(sent.keys() | predicted.keys()):
        counted, expected = sent.get(key, Fraction(0)), predicted.get(key, Fraction(0))
        if counted != expected:
            wrong.append(f"{' '.join(key)}: counted {float(counted):.1f}, predicted {float(expected):.1f}")
            untagged |= key[0] in ("parameters", "gradients") and counted > expected
    if wrong:
        raise Incorrect(
            f"bytes sent by {who} differ from the closed form: {'; '.join(wrong)}" + (UNTAGGED if untagged else "")
        )


def _utilisation(config: TrialConfig, row: Mapping[str, Any], device_name: str | None) -> dict[str, Any]:
    if config.workload.name == "collective":
        return {}  # no FLOPs
    seconds = row["median_step_ms"] / 1e3
    rate = row["hardware_flops"] / seconds
    peak = hardware.peak_flops(device_name, config.dtype) if device_name else None
    if peak and rate / config.world_size > peak:
        raise Incorrect(
            f"{rate / config.world_size / 1e12:.0f} TFLOP/s a device is above its peak of {peak / 1e12:.0f}: "
            "the step did not do the work"
        )
    return {
        "mfu": row["model_flops"] / seconds / config.world_size / peak if peak else None,
        "hfu": rate / config.world_size / peak if peak else None,
        "attention_flops_per_s": rate if config.workload.name == "attention" else None,
    }


def device_name(device: torch.device) -> str | None:
    """The GPU's name, by which its peak rates are known; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def environment(device: torch.device) -> dict[str, Any]:
    """The row's `environment`. Every rank of the world calls it, since each names the device that it used."""
    cuda = device.type == "cuda"
    mine = (device_name(device), f"GPU-{torch.cuda.get_device_properties(device).uuid}") if cuda else None
    used: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(used, mine)
    return hardware.environment(device.type, os.environ) | {
        "device_names": [device[0] for device in used if device],
        "device_uuids": [device[1] for device in used if device],
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "process_group": type(_get_default_group()._get_backend(device)).__name__,
        "topology": hardware.topology() if cuda else None,
    }
