"""What failed and why: rows that are not ok, those with one reason on one line."""

from collections.abc import Sequence
from typing import Any

from sp_bench.report.cells import Cell
from sp_bench.report.formats import MISSING, counted
from sp_bench.report.page.appendix import name
from sp_bench.report.page.parts import Line, Ref, Table, ref

HEAD = ("status", "phase", "trials", "what", "reason")
LEFT = (0, 1, 3, 4)
MAX_REASON = 2000  # characters of one reason; the row holds the rest
MAX_REASONS = 400_000  # characters of all of them
SHOWN = 4  # cells that are named beside a reason


def failures(cells: Sequence[Cell]) -> Table:
    """One line for each (status, phase, reason), those of most trials first."""
    grouped: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        for row in cell.rows:
            if row["status"] != "ok":
                grouped.setdefault(_key(row), []).append(cell)
    longest = max(80, min(MAX_REASON, MAX_REASONS // max(1, len(grouped))))
    ordered = sorted(grouped.items(), key=lambda item: (item[0][0], -len(item[1]), item[0]))
    return Table("", "", HEAD, tuple(_line(*key, each, longest) for key, each in ordered), LEFT)


def _key(row: Any) -> tuple[str, str, str]:
    site = f" ({row['oom_site']})" if row["oom_site"] is not None else ""
    reason = "no reason given" if row["reason"] is None else str(row["reason"])
    return f"{row['status']}{site}", str(row["phase"] or MISSING), reason


def _line(status: str, phase: str, reason: str, cells: Sequence[Cell], longest: int) -> Line:
    distinct = tuple({cell.cell_id: cell for cell in cells}.values())
    what: str | Ref = ref(name(distinct[0]), distinct[0])
    if len(distinct) > 1:
        named = "; ".join(map(name, distinct[:SHOWN]))
        more = f"; and {counted(len(distinct) - SHOWN, 'cell')} more" if len(distinct) > SHOWN else ""
        what = Ref(named + more, distinct)
    if len(reason) > longest:
        reason = f"{reason[:longest]} … ({len(reason) - longest:,} more characters in the row)"
    return Line((status, phase, f"{len(cells):,}", what, reason), distinct)
