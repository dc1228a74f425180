"""Which method is fastest on more GPUs than were there: one real rank of 8 and more."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.held import SMALLEST_SIGN
from sp_bench.analysis.metrics import attention_tflops
from sp_bench.config.machine import NO_DELAY
from sp_bench.formats import counted
from sp_bench.report.figures.panels import MOST_PANELS, grid, is_first, left_out, panel_in, wrapped_title
from sp_bench.report.figures.style import (
    BLACK,
    Look,
    Plot,
    about,
    beside,
    explained,
    legend,
    mark,
    medians,
    places_axis,
    plain_log,
    tokens,
    trial_ids,
)

LEAST_RANKS = 8
HOST_BOUND, WAITS = "host_bound", "waits for the host"
CAPTION = (
    "Attention: time over that of the fastest method on as many GPUs; lower is better. Below the axis: GPUs, hosts, "
    f"and TFLOP/s a GPU of the fastest. Grey: within {SMALLEST_SIGN:.0%}, which one rank and modelled messages do not "
    "tell apart. Crosses: steps that wait for the host to launch kernels, which say nothing of method or network. "
    "Where the fastest waits, nothing is drawn. Lower bounds are left out. "
)
LABEL_IN = 0.2  # width of a label; where marks are nearer, labels stand upright
BAND = "#e4e4e4"
CROSS: dict[str, Any] = {"marker": "x", "ms": 5, "mew": 1.1, "ls": "none"}
Place = tuple[int, int]  # GPUs, hosts
OfPlace = dict[str, tuple[Cell, float]]  # method -> its fastest cell, and its TFLOP/s a GPU


def draw(cells: Sequence[Cell], look: Look) -> list[Plot]:
    """A panel for each head shape, length and link that has several numbers of GPUs with several methods."""
    found: dict[tuple[str, int, str], dict[Place, OfPlace]] = {}
    for cell in filter(_is_shown, cells):
        asked, speed = cell.asked, attention_tflops(cell) or 0.0
        passes = "forward" if asked["pass_kind"] == "forward" else ""
        window = words.unusual(cell, "workload.window")
        where = ", ".join(filter(None, [passes, words.heads(cell), window, words.kernel(cell)]))
        places = found.setdefault((where, asked["seq_len"], cell.link), {})
        of_place = places.setdefault((asked["sp_size"], words.hosts(cell)), {})
        method = words.plain_method(cell) + (" of latents" if asked["sends"] else "")
        if method not in of_place or speed > of_place[method][1]:
            of_place[method] = cell, speed
    panels = {key: kept for key, places in found.items() if len(kept := _with_fastest(places)) > 1}
    if not panels:
        return []
    shown = sorted(panels.items())[:MOST_PANELS]
    drawn = [cell for _, places in shown for of in places.values() for cell, _ in of.values()]
    several_links = len({link for (_, _, link), _ in shown}) > 1
    figure, axes = grid(look, len(shown), 2.1)
    handles: dict[str, Artist] = {}
    data: list[Mapping[str, object]] = []
    for ((where, length, link), places), axis in zip(shown, axes, strict=True):
        methods = sorted({method for of in places.values() for method in of})
        axis.axhspan(1, 1 + SMALLEST_SIGN, color=BAND, lw=0)
        ratios, labels = [1 + SMALLEST_SIGN], []
        apart_in = (panel_in(look, len(axes)) - 0.5) / len(places) * (beside(1, len(methods)) - beside(0, len(methods)))
        is_narrow = apart_in < LABEL_IN
        for number, ((size, hosts), of_place) in enumerate(sorted(places.items())):
            fastest = max(speed for _, speed in of_place.values())
            labels.append(f"{size}\n{counted(hosts, 'host')}\n{fastest:.0f}")
            for method, (cell, speed) in of_place.items():
                place = (number + beside(methods.index(method), len(methods)), fastest / speed)
                waits = cell.waits_for_host
                style = mark(cell) if not waits else {**CROSS, "color": mark(cell)["color"]}
                (handle,) = axis.plot(*([value] for value in place), **style)
                handles.setdefault(WAITS if waits else method, handle)
                if place[1] > 1 + SMALLEST_SIGN:
                    axis.annotate(f"{place[1]:.3g}", place, (0, 4), ha="center", va="bottom", rotation=90 * is_narrow,
                                  textcoords="offset points", fontsize=6)  # fmt: skip
                ratios.append(place[1])
                data.append({"link": link, "num_nodes": hosts, **about(cell), "tflops_per_gpu": speed,
                             "over_fastest": place[1], HOST_BOUND: waits, "trial_ids": trial_ids(cell)})  # fmt: skip
        places_axis(axis, labels)
        axis.set_xlabel("GPUs, hosts, TFLOP/s of the fastest")
        plain_log(axis, [*ratios, max(ratios) ** 1.12])  # with room for the highest label
        named = f", {words.option('link.name', link)}" if several_links else ""
        axis.set_title(wrapped_title(f"{where}\n{tokens(length)} tokens{named}", look, len(axes)), loc="left")
        if is_first(axis):
            axis.set_ylabel("time over the fastest")
    handles[f"within {SMALLEST_SIGN:.0%}"] = Patch(color=BAND)
    if handles.pop(WAITS, None):
        handles[WAITS] = Line2D([], [], **CROSS, color=BLACK)  # the last entry
    legend(figure, handles, look)
    links = "; ".join(sorted({words.link(cell) for cell in drawn}))
    caption = f"{CAPTION}Links: {links}. {medians(drawn)}{explained(drawn)}{left_out(len(found) - len(shown))}"
    return [Plot("ranks", "", figure, caption, pd.DataFrame(data))]


def _with_fastest(places: Mapping[Place, OfPlace]) -> dict[Place, OfPlace]:
    """The places with several methods, of which the fastest does not wait for the host."""
    return {
        place: of
        for place, of in places.items()
        if len(of) > 1 and not max(of.values(), key=lambda each: each[1])[0].waits_for_host
    }


def _is_shown(cell: Cell) -> bool:
    asked = cell.asked
    is_attention = asked["workload"] == "attention" and asked["sp_size"] >= LEAST_RANKS
    has_speed = cell.processor == "GPU" and attention_tflops(cell) is not None
    return is_attention and has_speed and cell.link not in ("", NO_DELAY) and not cell.is_lower_bound
