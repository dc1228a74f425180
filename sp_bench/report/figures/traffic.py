"""Bytes that a rank sends for attention, over the number of ranks, by head shape. Lines are the closed form, marks are
counted, crosses are NVLink's counters."""

from collections.abc import Sequence
from dataclasses import fields

import pandas as pd
from matplotlib.lines import Line2D

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.metrics import sent_gib, wire_gib
from sp_bench.analysis.settings import Setting
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import patterns
from sp_bench.costs.patterns import Degrees
from sp_bench.formats import GIB
from sp_bench.report.figures.panels import MOST_PANELS, grid, is_first, wrapped_title
from sp_bench.report.figures.style import (
    BLACK,
    COLOURS,
    Look,
    Plot,
    about,
    legend,
    mark,
    of_one_rank,
    rank_axis,
    trial_ids,
)

RANKS = (2, 4, 8, 16)
SHAPE = ("batch_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "pass_kind")  # of a panel
OWN = ("ulysses", "ring", "all_gather")
CAPTION = (
    "Bytes a rank sends for attention, by head shape. Lines: closed form (dashed: all-gather); marks: counted from the "
    "collectives; crosses: NVLink's counters."
)


def draw(settings: Sequence[Setting], look: Look) -> list[Plot]:
    found: dict[tuple[object, ...], list[Cell]] = {}
    for setting in settings:
        for cell in setting.cells:
            has_form = not cell.asked["sends"] and not cell.asked["attention_kind"]
            if cell.ok and cell.asked["workload"] == "attention" and sent_gib(cell) and has_form:
                key = tuple(cell.asked[name] for name in SHAPE)
                found.setdefault(key, []).append(cell)
    both = {key[:-1] for key in found if key[-1] != "forward"}  # a panel of the forward alone would repeat them
    shown = [each for each in found.items() if each[0][-1] != "forward" or each[0][:-1] not in both][:MOST_PANELS]
    if not shown:
        return []
    most = max(sent_gib(cell) or 0.0 for _, cells in shown for cell in cells)
    unit, per_gib = ("GiB", 1) if most > 1 / 16 else ("MiB", 1024)  # of the axis; the data are in GiB
    figure, axes = grid(look, len(shown), 1.75, 2.2)
    handles: dict[str, Line2D] = {}
    lines: dict[str, Line2D] = {}  # of the closed form
    data = []
    for (_, cells), axis in zip(shown, axes, strict=True):
        length = max(c.asked["seq_len"] for c in cells)
        here = [c for c in cells if c.asked["seq_len"] == length]
        for pattern in OWN:
            curve = [(size, sent) for size in RANKS if (sent := _closed(pattern, here[0], size)) is not None]
            if not curve:  # one head is no number of ranks' heads
                continue
            style = "--" if pattern == "all_gather" else "-"
            (lines[words.METHODS[pattern]],) = axis.plot(
                *zip(*((size, sent * per_gib) for size, sent in curve), strict=True),
                color=COLOURS[pattern],
                lw=1,
                ls=style,
            )
            data += [
                {
                    "method": words.METHODS[pattern],
                    "sp_size": size,
                    "seq_len": length,
                    "what": "closed form",
                    "gib": sent,
                }
                for size, sent in curve
            ]
        drawn_cells = [(cell, sent) for cell in _one_a_method(here) if (sent := sent_gib(cell))]
        for place, (cell, sent) in enumerate(drawn_cells):
            x = cell.asked["sp_size"] * 1.07 ** (place % 5 - 2)  # beside each other where bytes are equal
            (drawn,) = axis.plot([x], [sent * per_gib], **mark(cell))
            handles.setdefault(words.plain_method(cell), drawn)
            data.append({**about(cell), "what": "counted", "gib": sent, "trial_ids": trial_ids(cell)})
            if (wire := wire_gib(cell)) is not None:
                (drawn,) = axis.plot([x], [wire * per_gib], marker="x", color=BLACK, ms=3.5, ls="none")
                handles.setdefault("NVLink's counters", drawn)
                data.append({**about(cell), "what": "wire", "gib": wire, "trial_ids": trial_ids(cell)})
        rank_axis(axis, RANKS)
        axis.set_ylim(0)
        asked = here[0].asked
        batch = f"{asked['batch_size']} x " if asked["batch_size"] != 1 else ""
        shape = f"{asked['num_heads']}/{asked['num_kv_heads']} heads, {batch}{words.whole(length)} tokens"
        title = f"{shape}\n{words.workload(here[0])}"
        axis.set_title(wrapped_title(title, look, len(axes)), loc="left")
        axis.set_xlabel("ranks")
        if is_first(axis):
            axis.set_ylabel(f"{unit} sent a rank")
    legend(figure, handles | {name: line for name, line in lines.items() if name not in handles}, look)
    caption = CAPTION + of_one_rank(cell for _, cells in shown for cell in cells)
    return [Plot("bytes", "", figure, caption, pd.DataFrame(data))]


def _one_a_method(cells: Sequence[Cell]) -> list[Cell]:
    """One cell per method: its bytes do not depend on kernel or transport."""
    return list(
        {
            (*(c.asked[n] for n in ("method", "variant", "sp_size", "evidence")), c.communication.counted_bytes): c
            for c in cells
        }.values()
    )


def _closed(pattern: patterns.Kind, cell: Cell, size: int) -> float | None:
    """GiB by the closed form; None if the heads do not allow this size."""
    known = {field.name: cell.asked[field.name] for field in fields(AttentionShape) if field.name in cell.asked}
    shape = AttentionShape(**known)
    if pattern == "ulysses" and shape.num_heads % size:
        return None
    degrees = Degrees(size, 1) if pattern == "ulysses" else Degrees(1, size)
    sent = patterns.closed_form(pattern, shape, degrees)
    forward_only = cell.asked["pass_kind"] == "forward"
    return float(sent["forward"] + (0 if forward_only else sent["backward"])) / GIB
