"""Pairs each library's cell with our cell of the same setting, length, number of ranks and kernel."""

from collections.abc import Hashable, Sequence

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.pattern_bytes import degrees, kind
from sp_bench.analysis.ratios import fastest


def counterparts(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """(a library's measured cell, our fastest one of its kind), in the order of `cells`."""
    own: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        if cell.ok and not cell.is_library:
            own.setdefault(_where(cell), []).append(cell)
    theirs = [cell for cell in cells if cell.ok and cell.is_library]
    alike = [(their, [ours for ours in own.get(_where(their), ()) if _alike(their, ours)]) for their in theirs]
    return [(their, fastest(ours)) for their, ours in alike if ours]


def _where(cell: Cell) -> Hashable:
    return (cell.setting, cell.asked["sp_size"], cell.asked["seq_len"], cell.name.pack, cell.asked["kernel"])


def _alike(their: Cell, our: Cell) -> bool:
    """Whether our method has the library's pattern and splits the sequence in the same way."""
    if our.asked["method"] != (pattern := kind(their)):
        return False
    if pattern == "ulysses":
        return True
    same_degrees = pattern != "usp" or (degrees(our), _inner(our)) == (degrees(their), _inner(their))
    return same_degrees and our.asked["layout"] == their.asked["layout"]


def _inner(cell: Cell) -> str:
    """The group that holds adjacent ranks; by default the one that exchanges heads."""
    return cell.asked["placement"] or "ulysses_inner"
