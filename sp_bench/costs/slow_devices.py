"""Which devices of a campaign compute more slowly than the others of their trials, by host and UUID.

Every step waits for the slowest. One row may be an accident, so a device is named for the median over its rows.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from sp_bench.costs.flags import MAX_UNEVEN, MIN_LIMIT_MS
from sp_bench.formats import counted

COLUMNS = (  # that a row must have
    *("status", "causal", "layout", "ring_degree", "packing", "window", "limit_ms", "kernel_ms", "device_state"),
    *("environment", "node_environments", "ranks_per_node"),
)
MIN_ROWS = 3
UUID_LENGTH = 12  # characters of a UUID that name a device


def slow_devices(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each device that is slow, or in thermal slowdown in most of its rows. Rows of CPUs, and rows without
    the names of their devices, say nothing."""
    ratios: dict[str, list[float]] = {}
    heat: dict[str, list[bool]] = {}
    for row in rows:
        if row["status"] != "ok":
            continue
        names, kernels_ms = _names(row), _kernels_ms(row)
        usual = statistics.median_low(kernels_ms) if len(kernels_ms) > 1 else 0.0
        if usual >= MIN_LIMIT_MS:
            for name, ms in zip(names, kernels_ms, strict=False):
                ratios.setdefault(name, []).append(ms / usual)
        for name, state in zip(names, _listed(row["device_state"]), strict=False):
            if state is not None and state["throttle_reasons"] is not None:
                heat.setdefault(name, []).append(any("thermal" in reason for reason in state["throttle_reasons"]))
    lines = []
    for name in sorted({*ratios, *heat}):
        slower, hot = ratios.get(name, []), heat.get(name, [])
        words = []
        if len(slower) >= MIN_ROWS and (ratio := statistics.median(slower)) > MAX_UNEVEN:
            words.append(f"its kernels take {ratio:.2f}x as long as the median GPU's ({counted(len(slower), 'row')})")
        if len(hot) >= MIN_ROWS and sum(hot) * 2 > len(hot):
            words.append(f"it was in thermal slowdown in {sum(hot)} of {counted(len(hot), 'row')}")
        if words:
            lines.append(f"slow GPU: {name}: {', and '.join(words)}; every step waits for it")
    return lines


def _names(row: Mapping[str, Any]) -> list[str]:
    """The device of each rank, with its host; empty if unknown."""
    environment = row["environment"] or {}
    hosts = [each["hostname"] for each in _listed(row["node_environments"])] or [environment.get("hostname")]
    uuids = [str(uuid).removeprefix("GPU-") for uuid in _listed(environment.get("device_uuids"))]
    a_host = row["ranks_per_node"] or len(uuids)
    named = [(f"GPU-{uuid}"[:UUID_LENGTH], hosts[rank // a_host % len(hosts)]) for rank, uuid in enumerate(uuids)]
    return [f"{device} of {host}" for device, host in named]


def _kernels_ms(row: Mapping[str, Any]) -> list[float]:
    """ms of each rank's attention and matrix products, where all ranks have equally many: alone, or else as they ran in
    the untimed step. Empty if unknown."""
    alone = [ms for ms in _listed(row["limit_ms"]) if ms is not None]
    uneven = row["causal"] and row["layout"] == "contiguous" and (row["ring_degree"] or 1) > 1
    if alone or uneven or row["packing"] not in (None, "none") or row["window"] is not None:
        return alone
    return [(each["attention"] or 0.0) + (each["matmul"] or 0.0) for each in _listed(row["kernel_ms"]) if each]


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value)
