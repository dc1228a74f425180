"""Who computes packed documents right: what the two proofs said of each method and library, from rows.

`sp-bench methods --packed results/cpu_packed_gate` prints the table, and docs/PACKING.md holds it between two markers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from sp_bench import methods
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.rows import store

BEGIN = "<!-- written by: sp-bench methods --packed results/cpu_packed_gate --write docs/PACKING.md -->\n"
END = "<!-- end of what sp-bench methods wrote -->\n"
HEADINGS = (
    *("method", "layout", "variant", "ranks", "kernel", "library"),
    *("packed causal", "one document perturbed", "a step on a pack", "a step on a whole sequence"),
)
LEGEND = """\
Packed causal: of output, dq, dk and dv the relative error against each document alone that is nearest to its budget,
and the budget. Perturbed: the largest change of an element outside the changed document, and inside it that of the
tensor that changes least. A step: of training, with half of the labels masked. The loss of the world's labels, the
norm of all gradients, and the gradient that is nearest to its budget are compared with one process, which trains on
each document alone. An engine other than fsdp2 is named. Refuses: before any device is touched, for the reason of that
number. Wrong: the number says by how much. -: not tried.
"""


def table(campaign: Path) -> str:
    """Markdown: a line for each method, layout and variant of which the campaign has packed rows, and below it what the
    cells mean, with each reason once.

    Raises:
        ConfigError: the campaign has no rows of packed documents.
    """
    found, _ = store.read(campaign)
    every = found.to_pylist()
    rows = [row for row in every if _is_packed(row) or row["masked_label_share"]]
    if not any(map(_is_packed, rows)):
        raise ConfigError(f"{shown(campaign)} has no rows of packed documents; sp-bench run sweep=cpu_packed_gate")
    rows.sort(
        key=lambda row: (row["workload"] != "attention", _place(_what(row)), row["started_at"])
    )  # the newest counts
    reasons = list(dict.fromkeys(row["reason"] for row in rows if row["status"] != "ok"))
    attention = {_what(row): row for row in rows if row["workload"] == "attention"}
    packs, wholes = (
        {_what(row): row for row in rows if row["workload"] == "train_step" and _is_packed(row) == packed}
        for packed in (True, False)
    )
    lines = []
    for what in sorted(attention.keys() | packs.keys() | wholes.keys(), key=_place):
        steps = (_step(rows_of.get(what), reasons) for rows_of in (packs, wholes))
        lines.append((*what, *_proofs(attention.get(what), reasons), *steps))
    notes = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
    return f"{tabulate(lines, HEADINGS, tablefmt='github', disable_numparse=True)}\n\n{LEGEND}\n{notes}"


def _is_packed(row: Mapping[str, Any]) -> bool:
    return row["packing"] not in (None, "none")


def _what(row: Mapping[str, Any]) -> tuple[str, ...]:
    library, engine = methods.get(row["method"]).IMPLEMENTATION.partition("==")[0], ""
    if row["engine"] not in (None, "fsdp2"):
        engine = f", {row['engine']}"
        library = ", ".join(each.partition("==")[0] for each in row["engine_implementation"].split())
    return row["method"] + engine, row["layout"], row["variant"] or "", str(row["sp_size"]), row["kernel"], library


def _place(what: tuple[str, ...]) -> tuple[int, str, str, str, str]:
    """Methods in the order of `sp-bench methods`, each in alphabetical order."""
    name, _, engine = what[0].partition(", ")
    return methods.names().index(name), engine, what[2], what[1], what[4]


def _proofs(row: Mapping[str, Any] | None, reasons: Sequence[str]) -> tuple[str, str]:
    """What each proof said. The second comes after the first, so that a row that failed has no more to say."""
    if row is None:
        return "-", "-"
    if row["status"] != "ok":
        return _failed(row, reasons), "-"
    budgets = row["error_budget"]
    name = max(budgets, key=lambda each: row[f"rel_error_{each}"] / budgets[each])
    outside, inside = max(row["outside_difference"].values()), min(row["inside_difference"].values())
    return (
        f"right: {row[f'rel_error_{name}']:.1e} of {budgets[name]:.1e} in {name}",
        f"right: {outside:.2g} outside, {inside:.2g} inside",
    )


def _step(row: Mapping[str, Any] | None, reasons: Sequence[str]) -> str:
    if row is None:
        return "-"
    if row["status"] != "ok":
        return _failed(row, reasons)
    gradient = row["grad_error"]
    return (
        f"right: loss {row['rel_error_loss']:.1e}, norm {row['rel_error_grad_norm']:.1e}, "
        f"gradient {gradient['error']:.1e} of {gradient['budget']:.1e}"
    )


def _failed(row: Mapping[str, Any], reasons: Sequence[str]) -> str:
    said = {"unsupported": "refuses", "incorrect": "**wrong**"}.get(row["status"], row["status"])
    return f"{said} ({reasons.index(row['reason']) + 1})"
