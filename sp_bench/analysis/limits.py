"""Per series and number of ranks: the largest length that ran, and the smallest larger one that was out of memory.

A length does not fit if any replicate of any cell ran out of memory there, even if others ran, because it is not
reliable. The search for the longest length counts it the same way. Cells at one length may test the fit, take a single
step or time several. Other failures are no evidence about memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sp_bench.analysis.cells import OOM, Cell, listed
from sp_bench.formats import GIB
from sp_bench.hardware import device_bytes
from sp_bench.rows.names import config_leaves


@dataclass(frozen=True)
class Limit:
    """A cell is None if there is no such length; never both. Without an oom, the limit lies beyond all tried lengths.
    The oom is shorter than the largest that ran if memory was not monotone in the length and nothing longer ran out."""

    setting: str
    series: str
    sp_size: int
    largest_ok: Cell | None
    smallest_oom: Cell | None
    tried: tuple[int, ...]  # for each of `cells`, the number of rows that ran or were out of memory

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in (self.largest_ok, self.smallest_oom) if cell is not None)

    @property
    def is_bracket(self) -> bool:
        """Whether a length fits and a longer one does not."""
        ends = [cell.asked["seq_len"] for cell in self.cells]
        return len(ends) == 2 and ends[0] < ends[1]

    @property
    def is_open(self) -> bool:
        """Whether a length fits and nothing longer was out of memory: the limit is not reached."""
        return self.largest_ok is not None and not self.is_bracket

    @property
    def exhausted_memory(self) -> str:
        """`host memory` if the shortest length that does not fit ran out of it; empty for a device's memory."""
        rows = () if self.smallest_oom is None else self.smallest_oom.rows
        sites = {row["oom_site"] for row in rows if row["status"] == "oom"}
        return "" if "host" not in sites else "host memory" if len(sites) == 1 else "at times host memory"

    @property
    def is_search(self) -> bool:
        """Whether the trials only tested if the length fits, not its speed."""
        rows = [row for cell in self.cells for row in cell.rows]
        configs = {row["config"] for row in rows}  # replicates share theirs
        return any(row.get("probe") for row in rows) or any(config_leaves(c).get("workload.fit") for c in configs)


def capacity_gib(cell: Cell) -> float | None:
    """The memory cap of a device, or else its capacity; None for an unknown device."""
    if (cap := cell.asked["device_memory_gib"]) is not None:
        return cap
    names = [str(n) for row in cell.rows for n in listed((row["environment"] or {}).get("device_names"))]
    found = next(filter(None, map(device_bytes, names)), None)
    return found and found / GIB / (cell.asked["ranks_per_gpu"] or 1)


def limits(cells: Sequence[Cell]) -> list[Limit]:
    """All limits, by setting, sp_size and series."""
    grouped: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in cells:
        known = None not in (cell.asked["sp_size"], cell.asked["seq_len"])
        if known and cell.is_of_a_length and (cell.fits or cell.out_of_memory):
            grouped.setdefault((cell.setting, cell.asked["sp_size"], cell.name.series_of_limits), []).append(cell)
    return [_limit(group) for _, group in sorted(grouped.items())]


def _limit(group: Sequence[Cell]) -> Limit:
    first, failed = group[0], [c for c in group if c.out_of_memory]
    ran = [c for c in group if c.asked["seq_len"] not in {c.asked["seq_len"] for c in failed}]
    largest = max(ran, key=lambda c: (c.asked["seq_len"], c.ok), default=None)  # prefer one with a time
    beyond = [c for c in failed if largest is None or c.asked["seq_len"] > largest.asked["seq_len"]]
    smallest = min(beyond or failed, key=lambda c: c.asked["seq_len"], default=None)
    ends = [cell.asked["seq_len"] for cell in (largest, smallest) if cell is not None]
    saying = [c.asked["seq_len"] for c in group for row in c.rows if row["status"] in ("ok", OOM)]
    return Limit(
        setting=first.setting,
        series=first.name.series_of_limits,
        sp_size=first.asked["sp_size"],
        largest_ok=largest,
        smallest_oom=smallest,
        tried=tuple(map(saying.count, ends)),
    )
