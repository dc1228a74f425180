"""How fast attention is on more GPUs than were there: one real rank of 8 and more."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.lines import Line2D

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.metrics import attention_tflops
from sp_bench.config.machine import NO_DELAY
from sp_bench.report.figures.panels import MOST_PANELS, PANEL_IN, grid, is_first, left_out, wrapped_title
from sp_bench.report.figures.style import BLACK, Look, Plot, about, legend, line, rank_axis, tokens, trial_ids

LEAST_RANKS = 8
HOST_BOUND = "host_bound"
CAPTION = (
    "Attention of one real rank of so many, messages modelled as {link}; small marks: as {others}. Higher is better. "
    "Hollow and dashed: one real rank. Crosses: steps that wait for the host, which say nothing of the methods. "
    "Lower bounds are left out."
)
SMALL = {"ls": "none", "ms": 2.5}
BySize = dict[int, tuple[Cell, float]]  # ranks -> the fastest cell, and its TFLOP/s a GPU


def draw(cells: Sequence[Cell], look: Look) -> list[Plot]:
    """A panel for each head shape and length; a line a method over the numbers of ranks, by the link with most cells.
    Those of other links are small marks."""
    found: dict[tuple[str, int], dict[tuple[str, str], BySize]] = {}
    links: Counter[str] = Counter()
    for cell in cells:
        speed = attention_tflops(cell) if cell.processor == "GPU" else None
        if speed is None or not _is_shown(cell):
            continue
        asked, link = cell.asked, cell.link
        passes = "forward, " if asked["pass_kind"] == "forward" else ""
        where = f"{passes}{asked['num_heads']}/{asked['num_kv_heads']} heads, {words.kernel(cell)}"
        by_size = found.setdefault((where, asked["seq_len"]), {}).setdefault((_name(cell), link), {})
        size = asked["sp_size"]
        by_size[size] = max(by_size.get(size, (cell, speed)), (cell, speed), key=lambda each: each[1])
        links[link] += 1
    several = {key: lines for key, lines in found.items() if len({n for of in lines.values() for n in of}) > 1}
    if not several:
        return []
    main, *others = (link for link, _ in links.most_common())
    caption = CAPTION.format(link=main, others=words.listed_words(others) or "another")
    caption += left_out(len(several) - MOST_PANELS)
    shown = sorted(several.items())[:MOST_PANELS]
    figure, axes = grid(look, len(shown), PANEL_IN)
    handles: dict[str, Line2D] = {}
    data: list[Mapping[str, object]] = []
    for ((where, length), lines), axis in zip(shown, axes, strict=True):
        for (method, link), by_size in sorted(lines.items()):
            known = sorted(by_size.items())
            style = line(known[0][1][0]) | ({} if link == main else SMALL)
            of_method = [(n, speed) for n, (cell, speed) in known if HOST_BOUND not in cell.flags]
            (drawn,) = axis.plot([n for n, _ in of_method], [speed for _, speed in of_method], **style)
            if link == main:
                handles.setdefault(method, drawn)
            for size, (cell, speed) in known:
                bound = HOST_BOUND in cell.flags
                if bound:
                    axis.plot([size], [speed], marker="x", color=style["color"], ms=5, ls="none")
                    handles.setdefault(HOST_BOUND, Line2D([], [], marker="x", color=BLACK, ms=5, ls="none"))
                data.append({"link": link, **about(cell), "tflops_per_gpu": speed, HOST_BOUND: bound,
                             "trial_ids": trial_ids(cell)})  # fmt: skip
        rank_axis(axis, sorted({n for by_size in lines.values() for n in by_size}))
        axis.set_ylim(0, 1.08 * max(speed for of in lines.values() for _, speed in of.values()))
        axis.set_title(wrapped_title(f"{where}\n{tokens(length)} tokens", look, len(axes)), loc="left")
        axis.set_xlabel("GPUs")
        if is_first(axis):
            axis.set_ylabel("TFLOP/s a GPU")
    if HOST_BOUND in handles:
        handles["waits for the host"] = handles.pop(HOST_BOUND)  # the last entry
    legend(figure, handles, look)
    return [Plot("ranks", "", figure, caption, pd.DataFrame(data))]


def _name(cell: Cell) -> str:
    return words.plain_method(cell) + (" of latents" if cell.asked["sends"] else "")


def _is_shown(cell: Cell) -> bool:
    asked = cell.asked
    link = cell.link
    return (
        asked["workload"] == "attention"
        and asked["sp_size"] >= LEAST_RANKS
        and link not in ("", NO_DELAY)
        and not cell.is_lower_bound
    )
