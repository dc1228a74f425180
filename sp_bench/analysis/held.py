"""Cells of one real rank of P beside the same cells with all ranks: how near one rank and a link model come.

A cell is held against the newest measured cell of equal options on the same fabric, of those on its own devices if
there are some. Links differ: one place can have several, and `link=none`, messages that take no time, is what the
others must beat.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from sp_bench.analysis.cells import Cell, listed
from sp_bench.analysis.grades import aged_by
from sp_bench.analysis.limits import Limit, limits
from sp_bench.analysis.ratios import ratio_of_pairs
from sp_bench.config.machine import NO_DELAY

SMALLEST_SIGN = 0.03  # measured differences below this share have no sign to predict
_OF_WORLD = ("world", "link", "real_rank")
# Before, a process that went on to a trial of one rank measured as the rank that it had been in a trial of all.
OWN_RANK = datetime(2026, 11, 29, 15, 44, tzinfo=UTC)


@dataclass(frozen=True)
class Held:
    """A cell of one real rank, the measured cell of its options, and the same rank with messages that take no time.
    attributed: the measured cell that was also timed without messages, of the same code."""

    one: Cell
    measured: Cell
    no_delay: Cell | None
    attributed: Cell | None

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return _ms(self.one) / _ms(self.measured)

    @property
    def ratio_without_delay(self) -> float | None:
        return None if self.no_delay is None else _ms(self.no_delay) / _ms(self.measured)

    @property
    def scaled(self) -> float | None:
        """Predicted over measured if both machines computed as fast: by the time of the step without messages, which
        both measured; or as it is on the same devices."""
        if self.attributed and (arms := self._pair("compute_only_step_ms")):
            return _ms(self.one) / arms[0] * arms[1] / _ms(self.attributed)
        return self.ratio if self.is_of_one_machine else None

    @property
    def is_of_one_machine(self) -> bool:
        """Both ran on the same devices."""
        return _share_devices(self.one, self.measured)

    @property
    def exposed_ms(self) -> tuple[float, float] | None:
        """(predicted, measured) time of a step beyond that without messages."""
        return self._pair("exposed_comm_ms")

    @property
    def kernels(self) -> float | None:
        """Time of attention and matrix products in the step that was traced: predicted over measured."""
        ones, all_ranks = (_traced_ms(cell, ("attention", "matmul"), median) for cell in (self.one, self.measured))
        return ones / all_ranks if ones and all_ranks else None

    @property
    def traced_exposed_ms(self) -> tuple[float, float] | None:
        """(predicted, measured)"""
        ones, all_ranks = (traced_exposed_ms(cell) for cell in (self.one, self.measured))
        return None if ones is None or all_ranks is None else (ones, all_ranks)

    @property
    def exposed_is_near(self) -> bool | None:
        """Within 30%, or within 0.5% of the step; of the traced step, else by the steps without messages."""
        if (known := self.traced_exposed_ms or self.exposed_ms) is None:
            return None
        predicted, measured = known
        return abs(predicted - measured) <= max(0.3 * abs(measured), 0.005 * _ms(self.measured))

    @property
    def peak(self) -> float | None:
        """Predicted over measured memory that this rank allocates: in a ring others allocate more. Without what was
        left there before, where both rows say it. None also if it is not known which rank ran."""
        if self.is_of_one_machine and _newest(self.one) < OWN_RANK:
            return None
        asked, config = self.one.asked, self.one.config  # of uneven ranks no cell is held
        said = [rank for rank in (self.one.measured[0]["ran_rank"], asked["real_rank"]) if rank is not None]
        place = int(said[0]) if said else config.usual_rank if config else 0
        (one, all_ranks), (left, left_of_all) = (
            (_of_rank(self.one, column, 0), _of_rank(self.measured, column, place))
            for column in ("peak_allocated_bytes", "leftover_bytes")
        )
        if one is None or all_ranks is None:
            return None
        if left is not None and left_of_all is not None:
            one, all_ranks = one - left, all_ranks - left_of_all
        return one / all_ranks

    def device(self, what: str) -> tuple[float, float] | None:
        """(one rank, all ranks): sm_clock_mhz or power_w under load, the median over ranks and replicates."""
        ones, all_ranks = (_middle_state(cell, what) for cell in (self.one, self.measured))
        return None if ones is None or all_ranks is None else (ones, all_ranks)

    def _pair(self, column: str) -> tuple[float, float] | None:
        """(one rank, all ranks) of a column of both that were timed without messages too."""
        if self.attributed is None:
            return None
        one, all_ranks = self.one.middle(column), self.attributed.middle(column)
        return None if one is None or all_ranks is None else (one, all_ranks)

    @property
    def is_like_code(self) -> bool:
        """False: a change that moves its speed came between the two."""
        return _is_like_code(self.one, self.measured)


@dataclass(frozen=True)
class Group:
    """Places of one workload, number of ranks and link."""

    workload: str
    sp_size: int
    link: str
    helds: tuple[Held, ...]

    @property
    def of_like_code(self) -> tuple[Held, ...]:
        return tuple(held for held in self.helds if held.is_like_code)

    def values(self, read: Callable[[Held], float | None]) -> list[float]:
        """What the places of like code have, from the smallest."""
        return sorted(value for held in self.of_like_code if (value := read(held)) is not None)


@dataclass(frozen=True)
class Sign:
    """The ring against Ulysses at one place: times of the ring over those of Ulysses."""

    held: Held  # of Ulysses, which names the place
    measured: float
    predicted: float
    without_delay: float | None
    is_like_code: bool

    @property
    def counts(self) -> bool:
        return abs(self.measured - 1) >= SMALLEST_SIGN

    @property
    def is_right(self) -> bool:
        return (self.predicted > 1) == (self.measured > 1)


@dataclass(frozen=True)
class Edge:
    """A bracket of the longest sequence with all ranks, and one real rank at both of its lengths."""

    limit: Limit
    ends: tuple[Cell, Cell]  # of one rank: at the length that fits, and at the one that does not

    @property
    def is_right(self) -> bool:
        return self.ends[0].fits and self.ends[1].out_of_memory


def edges(cells: Sequence[Cell]) -> list[Edge]:
    """The brackets of which one real rank tried both ends."""
    tried = [cell for cell in cells if cell.fits or cell.out_of_memory]
    ones = {_place(cell): cell for cell in tried if not cell.all_ranks_were_there}
    brackets = (each for each in limits([c for c in tried if c.all_ranks_were_there]) if each.is_bracket)
    beside = ((each, [ones.get(_place(cell)) for cell in each.cells]) for each in brackets)
    return [Edge(limit, (fits, fails)) for limit, (fits, fails) in beside if fits and fails]


def held(cells: Sequence[Cell]) -> list[Held]:
    """Those that have a measured cell and do not wait for the host: training steps first, most ranks first, the longest
    first."""
    ones = [cell for cell in cells if cell.ok and cell.is_comparable and not cell.all_ranks_were_there]
    measured = _by_place(cell for cell in cells if cell.ok and cell.all_ranks_were_there)
    instant = _by_place(cell for cell in ones if cell.link == NO_DELAY)
    found = []
    for cell in (each for each in ones if each.link != NO_DELAY):
        if beside := measured.get(place := _place(cell)):
            newest = _nearest(cell, beside)
            timed_apart = [
                each for each in beside if each.middle("compute_only_step_ms") and _is_like_code(each, newest)
            ]
            without_delay = max(instant.get(place, ()), key=_newest, default=None)
            found.append(Held(cell, newest, without_delay, _nearest(cell, timed_apart) if timed_apart else None))
    return sorted(found, key=_order)


def errors(helds: Sequence[Held], workload: str) -> tuple[float, ...]:
    """The relative errors of a workload's times on NVLink, where measured rows are of like code: the lowest first.
    Below 0 one rank is too short."""
    counts = [
        each
        for each in helds
        if each.is_like_code and (each.one.asked["workload"], each.one.asked["fabric"]) == (workload, "nvlink")
    ]
    return tuple(sorted(each.ratio - 1 for each in counts))


def largest_error(helds: Sequence[Held], workload: str) -> float | None:
    """The largest of `errors`, without its sign; None: there are none."""
    return max(map(abs, errors(helds, workload)), default=None)


def traced_exposed_ms(cell: Cell) -> float | None:
    """Time in which messages run and no kernel does, in the step that was traced. Of the rank that has least: others
    wait for it."""
    return _traced_ms(cell, ("exposed_messages",), min)


def groups(helds: Sequence[Held]) -> list[Group]:
    grouped: dict[tuple[str, int, str], list[Held]] = {}
    for each in helds:
        asked = each.one.asked
        grouped.setdefault((asked["workload"], asked["sp_size"], each.one.link), []).append(each)
    return [Group(*key, tuple(each)) for key, each in grouped.items()]


def signs(helds: Sequence[Held], cells: Sequence[Cell]) -> list[Sign]:
    """Places where both the ring and Ulysses are held, and ran beside each other in a campaign with all ranks; of
    several campaigns the newest."""
    measured = _by_place(cell for cell in cells if cell.ok and cell.all_ranks_were_there)
    rings = {_beside(each.one): each for each in helds if each.one.asked["method"] == "ring"}
    found = []
    for ulysses in helds:
        ring = rings.get(_beside(ulysses.one)) if ulysses.one.asked["method"] == "ulysses" else None
        if ring is None or (predicted := ratio_of_pairs(ring.one, ulysses.one)) is None:
            continue
        beside = [
            (a, ratio)
            for a in measured[_place(ring.one)]
            for b in measured[_place(ulysses.one)]
            if (ratio := ratio_of_pairs(a, b)) is not None
        ]
        if beside:
            newest, ratio = max(beside, key=lambda pair: _newest(pair[0]))
            both = ring.no_delay, ulysses.no_delay
            without = ratio_of_pairs(both[0], both[1]) if both[0] and both[1] else None
            found.append(Sign(ulysses, ratio, predicted, without, _is_like_code(ring.one, newest)))
    return found


def _of_rank(cell: Cell, column: str, rank: int) -> float | None:
    """The value of a rank that is there: the median over the replicates."""
    known = [values[rank] for row in cell.measured if len(values := listed(row[column])) > rank]
    return median(known) if known else None


def _by_place(cells: Iterable[Cell]) -> dict[tuple[Any, ...], list[Cell]]:
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(_place(cell), []).append(cell)
    return found


def _place(cell: Cell) -> tuple[Any, ...]:
    """Equal for cells that differ only in how many ranks are there and in what models their messages."""
    return cell.but(*_OF_WORLD)


def _beside(cell: Cell) -> tuple[Any, ...]:
    """Equal for the ring and Ulysses of one place and link."""
    return (cell.but(*_OF_WORLD, "method"), cell.link)


def _is_like_code(a: Cell, b: Cell) -> bool:
    return aged_by(a, _newest(a)) == aged_by(b, _newest(b))


def _nearest(one: Cell, found: Sequence[Cell]) -> Cell:
    """The newest, of those on the same devices if there are some."""
    return max(found, key=lambda cell: (_share_devices(one, cell), _newest(cell)))


def _share_devices(a: Cell, b: Cell) -> bool:
    return not (set(a.device_sets.values()) - {None}).isdisjoint(b.device_sets.values())


def _newest(cell: Cell) -> datetime:
    return max(row["started_at"] for row in cell.measured)


def _ms(cell: Cell) -> float:
    assert cell.median_step_ms is not None, "cells without a time are not held"
    return cell.median_step_ms


def _traced_ms(cell: Cell, parts: Sequence[str], over_ranks: Callable[[Iterable[float]], float]) -> float | None:
    """Median over replicates of parts of the traced step; None where no row has the trace."""
    traces = [listed(row["kernel_ms"]) for row in cell.measured]
    known = [over_ranks([_sum(rank, parts) for rank in ranks]) for ranks in traces if ranks]
    return median(known) if known else None


def _middle_state(cell: Cell, what: str) -> float | None:
    states = [state for row in cell.measured for state in listed(row["device_state"]) if state is not None]
    known = [state[what] for state in states if state[what] is not None]
    return median(known) if known else None


def _sum(rank: Mapping[str, float], parts: Sequence[str]) -> float:
    return sum(rank[part] for part in parts)


def _order(held: Held) -> tuple[Any, ...]:
    asked = held.one.asked
    return (
        asked["workload"] != "train_step",
        -asked["sp_size"],
        asked["fabric"] != "nvlink",
        asked["fabric"],
        held.one.link,
        asked["kernel"],
        -asked["seq_len"],
        asked["method"],
        held.one.cell_id,
    )
