"""Groups cells by setting and answers, per place: which method is faster, by how much, and is it proven?

The cells of a setting share all options except fabric, kernel, length and ranks. A place is one length, number of
ranks, pack of documents, fabric and kernel; methods are compared there. A tie: the whole interval lies within the
smallest effect of interest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sp_bench.analysis import identifiers, words
from sp_bench.analysis.cells import Cell, Launch
from sp_bench.analysis.fabric_model import bandwidths
from sp_bench.analysis.grades import Grade, grade
from sp_bench.analysis.held import SMALLEST_SIGN
from sp_bench.analysis.limits import Limit, limits
from sp_bench.analysis.over_depth import at_full_depth
from sp_bench.analysis.pattern_bytes import kind
from sp_bench.analysis.ratios import PairedRatio, by_speed, fastest, paired_ratio, pairs, ranked, ratio_of_pairs, times
from sp_bench.analysis.time_parts import kernels_alone
from sp_bench.config.workload import COMPARED
from sp_bench.formats import MISSING

SMALLEST = 0.02  # the smallest effect of interest: one config on two machines differs by as much, code aside
AHEAD, BEHIND, TIE, UNDECIDED = "ahead", "behind", "a tie", "undecided"
CLOSE, UNPROVEN, APART = "close, no interval", "no interval", "not compared: no replicates pair"
QUESTION = ("ulysses", "ring")  # what this benchmark asks about
NO_METHOD = (*COMPARED, "collective")  # workloads that ask for no time of a method


@dataclass(frozen=True)
class Difference:
    """Step time of `slow` over that of `fast`, by replicates of one campaign and machine. Other replicates count too
    when the faster cell is chosen, so the ratio may be below 1."""

    fast: Cell
    slow: Cell
    smallest: float = SMALLEST

    @cached_property
    def paired(self) -> PairedRatio | None:
        return paired_ratio(self.slow, self.fast)

    @cached_property
    def ratio(self) -> float | None:
        """The ratio; None if no replicates pair."""
        return ratio_of_pairs(self.slow, self.fast)

    @property
    def outcome(self) -> str:
        """What may be claimed of the two.

        ahead, behind: the interval excludes 1, and the ratio is beyond the smallest effect. A tie: the whole interval
        is within the smallest effect. Undecided: it is neither; or there are fewer than 6 pairs, and replicates of one
        cell differ by more than the two cells do. Close: no interval, and ratio and replicates are within the smallest
        effect. No interval: all others without one.
        """
        if self.ratio is None:
            return APART
        is_small = abs(self.ratio - 1) < self.smallest
        if self.paired is None:
            if is_small and self.spread < 1 + self.smallest:
                return CLOSE
            return UNDECIDED if self.spread > max(self.ratio, 1 / self.ratio) else UNPROVEN
        low, high = self.paired.interval.low, self.paired.interval.high
        if 1 - self.smallest <= low and high <= 1 + self.smallest:
            return TIE
        if is_small or not self.paired.excludes_1:
            return UNDECIDED
        return AHEAD if low > 1 else BEHIND

    @property
    def doubt(self) -> str:
        """What to put behind the ratio; empty where it stands for itself."""
        return {AHEAD: "", BEHIND: "", CLOSE: f"within {self.smallest:.0%}, {UNPROVEN}"}.get(self.outcome, self.outcome)

    @cached_property
    def spread(self) -> float:
        """The largest over the smallest time of the pairs' replicates, of the cell in which they differ more."""
        times = [[cell.step_ms[key] for key in self.keys] for cell in (self.fast, self.slow)]
        return max(max(each) / min(each) for each in times)

    @cached_property
    def keys(self) -> list[Launch]:
        """The replicates that pair."""
        return pairs(self.slow, self.fast)

    @cached_property
    def grade(self) -> Grade:
        return grade((self.fast, self.slow), self.keys)

    @property
    def is_proven(self) -> bool:
        """May be bold."""
        return self.outcome == AHEAD and self.grade.may_be_bold

    @property
    def overlaps(self) -> bool:
        """Whether a replicate of `slow` was no slower than one of `fast`, of those that pair."""
        return min(self.slow.step_ms[key] for key in self.keys) <= max(self.fast.step_ms[key] for key in self.keys)

    @property
    def is_behind(self) -> bool:
        """Whether `slow` is the faster one, by more than a tie."""
        return self.outcome == BEHIND or (self.outcome == UNPROVEN and (self.ratio or 1) < 1)

    @property
    def turned(self) -> "Difference":
        """The difference with the cell that is faster by pairs as `fast`."""
        is_slower = self.ratio is not None and self.ratio < 1
        return Difference(self.slow, self.fast, self.smallest) if is_slower else self

    @property
    def words(self) -> str:
        """1.03x [1.01, 1.04]."""
        return self.paired.words if self.paired else MISSING if self.ratio is None else times(self.ratio)


@dataclass(frozen=True)
class Place:
    """Cells on several ranks with one setting, fabric, length, number of ranks, pack and kernel."""

    cells: tuple[Cell, ...]
    smallest: float

    @property
    def first(self) -> Cell:
        return self.cells[0]

    @cached_property
    def best(self) -> tuple[Cell, ...]:
        """The fastest cell of each method, fastest first."""
        methods: dict[str, list[Cell]] = {}
        for cell in self.cells:
            methods.setdefault(f"{cell.asked['method']} {cell.asked['variant']}", []).append(cell)
        return tuple(ranked([fastest(each) for each in methods.values()]))

    @property
    def contested(self) -> bool:
        return len(self.best) > 1

    @cached_property
    def own(self) -> tuple[Cell, ...]:
        """Our methods in `best`. Libraries are compared with our method of their kind instead."""
        return tuple(cell for cell in self.best if not cell.is_library)

    @cached_property
    def contenders(self) -> tuple[Cell, ...]:
        return self.own if len(self.own) > 1 else self.best

    @cached_property
    def leader(self) -> Cell:
        return leader(self.contenders, self.smallest)

    @property
    def others(self) -> tuple[Cell, ...]:
        """The contenders without the leader, the fastest first."""
        return tuple(cell for cell in self.contenders if cell is not self.leader)

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """The difference between the leader and each other contender."""
        return tuple(Difference(self.leader, other, self.smallest) for other in self.others)

    @property
    def rival(self) -> Cell | None:
        """The contender shown beside the leader: Ulysses or the ring if possible, else the next by time. Cells whose
        replicates pair with the leader's come first."""
        beside = [d.slow for d in self.differences if d.ratio is not None] or self.others
        asked = [c for c in beside if kind(c) in QUESTION and kind(c) != kind(self.leader)]
        return next(iter(asked or beside), None)

    @property
    def difference(self) -> Difference | None:
        """The difference between leader and rival, the faster one first; None without a rival."""
        return None if self.rival is None else Difference(self.leader, self.rival, self.smallest).turned

    def of_kind(self, name: str) -> Cell | None:
        """Our fastest cell of a method that sends keys and values."""
        return next((c for c in self.own if c.asked["method"] == name and not c.asked["sends"]), None)

    @property
    def order(self) -> tuple[Any, ...]:
        """A sort key: the largest place last, then the lowest seed of a pack, then the fastest kernel."""
        asked = self.first.asked
        return (
            asked["world_size"] or 0,
            asked["sp_size"] or 0,
            asked["seq_len"] or 0,
            -(self.first.name.pack or 0),
            -(self.best[0].median_step_ms or 0),
        )


@dataclass(frozen=True)
class Setting:
    parts: tuple[str, ...]  # the parts of its title, which is unique on a page
    cells: tuple[Cell, ...]
    alone: Mapping[str, Cell]  # cell_id -> the kernel alone on a share of the heads
    fabrics: tuple[str, ...]  # the fastest first
    smallest: float

    @property
    def title(self) -> str:
        return ", ".join(self.parts)

    def apart(self, others: Sequence["Setting"]) -> list[str]:
        """The parts of its title that some of the others lack."""
        return [part for part in self.parts if not all(part in other.parts for other in others)]

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The places where something ran: slower fabrics first, the largest and fastest last. Cells that wait for the
        host are in no verdict."""
        grouped: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.cells:
            if cell.ok and cell.is_of_a_length and not is_baseline(cell) and cell.is_comparable:
                grouped.setdefault(place_key(cell), []).append(cell)
        found = [Place(tuple(sorted(group, key=by_speed)), self.smallest_for(group[0])) for group in grouped.values()]
        return tuple(sorted(found, key=lambda p: (-self.fabrics.index(str(p.first.asked["fabric"])), *p.order)))

    def smallest_for(self, cell: Cell) -> float:
        """The smallest difference that counts between cells like this one. It is larger for one real rank."""
        return self.smallest if cell.all_ranks_were_there else max(self.smallest, SMALLEST_SIGN)

    @property
    def contests(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.contested)

    @property
    def main(self) -> Place | None:
        """The main place: the largest on the fastest fabric and kernel, among places with several methods if there are
        any. None if nothing ran on several ranks."""
        return next(reversed(self.contests or self.places), None)

    @cached_property
    def limits(self) -> list[Limit]:
        return limits([c for c in self.cells if not is_baseline(c)])

    @property
    def out_of_memory(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.out_of_memory]

    @property
    def campaigns(self) -> list[str]:
        return list(_folders(self.cells))

    def share(self, cell: Cell) -> Difference | None:
        """The kernel alone's step time over the cell's: the share of the kernel's speed that the method reaches."""
        alone = self.alone.get(cell.cell_id)
        return None if alone is None else Difference(cell, alone, self.smallest_for(cell))


def leader(cells: Sequence[Cell], smallest: float) -> Cell:
    """The cell that the fewest others beat by more than a tie. Among equals, the one that pairs with most others, and
    then the fastest by its median over all replicates."""
    found = {
        cell.cell_id: [Difference(cell, other, smallest) for other in cells if other is not cell] for cell in cells
    }

    def order(cell: Cell) -> tuple[Any, ...]:
        of_others = found[cell.cell_id]
        num_beside = sum(each.ratio is not None for each in of_others)
        return (sum(each.is_behind for each in of_others), -num_beside, *by_speed(cell))

    return min(cells, key=order)


def place_key(cell: Cell) -> tuple[Any, ...]:
    return (*(cell.asked[name] for name in ("fabric", "world_size", "sp_size", "seq_len")), cell.name.pack,
            cell.asked["kernel"])  # fmt: skip


def is_baseline(cell: Cell) -> bool:
    """Whether one device computes attention alone."""
    return cell.asked["method"] == "single" and cell.asked["workload"] == "attention"


def settings(cells: Sequence[Cell], smallest: float = SMALLEST) -> list[Setting]:
    """All settings: training steps first, then those with intervals, more devices and longer sequences. A kernel alone
    belongs to the setting whose baseline it is. Steps of one real rank that ran with few layers are whole steps."""
    cells = at_full_depth(cells)
    alone = kernels_alone(cells)
    taken = {cell.cell_id for cell in alone.values()}
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.asked["workload"] not in NO_METHOD and cell.cell_id not in taken:
            grouped.setdefault(cell.over_fabrics, []).append(cell)
    speeds = _bandwidth_by_fabric(cells)
    titles = _titles(list(grouped.values()))
    made = [
        Setting(parts, tuple(group), {c.cell_id: alone[c.cell_id] for c in group if c.cell_id in alone},
                _fabrics(group, speeds), smallest)
        for parts, group in zip(titles, grouped.values(), strict=True)
    ]  # fmt: skip
    return sorted(made, key=_order)


def _order(setting: Setting) -> tuple[Any, ...]:
    main = setting.main
    if main is None:
        return (3, setting.title)
    proven = any(d.paired for d in main.differences)
    trains = setting.cells[0].asked["workload"] == "train_step"
    return (not main.contested, not trains, not proven, *(-size for size in main.order[:3]), setting.title)


def _bandwidth_by_fabric(cells: Sequence[Cell]) -> dict[str, float]:
    """Fabric -> the largest bandwidth of any primitive, bytes/s."""
    found: dict[str, float] = {}
    for (_, name, *_), bandwidth in bandwidths(cells).items():
        found[str(name)] = max(found.get(str(name), 0.0), bandwidth.bytes_per_s)
    return found


def _fabrics(cells: Sequence[Cell], speeds: Mapping[str, float]) -> tuple[str, ...]:
    """Fabrics, the fastest first. Those of unknown speed: NVLink, then by name."""
    names = {str(cell.asked["fabric"]) for cell in cells}
    return tuple(sorted(names, key=lambda name: (-speeds.get(name, 0.0), name != "nvlink", name)))


def _folders(cells: Sequence[Cell]) -> tuple[str, ...]:
    return tuple(sorted({str(row["folder"]) for cell in cells for row in cell.rows}))


def _titles(groups: Sequence[Sequence[Cell]]) -> list[tuple[str, ...]]:
    """The parts of each setting's title. Equal titles get the options in which they differ, and their campaigns. A
    setting without packing is marked if its campaign has packs."""
    plain = [words.setting(group[0]) for group in groups]
    of_packs = {
        (tuple(part for part in title if part != words.packed(group[0])), _folders(group))
        for title, group in zip(plain, groups, strict=True) if words.is_packed(group[0])
    }  # fmt: skip
    plain = [
        (*title, "one document") if (title, _folders(group)) in of_packs and not words.is_packed(group[0]) else title
        for title, group in zip(plain, groups, strict=True)
    ]
    made = []
    for title, group in zip(plain, groups, strict=True):
        alike = [other for other, name in zip(groups, plain, strict=True) if name == title]
        extra = []
        if len(alike) > 1:
            values = [each[0].name.values for each in alike]
            same = identifiers.shared_values(values)
            own = group[0].name.values
            titled = words.DRAWN if words.is_packed(group[0]) else ()
            extra = [
                words.option(path, own[path])
                for path in own
                if path not in same and path not in titled and path != "pool" and not path.startswith("fabric.")
            ]
            if len({value.get("pool") for value in values}) > 1:
                extra.append(", ".join(_folders(group)))
        name = (*title, *extra)
        number = 1 + sum(other[: len(name)] == name for other in made)
        made.append(name if number == 1 else (*name, f"environment {number}"))
    return made
