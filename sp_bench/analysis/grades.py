"""How much a number can be relied on. A: 6 replicates or more, none of them doubtful. B: 2 to 5. C: one replicate, a
doubtful one, or code from before a change that moves its speed. What was not measured has a mark in place of a grade.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any

from sp_bench.analysis.cells import Cell, Launch
from sp_bench.analysis.ratios import MIN_REPLICATES
from sp_bench.config.yaml_text import read_yaml
from sp_bench.formats import counted
from sp_bench.rows.row import MEASURED

FILE = "code_changes.yaml"
A, B, C = "A", "B", "C"
# Flags that doubt a time. The others are about memory, or about a step that has no time.
DOUBTS = frozenset({
    *("short_window", "clock_mismatch", "window_disagrees", "unsettled", "transient", "bimodal", "host_bound"),
    *("thermal_slowdown", "uneven_devices", "foreign_load", "unequal_nodes", "shared_gpu", "allocator_retried"),
    *("kernel_uncounted", "loss_not_falling", "full_depth_unproven", "single_step"),
})  # fmt: skip


@dataclass(frozen=True)
class Grade:
    """`mark` is A, B or C, or the evidence of what was not measured."""

    mark: str
    why: str

    @property
    def is_weak(self) -> bool:
        """Shown in grey and never in bold."""
        return self.mark not in (A, B)


@dataclass(frozen=True)
class CodeChange:
    """A commit that moves the speed of some cells."""

    commit: str
    at: datetime
    what: str
    moves: Sequence[Mapping[str, Sequence[Any]]]
    by: str

    def concerns(self, cell: Cell) -> bool:
        return not cell.is_library and any(
            all(cell.options.get(path) in values for path, values in each.items()) for each in self.moves
        )


def grade(cells: Sequence[Cell], launches: Collection[Launch]) -> Grade:
    """The grade of a statement about `cells`, of each of which it uses the replicates `launches`."""
    evidence = sorted({str(cell.asked["evidence"]) for cell in cells} - {MEASURED})
    if evidence:
        return Grade(", ".join(evidence), "not all ranks were there")
    rows = [(cell, cell.launches[key]) for cell in cells for key in launches]
    flags = sorted({flag for cell in cells for key in launches for flag in cell.doubts[key]} & DOUBTS)
    aged = dict.fromkeys(commit for cell, row in rows for commit in aged_by(cell, row["started_at"]))
    why = [f"flagged {' '.join(flags)}"] * bool(flags) + [f"code before {commit}" for commit in aged]
    number = counted(len(launches), "replicate")
    if why or len(launches) < 2:
        return Grade(C, ", ".join([*why, number]))
    return Grade(A if len(launches) >= MIN_REPLICATES else B, number)


def aged_by(cell: Cell, started_at: datetime) -> list[str]:
    """The commits that moved the cell's speed after its rows began."""
    return [change.commit for change in code_changes() if started_at < change.at and change.concerns(cell)]


@cache
def code_changes() -> tuple[CodeChange, ...]:
    """The committed list of changes that move speed."""
    text = files("sp_bench.analysis").joinpath(FILE).read_text("utf-8")
    return tuple(CodeChange(**each) for each in read_yaml(text, FILE))
