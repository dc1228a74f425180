"""Which series of a crowded setting its figures show: of each method that which comes nearest to the fastest anywhere,
then ours on the kernels of the libraries among these, then those that come nearest of all.

Without ours on its own kernel a library is beside ours on faster ones alone, and kernels look like methods."""

from collections import Counter
from collections.abc import Collection, Sequence

from sp_bench.report.cells import Cell
from sp_bench.report.ratios import ranked

MAX_SERIES = 14  # more of them could not be told apart
MAX_NAMED = 12  # of those that are not drawn


def reduced(cells: Sequence[Cell]) -> tuple[list[Cell], str]:
    """Cells of one setting, without those of series beyond MAX_SERIES, and a sentence on these; empty without any.

    Series rank by their best place among all of one sp_size and seq_len, then by how many they ran at."""
    ranks: dict[str, list[int]] = {c.series: [] for c in cells}
    for key in {(c.asked["sp_size"], c.asked["seq_len"]) for c in cells}:
        here = [c for c in cells if c.ok and (c.asked["sp_size"], c.asked["seq_len"]) == key]
        for rank, cell in enumerate(ranked(here)):
            ranks[cell.series].append(rank)
    if len(ranks) <= MAX_SERIES:
        return list(cells), ""
    ordered = sorted(ranks, key=lambda s: (min(ranks[s], default=len(ranks)), -len(ranks[s]), sum(ranks[s]), s))
    method_of = {c.series: (c.asked["method"], c.asked["implementation"]) for c in cells}
    firsts = {method_of[series]: series for series in reversed(ordered)}.values()
    compared = _library_series_on_its_kernel(cells, firsts)
    ordered.sort(key=lambda series: (series not in firsts, -compared[series]))  # stable
    kept, left_out = set(ordered[:MAX_SERIES]), ordered[MAX_SERIES:]
    controls = ", then ours on the kernels of libraries" if any(compared.values()) else ""
    more = f" and {len(left_out) - MAX_NAMED:,} more" if len(left_out) > MAX_NAMED else ""
    words = (
        f"Drawn are {MAX_SERIES} of {len(ranks):,} series, of each method first that which comes nearest to being the "
        f"fastest at any sp_size and seq_len{controls}; in the tables only: {'; '.join(left_out[:MAX_NAMED])}{more}."
    )
    return [c for c in cells if c.series in kept], words


def _library_series_on_its_kernel(cells: Sequence[Cell], drawn: Collection[str]) -> Counter[str]:
    """Of each series of ours: how many libraries' series among `drawn` run its kernel."""
    kernels = Counter({c.series: c.asked["kernel"] for c in cells if c.is_library and c.series in drawn}.values())
    return Counter({c.series: kernels[c.asked["kernel"]] for c in cells if not c.is_library})
