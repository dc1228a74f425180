"""From the ranks' measurements to the record that rank 0 hands over."""

import hashlib
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.distributed_c10d import _get_default_group

from sp_bench import hardware
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.attention import Traffic
from sp_bench.measure import launches, one_rank, work
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.ledger import Counts
from sp_bench.measure.timing import Measurement, RankColumns

UNTAGGED: Prose = (
    ". What a method sends outside `with ledger.attention():` counts as parameters and gradients; put its collectives "
    "into that, forward and backward (from sp_bench.measure import ledger), or declare traffic = None in its file if "
    "its bytes have no closed form"
)


def assemble(
    config: TrialConfig, measurements: Sequence[Measurement], *, traffic_is_mean: bool = False
) -> dict[str, Any]:
    """What rank 0 hands over: row columns from all ranks' measurements, in rank order. Numbers that follow from these
    and from the config are the driver's to compute.

    Each rank must have sent the predicted bytes; with `traffic_is_mean`, the ranks must have sent them in the mean.

    Raises:
        Incorrect: bytes, FLOPs, calls of the kernel or updated parameters differ from the closed form, or the step
            launched another attention kernel than the trial's, or not all of it.
    """
    of_ranks = {each.name: _all_or_none([getattr(m, each.name) for m in measurements]) for each in fields(RankColumns)}
    row = measurements[0].columns | of_ranks
    row |= _communication(measurements, traffic_is_mean, spread=config.num_nodes > 1)
    row["trace_files"] = [file for m in measurements for file in m.trace_files] or None
    row |= _arms(measurements) | {"comm_wire_bytes": _wire_bytes(config, measurements)}
    row |= work.columns(config.dtype, [m.work for m in measurements], [m.expected for m in measurements])
    return row | launches.columns(config, measurements)


def _all_or_none(values: Sequence[Any]) -> list[Any] | None:
    return None if None in values else list(values)


def _slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    """The maximum over ranks of each step."""
    return [max(step) for step in zip(*samples, strict=True)]


def _arms(measurements: Sequence[Measurement]) -> dict[str, Any]:
    if not measurements[0].arms_ms:
        return {}
    compute_only = [m.arms_ms["compute_only"] for m in measurements]
    columns: dict[str, Any] = {
        "compute_only_step_ms": _slowest(compute_only),
        "compute_only_rank_ms": [statistics.median(step_ms) for step_ms in compute_only],
    }
    if "comm_only" in measurements[0].arms_ms:
        columns["comm_only_step_ms"] = _slowest([m.arms_ms["comm_only"] for m in measurements])
    return columns


def _wire_bytes(config: TrialConfig, measurements: Sequence[Measurement]) -> float | None:
    """The most that a rank sent over NVLink, as NVML counts it; None: not counted, or NCCL was to use other ways."""
    wire = _all_or_none([m.wire_bytes for m in measurements])
    # without peer access NCCL goes through host memory, and one rank has no peers
    by_nvlink = "NCCL_P2P_DISABLE" not in config.fabric.env and config.world == "ranks"
    return max(wire) if wire and by_nvlink else None


def _communication(measurements: Sequence[Measurement], traffic_is_mean: bool, *, spread: bool) -> dict[str, Any]:
    if traffic_is_mean:
        sent = [_sent(m) for m in measurements]
        keys = {key for each in sent for key in each}
        mean = {key: sum((each.get(key, Fraction(0)) for each in sent), Fraction(0)) / len(sent) for key in keys}
        _require_equal("the ranks in the mean", mean, measurements[0].predicted)
    else:
        for rank, m in enumerate(measurements):
            _require_equal(f"rank {rank}", _sent(m), m.predicted)
    busiest = max(measurements, key=lambda m: _total_counted(m.counts))
    counted, predicted = busiest.counts, busiest.predicted
    keys = sorted(counted.keys() | predicted.keys())
    unpredicted = measurements[0].unpredicted
    far = [{key: size for key, size in m.between_nodes.items() if key[0] != "other"} for m in measurements]
    return {
        "comm_counted_bytes": float(_total_counted(counted)),
        "internode_counted_bytes": [float(sum(each.values())) for each in far] if spread else None,
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


def _require_equal(who: Prose, sent: Traffic, predicted: Traffic) -> None:
    wrong, untagged = [], False
    for key in sorted(sent.keys() | predicted.keys()):
        counted, expected = sent.get(key, Fraction(0)), predicted.get(key, Fraction(0))
        if counted != expected:
            each: Prose = f"{' '.join(key)}: counted {float(counted):.1f}, predicted {float(expected):.1f}"
            wrong.append(each)
            untagged |= key[0] in ("parameters", "gradients") and counted > expected
    if wrong:
        raise Incorrect(
            f"bytes sent by {who} differ from the closed form: {'; '.join(wrong)}" + (UNTAGGED if untagged else "")
        )


def of_all_ranks(mine: Any) -> list[Any]:
    """What each rank gives, in rank order; of a world of one rank its own alone. Every rank of the world calls it."""
    if dist.get_backend() == one_rank.BACKEND:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def device_name(device: torch.device) -> str | None:
    """The GPU's name, by which its peak rates are known; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def environment(device: torch.device) -> dict[str, Any]:
    """The row's `environment`. Every rank of the world calls it, since each names the device that it used."""
    mine = _environment(device)
    used = of_all_ranks((mine["device_names"], mine["device_uuids"]))
    return mine | {
        "device_names": [name for names, _ in used for name in names],
        "device_uuids": [uuid for _, uuids in used for uuid in uuids],
        "topology": hardware.topology() if device.type == "cuda" else None,
    }


def machine_id(device: torch.device) -> str:
    """8 hex digits of what the ranks run on: host, processors, device, driver, libraries and variables of each. Every
    rank of the world calls it, and gets the same."""
    text = json.dumps(of_all_ranks(_environment(device)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _environment(device: torch.device) -> dict[str, Any]:
    """This rank's environment, with the one device that it uses."""
    cuda = device.type == "cuda"
    return hardware.environment(device.type, os.environ) | {
        "device_names": [device_name(device)] if cuda else [],
        "device_uuids": [f"GPU-{torch.cuda.get_device_properties(device).uuid}"] if cuda else [],
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "process_group": type(_get_default_group()._get_backend(device)).__name__,
    }
