"""Which series of a crowded setting its figures show: those that come nearest to the fastest anywhere."""

from collections.abc import Sequence

from sp_bench.report.cells import Cell

MAX_SERIES = 14  # more of them could not be told apart


def reduced(cells: Sequence[Cell]) -> tuple[list[Cell], str]:
    """Cells of one setting, without those of series beyond MAX_SERIES, and a sentence on these; empty without any.

    Series rank by their best place among all of one sp_size and seq_len, then by how many they ran at."""
    ranks: dict[str, list[int]] = {c.series: [] for c in cells}
    for key in {(c.asked["sp_size"], c.asked["seq_len"]) for c in cells}:
        here = [c for c in cells if c.ok and (c.asked["sp_size"], c.asked["seq_len"]) == key]
        for rank, cell in enumerate(sorted(here, key=lambda c: (c.median_step_ms or 0.0, c.series))):
            ranks[cell.series].append(rank)
    if len(ranks) <= MAX_SERIES:
        return list(cells), ""
    ordered = sorted(ranks, key=lambda s: (min(ranks[s], default=len(ranks)), -len(ranks[s]), sum(ranks[s]), s))
    kept = set(ordered[:MAX_SERIES])
    words = (
        f"Drawn are the {MAX_SERIES} of {len(ranks):,} series that come nearest to being the fastest at any sp_size "
        "and seq_len; the tables have all."
    )
    return [c for c in cells if c.series in kept], words
