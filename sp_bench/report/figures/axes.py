"""Axes of panels: lengths with a tick at each one that ran, values from zero or logarithmic, names beside rows."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log2
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from sp_bench.report.figures.legends import points, row_inches, text_inches, wrapped
from sp_bench.report.figures.venues import width_in

LOG_RATIO = 12  # a wider range of values gets a logarithmic axis
DECADES_RATIO = 1000  # a still wider one only labels of whole decades
TICKS = 5
CLOSE_RATIO = 2  # dots of a narrower range get an axis that begins above zero
MARGIN = 0.35  # octaves on both sides of the lengths
BINARY = ((2**20, "Mi"), (2**10, "Ki"))
SEQ_LEN = "seq_len (tokens, Ki = 1,024)"
NAMES_SHARE = 0.36  # of a figure's width: most that names beside its panels take
TALLEST_IN = 8.6  # of a figure that fits a page with its caption


def short(length: int) -> str:
    """131,072 -> 128Ki. Exact: what is no multiple of 1,024 is written out."""
    return next((f"{length // size:,}{unit}" for size, unit in BINARY if length and length % size == 0), f"{length:,}")


def scale_lengths(panel: Axes, lengths: Sequence[int], room_in: float) -> None:
    """Logarithmic to base 2, a label at every length that was run: upright where they would meet on `room_in` inches,
    and where even those would, from the longest down as many as fit."""
    known = sorted(set(lengths))
    low, high = known[0] / 2**MARGIN, known[-1] * 2**MARGIN
    panel.set_xscale("log", base=2)
    panel.set_xlim(low, high)
    octave_in = room_in / log2(high / low)
    nearest_in = min((octave_in * log2(b / a) for a, b in pairwise(known)), default=room_in)
    upright = nearest_in < max(text_inches(f"{short(n)}n", "xtick.labelsize") for n in known)
    line_in = 1.3 * points("xtick.labelsize") / 72
    labelled: list[int] = []
    for length in reversed(known):
        if not labelled or not upright or octave_in * log2(labelled[-1] / length) > line_in:
            labelled.append(length)
    panel.xaxis.set_major_locator(FixedLocator(labelled))
    panel.xaxis.set_major_formatter(FixedFormatter([short(n) for n in labelled]))
    panel.xaxis.set_minor_locator(FixedLocator(known) if len(labelled) < len(known) else NullLocator())
    panel.xaxis.set_minor_formatter(NullFormatter())
    if upright:
        panel.tick_params(axis="x", labelrotation=90)


def is_close(values: Sequence[float]) -> bool:
    """Whether the axis of dots with these values begins above zero."""
    positive = [v for v in values if v > 0]
    return bool(positive) and max(positive) < CLOSE_RATIO * min(positive)


def scale_values(panel: Axes, axis: str, values: Sequence[float], strip: float = 0.0, ticks: int = TICKS) -> None:
    """From zero, or logarithmic where values span more than LOG_RATIO; all of them below the uppermost `strip`; about
    `ticks` labels, fewer than TICKS for a narrow panel.

    Dots, along x, say their value by place and not by length: close ones get an axis that begins above zero."""
    positive = [v for v in values if v > 0]
    if not positive:
        return
    along: Any = panel.yaxis if axis == "y" else panel.xaxis
    set_scale, set_limits = (panel.set_yscale, panel.set_ylim) if axis == "y" else (panel.set_xscale, panel.set_xlim)
    low, high, room = min(positive), max(positive), 1 - strip
    if high > LOG_RATIO * low:
        bottom, top = low / 1.5, 1.5 * high
        set_scale("log")
        set_limits(bottom, bottom * (top / bottom) ** (1 / room))
        few = ((1, 5), (2,)) if ticks < TICKS else ((1, 2, 5), ())
        labelled, unlabelled = ((1,), (2, 5)) if high > DECADES_RATIO * low else few
        along.set_major_locator(LogLocator(10, subs=labelled))
        along.set_minor_locator(LogLocator(10, subs=unlabelled) if unlabelled else NullLocator())
    elif axis == "x" and is_close(positive):
        margin = 0.15 * max(high - low, 0.1 * high)
        top = high + margin
        set_limits(low - margin, top)
        along.set_major_locator(MaxNLocator(ticks))
    else:
        top = high * 1.12
        set_limits(0, top / room)
        along.set_major_locator(FixedLocator([v for v in MaxNLocator(ticks).tick_values(0, top / room) if v <= top]))
    along.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}" if value <= top else ""))
    along.set_minor_formatter(NullFormatter())


def fitted_names(names: Sequence[str], share: float = NAMES_SHARE) -> tuple[dict[str, str], float]:
    """(name -> name wrapped to that share of the figure's width, inches of a row that has it beside it)."""
    texts = {name: wrapped(name, share * width_in(), "ytick.labelsize") for name in names}
    return texts, row_inches(list(texts.values()) or [""])


def name_rows(panel: Axes, texts: Mapping[str, str], names: Sequence[str]) -> dict[str, int]:
    """Names beside a panel, the first on top; name -> its place on y."""
    places = {name: place for place, name in enumerate(reversed(names))}
    panel.set_yticks(list(places.values()), [texts[name] for name in places])
    panel.set_ylim(-0.7, len(names) - 0.3)
    panel.grid(axis="y", visible=False)
    return places


def fitting(panels: Mapping[int, int], row_in: float, panel_in: float, spare_in: float) -> list[int]:
    """The panels that fit one page, the last first: `panels` maps each to its rows. At least the last one."""
    kept: list[int] = []
    left_in = TALLEST_IN - spare_in
    for panel in sorted(panels, reverse=True):
        left_in -= panels[panel] * row_in + panel_in
        if kept and left_in < 0:
            break
        kept.append(panel)
    return sorted(kept)
