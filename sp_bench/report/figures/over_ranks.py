"""How fast attention is on more GPUs than were there: one real rank of 8 and more."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.lines import Line2D

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.metrics import attention_tflops
from sp_bench.config.trial import NO_DELAY
from sp_bench.report.figures.panels import MOST_PANELS, PANEL_IN, grid, is_first, left_out, wrapped_title
from sp_bench.report.figures.style import BLACK, Look, Plot, about, legend, line, rank_axis, tokens, trial_ids

LEAST_RANKS = 8
HOST_BOUND = "host_bound"
CAPTION = (
    "Attention of one real rank of so many, messages modelled, 8 GPUs a host unless the title says NVLink. Crossed: "
    "steps that wait for the host, which say nothing of the methods."
)


def draw(cells: Sequence[Cell], look: Look) -> list[Plot]:
    """A panel for each head shape, length and link; a line a method, its fastest cell at each number of ranks."""
    panels: dict[tuple[str, int, str], dict[str, dict[int, tuple[Cell, float]]]] = {}
    for cell in cells:
        speed = attention_tflops(cell) if cell.processor == "GPU" else None
        if speed is None or not _is_shown(cell):
            continue
        asked = cell.asked
        passes = "forward, " if asked["pass_kind"] == "forward" else ""
        where = f"{passes}{asked['num_heads']}/{asked['num_kv_heads']} heads, {words.kernel(cell)}"
        panel = panels.setdefault((where, asked["seq_len"], words.link(cell.options)), {})
        drawn = panel.setdefault(words.plain_method(cell), {})
        size = asked["sp_size"]
        drawn[size] = max(drawn.get(size, (cell, speed)), (cell, speed), key=lambda each: each[1])
    several = {key: panel for key, panel in panels.items() if len({n for of in panel.values() for n in of}) > 1}
    if not several:
        return []
    shown = sorted(several.items(), key=lambda each: (each[0][0], each[0][2], each[0][1]))
    caption = CAPTION + left_out(len(shown) - MOST_PANELS)
    shown = shown[:MOST_PANELS]
    figure, axes = grid(look, len(shown), PANEL_IN)
    handles: dict[str, Line2D] = {}
    data: list[Mapping[str, object]] = []
    for ((where, length, link), panel), axis in zip(shown, axes, strict=True):
        for method, by_size in sorted(panel.items()):
            known = sorted(by_size.items())
            style = line(known[0][1][0])
            (drawn_line,) = axis.plot([n for n, _ in known], [speed for _, (_, speed) in known], **style)
            handles.setdefault(method, drawn_line)
            for size, (cell, speed) in known:
                bound = HOST_BOUND in cell.flags
                if bound:
                    (cross,) = axis.plot([size], [speed], marker="x", color=BLACK, ms=6, ls="none")
                    handles["waits for the host"] = cross
                data.append({"link": link, **about(cell), "tflops_per_gpu": speed, HOST_BOUND: bound,
                             "trial_ids": trial_ids(cell)})  # fmt: skip
        rank_axis(axis, sorted({n for by_size in panel.values() for n in by_size}))
        axis.set_ylim(0)
        axis.set_title(wrapped_title(f"{where}\n{tokens(length)} tokens, {link}", look, len(axes)), loc="left")
        axis.set_xlabel("ranks")
        if is_first(axis):
            axis.set_ylabel("TFLOP/s a GPU")
    legend(figure, handles, look)
    return [Plot("ranks", "", figure, caption, pd.DataFrame(data))]


def _is_shown(cell: Cell) -> bool:
    asked = cell.asked
    link = words.link(cell.options)
    return asked["workload"] == "attention" and asked["sp_size"] >= LEAST_RANKS and link not in ("", NO_DELAY)
