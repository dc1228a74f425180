"""Pairs each library's cell with our cells of the same setting, length and number of ranks."""

from collections.abc import Sequence

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.pattern_bytes import degrees, kind
from sp_bench.analysis.ratios import fastest

SAME, FASTEST = "same kernel", "our fastest kernel"
ANY = "any method of ours"


def libraries(cells: Sequence[Cell]) -> list[Cell]:
    return [c for c in cells if c.ok and c.is_library and c.is_of_a_length]


def counterparts(their: Cell, cells: Sequence[Cell]) -> list[tuple[str, Cell]]:
    """(what is compared, our fastest such cell)."""
    where = ("sp_size", "seq_len")
    own = [c for c in cells if c.ok and not c.is_library and c.setting == their.setting]
    own = [c for c in own if all(c.asked[n] == their.asked[n] for n in where) and c.name.pack == their.name.pack]
    alike = [c for c in own if _alike(their, c)]
    same_kernel = [c for c in alike if c.asked["kernel"] == their.asked["kernel"]]
    groups = {SAME: same_kernel, FASTEST: alike, ANY: own}
    return [(what, fastest(group)) for what, group in groups.items() if group]


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
