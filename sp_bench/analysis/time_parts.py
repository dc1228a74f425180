"""The parts of an attention step's time: the kernel alone, computing beyond it, and exposed communication.

The kernel alone is method `single` on one device, with the whole sequence and 1/P of the heads: the work of one of P
ranks without exchange, blocks, merges or waiting.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from sp_bench.analysis.cells import Cell, Launch, listed
from sp_bench.analysis.ratios import of_one_machine, rounded_ratio, shared_replicates
from sp_bench.analysis.statistics import Interval, median_interval
from sp_bench.costs.step_flags import is_unsettled
from sp_bench.formats import MISSING, number

# Options that the kernel alone need not share: how attention is split, and shapes, which are compared by heads.
_OWN = ("method", "model", "fabric", "sp_size", "hardware.device_memory_gib")


@dataclass(frozen=True)
class Part:
    """Median ms of a part of the step, with an interval from 6 replicates on."""

    ms: float
    interval: Interval | None

    @property
    def words(self) -> str:
        span = self.interval
        return number(self.ms) + (f" [{number(span.low)}, {number(span.high)}]" if span else "")


@dataclass(frozen=True)
class Attribution:
    """The parts of a cell's step time, median ms; None if not measured."""

    cell: Cell
    alone: Cell | None
    compute_only_ms: float | None
    comm_only_ms: float | None
    exposed: Part | None
    beyond_kernel: Part | None  # compute only - kernel alone, over pairs of replicates
    imbalance: Part | None  # part of beyond_kernel: the slowest rank's compute minus the mean rank's
    overlap_efficiency: float | None
    unsettled_arms: tuple[str, ...]  # arms whose step time drifted while they were timed

    @property
    def alone_ms(self) -> float | None:
        return self.alone.median_step_ms if self.alone else None

    @property
    def fraction(self) -> tuple[str, str]:
        """(share of the kernel alone's speed, interval of the paired ratio or empty)."""
        return (MISSING, "") if self.alone is None else rounded_ratio(self.alone, self.cell)

    @property
    def fraction_words(self) -> str:
        return " ".join(filter(None, self.fraction))


def kernels_alone(cells: Sequence[Cell]) -> dict[str, Cell]:
    """cell_id of each measured attention cell on several ranks -> the same kernel alone with 1/P of the heads, where it
    was measured; the cell with most replicates if there are several."""
    singles: dict[Hashable, Cell] = {}
    for cell in sorted(cells, key=lambda c: (len(c.step_ms), c.cell_id)):
        asked = cell.asked
        if _is_timed_attention(cell) and (asked["method"], asked["sp_size"]) == ("single", 1):
            singles[_share_of_heads(cell, asked["num_heads"], asked["num_kv_heads"])] = cell
    found: dict[str, Cell] = {}
    for cell in filter(_is_of_several, cells):
        size, heads, kv_heads = (cell.asked[name] for name in ("sp_size", "num_heads", "num_kv_heads"))
        if heads and kv_heads and heads % size == 0 and (of_kv := max(kv_heads, size)) % size == 0:
            key = _share_of_heads(cell, heads // size, of_kv // size)
            found |= {cell.cell_id: singles[key]} if key in singles else {}
    return found


def _is_timed_attention(cell: Cell) -> bool:
    return cell.ok and cell.asked["workload"] == "attention"


def _is_of_several(cell: Cell) -> bool:
    return _is_timed_attention(cell) and (cell.asked["sp_size"] or 1) > 1


def _share_of_heads(cell: Cell, num_heads: int, num_kv_heads: int) -> Hashable:
    return (cell.pool, num_heads, num_kv_heads, cell.asked["head_dim"], cell.but(*_OWN))


def attributions(cells: Sequence[Cell]) -> list[Attribution]:
    """The parts of each measured attention cell on several ranks that has any known part."""
    alone = kernels_alone(cells)
    made = [_attribution(cell, alone.get(cell.cell_id)) for cell in filter(_is_of_several, cells)]
    return [a for a in made if a.alone is not None or a.compute_only_ms is not None]


def _attribution(cell: Cell, alone: Cell | None) -> Attribution:
    return Attribution(
        cell,
        alone,
        cell.middle("compute_only_step_ms"),
        cell.middle("comm_only_step_ms"),
        _part(cell.of_launches("exposed_comm_ms"), cell),
        None if alone is None else _beyond_kernel(cell, alone),
        _part(cell.of_launches("imbalance_ms"), cell),
        cell.middle("overlap_efficiency"),
        tuple(
            arm.replace("_", " ")
            for arm in ("compute_only", "comm_only")
            if any(is_unsettled(listed(row[f"{arm}_step_ms"])) for row in cell.measured)
        ),
    )


def _part(of_launches: Mapping[Launch, float], cell: Cell) -> Part | None:
    """A part's median and interval. None as the interval if the launches are of several campaigns or machines."""
    if not of_launches:
        return None
    values, are_of_one = [*of_launches.values()], len(of_one_machine(of_launches, cell)) == len(of_launches)
    return Part(median(values), median_interval(values) if are_of_one else None)


def _beyond_kernel(cell: Cell, alone: Cell) -> Part | None:
    """The median of the differences. So the medians of parts need not add up to that of the step."""
    compute_ms = cell.of_launches("compute_only_step_ms")
    pairs = [key for key in shared_replicates(cell, alone) if key in compute_ms]
    return _part({key: compute_ms[key] - alone.step_ms[key] for key in pairs}, cell)


def largest(group: Sequence[Attribution]) -> list[Attribution]:
    """The attributions on most ranks, and among those with most tokens."""
    place = max((a.cell.asked["sp_size"], a.cell.asked["seq_len"]) for a in group)
    return [a for a in group if (a.cell.asked["sp_size"], a.cell.asked["seq_len"]) == place]
