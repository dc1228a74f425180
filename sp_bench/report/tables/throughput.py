"""Step time and throughput by method, number of ranks and length, from median step times."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from sp_bench.report.cells import Cell
from sp_bench.report.ratios import WITHOUT_INTERVAL, paired_ratio, ranked
from sp_bench.report.tables.grid import Family, families, grid, place
from sp_bench.report.tables.parts import Entry, PaperTable, measured, significant, words_of


@dataclass(frozen=True)
class Quantity:
    stem: str
    title: str
    unit: str  # of one rank, with `{}` where its processor is named
    rate: Callable[[Cell, float], float | None]  # at a step time in ms
    note: str = ""
    kind: str = "throughput"


QUANTITIES = (
    Quantity("tokens", "Throughput", "tokens/s/{}", lambda cell, ms: cell.rate(ms, per_rank=True)),
    Quantity(
        "tflops", "Attention throughput", "TFLOP/s/{}", lambda cell, ms: cell.attention_tflops(ms),
        note=" FLOPs are those of the pairs that the mask leaves, forward 1 and backward 2.5.",
    ),
    Quantity("ms", "Step time", "ms", lambda cell, ms: ms, kind="step_time"),
)  # fmt: skip


def tables(cells: Sequence[Cell]) -> list[PaperTable]:
    """One a quantity and family of settings in which any cell has a rate."""
    return [
        _table(family, quantity)
        for family in families(cells)
        for quantity in QUANTITIES
        if any(cell.median_step_ms and quantity.rate(cell, cell.median_step_ms) for cell in family.cells)
    ]


def best_cells(cells: Sequence[Cell]) -> set[tuple[str, str]]:
    """(setting, cell_id) of those with the smallest median of their setting and place, where the interval of the paired
    ratio of the next best to it excludes 1. A cell without a rival is none."""
    grouped: dict[tuple[str, int, int], list[Cell]] = {}
    for cell in cells:
        if cell.ok:
            grouped.setdefault((cell.setting, *place(cell)), []).append(cell)
    found = set()
    for rivals in grouped.values():
        first, *others = ranked(rivals)
        ratio = paired_ratio(others[0], first) if others else None
        if ratio is not None and ratio.interval.low > 1:
            found.add((first.setting, first.cell_id))
    return found


def _table(family: Family, quantity: Quantity) -> PaperTable:
    best = best_cells(family.cells)
    ran = [cell for cell in family.cells if cell.ok]
    all_few = all(cell.interval_ms is None for cell in ran)
    unit = quantity.unit.format(family.processor)

    def entry(cell: Cell) -> Entry:
        rate = quantity.rate(cell, cell.median_step_ms or 0.0)
        if rate is None:
            return words_of(cell)
        bounds = _bounds(cell, quantity)
        is_best = (cell.setting, cell.cell_id) in best
        return measured(cell, significant(rate), interval=bounds, mark_few=not all_few, best=is_best)

    caption = f"seq_len in tokens. From the median step time over the replicates{_interval_words(ran)}.{quantity.note}"
    caption += _best_words(family, best)
    title = f"{quantity.title}, {unit}"
    return grid(quantity.kind, f"{quantity.kind}-{quantity.stem}-{family.what}", family, title, unit, caption, entry)


def _bounds(cell: Cell, quantity: Quantity) -> str:
    if cell.interval_ms is None:
        return ""
    bounds = [quantity.rate(cell, ms) for ms in (cell.interval_ms.low, cell.interval_ms.high)]
    known = sorted(bound for bound in bounds if bound is not None)
    return f"[{significant(known[0])}, {significant(known[-1])}]" if known else ""


def _interval_words(ran: Sequence[Cell]) -> str:
    coverages = [cell.interval_ms.coverage for cell in ran if cell.interval_ms is not None]
    if not coverages:
        return f"; none has an interval ({WITHOUT_INTERVAL})"
    return f", with its order-statistic interval in brackets (coverage at least {min(coverages):.1%})"


def _best_words(family: Family, best: Set[tuple[str, str]]) -> str:
    column = "a column and fabric" if family.several else "a column"
    places = [(cell.setting, *place(cell)) for cell in family.cells if cell.ok]
    if len(set(places)) == len(places):  # nothing has a rival
        return ""
    if not best:
        return f" No best of {column} is marked: no interval of a paired ratio to the next excludes 1."
    return f" Bold: best of {column}, where the interval of its paired ratio to the next excludes 1."
