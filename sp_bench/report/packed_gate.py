"""Tables of which methods and libraries compute packed documents right, from the proofs in rows.

`sp-bench methods --packed results/cpu_packed_gate` prints them, and writes them between two markers of docs/PACKING.md.
A report has them too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.words import is_packed
from sp_bench.formats import counted
from sp_bench.report import table
from sp_bench.report.table import Column, Group, Table
from sp_bench.rows.names import library

DOCUMENTED = ("results/cpu_packed_gate", "results/h200x2_packed_gate", "results/h200x2_packed_2")
BEGIN = f"<!-- written by: sp-bench methods --packed {' --packed '.join(DOCUMENTED)} --write docs/PACKING.md -->\n"
END = "<!-- end of what sp-bench methods wrote -->\n"
PROOFS = ("packed causal", "one document perturbed")
OF_WHOLE = ", whole sequence"  # ends the name of a column without packs
LEGEND = """\

Packed causal: the relative error against each document alone, of the tensor (output, dq, dk or dv) that comes nearest
to its budget, and that budget. One document perturbed: the largest change of an element outside the changed document,
and the change inside it of the tensor that changes least. A failure of either proof stands under the first. Labels
masked, or a training step: one step on a pack, or on a whole sequence where the head says so, compared with one
process: the loss over the labels of all ranks, the norm of all gradients, and the gradient that comes nearest to its
budget. An engine other than fsdp2 follows the method's name. Wrong: what was off, and by how much. Refuses: for the
reason of that number, before any device is touched. -: not tried.
"""
RIGHT, WRONG, REFUSES, NOT_TRIED = "right", "wrong", "refuses", "-"
# The groups of a table, in order: the most important first.
GROUPS = {WRONG: "Wrong", "failed": "Failed otherwise", RIGHT: "Right", REFUSES: "Refused"}


@dataclass(frozen=True)
class Verdict:
    """The result of one proof."""

    outcome: str  # right, wrong, refuses, not tried, or another status of a failed row
    detail: str = ""  # the numbers behind it
    reason: int | None = None  # its number in the table's notes

    @property
    def words(self) -> str:
        return self.outcome + (f": {self.detail}" if self.detail else "") + (f" ({self.reason})" if self.reason else "")

    @property
    def group(self) -> str:
        return self.outcome if self.outcome in (*GROUPS, NOT_TRIED) else "failed"


class Names(NamedTuple):
    """Names the subject of a line. Empty if it has no such part."""

    method: str  # with an engine other than fsdp2
    layout: str
    variant: str
    ranks: str
    kernel: str
    library: str


@dataclass(frozen=True)
class Line:
    cell: Cell  # the first of the cells behind it
    names: Names
    verdicts: tuple[Verdict, ...]

    @property
    def group(self) -> str:
        """The first of GROUPS that any verdict is in. So a line is right only if every proof that ran is."""
        return next(group for group in GROUPS if any(verdict.group == group for verdict in self.verdicts))


NAMES: tuple[Column[Line], ...] = (
    Column("method", lambda line: line.names.method, width=0.14),
    Column("layout", lambda line: line.names.layout, width=0.085),
    Column("variant", lambda line: line.names.variant, width=0.065),
    Column("ranks", lambda line: line.names.ranks, width=0.04),
    Column("kernel", lambda line: line.names.kernel, width=0.08),
    Column("library", lambda line: line.names.library, width=0.09),
)


def gates(cells: Sequence[Cell]) -> list[Table[Line]]:
    """One table per campaign and kind of hardware with proofs of packed documents. It includes steps with masked labels
    on whole sequences."""
    placed: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if _is_proof(cell):
            for folder in dict.fromkeys(str(row["folder"]) for row in cell.rows):
                placed.setdefault((folder, str(cell.asked["hardware"]).upper()), []).append(cell)
    of_packs = [place for place, group in sorted(placed.items()) if any(map(is_packed, group))]
    return [_gate(", ".join(place), placed[place], place[0]) for place in of_packs]


def _is_proof(cell: Cell) -> bool:
    step = cell.asked["workload"] == "train_step"
    if is_packed(cell):
        return step or cell.asked["workload"] == "attention"
    return step and bool(cell.options.get(words.MASKED))


def _gate(title: str, cells: Sequence[Cell], folder: str) -> Table[Line]:
    attention: dict[Names, list[Any]] = {}
    steps: dict[Names, dict[str, list[Any]]] = {}
    first: dict[Names, Cell] = {}
    for cell in sorted(cells, key=_order):
        names, rows = _names(cell), [row for row in cell.rows if str(row["folder"]) == folder]
        first.setdefault(names, cell)
        if cell.asked["workload"] == "attention":
            attention.setdefault(names, []).extend(rows)
        else:
            steps.setdefault(names, {}).setdefault(_step_head(cell), []).extend(rows)
    step_heads = sorted({head for each in steps.values() for head in each}, key=lambda head: (OF_WHOLE in head, head))
    reasons: list[str] = []
    lines = []
    for names, cell in first.items():
        of_attention = attention.get(names, [])
        proofs = _verdict(of_attention, _alone, reasons), _perturbed(of_attention)
        trained = (_verdict(steps.get(names, {}).get(head, []), _step, reasons) for head in step_heads)
        lines.append(Line(cell, names, (*proofs, *trained)))
    grouped = [Group(GROUPS[group], tuple(line for line in lines if line.group == group)) for group in GROUPS]
    shown = tuple(group for group in grouped if group.lines)
    of_groups = ", ".join(f"{len(group.lines)} {group.title.lower()}" for group in shown)
    summary = f"{counted(len(lines), 'line')}: {of_groups}."
    proofs = [_proof(n, head) for n, head in enumerate((*PROOFS, *step_heads))]
    return Table(
        title, summary, (*NAMES, *proofs), shown, style="plain gate", prose=True, links=True,
        subject="Who computes packed documents right: ", legend=LEGEND, notes=tuple(reasons),
    )  # fmt: skip


def _proof(number: int, head: str) -> Column[Line]:
    return Column(
        head,
        lambda line: line.verdicts[number].words,
        strong=lambda line: WRONG if line.verdicts[number].outcome == WRONG else "",
    )


def _names(cell: Cell) -> Names:
    asked, codes = cell.asked, [cell.asked["implementation"] or ""]
    if _engine(cell):
        of_engine = next((row["engine_implementation"] for row in cell.rows if row["engine_implementation"]), "")
        codes = str(of_engine).split() or codes
    libraries = ", ".join(whose[0] if (whose := library(code)) else code for code in codes)
    method = ", ".join(filter(None, [asked["method"], _engine(cell)]))
    names = (method, asked["layout"], asked["variant"], asked["sp_size"], asked["kernel"], libraries)
    return Names(*("" if name is None else str(name) for name in names))


def _engine(cell: Cell) -> str:
    """The engine's name; empty for fsdp2, and without a training step."""
    return "" if cell.asked["engine"] in (None, "fsdp2") else str(cell.asked["engine"])


def _order(cell: Cell) -> tuple[Any, ...]:
    """Sorts methods as they are declared, then methods from outside; the lines of a method alphabetically."""
    known, method, names = list(words.METHODS), str(cell.asked["method"]), _names(cell)
    place = known.index(method) if method in known else len(known)
    return (place, method, _engine(cell), *names[2:0:-1], *names[3:])


def _step_head(cell: Cell) -> str:
    share = cell.options.get(words.MASKED)
    return (words.option(words.MASKED, share) if share else "a training step") + ("" if is_packed(cell) else OF_WHOLE)


def _verdict(
    rows: Sequence[Mapping[str, Any]], proof: Callable[[Sequence[Mapping[str, Any]]], str], reasons: list[str]
) -> Verdict:
    """The verdict on all rows of a line, such as several packs or replicates. One wrong row makes it wrong."""
    if not rows:
        return Verdict(NOT_TRIED)
    of_status: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        of_status.setdefault(str(row["status"]), []).append(row)
    if wrong := of_status.get("incorrect"):
        among = f"; {len(wrong)} of {len(rows)} rows" if len(rows) > 1 else ""
        return Verdict(WRONG, f"{wrong[0]['reason']}{among}")
    failed = next((status for status in of_status if status not in ("ok", "unsupported")), None)
    if failed is None and (right := of_status.get("ok")):
        return Verdict(RIGHT, proof(right))
    worst = failed or "unsupported"
    reason = str(of_status[worst][0]["reason"])
    if reason not in reasons:
        reasons.append(reason)
    return Verdict(REFUSES if worst == "unsupported" else worst, reason=reasons.index(reason) + 1)


def _alone(rows: Sequence[Mapping[str, Any]]) -> str:
    known = [(row[f"rel_error_{name}"], budget, name) for row in rows for name, budget in row["error_budget"].items()]
    error, budget, name = max(known, key=lambda each: each[0] / each[1])
    return f"{error:.1e} of {budget:.1e} in {name}"


def _perturbed(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """The second proof. Not tried if a row failed: its verdict stands under the first proof."""
    changed = [row for row in rows if row["status"] == "ok" and row["outside_difference"] is not None]
    if not changed or len(changed) < len(rows):
        return Verdict(NOT_TRIED)
    outside = max(value for row in changed for value in row["outside_difference"].values())
    inside = min(value for row in changed for value in row["inside_difference"].values())
    return Verdict(RIGHT, f"{outside:.2g} outside, {inside:.2g} inside")


_OF_STEP = ("rel_error_loss", "rel_error_grad_norm")


def _step(rows: Sequence[Mapping[str, Any]]) -> str:
    whole = [row for row in rows if None not in (row[name] for name in ("grad_error", *_OF_STEP))]
    if not whole:  # old rows
        return "errors not recorded"
    gradient = max((row["grad_error"] for row in whole), key=lambda each: each["error"] / each["budget"])
    loss, norm = (max(row[name] for row in whole) for name in _OF_STEP)
    return f"loss {loss:.1e}, norm {norm:.1e}, gradient {gradient['error']:.1e} of {gradient['budget']:.1e}"


def markdown(of: Sequence[Table[Line]]) -> str:
    """The legend and the tables; empty without tables."""
    return "\n".join([LEGEND, table.markdown(of)]) if of else ""
