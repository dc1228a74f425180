"""The map of who wins: a tile for each (seq_len, sp_size) with the method of the lowest median step and the second's
time over it, said to be ahead only where that is proven."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sp_bench.report.cells import Cell
from sp_bench.report.figures.drawings import Plot, about, trial_ids
from sp_bench.report.figures.legends import LEADING, legend, points, wrapped
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import width_in
from sp_bench.report.formats import whole
from sp_bench.report.ratios import WITHOUT_INTERVAL, times
from sp_bench.report.winners import Place, Win, places

MAX_LENGTHS, MAX_SIZES = 12, 6  # lines and columns of tiles
PROVEN, UNPROVEN = 0.55, 0.22  # of the method's colour, the rest white
MAX_METHODS = 5  # that a tile names as out of memory
BESIDE = 0.95  # inches beside the tiles
HATCH = "////"
SIZE = "ytick.labelsize"  # of the texts in tiles
TITLE = "Lowest median step time, and the second's over it"
NO_WIN: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.75", "linewidth": 0.8}
CAPTION = (
    "Fastest method by median step time, and step time of the second, the best of another method, over its own. Full "
    "colour: the interval of the paired ratio of every other method's best to it is above 1. Hatched and light: not "
    f"proven, an interval contains 1 or there is none ({WITHOUT_INTERVAL}). White: no two methods ran. No tile: "
    "not tried. {kernels}"
)


def draw_winners(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """None with fewer than two methods or two places at which two of them ran."""
    found = places(cells)
    if sum(place.win is not None for place in found) < 2:
        return None
    lengths, sizes = sorted({p.seq_len for p in found}), sorted({p.sp_size for p in found if _is_open(p, found)})
    kept_lengths, kept_sizes = lengths[-MAX_LENGTHS:], sizes[-MAX_SIZES:]
    shown = [p for p in found if p.seq_len in kept_lengths and p.sp_size in kept_sizes]
    words = ""
    if len(lengths) > MAX_LENGTHS or len(sizes) > MAX_SIZES:
        words = f" The {len(kept_lengths)} longest seq_lens and {len(kept_sizes)} largest sp_sizes are drawn."
    kernels = sorted({str(p.win.winner.asked["kernel"]) for p in shown if p.win})
    caption = CAPTION.format(kernels=f"Methods are compared on one kernel ({', '.join(kernels)}).") + words
    data = pd.DataFrame([_data(place) for place in shown])
    sources = tuple({c.cell_id: c for p in shown for c in (*p.measured, *p.out_of_memory)}.values())
    return Plot(_figure(shown, kept_lengths, kept_sizes, style), caption, data, sources)


def _is_open(place: Place, every: Sequence[Place]) -> bool:
    """Whether any length at its sp_size was a contest: one rank, where only `single` runs, is not."""
    return any(p.win is not None for p in every if p.sp_size == place.sp_size)


def _figure(shown: Sequence[Place], lengths: Sequence[int], sizes: Sequence[int], style: Mapping[str, Style]) -> Figure:
    name = _naming(shown)
    texts = {(p.sp_size, p.seq_len): _text(p, (width_in() - BESIDE) / len(sizes), name) for p in shown}
    line = LEADING * points(SIZE) / 72
    heights = [max(t.count("\n") + 1 for (_, n), t in texts.items() if n == length) for length in lengths]
    tops = list(accumulate(height + 0.9 for height in heights))
    figure = Figure(figsize=(width_in(), line * tops[-1] + 1.0), layout="constrained")
    panel = figure.subplots()
    panel.set_title(TITLE)
    for place in shown:
        turn = lengths.index(place.seq_len)
        low, high = tops[turn] - heights[turn] - 0.8, tops[turn] - 0.1
        _tile(panel, place, sizes.index(place.sp_size), (low, high), style)
        text = texts[place.sp_size, place.seq_len]
        panel.text(
            sizes.index(place.sp_size), (low + high) / 2, text, ha="center", va="center", size=points(SIZE),
            linespacing=LEADING * 0.95,
        )  # fmt: skip
    panel.set_xticks(range(len(sizes)), [whole(n) for n in sizes])
    panel.set_yticks([top - (h + 0.9) / 2 for top, h in zip(tops, heights, strict=True)], [whole(n) for n in lengths])
    panel.set_xlim(-0.5, len(sizes) - 0.5)
    panel.set_ylim(0, tops[-1])
    panel.set_xlabel("sp_size (ranks)")
    panel.set_ylabel("seq_len (tokens)")
    panel.tick_params(length=0)
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)
    handles = _key(shown, style)
    legend(figure, handles, [str(handle.get_label()) for handle in handles], 6)
    return figure


def _key(shown: Sequence[Place], style: Mapping[str, Style]) -> list[Patch]:
    won = {str(p.win.winner.asked["method"]): style[p.win.winner.series] for p in shown if p.win}
    by_order = sorted(won.items(), key=lambda method: method[1].order)
    handles = [Patch(color=_tint(look, PROVEN), label=name) for name, look in by_order]
    if any(p.win and not p.win.proven for p in shown):
        handles.append(Patch(facecolor="#ededed", edgecolor="0.65", hatch=HATCH, lw=0, label="lead not proven"))
    if any(p.win is None for p in shown):
        handles.append(Patch(**NO_WIN, label="no contest"))
    return handles


def _tile(panel: Axes, place: Place, turn: int, ends: tuple[float, float], style: Mapping[str, Style]) -> None:
    corner, high = (turn - 0.49, ends[0]), ends[1] - ends[0]
    if place.win is None:
        panel.add_patch(Rectangle(corner, 0.98, high, **NO_WIN))
        return
    look, proven = style[place.win.winner.series], place.win.proven
    hatch = {} if proven else {"hatch": HATCH, "edgecolor": _tint(look, 0.35)}
    face = _tint(look, PROVEN if proven else UNPROVEN)
    panel.add_patch(Rectangle(corner, 0.98, high, facecolor=face, linewidth=0, **hatch))


def _tint(look: Style, share: float) -> tuple[float, float, float]:
    """Between white and the method's colour: black text stays legible on it."""
    red, green, blue = (1 - share * (1 - value) for value in to_rgb(look.colour))
    return red, green, blue


def _naming(shown: Sequence[Place]) -> Callable[[Cell], str]:
    """What tiles call a cell: without its kernel where all that are compared have one, which the caption says."""
    kernels = {cell.asked["kernel"] for p in shown if p.win for cell in (p.win.winner, p.win.second)}
    return (lambda cell: cell.name.series_but_kernel) if len(kernels) == 1 else (lambda cell: cell.series)


def _text(place: Place, inches: float, name: Callable[[Cell], str]) -> str:
    """Method, lead, and who was out of memory, in lines as wide as a tile."""
    failed = _methods(place.out_of_memory)
    if place.win is None:
        ran = _methods(place.measured)
        lines = [f"only {ran}" if ran else ""]
    else:
        lines = [name(place.win.winner), _lead(place.win, name)]
    lines.append(f"out of memory: {failed}" if failed else "")
    return "\n".join(wrapped(text, inches - 0.15, SIZE) for text in lines if text)


def _lead(win: Win, name: Callable[[Cell], str]) -> str:
    """The lead over the second, and over whom it is not proven: whose paired ratio's interval is not above 1."""
    second, doubtful = name(win.second), win.unproven_against
    if win.second not in doubtful:
        others = f", not proven against {_methods(doubtful)}" if doubtful else ""
        return f"{times(win.lead)} ahead of {second}{others}"
    return f"{second}: {times(win.lead)}, {'not told apart' if win.paired else 'no interval'}"


def _methods(cells: Sequence[Cell]) -> str:
    names = sorted({str(cell.asked["method"]) for cell in cells})
    return ", ".join(names) if len(names) <= MAX_METHODS else f"{len(names):,} methods"


def _data(place: Place) -> dict[str, Any]:
    """The tile. Without a contest only what ran and what was out of memory is said."""
    win, cells = place.win, (*place.measured, *place.out_of_memory)
    interval = win.paired.interval if win and win.paired else None
    leading = about(win.winner if win else cells[0])
    if win is None:
        leading |= dict.fromkeys(("series", "method", "kernel"))
    return (
        leading
        | {"step_ms": win and win.winner.median_step_ms, "second": win and win.second.series}
        | {"second_step_ms": win and win.second.median_step_ms, "lead": win and win.lead}
        | {"lead_interval_low": interval and interval.low, "lead_interval_high": interval and interval.high}
        | {"coverage": interval and interval.coverage, "proven": win and win.proven}
        | {"not_proven_against": _names(win.unproven_against if win else ())}
        | {"ran": _names(place.measured), "out_of_memory": _names(place.out_of_memory)}
        | {"trial_ids": " ".join(filter(None, map(trial_ids, cells)))}
    )


def _names(cells: Sequence[Cell]) -> str:
    return ", ".join(cell.series for cell in cells)
