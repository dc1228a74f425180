"""A comparison as text for a terminal or a log. A name that is too long for its line is folded, never cut."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sp_bench.analysis.cells import Cell
from sp_bench.analysis.comparison import (
    BETTER,
    CHANGED,
    FASTER,
    INDISTINCT,
    NO_INTERVAL,
    REGRESSION,
    SLOWER,
    Comparison,
    Pair,
    Side,
    name,
    p95_ms,
    spread,
    status_words,
)
from sp_bench.analysis.provenance import origin
from sp_bench.analysis.ratios import MIN_REPLICATES
from sp_bench.analysis.statistics import CONFIDENCE
from sp_bench.config.parsing import shown
from sp_bench.costs.slow_devices import slow_devices
from sp_bench.formats import counted, number, whole, without_escapes
from sp_bench.report.table import Column

REASON_WIDTH = 300  # characters of a row's reason
LONGEST = 2000  # characters of a line
LOOKS = {SLOWER: "red", FASTER: "green", INDISTINCT: "dim", NO_INTERVAL: "yellow"}
SEPARATE = ", on separate devices"
SERIES: Column[Pair] = Column("series", lambda pair: shown(pair.a.series))
RATIO: Column[Pair] = Column("B/A", lambda pair: pair.words)
VERDICT: Column[Pair] = Column("verdict", lambda pair: f"{pair.verdict}{SEPARATE if pair.on_separate_devices else ''}")
WORDS = (SERIES, RATIO, VERDICT)  # columns of numbers are not broken
PAIR: tuple[Column[Pair], ...] = (
    SERIES,
    Column("sp_size", lambda pair: pair.a.asked["sp_size"], whole),
    Column("seq_len", lambda pair: pair.a.asked["seq_len"], whole),
    Column("A ms", lambda pair: pair.a.median_step_ms, number),
    Column("B ms", lambda pair: pair.b.median_step_ms, number),
    Column("B p95", lambda pair: p95_ms(pair.b), number),
    RATIO,
    Column("pairs", lambda pair: len(pair.points)),
    VERDICT,
)
STATUS_LOOKS = {REGRESSION: "red", BETTER: "green", CHANGED: ""}


def show(comparison: Comparison, console: Console) -> None:
    """Print both sides and how their environments differ, a table per setting with the slowest first, changed statuses,
    and the cells that only one side has."""
    for label, side in (("A", comparison.a), ("B", comparison.b)):
        _say(console, f"{label} ({side.folder}): {_side_words(side)}")
    for difference in comparison.differences():
        _say(console, f"warning: A and B differ in {difference}", "yellow")
    for setting, pairs in groupby(sorted(comparison.pairs, key=_worst_setting(comparison)), lambda p: p.a.setting):
        console.print()
        _say(console, setting, "bold")
        console.print(_pair_table(list(pairs)))
    if comparison.pairs:
        console.print()
        _say(console, _reading(comparison.pairs), "dim")
    _changes(comparison, console)
    for label, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        _only(label, only, console)
    console.print()
    _say(console, _summary(comparison), "bold")


def _say(console: Console, words: str, style: str = "") -> None:
    """Print a text. Escapes in it, which rows may have from a program's output, do not move the cursor."""
    plain = "\n".join(shown(line, LONGEST) for line in words.split("\n"))
    console.print(Text(plain, style=style), soft_wrap=not console.is_terminal)


def _side_words(side: Side) -> str:
    left_out = [
        f"{counted(num_rows, 'row')} of core_id {core_id} left out: their cells were measured again later, "
        "with other code, libraries or devices"
        for core_id, num_rows in side.selection.left_out.items()
    ]
    slow = slow_devices(row for cell in side.cells.values() for row in cell.measured)
    return "\n".join(["; ".join([origin(list(side.cells.values())), *left_out]), *slow, *side.selection.problems])


def _worst_setting(comparison: Comparison):
    """A sort key that keeps the pairs of a setting together, the setting with the slowest cell first."""
    order = {setting: place for place, setting in enumerate(dict.fromkeys(p.a.setting for p in comparison.pairs))}
    return lambda pair: order[pair.a.setting]


def _pair_table(pairs: Sequence[Pair]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in PAIR:
        folds: Any = {"overflow": "fold"} if column in WORDS else {"justify": "right", "no_wrap": True}
        table.add_column(column.head, **folds)
    for pair in pairs:
        looks = [LOOKS[pair.verdict] if column is VERDICT else "" for column in PAIR]
        table.add_row(*(Text(column.text(pair), style=look) for column, look in zip(PAIR, looks, strict=True)))
    return table


def _reading(pairs: Sequence[Pair]) -> str:
    sentences = [
        "Times are medians of the replicates' median step times; p95 is over all timed steps. B/A above 1: B is slower."
    ]
    widest = [max(found) for side in ("a", "b") if (found := [s for p in pairs if (s := spread(getattr(p, side)))])]
    if widest:
        sentences.append(f"Replicates of a cell lie up to {max(widest):.1%} apart.")
    coverages = [p.paired.interval.coverage for p in pairs if p.paired is not None]
    if coverages:
        sentences.append(
            "B/A is the median over the replicates that both have; in brackets its order-statistic interval, which "
            f"covers {min(coverages):.1%} or more; a verdict is given where it excludes 1."
        )
    if len(coverages) < len(pairs):
        sentences.append(
            f"Fewer than {MIN_REPLICATES} pairs, or one side's replicates on separate sets of devices, allow no "
            f"interval of {CONFIDENCE:.0%}: B/A is then the ratio of the "
            "medians over the replicates that both have, with the pairs' own ratios in parentheses, and no verdict."
        )
    return " ".join(sentences)


def _changes(comparison: Comparison, console: Console) -> None:
    if not comparison.changes:
        return
    console.print()
    _say(console, "Statuses that differ", "bold")
    for change in comparison.changes:
        reason = (
            f" ({shorten(without_escapes(change.reason), REASON_WIDTH, placeholder=' ...')})" if change.reason else ""
        )
        _say(console, f"{change.kind}: {name(change.a)}: {change.words}{reason}", STATUS_LOOKS[change.kind])


def _only(label: str, cells: Sequence[Cell], console: Console) -> None:
    if not cells:
        return
    console.print()
    _say(console, f"Only in {label}: {counted(len(cells), 'cell')}", "bold")
    for cell in cells:
        _say(console, f"{name(cell)}: {status_words(cell)}")


def _summary(comparison: Comparison) -> str:
    verdicts = Counter(pair.verdict for pair in comparison.pairs)
    parts = [
        f"{verdicts[verdict]} {'with ' if verdict == NO_INTERVAL else ''}{verdict}"
        for verdict in LOOKS
        if verdicts[verdict]
    ]
    parts.append(f"{counted(sum(c.kind == REGRESSION for c in comparison.changes), 'regression')} in status")
    if comparison.num_unmeasured:
        parts.append(f"{comparison.num_unmeasured} without step times in both")
    return f"{counted(len(comparison.pairs), 'cell')} compared: {', '.join(parts)}"
