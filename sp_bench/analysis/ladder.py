"""Ladders: the effect of each option on the training step of one method, for steps measured at one place.

A ladder includes libraries that send the same messages, and everything at the place if it compares engines. It spans
settings, since those differ in options: recomputation, model code, kernel, engine, allocator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.identifiers import ENGINE, KERNEL, OF_STEP, PROTOCOL, RECOMPUTED, SINGLE_STEP
from sp_bench.analysis.pattern_bytes import kind
from sp_bench.analysis.ratios import ranked, ratio_of_pairs
from sp_bench.analysis.settings import Setting
from sp_bench.analysis.words import LENGTHS, MASKED, PACKING
from sp_bench.rows.names import group_of

FEWEST = 3  # settings of a ladder of one engine; the titles of two settings show their difference well enough
_OF_RUNG = (
    "workload",
    "engine",
    "kernel",
    "method",
    "hardware.allocator",
)  # groups and options in which rungs may differ
_OF_WORK = (PACKING, *LENGTHS, MASKED)  # equal on all rungs: they do the same work
_TRAINED_ALIKE = (
    "workload.learning_rate",
    "workload.max_grad_norm",
    "workload.optimizer",
)  # options that do not change the speed


@dataclass(frozen=True)
class Ladder:
    setting: Setting  # of the rungs alone
    where: str
    names: Mapping[str, str]  # cell_id -> method, kernel and the options in which the rungs differ
    short_names: Mapping[str, str]  # the same without `columns`
    columns: tuple[str, ...]  # options in which the rungs differ, and for which a table has columns

    @property
    def measured(self) -> list[Cell]:
        """The measured cells, the fastest first."""
        return ranked([cell for cell in self.setting.cells if cell.ok])

    @property
    def compared(self) -> list[Cell]:
        """The measured cells without those that wait for the host, which are in no verdict."""
        return [cell for cell in self.measured if cell.is_comparable]

    @property
    def fair(self) -> tuple[Cell, Cell] | None:
        """(faster, slower) of two engines on one kernel that recompute as much, the fastest that pair; None: there are
        none, or one engine."""
        both = ((fast, slow) for fast, slow in combinations(self.compared, 2) if _is_fair(fast, slow))
        return next((pair for pair in both if ratio_of_pairs(pair[1], pair[0]) is not None), None)


def _is_fair(one: Cell, other: Cell) -> bool:
    values = [[cell.options.get(path) for path in (KERNEL, RECOMPUTED)] for cell in (one, other)]
    return values[0] == values[1] and one.options.get(ENGINE) != other.options.get(ENGINE)


def ladders(settings: Sequence[Setting]) -> list[Ladder]:
    """All ladders, the longest sequences first."""
    places: dict[tuple[object, ...], list[Cell]] = {}
    for setting in settings:
        for cell in setting.cells:
            if cell.asked["workload"] == "train_step":
                for campaign in folders(cell):  # machines and code differ between them, so no ladder mixes them
                    places.setdefault((campaign, *of_place(cell)), []).append(cell)
    found = [
        (campaign, cells)
        for (campaign, *_), at_place in places.items()
        for cells in _of_one_question(at_place)
        if not all(cell.is_library for cell in cells)
        and _num_settings(cells, settings) >= (FEWEST if len(_engines(cells)) == 1 else 2)
    ]
    found.sort(key=lambda each: -(each[1][0].asked["seq_len"] or 0))
    return [_ladder(str(campaign), cells, settings[0]) for campaign, cells in found]


def _of_one_question(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Groups of cells that one ladder compares: by communication pattern. If the place has several engines it is one
    group, since each engine has its own methods."""
    of_stacks = len(_engines(cells)) > 1
    grouped: dict[object, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(None if of_stacks else kind(cell), []).append(cell)
    return list(grouped.values())


def _engines(cells: Sequence[Cell]) -> set[str]:
    return {str(cell.options.get(ENGINE)) for cell in cells}


def each_adds_one(cells: Sequence[Cell]) -> bool:
    """Whether the cells have one method, kernel and engine, and each except the plainest has all options of another
    cell and one more."""
    sets = [chosen(cell) for cell in cells]
    plainest = min(sets, key=len)
    added = [other for other in sets if other != plainest]
    differ = set(_differing(cells, [path for cell in cells for path in cell.options]))
    climbs = all(any(one < other and len(other - one) == 1 for one in sets) for other in added)
    return bool(added) and climbs and differ <= {*words.STEP_COLUMNS, *PROTOCOL}


def chosen(cell: Cell) -> set[tuple[str, str]]:
    """(option, value) of a step's options that a plain step does not have."""
    values = {path: cell.options.get(path) for path in words.STEP_COLUMNS}
    return {(path, str(value)) for path, value in values.items() if value not in (None, "none", OF_STEP.get(path))}


def covered(setting: Setting, of: Sequence[Ladder]) -> bool:
    """Whether ladders show all of a setting: it compares no two methods, and each cell is a rung."""
    rungs = {cell_id for ladder in of for cell_id in ladder.names}
    return not setting.contests and all(cell.cell_id in rungs for cell in setting.cells)


def of_place(cell: Cell) -> tuple[str, ...]:
    """The options that all rungs share: same work on the same ranks."""
    shared = (path for path in cell.options if path in _OF_WORK or not {path, group_of(path)} & {*_OF_RUNG})
    return str(cell.micro_batches), *(str(cell.options[path]) for path in shared)


def folders(cell: Cell) -> tuple[str, ...]:
    return tuple(sorted({str(row["folder"]) for row in cell.rows}))


def _num_settings(cells: Sequence[Cell], settings: Sequence[Setting]) -> int:
    ids = {cell.cell_id for cell in cells}
    return sum(any(cell.cell_id in ids for cell in setting.cells) for setting in settings)


def _ladder(campaign: str, cells: Sequence[Cell], like: Setting) -> Ladder:
    first = cells[0]
    sent = {kind(cell) for cell in cells}
    fabric = words.fabric(first.asked["fabric"]) if (first.asked["world_size"] or 1) > 1 else ""
    where = ", ".join(filter(None, [words.place(first), fabric]))
    parts = (
        f"{'Stacks for' if len(_engines(cells)) > 1 else 'Options of'} a training step of {words.model(first)}",
        words.plain_method(next((cell for cell in cells if not cell.is_library), first)) if len(sent) == 1 else "",
        words.dtype(first),
        words.hardware(first),
        where,
        campaign,
    )
    setting = Setting(tuple(filter(None, parts)), tuple(cells), {}, (str(first.asked["fabric"]),), like.smallest)
    columns = words.step_columns(cells)
    return Ladder(setting, where, rung_names(cells), rung_names(cells, columns), tuple(columns))


def rung_names(cells: Sequence[Cell], left_out: Sequence[str] = ()) -> dict[str, str]:
    """Names such as `Ulysses, FlashAttention-4, selective, compiled`. Options that only engines differ in are left to
    the engine's name. left_out: options that are shown elsewhere."""
    among = {engine: [c for c in cells if str(c.options.get(ENGINE)) == engine] for engine in _engines(cells)}
    of_all = _differing(cells, [ENGINE, RECOMPUTED])
    names = {}
    for cell in cells:
        alike = among[str(cell.options.get(ENGINE))]
        paths = [path for path in cell.options if group_of(path) not in ("method", "kernel")]
        named = of_all + [p for p in _differing(alike, paths) if p not in (*of_all, *PROTOCOL, *_TRAINED_ALIKE)]
        kernel = words.kernel(cell) if _differing(cells, [KERNEL]) else ""
        options = [words.of_step(path, cell.options.get(path)) for path in named if path not in left_out]
        # Even if all rungs have it
        if cell.options.get(SINGLE_STEP) and SINGLE_STEP not in cell.name.series_values:
            options.append(words.option(SINGLE_STEP, True))
        names[cell.cell_id] = ", ".join(filter(None, [words.method(cell), kernel, *options]))
    return names


def _differing(cells: Sequence[Cell], paths: Sequence[str]) -> list[str]:
    return [path for path in paths if len({str(cell.options.get(path)) for cell in cells}) > 1]
