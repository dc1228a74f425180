"""One cell over campaigns and time, as text: what became faster or slower since the campaign before."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sp_bench.analysis.cells import Cell, cells, of_equal_steps
from sp_bench.analysis.chosen import Words, matching
from sp_bench.analysis.comparison import name
from sp_bench.analysis.selection import select
from sp_bench.analysis.statistics import Interval, median_interval
from sp_bench.config.parsing import shown
from sp_bench.formats import MISSING, number
from sp_bench.rows import git

MARK = "*"  # behind ratios that are not known to be of one machine


@dataclass(frozen=True)
class Entry:
    """A cell in one campaign and environment."""

    campaign: str
    started_at: datetime
    commit: str  # of its first replicate; empty if unknown
    machine: int | None  # number of the set of devices; None: unknown, or several
    step_ms: tuple[float, ...]  # median of each replicate
    before: "Entry | None"  # in the campaign before

    @property
    def median_ms(self) -> float:
        return median(self.step_ms)

    @property
    def interval(self) -> Interval | None:
        return median_interval(self.step_ms)

    @property
    def ratio(self) -> float | None:
        """Step time over that of the entry before: above 1 is slower."""
        return None if self.before is None else self.median_ms / self.before.median_ms

    @property
    def is_of_one_machine(self) -> bool:
        """Whether the ratio is known to be of one machine, so that it is of the code alone."""
        return self.before is not None and self.machine is not None and self.machine == self.before.machine


def history(folders: Sequence[Path], words: Words, executor: Executor | None) -> list[tuple[str, list[Entry]]]:
    """(name of a cell, its entries by time) of each cell that ran in several campaigns or environments.
    words: option -> values that the cells must have.

    Raises:
        OSError: a folder is missing or cannot be read.
        ConfigError: no cell has those values.
    """
    found: dict[object, list[Cell]] = {}
    for cell in matching(cells(of_equal_steps(select(folders, mix=True, executor=executor).rows)), words, "only."):
        found.setdefault((cell.but(), cell.asked["method_source"]), []).append(cell)
    made = [(name(same[0]), _entries(same)) for same in found.values()]
    return [(cell, entries) for cell, entries in made if len(entries) > 1]


def _entries(same: Sequence[Cell]) -> list[Entry]:
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in (row for cell in same for row in cell.measured):
        groups.setdefault((row["folder"], row["core_id"]), []).append(row)
    entries: list[Entry] = []
    for (campaign, _), rows in sorted(groups.items(), key=lambda item: min(row["started_at"] for row in item[1])):
        first = min(rows, key=lambda row: row["started_at"])
        machines = {row["device_set"] for row in rows}
        entries.append(
            Entry(
                campaign,
                first["started_at"],
                git.short(first["git_sha"] or ""),
                machines.pop() if len(machines) == 1 else None,
                tuple(row["median_step_ms"] for row in rows),
                entries[-1] if entries else None,
            )
        )
    return entries


def show(found: Sequence[tuple[str, list[Entry]]], console: Console) -> None:
    """Print a table a cell. Machines are numbered by their devices, and differ too."""
    for cell, entries in found:
        console.print(Text(shown(cell, 2000), style="bold"))
        table = Table(box=None, pad_edge=False)
        for head in ("campaign", "started", "commit"):
            table.add_column(head, overflow="fold")
        for head in ("machine", "replicates", "median ms", "95% interval", "over the one before"):
            table.add_column(head, justify="right", no_wrap=True)
        for each in entries:
            spread = f"{number(each.interval.low)} to {number(each.interval.high)}" if each.interval else MISSING
            words = (Text(shown(each.campaign)), f"{each.started_at:%Y-%m-%d %H:%M}", each.commit or MISSING)
            ratio = MISSING if each.ratio is None else f"{each.ratio:.3f}x{'' if each.is_of_one_machine else MARK}"
            machine = MISSING if each.machine is None else str(each.machine)
            table.add_row(*words, machine, str(len(each.step_ms)), number(each.median_ms), spread, ratio)
        console.print(table)
        console.print()
    if any(each.before and not each.is_of_one_machine for _, entries in found for each in entries):
        console.print(f"{MARK} of two machines, or of an unknown one: the ratio is not of the code alone")
