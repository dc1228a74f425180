"""What the rows say, in words. Every number is computed here from cells; nothing is claimed without an interval."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from sp_bench.report.cells import Cell
from sp_bench.report.effort import effort
from sp_bench.report.fabric_model import foremost, places
from sp_bench.report.formats import counted, number, whole
from sp_bench.report.page import rivals
from sp_bench.report.ratios import MIN_REPLICATES, paired_ratio, ratio_of_medians
from sp_bench.report.selection import Selection


@dataclass(frozen=True)
class Verdict:
    """`summary`: sentences on the whole; `comparisons`: one sentence a (setting, sp_size, seq_len), largest first."""

    summary: tuple[str, ...]
    comparisons: Mapping[str, tuple[str, ...]]  # by setting


def judge(cells: Sequence[Cell], selection: Selection) -> Verdict:
    speeds = [cell for cell in cells if cell.ok and cell.asked["workload"] not in ("parity", "collective")]
    comparisons: dict[str, list[str]] = {}
    shown = foremost(speeds, places(cells))
    for (setting, sp_size, seq_len), group in by_place(shown):
        if len(group) > 1:
            comparisons.setdefault(setting, []).append(_compare(sp_size, seq_len, group))
    summary = [_counts(selection), *rivals.summary(cells), *_out_of_memory(cells), *_bytes(cells), *_parity(cells)]
    summary += _alone(speeds)
    summary += _effort(selection)
    if any(len(cell.step_ms) < MIN_REPLICATES for cell in speeds) and comparisons:
        fewest, most = min(len(c.step_ms) for c in speeds), max(len(c.step_ms) for c in speeds)
        spread = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        summary.append(
            f"Cells have {spread} replicate{'' if most == 1 else 's'}. With fewer than {MIN_REPLICATES} no interval is "
            "claimed: the order below is what was observed, not a proven difference."
        )
    if len(shown) < len(speeds):
        summary.append("Below is the fastest fabric of each setting; all of them are compared under Fabrics.")
    return Verdict(tuple(summary), {setting: tuple(lines) for setting, lines in comparisons.items()})


def by_place(cells: Sequence[Cell]) -> list[tuple[tuple[str, int, int], list[Cell]]]:
    """Cells that answer the same question, the most ranks and tokens of a setting first."""
    placed = [c for c in cells if c.asked["sp_size"] is not None and c.asked["seq_len"] is not None]

    def place(cell: Cell) -> tuple[str, int, int]:
        return cell.setting, -cell.asked["sp_size"], -cell.asked["seq_len"]

    return [((s, -p, -n), list(group)) for (s, p, n), group in groupby(sorted(placed, key=place), key=place)]


def _compare(sp_size: int, seq_len: int, rivals: Sequence[Cell]) -> str:
    ranked = sorted(rivals, key=lambda c: (c.median_step_ms or 0.0, c.series))
    first, second, last = ranked[0], ranked[1], ranked[-1]
    proven = all((ratio := paired_ratio(rival, first)) is not None and ratio.interval.low > 1 for rival in ranked[1:])
    verb = "is fastest" if proven else "has the lowest median step time"
    sentence = f"{whole(seq_len)} tokens on {counted(sp_size, 'rank')}: {first.series} {verb}, {_times(second, first)}"
    sentence += f" ahead of {second.series} ({_ms(first)} against {_ms(second)}{_rate(first)}; "
    sentence += f"{_evidence(first, second)})"
    if len(ranked) > 2:
        sentence += f"; {_times(last, first)} ahead of the slowest of {len(ranked)}, {last.series}"
    return f"{sentence}."


def _evidence(first: Cell, second: Cell) -> str:
    """Why, or why not, the first may be called faster than the second."""
    if (paired := paired_ratio(second, first)) is None:
        return f"{_replicates(first, second)}: no interval is claimed"
    evidence = f"paired over {paired.pairs} replicates {paired.words}, coverage {paired.interval.coverage:.1%}"
    return evidence if paired.interval.low > 1 else f"{evidence}: neither is called faster"


def _replicates(first: Cell, second: Cell) -> str:
    a, b = len(first.step_ms), len(second.step_ms)
    return f"{counted(a, 'replicate')} each" if a == b else f"{a} and {counted(b, 'replicate')}"


def _times(slower: Cell, faster: Cell) -> str:
    ratio = ratio_of_medians(slower, faster)
    return f"{ratio:.3f}x" if ratio < 1.05 else f"{ratio:.2f}x"


def _rate(cell: Cell) -> str:
    """Attention FLOP/s, where they are known."""
    rate = cell.attention_tflops(cell.median_step_ms) if cell.median_step_ms else None
    return "" if rate is None else f"; {number(rate)} attention TFLOP/s/{cell.processor}"


def _ms(cell: Cell) -> str:
    return f"{number(cell.median_step_ms)} ms"


def _counts(selection: Selection) -> str:
    statuses = Counter(str(status) for status in selection.rows["status"])
    if not statuses:
        return "There are no rows: nothing was measured, and nothing can be said."
    parts = [f"{quantity:,} {status}" for status, quantity in statuses.most_common()]
    return f"{counted(statuses.total(), 'trial')}: {', '.join(parts)}."


def _effort(selection: Selection) -> list[str]:
    columns = selection.rows[["status", "duration_s", "phase_s"]]
    sentence = effort([dict(zip(columns, row, strict=True)) for row in columns.itertuples(index=False)]).sentence()
    return [sentence] if sentence else []


def _out_of_memory(cells: Sequence[Cell]) -> list[str]:
    """Per setting and sp_size, the shortest length at which anything was out of memory, and what."""
    failed = [c for c in cells if "oom" in c.statuses]
    shortest: dict[tuple[str, int], list[Cell]] = {}
    for (setting, sp_size, _), same_length in by_place(failed):  # the longest come first
        shortest[setting, sp_size] = same_length
    return [
        f"Out of memory first, {setting}, {counted(sp_size, 'rank')}: {', '.join(sorted({c.series for c in same}))} "
        f"at {whole(same[0].asked['seq_len'])} tokens."
        for (setting, sp_size), same in shortest.items()
    ]


def _bytes(cells: Sequence[Cell]) -> list[str]:
    compared = [c.communication.equal for c in cells if c.communication.equal is not None]
    if not compared:
        return []
    what, cells_compared = "Bytes counted from the issued collectives", counted(len(compared), "cell")
    if all(compared):
        return [f"{what} equal the closed form in all {cells_compared}."]
    return [f"{what} differ from the closed form in {compared.count(False)} of {cells_compared}."]


def _parity(cells: Sequence[Cell]) -> list[str]:
    name = "NLL difference, nats"
    found = [c.errors[name][0] for c in cells if name in c.errors]
    if not found:
        return []
    return [f"Training parity over {counted(len(found), 'cell')}: NLL differs by at most {number(max(found))} nats."]


def _alone(speeds: Sequence[Cell]) -> list[str]:
    lonely = [rivals[0] for _, rivals in by_place(speeds) if len(rivals) == 1]
    if not lonely:
        return []
    names = sorted({cell.series for cell in lonely})
    shown = ", ".join(names) if len(names) <= 5 else f"{', '.join(names[:5])} and {len(names) - 5} more"
    return [f"Without a rival at their length and number of ranks: {counted(len(lonely), 'cell')} ({shown})."]
