"""Bytes that a rank sends for attention, over the number of ranks, by head shape. Lines are the closed form, marks are
counted, crosses are NVLink's counters."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
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
    explained,
    legend,
    mark,
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
    shown = _panels(settings)[:MOST_PANELS]
    if not shown:
        return []
    most = max(sent_gib(cell) or 0.0 for cells in shown for cell in cells)
    unit, per_gib = ("GiB", 1) if most > 1 / 16 else ("MiB", 1024)  # of the axis; the data are in GiB
    figure, axes = grid(look, len(shown), 1.75, 2.2)
    handles: dict[str, Line2D] = {}
    lines: dict[str, Line2D] = {}  # of the closed form
    data = []
    for cells, axis in zip(shown, axes, strict=True):
        length = max(cell.asked["seq_len"] for cell in cells)
        here = [cell for cell in cells if cell.asked["seq_len"] == length]
        data += [*_forms(axis, here[0], per_gib, lines), *_counted(axis, here, per_gib, handles)]
        rank_axis(axis, RANKS)
        axis.set_ylim(0)
        axis.set_title(wrapped_title(_title(here[0]), look, len(axes)), loc="left")
        axis.set_xlabel("ranks")
        if is_first(axis):
            axis.set_ylabel(f"{unit} sent a rank")
    legend(figure, handles | {name: line for name, line in lines.items() if name not in handles}, look)
    caption = CAPTION + explained(cell for cells in shown for cell in cells)
    return [Plot("bytes", "", figure, caption, pd.DataFrame(data))]


def _panels(settings: Sequence[Setting]) -> list[list[Cell]]:
    """The cells of each panel: attention of one shape whose bytes have a closed form."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in (cell for setting in settings for cell in setting.cells):
        has_form = not cell.asked["sends"] and not cell.asked["attention_kind"]
        if cell.ok and cell.asked["workload"] == "attention" and sent_gib(cell) and has_form:
            found.setdefault(tuple(cell.asked[name] for name in SHAPE), []).append(cell)
    both = {key[:-1] for key in found if key[-1] != "forward"}  # a panel of the forward alone would repeat them
    return [cells for key, cells in found.items() if key[-1] != "forward" or key[:-1] not in both]


def _forms(axis: Axes, cell: Cell, per_gib: int, lines: dict[str, Line2D]) -> Iterator[dict[str, Any]]:
    """Draws the closed forms at a cell's shape. Yields their data."""
    for pattern in OWN:
        curve = [(size, sent) for size in RANKS if (sent := _closed(pattern, cell, size)) is not None]
        if not curve:  # one head is no number of ranks' heads
            continue
        name, style = words.METHODS[pattern], "--" if pattern == "all_gather" else "-"
        sizes, scaled = zip(*((size, sent * per_gib) for size, sent in curve), strict=True)
        (lines[name],) = axis.plot(sizes, scaled, color=COLOURS[pattern], lw=1, ls=style)
        for size, sent in curve:
            length = cell.asked["seq_len"]
            yield {"method": name, "sp_size": size, "seq_len": length, "what": "closed form", "gib": sent}


def _counted(axis: Axes, cells: Sequence[Cell], per_gib: int, handles: dict[str, Line2D]) -> Iterator[dict[str, Any]]:
    """Draws the counted bytes of cells, and those of NVLink's counters. Yields their data."""
    places: dict[tuple[int, str], list[tuple[Cell, float]]] = {}  # where marks of equal bytes would hide each other
    for cell in _one_a_method(cells):
        if sent := sent_gib(cell):
            places.setdefault((cell.asked["sp_size"], f"{sent:.2g}"), []).append((cell, sent))
    for (ranks, _), found in places.items():
        for number, (cell, sent) in enumerate(found):
            x = ranks * 1.07 ** (number - (len(found) - 1) / 2)
            (drawn,) = axis.plot([x], [sent * per_gib], **mark(cell))
            handles.setdefault(words.plain_method(cell), drawn)
            yield {**about(cell), "what": "counted", "gib": sent, "trial_ids": trial_ids(cell)}
            if (wire := wire_gib(cell)) is not None:
                (drawn,) = axis.plot([x], [wire * per_gib], marker="x", color=BLACK, ms=3.5, ls="none")
                handles.setdefault("NVLink's counters", drawn)
                yield {**about(cell), "what": "wire", "gib": wire, "trial_ids": trial_ids(cell)}


def _title(cell: Cell) -> str:
    asked = cell.asked
    batch = f"{asked['batch_size']} x " if asked["batch_size"] != 1 else ""
    shape = f"{asked['num_heads']}/{asked['num_kv_heads']} heads, {batch}{words.whole(asked['seq_len'])} tokens"
    return f"{shape}\n{words.workload(cell)}"


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
