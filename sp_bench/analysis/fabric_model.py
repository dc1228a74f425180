"""Predicts a step from bytes and measured bandwidth, for cells that ran on several fabrics.

The prediction is compute time plus the messages that the method's schedule leaves exposed (overlap.py). A message takes
its predicted bytes over the bandwidth measured for the primitive on the same fabric and number of ranks. Latency is
ignored.

Bandwidth is that of the largest message, hundreds of MiB as in attention. A line fitted through all sizes would be
steeper: small messages wait for the host, so its slope can exceed what the links carry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from sp_bench.analysis.cells import Cell, listed
from sp_bench.analysis.overlap import Times, exposed_ms
from sp_bench.costs.message_sizes import transport_name

# op of the byte counts -> primitive of the bandwidths; a reduce-scatter is a gather in reverse
PRIMITIVES = {
    "all_to_all": "all_to_all",
    "send": "send_recv",
    "all_gather": "all_gather",
    "reduce_scatter": "all_gather",
}
BandwidthKey = tuple[Any, ...]  # pool, fabric, hardware, sp_size, primitive


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_s: float  # of the largest message, median over the collective rows
    cells: tuple[Cell, ...]  # the collective cells


@dataclass(frozen=True)
class Point:
    """One cell beside its prediction; times in ms."""

    cell: Cell
    primitive: str  # the slowest of the method's primitives; its bandwidth is the point's x
    bandwidth: Bandwidth
    times: Times  # bytes over bandwidth
    compute_ms: float = 0.0

    @property
    def fabric(self) -> str:
        return str(self.cell.asked["fabric"])

    @property
    def predicted_ms(self) -> float:
        return self.compute_ms + exposed_ms(self.cell.asked, self.times, self.compute_ms)

    @property
    def measured_ms(self) -> float:
        return self.cell.median_step_ms or 0.0


@dataclass(frozen=True)
class Place:
    """Cells of one shape, length and number of ranks, in two or more series on two or more fabrics."""

    over_fabrics: str
    seq_len: int
    sp_size: int
    points: tuple[Point, ...]

    @property
    def fabrics(self) -> list[str]:
        """The fastest first, by the largest bandwidth of any of its points."""
        best: dict[str, float] = {}
        for point in self.points:
            best[point.fabric] = max(best.get(point.fabric, 0.0), point.bandwidth.bytes_per_s)
        return sorted(best, key=lambda name: (-best[name], name))

    def on(self, fabric: str) -> list[Point]:
        return [point for point in self.points if point.fabric == fabric]

    @property
    def title(self) -> str:
        asked = self.points[0].cell.asked
        heads = f"{asked['num_heads']}/{asked['num_kv_heads']} heads"
        words = (f"{self.seq_len:,} tokens", heads, f"{self.sp_size} ranks", self.points[0].cell.launch_note)
        return ", ".join(filter(None, words))


def bandwidths(cells: Sequence[Cell]) -> dict[BandwidthKey, Bandwidth]:
    found: dict[BandwidthKey, list[tuple[float, Cell]]] = {}
    for cell in cells:
        for row in cell.rows if cell.asked["workload"] == "collective" else ():
            if row["status"] == "ok" and row["comm_counted_bytes"] and row["primitive"]:
                primitive = transport_name(row["primitive"], cell.options["method.exchange"])
                key = (cell.pool, row["fabric"], row["hardware"], row["sp_size"], primitive)
                bytes_per_s = 1e3 * float(row["comm_counted_bytes"]) / float(row["median_step_ms"])
                found.setdefault(key, []).append((bytes_per_s, cell))
    return {
        key: Bandwidth(median(value for value, _ in each), tuple({c.cell_id: c for _, c in each}.values()))
        for key, each in found.items()
    }


def compared(cells: Sequence[Cell]) -> list[Cell]:
    """The measured attention cells on several ranks that have predicted bytes."""
    attention = [c for c in cells if c.ok and c.asked["workload"] == "attention"]
    return [c for c in attention if (c.asked["sp_size"] or 1) > 1 and c.communication.predicted_bytes]


def places(cells: Sequence[Cell]) -> list[Place]:
    """All places, by name and the longest first. Cells without a measured bandwidth are left out."""
    known = bandwidths(cells)
    grouped: dict[tuple[str, int, int], list[Point]] = {}
    for cell in compared(cells):
        if (point := _point(cell, known)) is not None:
            key = (cell.over_fabrics, -cell.asked["seq_len"], cell.asked["sp_size"])
            grouped.setdefault(key, []).append(point)
    made = [Place(name, -n, p, tuple(_with_compute(points))) for (name, n, p), points in sorted(grouped.items())]
    return [place for place in made if sum(len(place.on(fabric)) > 1 for fabric in place.fabrics) > 1]


def _point(cell: Cell, known: Mapping[BandwidthKey, Bandwidth]) -> Point | None:
    """A cell with its prediction; None if the bandwidth of one of its primitives is unknown."""
    where = (cell.pool, *(cell.asked[name] for name in ("fabric", "hardware", "sp_size")))
    exchange, sent = cell.options["method.exchange"], _predicted_bytes(cell)
    names = {op: transport_name(PRIMITIVES.get(op, op), exchange) for op in sorted({op for _, op in sent})}
    if not sent or any((*where, name) not in known for name in names.values()):
        return None
    used = {op: known[*where, name] for op, name in names.items()}
    slowest = min(names, key=lambda op: used[op].bytes_per_s)
    times = {(phase, op): 1e3 * size / used[op].bytes_per_s for (phase, op), size in sent.items()}
    return Point(cell, names[slowest], used[slowest], times)


def _predicted_bytes(cell: Cell) -> dict[tuple[str, str], float]:
    """Bytes by phase and op. All replicates have the same, so the last one's."""
    sizes: dict[tuple[str, str], float] = {}
    for entry in listed(cell.measured[-1]["comm"]):
        if entry["phase"] != "other" and entry["predicted_bytes"]:
            key = (str(entry["phase"]), str(entry["op"]))
            sizes[key] = sizes.get(key, 0.0) + entry["predicted_bytes"]
    return sizes


def _with_compute(points: Sequence[Point]) -> list[Point]:
    """Adds each series' compute time: that of its compute-only arm on the fastest fabric. Without such an arm, the time
    for which the model reproduces the step on the fastest fabric, so that it is exact there by construction."""
    by_series: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda p: (-p.bandwidth.bytes_per_s, p.fabric)):
        by_series.setdefault(point.cell.series, []).append(point)
    known: dict[str, float] = {}
    for series, (fastest, *slower) in by_series.items():
        arms = [ms for p in (fastest, *slower) if (ms := p.cell.middle("compute_only_step_ms")) is not None]
        known[series] = arms[0] if arms else _compute_of(fastest)
    return [replace(point, compute_ms=known[point.cell.series]) for point in points]


def _compute_of(point: Point) -> float:
    """The compute time for which the predicted step equals the measured one; 0 if its messages alone take longer."""
    low, high = 0.0, point.measured_ms
    for _ in range(60):  # bisection: the prediction never falls as compute grows
        middle = (low + high) / 2
        if replace(point, compute_ms=middle).predicted_ms < point.measured_ms:
            low = middle
        else:
            high = middle
    return low
