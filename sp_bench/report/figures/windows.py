"""What a window makes of Ulysses and the ring: how many times as long Ulysses takes, by window and link."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from sp_bench.analysis import identifiers, words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.ratios import by_speed, pairs, ratio_of_pairs
from sp_bench.config.machine import NO_DELAY
from sp_bench.formats import counted
from sp_bench.report.figures.panels import MOST_PANELS, PANEL_IN, grid, is_first, left_out, wrapped_title
from sp_bench.report.figures.style import (
    BLACK,
    GREY,
    Look,
    Plot,
    explained,
    is_modelled,
    legend,
    medians,
    plain_log,
    tokens,
    trial_ids,
)

METHODS = ("ulysses", "ring")
CAPTION = (
    "Time of Ulysses over that of the ring, attention alone. Higher is better for the ring. Of the ring's layouts the "
    "one with most replicates counts, of equals the faster. Under a window the ring sends borders alone, and Ulysses "
    "all heads. Cells that wait for the host, and lower bounds, are left out."
)
LABELLED = 1.15  # times: nearer to 1 the axis says enough
MARKERS = "os^Dv*"  # by the number of GPUs
ABOVE: dict[str, Any] = {"xytext": (3, 3)}  # beside lines that fall
BELOW: dict[str, Any] = {"xytext": (-3, -3), "ha": "right", "va": "top"}
IN_PANEL = ("method", "fabric", "num_nodes", "sp_size", "workload.window")  # options in which cells of a panel differ


def draw(cells: Sequence[Cell], look: Look) -> list[Plot]:
    """A panel for each kernel, link and set of all other options; a line for each number of GPUs over windows, of
    which the last is none. Places without a window at any of its points are left out."""
    found: dict[tuple[Any, ...], dict[tuple[int, int], dict[int | None, list[Cell]]]] = {}
    for cell in filter(_is_shown, cells):
        of_place = found.setdefault(_panel(cell), {}).setdefault((cell.asked["sp_size"], words.hosts(cell)), {})
        of_place.setdefault(cell.asked["window"], []).append(cell)
    lines = {
        panel: {size: ratios for size, windows in places.items() if len(ratios := _ratios(windows)) > 1}
        for panel, places in found.items()
    }
    several = {panel: places for panel, places in lines.items() if places}
    if not several:
        return []
    shown = sorted(several.items(), key=lambda item: str(item[0]))[:MOST_PANELS]
    figure, axes = grid(look, len(shown), PANEL_IN)
    sizes = sorted({size for _, of in shown for size, _ in of})
    handles: dict[str, Line2D] = {}
    drawn: list[Cell] = []
    data = []
    for ((title, length, link, _), places), axis in zip(shown, axes, strict=True):
        windows = sorted({w for of in places.values() for w in of}, key=_last_none)
        highest = {w: max(of[w][0] for of in places.values() if w in of) for w in windows}
        for (size, hosts), ratios in sorted(places.items()):
            style: dict[str, Any] = {"marker": MARKERS[sizes.index(size) % len(MARKERS)]}
            at = [(windows.index(w), ratio) for w, (ratio, _) in ratios.items()]
            if is_modelled(next(iter(ratios.values()))[1][0]):
                style |= {"mfc": "white", "ls": "--"}
            (handle,) = axis.plot(*zip(*sorted(at), strict=True), color=BLACK, ms=3.5, lw=1, **style)
            handles.setdefault(f"{size} GPUs", handle)
            for window, (ratio, pair) in ratios.items():
                if not 1 / LABELLED < ratio < LABELLED:
                    place, where = (windows.index(window), ratio), ABOVE if ratio == highest[window] else BELOW
                    axis.annotate(f"{ratio:.2f}", place, textcoords="offset points", fontsize=6, **where)
                data += [{"window": window, "sp_size": size, "num_nodes": hosts, "link": link, "seq_len": length,
                          "ratio": ratio,
                          "ulysses_ms": pair[0].median_step_ms, "ring_ms": pair[1].median_step_ms,
                          "layout": pair[1].asked["layout"], "trial_ids": " ".join(map(trial_ids, pair))}]  # fmt: skip
                drawn += pair
        axis.axhline(1, color=GREY, lw=0.8)
        axis.set_xticks(range(len(windows)), ["none" if w is None else f"{w:,}" for w in windows])
        plain_log(axis, [1.0, *(ratio for of in places.values() for ratio, _ in of.values())])
        axis.set_title(wrapped_title(f"{title}\n{tokens(length)} tokens, {link}", look, len(axes)), loc="left")
        axis.set_xlabel("window, tokens")
        if is_first(axis):
            axis.set_ylabel("Ulysses / ring")
    legend(figure, handles, look)
    caption = f"{CAPTION} {medians(drawn)}" + explained(drawn, "in parts") + left_out(len(several) - MOST_PANELS)
    return [Plot("windows", "", figure, caption, pd.DataFrame(data))]


def _ratios(windows: dict[int | None, list[Cell]]) -> dict[int | None, tuple[float, tuple[Cell, Cell]]]:
    """The ratio at each window where both methods ran, with their cells; nothing if there is no window among them.

    Of cells whose replicates pair, those with most pairs, and of these the fastest."""
    found: dict[int | None, tuple[float, tuple[Cell, Cell]]] = {}
    for window in sorted(windows, key=_last_none):
        ulysses, rings = ([c for c in windows[window] if c.asked["method"] == name] for name in METHODS)
        known = [(ratio, both) for both in product(ulysses, rings) if (ratio := ratio_of_pairs(*both))]
        if known:
            found[window] = min(known, key=lambda each: (-len(pairs(*each[1])), *map(by_speed, each[1][::-1])))
    return found if any(w is not None for w in found) else {}


def _is_shown(cell: Cell) -> bool:
    """Attention of one of the two, whose messages take time."""
    is_attention = cell.asked["workload"] == "attention" and cell.link != NO_DELAY
    is_measured = cell.ok and bool(cell.median_step_ms) and cell.is_comparable
    return is_measured and is_attention and cell.asked["method"] in METHODS


def _last_none(window: int | None) -> tuple[bool, int]:
    return window is None, window or 0


def _panel(cell: Cell) -> tuple[Any, ...]:
    """Title, tokens, link, and all options that cells of a panel share."""
    asked = cell.asked
    parts = [
        "forward" if asked["pass_kind"] == "forward" else "",
        words.heads(cell),
        "sinks" if asked["sinks"] else "",
        "" if asked["causal"] else "not causal",
        words.packed(cell),
        words.dtype(cell),
        f"batch {asked['batch_size']}" if asked["batch_size"] != 1 else "",
        words.unusual(cell, identifiers.LAUNCH),
        words.kernel(cell),
    ]
    return ", ".join(filter(None, parts)), asked["seq_len"], _link(cell), cell.but(*IN_PANEL)


def _link(cell: Cell) -> str:
    """What carries the messages of all ranks or of one real rank, and how many GPUs share a host. The legend then names
    numbers of GPUs alone."""
    hosts = words.hosts(cell)
    link = f"modelled: {words.link(cell)}" if is_modelled(cell) else words.fabric(cell.asked["fabric"])
    return f"{link}, {'one host' if hosts == 1 else counted(cell.asked['sp_size'] // hosts, 'GPU') + ' a host'}"
