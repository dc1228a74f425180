"""The appendix of rows: where every number of the page links to, a cell or a set of cells at a time."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING, in_bytes, number, whole

ALL = "rows"  # the anchor of the appendix itself


class Anchors:
    """Addresses of cells on one page, and of the sets of cells that its words refer to, in the order of asking."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._numbers = {cell.cell_id: number for number, cell in enumerate(cells, 1)}
        self._sets: dict[tuple[int, ...], int] = {}

    def __call__(self, cells: Sequence[Cell]) -> str:
        """The id that the rows of these cells have on the page: one cell's, a set's, or the whole appendix's."""
        numbers = tuple(sorted({self.number(cell) for cell in cells}))
        if len(numbers) == 1:
            return f"c{numbers[0]}"
        if len(numbers) in (0, len(self._numbers)):
            return ALL
        return f"s{self._sets.setdefault(numbers, len(self._sets) + 1)}"

    def number(self, cell: Cell) -> int:
        """From 1, in the order of the page."""
        return self._numbers[cell.cell_id]

    @property
    def sets(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """(number of the set, its runs of cells from the first to the last)."""
        return [(number, _runs(numbers)) for numbers, number in self._sets.items()]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """1, 2, 3, 7 -> (1, 3), (7, 7)."""
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        runs.append((members[0], members[-1]))
    return runs


def appendix(cells: Sequence[Cell], *, detailed: bool) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """(setting, its cells with their rows), in the order of the page; `detailed`: with bytes and errors."""
    numbered = enumerate(cells, 1)
    return [
        (setting, [_entry(number, cell, detailed) for number, cell in group])
        for setting, group in groupby(numbered, key=lambda pair: pair[1].setting)
    ]


def name(cell: Cell) -> str:
    """ulysses, 131,072 tokens, 8 ranks: with the setting it is one cell."""
    words = [cell.series]
    if cell.asked["seq_len"] is not None:
        words.append(f"{whole(cell.asked['seq_len'])} tokens")
    words.append(f"sp_size {whole(cell.asked['sp_size'])}")
    return ", ".join(words)


def _entry(place: int, cell: Cell, detailed: bool) -> Mapping[str, Any]:
    return {
        "number": place,
        "name": name(cell),
        "details": _details(cell) if detailed else [],
        "rows": [
            {
                "trial_id": str(row["trial_id"]),
                "replicate": MISSING if row["replicate"] is None else str(row["replicate"]),
                "status": str(row["status"]),
                "step_ms": number(row["median_step_ms"]),
                "file": str(row["file"]),
            }
            for row in cell.rows
        ],
    }


def _details(cell: Cell) -> list[str]:
    lines = []
    if phases := cell.communication.phases:
        each = (f"{phase} {in_bytes(p)} predicted, {in_bytes(c)} counted" for phase, (p, c) in phases.items())
        total = (whole(cell.communication.predicted_bytes), whole(cell.communication.counted_bytes))
        lines.append(f"bytes: {'; '.join(each)}; without phase other {total[0]} B predicted, {total[1]} B counted")
    if cell.errors:
        each = (
            f"{what} {error:.1e}{f' of {budget:.1e}' if budget else ''}"
            for what, (error, budget) in cell.errors.items()
        )
        lines.append(f"errors, of their budgets: {'; '.join(each)}")
    return lines
