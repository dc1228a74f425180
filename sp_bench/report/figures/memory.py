"""How long before memory runs out: memory over the length with the device's capacity, and the bracket of the longest
sequence that fits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell, listed
from sp_bench.analysis.limits import Limit, capacity_gib
from sp_bench.analysis.longest import NOT_REACHED, ends, is_fit_only, longest, tries
from sp_bench.analysis.metrics import in_use_gib, memory_gib, reserved_gib
from sp_bench.analysis.settings import Setting
from sp_bench.formats import GIB
from sp_bench.report.figures.panels import ROW_IN, Panel, dots, over_length, panels, shared_title
from sp_bench.report.figures.steps import MOST_BARS, Bar, Parts, stacked
from sp_bench.report.figures.style import (
    BLACK,
    GREY,
    Look,
    Plot,
    bar,
    colour,
    is_modelled,
    legend,
    tokens_axis,
    trial_ids,
    wrapped,
)


def draw(settings: Sequence[Setting], look: Look) -> list[Plot]:
    on_device = [s for s in settings if any(c.memory_column == "max_peak_allocated_bytes" for c in s.cells)]
    if not on_device:
        return _brackets(settings, look)
    shared = shared_title(on_device)
    found = [_with_capacity(panel) for panel in panels(on_device, memory_gib)]
    label = "GiB a GPU"
    caption = "Peak memory of the rank that needs most; the line across is the device's capacity or its cap."
    plots = over_length("memory", found, memory_gib, f"allocated, {label}", look, shared + caption)
    marks = [("allocated", memory_gib), ("reserved", reserved_gib), ("in use", in_use_gib)]
    without_line = [replace(panel, limit=None) for panel in found]
    of_dots = (
        "Peak memory of the rank that needs most: allocated by tensors / reserved by torch / in use on the device. "
        "What is reserved may be far more than what tensors take (docs/METRICS.md)."
    )
    plots += dots("memory", without_line, marks, label, look, shared + of_dots)
    return plots + _parts(settings, look) + _brackets(settings, look)


# Paul Tol's bright scheme and greys, 2021
HOLDERS: Parts = {
    "parameter_shards": ("parameters", "#BBBBBB", ""),
    "moments": ("optimizer state", "#777777", "||||"),
    "gradients": ("gradients", "#AA3377", "----"),
    "gathered_parameters": ("gathered parameters", "#228833", "++++"),
    "checkpoints": ("kept for the backward", "#EE6677", "xxxxxx"),
    "attention": ("attention", "#4477AA", ""),
    "tiles": ("loss, and tiles of the MLP", "#CCBB44", "...."),
    "layers": ("layers", "#66CCEE", "////"),
    "messages": ("messages", "#EE8866", "\\\\\\\\"),
    "other": ("other", "#DDDDDD", "oo"),
}
ENDS = {"forward": "after the forward", "backward": "after the backward", "optimizer": "after the optimizer"}


def _parts(settings: Sequence[Setting], look: Look) -> list[Plot]:
    """What the peak consists of, for the cells that were traced."""
    found = [(setting, cell) for setting in settings for cell in setting.cells if cell.ok and _held_gib(cell)]
    if not found:
        return []
    found.sort(key=lambda each: -sum(_held_gib(each[1]).values()))
    bars = [Bar(s, cell, _held_gib(cell), cell.predicted_gib, _ends_gib(cell)) for s, cell in found[:MOST_BARS]]
    figure, shared, data = stacked(bars, HOLDERS, "GiB a GPU", "predicted", look)
    caption = (
        " The peak of one untimed step by what holds it, on the rank that needs most. The black line is what was "
        "predicted. Marks are what was allocated at the end of each phase."
    )
    return [Plot("memory", "parts", figure, shared + caption, data.rename(columns={"line": "predicted_gib"}))]


def _held_gib(cell: Cell) -> dict[str, float]:
    """GiB by holder. Empty if the cell was not traced, or if an old row lacks a holder."""
    traced = [
        ranks for row in cell.measured if (ranks := listed(row["peak_parts_bytes"])) and None not in ranks[0].values()
    ]
    if not traced:
        return {}
    most = max(traced[-1], key=lambda rank: sum(rank.values()))
    return {part: most[part] / GIB for part in HOLDERS}


def _ends_gib(cell: Cell) -> dict[str, float]:
    """GiB at the end of each phase, on the rank that holds most then. Empty if unknown."""
    known = [ranks for row in cell.measured if (ranks := listed(row["phase_end_bytes"]))]
    return {label: max(rank[phase] for rank in known[-1]) / GIB for phase, label in ENDS.items()} if known else {}


def _with_capacity(panel: Panel) -> Panel:
    """Add the device's capacity to a panel if a sequence came near it: else the line would flatten all others. Cells
    that did not fit have no peak, so edges go."""
    limit = capacity_gib(panel.cells[0])
    most = max((memory_gib(c) or 0.0 for c in panel.cells), default=0.0)
    return replace(panel, limit=limit if limit is not None and most > limit / 8 else None, edges=())


def _brackets(settings: Sequence[Setting], look: Look) -> list[Plot]:
    """One bar per method and number of GPUs, the longest first, for settings in which something ran out of memory or
    was tested for its fit. An arrow means that nothing longer ran out. The axis is linear: on a logarithmic one the two
    ends of a 4% bracket would coincide."""
    found = longest(settings)
    if found is None:
        return []
    named = sorted(zip(found.names, found.limits, strict=True), key=lambda each: _lengths(each[1])[0])
    wide = look.width_in > 5
    lines = [f"{name}{', fit only' if is_fit_only(limit) else ''}" for name, limit in named]
    numbers = [ends(limit)[0] if limit.is_open else "[{}, {}]".format(*ends(limit)) for _, limit in named]
    if not wide:
        lines = [f"{name}: {number}" for name, number in zip(lines, numbers, strict=True)]
    labels = [wrapped(name, 58 if wide else 28) for name in lines]
    tallest = max(label.count("\n") for label in labels)
    figure = look.figure((ROW_IN + 0.03 + 0.125 * tallest) * len(named) + 0.85)
    axis = figure.subplots()
    handles: dict[str, Artist] = {}
    across = axis.get_yaxis_transform()  # x from 0 to 1
    for place, (_, limit) in enumerate(named):
        fits, fails = _lengths(limit)
        if limit.largest_ok is not None:
            ran = limit.largest_ok
            axis.barh(place, fits, height=0.6, **bar(ran, colour(ran)))
            of = ", of a library" * ran.is_library + ", by one real rank" * is_modelled(ran)
            handles.setdefault(f"fits{of}", Patch(**bar(ran, GREY)))
        if limit.is_open:
            axis.annotate("", (1, place), (fits, place), xycoords=across, textcoords="data", arrowprops=OPEN)
            handles[f"the edge is {NOT_REACHED}"] = Line2D([], [], marker=">", color="#999999", ls=":")
        whose = f", {limit.exhausted_memory}" if limit.exhausted_memory else ""
        if fails is not None:
            hatch = "...." if whose else "/////"
            axis.barh(place, fails - fits, left=fits, height=0.6, facecolor="white", edgecolor="#777777", hatch=hatch)
            axis.plot([fails, fails], [place - 0.42, place + 0.42], color=BLACK, lw=0.8)
            unknown = Patch(facecolor="white", edgecolor="#777777", hatch=hatch)
            handles.setdefault(f"not known, up to what does not fit{whose}", unknown)
        elif limit.smallest_oom is not None:  # at a shorter length
            (drawn,) = axis.plot([limit.smallest_oom.asked["seq_len"]], [place], marker="X", ls="none", **SHORTER)
            handles.setdefault(f"did not fit{whose}", drawn)
        if wide:
            axis.text(1.02, place, numbers[place], fontsize=6.5, va="center", transform=across)
    axis.set_yticks(range(len(named)), labels, fontsize=6.5)
    axis.set_ylim(-0.7, len(named) - 0.3)
    axis.grid(axis="y", visible=False)
    most = max(cell.asked["seq_len"] for limit in found.limits for cell in limit.cells)
    tokens_axis(axis, most, look.width_in / 3, room=0.12 if any(limit.is_open for limit in found.limits) else 0.03)
    axis.set_xlabel("tokens")
    legend(figure, dict(sorted(handles.items(), key=lambda each: not each[0].startswith("fits"))), look)
    caption = (
        f"{found.title}. The longest sequence that fits, as a bracket; an arrow: nothing longer has a row that "
        "says whether it fits. Fit only: most layers' attention was left out."
    )
    data = pd.DataFrame([_data(name, limit) for name, limit in reversed(named)])
    return [Plot("memory", "longest", figure, caption, data)]


SHORTER: dict[str, Any] = {"color": BLACK, "ms": 6}
OPEN = {"arrowstyle": "-|>", "color": "#999999", "ls": ":", "lw": 1.0, "shrinkA": 3, "shrinkB": 0}


def _lengths(limit: Limit) -> tuple[int, int | None]:
    """(tokens that fit, or 0 if none are known to; tokens that do not fit, None if no longer length failed)."""
    fits, fails = (end and end.asked["seq_len"] for end in (limit.largest_ok, limit.smallest_oom))
    return fits or 0, fails if fails is not None and fails > (fits or 0) else None


def _data(name: str, limit: Limit) -> dict[str, object]:
    ran, failed = limit.largest_ok, limit.smallest_oom
    lengths = {"longest_ok": ran and ran.asked["seq_len"], "shortest_oom": failed and failed.asked["seq_len"]}
    ids = " ".join(trial_ids(cell) for cell in limit.cells)
    lengths |= {"edge_reached": not limit.is_open, "out_of": limit.exhausted_memory}
    tried = {"tries": tries(limit), "fit_only": is_fit_only(limit), "trial_ids": ids}
    return {"method": words.method(limit.cells[0]), "sp_size": limit.sp_size, "line": name, **lengths, **tried}
