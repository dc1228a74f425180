"""Packed documents: the speed of each method on each pack, beside the same tokens as one document.

Each distribution of lengths is a setting of its own, since times on different documents are not compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.ratios import by_speed
from sp_bench.analysis.settings import Setting, is_baseline
from sp_bench.analysis.words import LENGTHS, PACKING, drawn, is_packed

PACK = (PACKING, *LENGTHS, "seed")  # the options that define the documents


@dataclass(frozen=True)
class Packs:
    """All distributions of one campaign at one place."""

    setting: Setting
    # distribution, and the kernel if there are several -> cells, the fastest first, failed ones last
    distributions: Mapping[str, tuple[Cell, ...]]
    unpacked: Mapping[str, Cell]  # cell_id -> the same method and kernel on one document

    def time_ratio(self, cell: Cell) -> float | None:
        """Step time over the time on one document; None: one of both is in no verdict."""
        one = self.unpacked.get(cell.cell_id)
        if not cell.is_comparable or (one is not None and not one.is_comparable):
            return None
        return _ratio(cell, one, "median_step_ms")

    def work_ratio(self, cell: Cell) -> float | None:
        """Model FLOPs over those on one document. They do not depend on method or kernel."""
        of_one = next((each for each in self.setting.cells if not is_packed(each)), None)
        return _ratio(cell, of_one, "model_flops")


def packs(settings: Sequence[Setting]) -> list[Packs]:
    """The packs of all campaigns and places, the longest sequences first."""
    grouped: dict[object, list[tuple[Setting, Cell]]] = {}
    for setting in settings:
        for cell in setting.cells:
            key = (*setting.campaigns, cell.but(*PACK, "method", "kernel"))
            grouped.setdefault(key, []).append((setting, cell))
    found = [_packs(group) for group in grouped.values() if any(is_packed(cell) for _, cell in group)]
    return sorted(found, key=lambda each: -(each.setting.cells[0].asked["seq_len"] or 0))


def covered(setting: Setting, of: Sequence[Packs]) -> bool:
    """Whether the packs have all cells of the setting."""
    shown = {cell.cell_id for each in of for cell in each.setting.cells}
    return all(cell.cell_id in shown for cell in setting.cells)


def _ratio(cell: Cell, one: Cell | None, column: str) -> float | None:
    of_cell, of_one = (None if each is None else each.middle(column) for each in (cell, one))
    return of_cell / of_one if of_cell and of_one else None


def _packs(group: Sequence[tuple[Setting, Cell]]) -> Packs:
    of_settings = list({setting.title: setting for setting, _ in group}.values())
    of_packs = {words.packed(cell) for _, cell in group}
    shared = [p for p in of_settings[0].parts if p not in of_packs and all(p in other.parts for other in of_settings)]
    ordered = sorted((cell for _, cell in group), key=_order)
    several = len({cell.asked["kernel"] for cell in ordered if not is_baseline(cell)}) > 1
    distributions: dict[str, tuple[Cell, ...]] = {}
    for cell in ordered:
        words_of = words.distribution(cell)
        if several and not is_baseline(cell):
            words_of += f"; {words.kernel(cell)}"
        distributions[words_of] = (*distributions.get(words_of, ()), cell)
    of_one = {cell.but(*PACK): cell for cell in ordered if not is_packed(cell)}
    unpacked = {cell.cell_id: one for cell in ordered if (one := of_one.get(cell.but(*PACK)))}
    like = of_settings[0]
    title = (*shared, words.size(ordered[0]), "packed documents")
    return Packs(Setting(title, tuple(ordered), {}, like.fabrics, like.smallest), distributions, unpacked)


def _order(cell: Cell) -> tuple[Any, ...]:
    """A sort key: packs before one document, then by seed, the fastest first, failed cells last."""
    seed = cell.name.pack
    which = () if seed is None else (drawn(cell), seed)
    return (not is_packed(cell), which, not cell.ok, *by_speed(cell))
