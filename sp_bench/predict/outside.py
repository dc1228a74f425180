"""What devices hold outside torch's allocator, from rows: costs/nccl.json."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sp_bench.costs.nccl import GIB, Held, counts
from sp_bench.rows import store
from sp_bench.rows.row import MEASURED

COLUMNS = (
    *("status", "started_at", "evidence", "implementation", "engine", "workload", "hardware", "fabric", "exchange"),
    *("isolation", "world_size", "sp_size", "ulysses_degree", "ring_degree", "ranks_per_node", "primitive"),
    *("ranks_per_gpu", "device_used_bytes", "peak_reserved_bytes", "flags"),
)
OURS = {"status": "ok", "implementation": "sp_bench", "engine": "fsdp2", "workload": "train_step", "hardware": "h200"}


def fitted(folders: Sequence[Path]) -> Held:
    """GiB of each kind, by least squares over the medians of like rows."""
    samples: dict[Held, list[float]] = {}
    for folder in folders:
        for number, gib in _samples(store.read(folder, COLUMNS)[0].to_pylist()):
            samples.setdefault(number, []).append(gib)
    solved, *_ = np.linalg.lstsq(np.array([*samples], float), [median(each) for each in samples.values()])
    return Held(*(round(float(gib), 3) for gib in solved))


def _samples(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Held, float]]:
    """(what a rank has, GiB outside the allocator) of steps in fresh processes: warm groups keep communicators of
    earlier trials. Where memory ran out the allocator has freed some of its peak."""
    warm: set[Any] = set()
    for row in sorted(rows, key=lambda row: row["started_at"]):
        all_there, ranks, shares = row["evidence"] == MEASURED, row["world_size"], row["ranks_per_gpu"] or 1
        is_fresh = row["isolation"] == "trial" or not all_there or ranks not in warm
        warm.add(ranks)
        known = all(row[name] == value for name, value in OURS.items()) and row["fabric"] == "nvlink"
        plain = row["exchange"] in (None, "collectives") and row["sp_size"] == ranks and shares == 1
        lists = row["device_used_bytes"], row["peak_reserved_bytes"]
        if not (is_fresh and known and plain and all(lists)) or ranks == 1 or "allocator_retried" in row["flags"]:
            continue
        sends = "send_recv" in row["primitive"]
        number = counts(row["ulysses_degree"], row["ranks_per_node"] or ranks, sends=sends) if all_there else Held()
        yield number, max(map(int.__sub__, *lists)) / GIB
