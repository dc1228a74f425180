"""Compares two campaigns cell by cell: what became slower, what fails now, and what only one of them has.

Two cells are the same if their configs are equal, apart from options at their default. Code and libraries may differ,
as they do between versions. Ratios are B over A of step times: above 1, B is slower.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import accumulate, islice, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from sp_bench.analysis import device_sets
from sp_bench.analysis.cells import Cell, cells, known_rows, listed
from sp_bench.analysis.identifiers import name_cells
from sp_bench.analysis.ratios import PairedRatio, median_ratio, ratio_of_medians
from sp_bench.analysis.selection import MIXED, Selection, select
from sp_bench.config.options import OPTIONS
from sp_bench.config.workload import AUTO
from sp_bench.formats import counted, whole
from sp_bench.hardware import OF_TRANSPORT_AND_MEMORY, public_value
from sp_bench.rows.names import as_asked, config_leaves

SLOWER, FASTER, INDISTINCT, NO_INTERVAL = "slower", "faster", "not told apart", "no interval"
KINDS = REGRESSION, BETTER, CHANGED = "regression", "better", "changed"  # of a cell's statuses
TIMED_STEPS = "workload.timed_steps"
MAX_OPTIONS = 5  # options named when no cell is in common
MAX_NEAREST = 500  # cells of each side among which the nearest two are looked for then
_BOUND = re.compile(r"median:(\d+(?:\.\d+)?)%")
_FACTS = ("cpu", "driver", "cuda", "cudnn", "nccl", "process_group")  # of the environment, beside packages and devices


class NotComparable(ValueError):
    """Two folders have no common cell, or a bound cannot be read. The message names a way out."""


@dataclass(frozen=True)
class Side:
    """One campaign, with the rows of each cell's newest environment."""

    folder: Path
    selection: Selection
    cells: Mapping[str, Cell]  # by cell_id; cells that both sides have go by A's

    @property
    def facts(self) -> dict[str, list[str]]:
        """What the rows ran on: `devices`, driver, libraries, packages and variables -> all values that occur."""
        found: dict[str, set[str]] = {"devices": set()}
        for environment in self.selection.rows["environment"]:
            known = environment if isinstance(environment, Mapping) else {}
            found["devices"].update(map(str, listed(known.get("device_names")) or _listed_one(known.get("cpu"))))
            shaping = [
                (name, public_value(name, value))  # old rows have the value itself
                for name, value in listed(known.get("env"))
                if value is not None and OF_TRANSPORT_AND_MEMORY.fullmatch(name)
            ]
            for name, value in [*((n, known.get(n)) for n in _FACTS), *listed(known.get("packages")), *shaping]:
                if value is not None:
                    found.setdefault(str(name), set()).add(str(value))
        for name, unit in (("power_limit_w", "W"), ("application_clock_mhz", "MHz")):
            recorded = [value for values in self.selection.rows[name] for value in listed(values)]
            if values := {value for value in recorded if value is not None}:
                found[name.rpartition("_")[0].replace("_", " ")] = {f"{value:,.0f} {unit}" for value in values}
        return {name: sorted(values) for name, values in found.items()}


@dataclass(frozen=True)
class Pair:
    """A cell that both sides measured."""

    a: Cell
    b: Cell
    points: tuple[float, ...]  # B over A for each replicate that both have, in order
    paired: PairedRatio | None  # needs 6 points, and one set of devices per side
    on_separate_devices: bool  # no device is in both: the ratio includes how the machines differ
    ratio: float  # median of the points if they have an interval, else the ratio of medians over the same replicates

    @property
    def verdict(self) -> str:
        if self.paired is None:
            return NO_INTERVAL
        if not self.paired.excludes_1:
            return INDISTINCT
        return SLOWER if self.paired.interval.low > 1 else FASTER

    @property
    def words(self) -> str:
        """1.25x [1.22, 1.27]; without an interval, the points in parentheses: 1.250x (1.220, 1.280)."""
        if self.paired is not None:
            return self.paired.words
        points = f" ({', '.join(f'{point:.3f}' for point in self.points)})" if len(self.points) > 1 else ""
        return f"{self.ratio:.3f}x{points}"


@dataclass(frozen=True)
class Change:
    """A cell whose statuses differ."""

    a: Cell
    b: Cell

    @property
    def kind(self) -> str:
        """Regression or better: a larger or smaller share of its replicates failed."""
        before, after = _failed_share(self.a), _failed_share(self.b)
        return REGRESSION if after > before else BETTER if after < before else CHANGED

    @property
    def words(self) -> str:
        return f"{status_words(self.a)} \N{RIGHTWARDS ARROW} {status_words(self.b)}"

    @property
    def reason(self) -> str:
        """The reason in the first failed row of the side that fails more."""
        failed = [row for row in (self.a if self.kind == BETTER else self.b).rows if row["status"] != "ok"]
        return str(failed[0]["reason"] or "") if failed else ""


@dataclass(frozen=True)
class Comparison:
    a: Side
    b: Side
    pairs: tuple[Pair, ...]  # slowest B first
    changes: tuple[Change, ...]  # regressions first
    only_a: tuple[Cell, ...]
    only_b: tuple[Cell, ...]
    num_unmeasured: int  # cells with equal statuses and no step time on at least one side

    def regressions(self, bound: float) -> list[str]:
        """One line per row of B that cannot be read, since its cell may be worse, then one per worse cell, worst first.

        A cell is worse if its statuses are, or if its ratio exceeds 1 + bound and its interval, if any, excludes 1.
        bound: 0.05 allows 5%."""
        unread = [f"{file}: cannot be read" for file in self.b.selection.unread]
        failed = [f"{name(change.b)}: {change.words}" for change in self.changes if change.kind == REGRESSION]
        slower = [p for p in self.pairs if p.ratio > 1 + bound and p.verdict in (SLOWER, NO_INTERVAL)]
        lines = [f"{name(p.b)}: {', '.join(filter(None, [p.words, *_doubts(p)]))}" for p in slower]
        return unread + failed + lines

    def as_json(self) -> dict[str, Any]:
        """The comparison for programs. Times in ms; `interval` is null below 6 pairs. p95: over all timed steps.
        spread: the largest of the replicates' medians over the smallest, minus 1."""
        return {
            "a": str(self.a.folder),
            "b": str(self.b.folder),
            "differences": self.differences(),
            "pairs": [
                {
                    "cell_id": pair.a.cell_id,
                    "name": name(pair.b),
                    "a_ms": pair.a.median_step_ms,
                    "b_ms": pair.b.median_step_ms,
                    "a_p95_ms": p95_ms(pair.a),
                    "b_p95_ms": p95_ms(pair.b),
                    "a_spread": spread(pair.a),
                    "b_spread": spread(pair.b),
                    "ratio": pair.ratio,
                    "interval": None if pair.paired is None else [pair.paired.interval.low, pair.paired.interval.high],
                    "points": list(pair.points),
                    "verdict": pair.verdict,
                    "separate_devices": pair.on_separate_devices,
                }
                for pair in self.pairs
            ],
            "changes": [
                {"name": name(each.b), "kind": each.kind, "statuses": each.words, "reason": each.reason}
                for each in self.changes
            ],
            "only_a": [name(cell) for cell in self.only_a],
            "only_b": [name(cell) for cell in self.only_b],
            "unread_b": list(self.b.selection.unread),
        }

    def differences(self) -> list[str]:
        """How the two sides' environments differ, such as `torch 2.11.0 -> 2.13.0`. If nothing else explains different
        core_ids, names the measuring code; if core_ids are equal, the methods whose code differs."""
        before, after = self.a.facts, self.b.facts
        found = [
            f"{fact} {_values(before.get(fact))} \N{RIGHTWARDS ARROW} {_values(after.get(fact))}"
            for fact in dict.fromkeys([*before, *after])
            if before.get(fact) != after.get(fact)
        ]
        if self.a.selection.core_ids == self.b.selection.core_ids:
            both = [(cell, self.b.cells[cell_id]) for cell_id, cell in self.a.cells.items() if cell_id in self.b.cells]
            if edited := sorted({before.series for before, after in both if before.env_ids != after.env_ids}):
                found.append(f"the code of the method, kernel or engine of {', '.join(edited)}")
        elif not found:
            found.append("the code that measures")
        apart = sum(pair.on_separate_devices for pair in self.pairs)
        of_all = "" if apart == len(self.pairs) else f", of {apart} of {counted(len(self.pairs), 'cell')}"
        return found + ([f"separate devices, by their UUIDs{of_all}"] if apart else [])


def fail_bound(text: str) -> float:
    """`median:5%` -> 0.05.

    Raises:
        NotComparable: any other form.
    """
    if (match := _BOUND.fullmatch(text)) is None:
        raise NotComparable(
            f"--fail-on {text}: use median:NUMBER%, such as median:5% or median:2.5%; "
            "the median step time is all that is compared"
        )
    return float(match[1]) / 100


def compare(
    folder_a: Path, folder_b: Path, executor: Executor | None = None, ignore: Collection[str] = ()
) -> Comparison:
    """Compare two campaigns by each cell's newest environment.

    executor: processes that share the reading. ignore: options, by path or column, in which cells may differ. If a
    campaign then has several equal cells, they stay apart.

    Raises:
        NotComparable: a folder without rows, no cell in common, or an unknown option.
        OSError: a folder cannot be read.
    """
    a, b = _sides(folder_a, folder_b, executor, [_path(name) for name in ignore])
    common = [(a.cells[cell_id], b.cells[cell_id]) for cell_id in a.cells if cell_id in b.cells]
    if not common:
        raise NotComparable(_nothing_in_common(a, b))
    pairs = [_pair(before, after) for before, after in common if before.ok and after.ok]
    changes = [Change(before, after) for before, after in common if _statuses_differ(before, after)]
    shown = {each.a.cell_id for each in (*pairs, *changes)}
    return Comparison(
        a,
        b,
        tuple(sorted(pairs, key=lambda p: (-p.ratio, name(p.a)))),
        tuple(sorted(changes, key=lambda c: (KINDS.index(c.kind), name(c.a)))),
        tuple(cell for cell_id, cell in a.cells.items() if cell_id not in b.cells),
        tuple(cell for cell_id, cell in b.cells.items() if cell_id not in a.cells),
        sum(before.cell_id not in shown for before, _ in common),
    )


def _path(name: str) -> str:
    """The path of an option, given its path or column."""
    found = [option.path for option in OPTIONS if name in (option.path, option.column, option.name)]
    if len(found) != 1:
        number = "several options are" if found else "no option is"
        known = ", ".join(found or sorted(option.path for option in OPTIONS))
        raise NotComparable(f"--ignore {name}: {number} called so; use one of {known}")
    return found[0]


def name(cell: Cell) -> str:
    """A cell's full name in one line."""
    sizes = [f"{column} {whole(cell.asked[column])}" for column in ("sp_size", "seq_len") if cell.asked[column]]
    return ", ".join([cell.series, *sizes, cell.setting])


def p95_ms(cell: Cell) -> float | None:
    """95th percentile over the timed steps of all replicates; None if rows lack them."""
    steps = [ms for row in cell.measured for ms in listed(row["step_ms"])]
    return float(np.percentile(steps, 95)) if steps else None


def spread(cell: Cell) -> float | None:
    """The largest of the replicates' medians over the smallest, minus 1. None for a single replicate."""
    medians = [row["median_step_ms"] for row in cell.measured]
    return max(medians) / min(medians) - 1 if len(medians) > 1 else None


def status_words(cell: Cell) -> str:
    """5 ok, 1 oom."""
    return ", ".join(f"{n} {status}" for status, n in Counter(str(row["status"]) for row in cell.rows).items())


def _listed_one(value: Any) -> list[Any]:
    return [] if value is None else [value]


def _sides(folder_a: Path, folder_b: Path, executor: Executor | None, ignore: Collection[str]) -> tuple[Side, Side]:
    """Both campaigns. Cells are named among those of both, so names are unique."""
    selections = [select([folder], executor=executor) for folder in (folder_a, folder_b)]
    for folder, selection in zip((folder_a, folder_b), selections, strict=True):
        if selection.rows.empty:
            raise NotComparable(f"{folder} has no rows to compare")
    selections = _numbered_alike(selections)
    ids = _common_ids(selections[0].rows, selections[1].rows, ignore)
    every = pd.concat([_first_rows(selection.rows) for selection in selections], ignore_index=True).assign(pool=MIXED)
    own_ids = set(every["cell_id"])
    every["cell_id"] = every["cell_id"].map(lambda cell_id: ids.get(cell_id, cell_id))
    firsts = known_rows(every.drop_duplicates("cell_id"))
    of_common = {row["cell_id"]: name for row, name in zip(firsts, name_cells(firsts), strict=True)}
    names = {own: of_common[ids.get(own, own)] for own in own_ids}
    a, b = (
        Side(folder, selection, {c.cell_id: c for c in _with_common_ids(cells(selection.rows, names), ids)})
        for folder, selection in zip((folder_a, folder_b), selections, strict=True)
    )
    return a, b


def _first_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """One row of each cell."""
    cell_ids = rows["cell_id"].fillna(rows["trial_id"])
    return rows[~cell_ids.duplicated()].assign(cell_id=cell_ids)


def _numbered_alike(selections: Sequence[Selection]) -> list[Selection]:
    """Number the sets of devices over both sides, so that one set has one number."""
    numbers = device_sets.numbered([each for s in selections for each in s.rows["environment"]])
    ends = list(accumulate((len(s.rows) for s in selections), initial=0))
    return [
        replace(selection, rows=selection.rows.assign(device_set=numbers[start:end]))
        for selection, start, end in zip(selections, ends, ends[1:], strict=False)
    ]


def _common_ids(a: pd.DataFrame, b: pd.DataFrame, ignore: Collection[str]) -> dict[str, str]:
    """cell_id of B -> cell_id of A, for equal cells whose ids differ: old rows lack an option, or the ranks agreed on
    the number of timed steps that is fixed on the other side."""
    # replicates share theirs
    sides = [pd.DataFrame(rows[["config", "evidence", "cell_id"]]).drop_duplicates() for rows in (a, b)]
    configs = {config for side in sides for config in side["config"].tolist()}
    if any(config_leaves(config).get(TIMED_STEPS) == AUTO for config in configs):
        ignore = {*ignore, TIMED_STEPS}
    options = {config: as_asked(config, ignore) for config in configs}
    before, after = (_cell_ids(side, options) for side in sides)
    both = [(before[known], after[known]) for known in after.keys() & before.keys()]
    return {new: old for (old, *others), (new, *more) in both if not others and not more and old != new}


def _cell_ids(rows: pd.DataFrame, options: Mapping[str, str]) -> dict[tuple[str, str], set[str]]:
    """The cells of each evidence, which `--ignore` never covers, and options; without those of no readable config."""
    found: dict[tuple[str, str], set[str]] = {}
    for config, evidence, cell_id in zip(*(rows[name].tolist() for name in rows), strict=True):
        if options[config]:
            found.setdefault((evidence, options[config]), set()).add(cell_id)
    return found


def _with_common_ids(found: Sequence[Cell], ids: Mapping[str, str]) -> Iterator[Cell]:
    for cell in found:
        own = cell.asked["cell_id"]
        pool = cell.cell_id.removeprefix(own)  # of several devices in one campaign
        yield replace(cell, cell_id=ids.get(own, own) + pool)


def _pair(a: Cell, b: Cell) -> Pair:
    before, after = ({row["replicate"]: row["median_step_ms"] for row in cell.measured} for cell in (a, b))
    both = sorted(key for key in before if key is not None and key in after)
    points = tuple(after[key] / before[key] for key in both)
    sets = [set(cell.device_sets.values()) - {None} for cell in (a, b)]
    on_several = any(map(device_sets.are_several, sets))
    if (paired := None if on_several else median_ratio(points)) is not None:
        ratio = paired.ratio
    elif both:  # only over shared replicates: else the ratio could lie outside its points
        ratio = median(after[key] for key in both) / median(before[key] for key in both)
    else:
        ratio = ratio_of_medians(b, a)
    return Pair(a, b, points, paired, all(sets) and not sets[0] & sets[1], ratio)


def _doubts(pair: Pair) -> Iterator[str]:
    if pair.paired is None:
        yield NO_INTERVAL
    if pair.on_separate_devices:
        yield "on separate devices"


def _failed_share(cell: Cell) -> float:
    return sum(row["status"] != "ok" for row in cell.rows) / len(cell.rows)


def _statuses_differ(a: Cell, b: Cell) -> bool:
    return a.statuses != b.statuses or _failed_share(a) != _failed_share(b)


def _values(values: list[str] | None) -> str:
    return " and ".join(values) if values else "none"


def _nothing_in_common(a: Side, b: Side) -> str:
    """An error text: in what the two most alike cells differ, what pairs them, and what each side has."""
    what = "; ".join(f"{side.folder} has {_contents(side)}" for side in (a, b))
    before, after = _nearest(a, b)
    if not (apart := sorted({option for option, _ in before ^ after})):
        return f"no cell is in both: equal configs have other evidence, or several cells. {what}"
    values = [tuple(dict(each).get(option, "default") for each in (before, after)) for option in apart]
    pairs = [f"{option}={old} against {new}" for option, (old, new) in zip(apart, values, strict=True)]
    more = f" and {counted(len(apart) - MAX_OPTIONS, 'option')} more" if len(apart) > MAX_OPTIONS else ""
    ignored = " ".join(f"--ignore {option}" for option in apart)
    way_out = (
        f" {ignored} pairs them." if len(apart) <= MAX_OPTIONS else " --ignore OPTION pairs cells that differ in it."
    )
    return f"no cell is in both: the nearest two differ in {', '.join(pairs[:MAX_OPTIONS])}{more}.{way_out} {what}"


def _nearest(a: Side, b: Side) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]:
    """The options of the two cells, one of each side, that differ in the fewest of them; of the first MAX_NEAREST
    cells of each side, since all pairs are looked at."""
    before, after = ([_asked_options(cell) for cell in islice(side.cells.values(), MAX_NEAREST)] for side in (a, b))
    return min(product(before, after), key=lambda pair: len({option for option, _ in pair[0] ^ pair[1]}))


def _asked_options(cell: Cell) -> frozenset[tuple[str, str]]:
    """(option, value) of each that is not at its default."""
    asked = as_asked(cell.asked["config"])
    return frozenset((option, str(value)) for option, value in (json.loads(asked) if asked else {}).items())


def _contents(side: Side) -> str:
    have = side.cells.values()
    parts = [_few(sorted({c.series for c in have}), ", ")]
    for column in ("sp_size", "seq_len"):
        if sizes := sorted({c.asked[column] for c in have if c.asked[column] is not None}):
            parts.append(f"{column} {_few(list(map(str, sizes)), ' ')}")
    return f"{counted(len(have), 'cell')} ({'; '.join(parts)})"


def _few(words: Sequence[str], between: str) -> str:
    more = f" and {len(words) - MAX_OPTIONS:,} more" if len(words) > MAX_OPTIONS else ""
    return between.join(words[:MAX_OPTIONS]) + more
