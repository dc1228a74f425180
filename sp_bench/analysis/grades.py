"""How much a number can be relied on. A: 6 replicates or more, none of them doubtful. B: 2 to 5, or more of which fewer
than half are doubtful, or an imitated link. C: one replicate, half of them doubtful, or code from before a change that
moves its speed. What was not measured has a mark in place of a grade.

A flag doubts its own replicate, and no number leaves one out. While fewer than half are doubtful, the median lies
between times that nobody doubts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, Launch
from sp_bench.analysis.ratios import MIN_REPLICATES
from sp_bench.config.yaml_text import read_yaml
from sp_bench.formats import counted
from sp_bench.rows.row import MEASURED

FILE = "code_changes.yaml"
A, B, C = "A", "B", "C"
MEANINGS = {
    A: "6 pairs or more and no doubt",
    B: "2 to 5 pairs, fewer than half doubtful, or an imitated link",
    C: "once: one pair, flagged: half or more doubtful, aged: older code",
}
# NCCL held to some channels stands for a slower link. An all-to-all's copy to itself passes through them too, which no
# link charges for, so that links of one name differ by primitive.
IMITATED = ("channels_1", "channels_2")
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
    number: str  # of replicates
    doubts: Mapping[str, str] = field(default_factory=dict)  # once, flagged, aged or imitated -> by what

    @property
    def words(self) -> str:
        """A; C·once·aged: one word, since it stands in cells of tables."""
        return "\N{MIDDLE DOT}".join((self.mark, *self.doubts))

    @property
    def why(self) -> str:
        """2 of 6 flagged transient, code before c1f674b, 6 replicates."""
        return ", ".join(filter(None, [*self.doubts.values(), self.number]))

    @property
    def may_be_bold(self) -> bool:
        return self.mark == A

    @property
    def is_weak(self) -> bool:
        """Shown in grey."""
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


def legend(marks: Collection[str] = tuple(MEANINGS)) -> str:
    """A, 6 pairs or more and no doubt; B, 2 to 5 pairs, or fewer than half doubtful."""
    return "; ".join(f"{mark}, {meaning}" for mark, meaning in MEANINGS.items() if mark in marks)


def grade(cells: Sequence[Cell], launches: Collection[Launch]) -> Grade:
    """The grade of a statement about `cells`, of each of which it uses the replicates `launches`."""
    size, number = len(launches), counted(len(launches), "replicate")
    doubtful = [found for key in launches if (found := DOUBTS & {flag for cell in cells for flag in cell.doubts[key]})]
    aged = {commit for cell in cells for key in launches for commit in aged_by(cell, cell.launches[key]["started_at"])}
    share = f"{len(doubtful)} of {size} " if len(doubtful) < size else ""
    by = " ".join(sorted({flag for each in doubtful for flag in each}))
    flagged = {"flagged": f"{share}flagged {by}"} if doubtful else {}
    if evidence := sorted({str(cell.asked["evidence"]) for cell in cells} - {MEASURED}):
        return Grade(", ".join(evidence), f"not all ranks were there, {number}", flagged)
    doubts = ({"once": ""} if size < 2 else {}) | flagged
    if aged:
        doubts["aged"] = f"code before {', '.join(sorted(aged))}"
    if links := sorted({words.fabric(cell.asked["fabric"]) for cell in cells if cell.asked["fabric"] in IMITATED}):
        doubts["imitated"] = f"link imitated by {words.listed_words(links)}"
    if size < 2 or aged or 2 * len(doubtful) >= size:
        return Grade(C, number, doubts)
    return Grade(A if size >= MIN_REPLICATES and not doubts else B, number, doubts)


def aged_by(cell: Cell, started_at: datetime) -> list[str]:
    """The commits that moved the cell's speed after its rows began."""
    return [change.commit for change in code_changes() if started_at < change.at and change.concerns(cell)]


@cache
def code_changes() -> tuple[CodeChange, ...]:
    """The committed list of changes that move speed."""
    text = files("sp_bench.analysis").joinpath(FILE).read_text("utf-8")
    return tuple(CodeChange(**each) for each in read_yaml(text, FILE))
