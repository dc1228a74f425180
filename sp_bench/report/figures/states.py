"""The gated delta rule by heads and by states: how long a GPU works, by the tokens of a rank."""

from collections.abc import Sequence

import pandas as pd

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.config.machine import NO_DELAY
from sp_bench.formats import counted
from sp_bench.report.figures.panels import PANEL_IN, grid, is_first
from sp_bench.report.figures.steps import part_ms
from sp_bench.report.figures.style import (
    Look,
    Plot,
    about,
    explained,
    legend,
    length_axis,
    line,
    plain_log,
    trial_ids,
)

WORK = ("attention", "matmul", "other", "exposed_messages")
CAPTION = (
    "Time of one layer's attention without the part in which nothing runs, forward and backward; lower is better. "
    "Heads travel by Ulysses, states by state passing. Where a rank has few tokens, a step waits longer for the host."
)


def draw(cells: Sequence[Cell], look: Look) -> list[Plot]:
    """A panel for each number of ranks on which both methods ran, without the cells whose messages take no time."""
    panels: dict[int, dict[str, list[Cell]]] = {}
    for cell in cells:
        if cell.ok and cell.asked["attention_kind"] == "gated_delta" and cell.link != NO_DELAY and _ms(cell):
            panels.setdefault(cell.asked["sp_size"], {}).setdefault(words.method(cell), []).append(cell)
    panels = {size: lines for size, lines in sorted(panels.items()) if len(lines) > 1}
    if not panels:
        return []
    figure, axes = grid(look, len(panels), PANEL_IN)
    handles, data = {}, []
    for (size, lines), axis in zip(panels.items(), axes, strict=True):
        for name, of_method in sorted(lines.items()):
            points = sorted((cell.asked["seq_len"] // size, _ms(cell), cell.cell_id, cell) for cell in of_method)
            (handle,) = axis.plot([x for x, *_ in points], [y for _, y, *_ in points], **line(points[0][-1]))
            handles.setdefault(name, handle)
            data += [about(cell) | {"gpu_ms": ms, "trial_ids": trial_ids(cell)} for _, ms, _, cell in points]
        every = [cell for of_method in lines.values() for cell in of_method]
        length_axis(axis, [cell.asked["seq_len"] // size for cell in every], PANEL_IN)
        plain_log(axis, [_ms(cell) for cell in every])
        axis.set_title(f"{size} ranks on {counted(every[0].options['num_nodes'], 'host')}", loc="left")
        axis.set_xlabel("tokens of a rank")
        if is_first(axis):
            axis.set_ylabel("ms that the GPU works")
    legend(figure, handles, look)
    return [
        Plot(
            "states",
            "",
            figure,
            CAPTION + explained([cell for lines in panels.values() for of in lines.values() for cell in of]),
            pd.DataFrame(data),
        )
    ]


def _ms(cell: Cell) -> float:
    """0: it has no trace."""
    return sum(part_ms(cell, "kernel_ms", WORK).values())
