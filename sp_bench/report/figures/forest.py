"""Paired ratios as a forest plot: one line per place and campaign. The caption counts signs over campaigns."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from sp_bench.analysis import identifiers, words
from sp_bench.analysis.ratios import decimals
from sp_bench.analysis.settings import Setting
from sp_bench.analysis.signs import RIVALS, Sign, counts, signs
from sp_bench.analysis.words import drawn, is_packed, pack
from sp_bench.report.figures.panels import ROW_IN
from sp_bench.report.figures.style import GREY, NO_INTERVAL, Look, Plot, explained, legend, mark, tokens, wrapped

MOST_LINES = 44  # of one figure: those with intervals and of large places go first


def draw(settings: Sequence[Setting], look: Look) -> list[Plot]:
    places: dict[int, tuple[str, dict[str, tuple[Sign, float]]]] = {}
    for rival in RIVALS:
        for sign in signs(settings, rival):
            if (ratio := sign.ratio) is not None:
                places.setdefault(id(sign.place), (_label(sign, settings), {}))[1][rival] = sign, ratio
    ordered = sorted(places.values(), key=lambda each: not any(s.paired for s, _ in each[1].values()))[:MOST_LINES]
    if not ordered:
        return []
    smallest = settings[0].smallest
    width = 70 if look.width_in > 5 else 25
    labels = [wrapped(label, width) for label, _ in reversed(ordered)]
    tallest = max(label.count("\n") + 1 for label in labels)
    figure = look.figure(max(ROW_IN, 0.115 * tallest + 0.03) * max(4, len(ordered)) + 1.05)
    axis = figure.subplots()
    handles: dict[str, Line2D] = {}
    data = []
    axis.axvspan(1 - smallest, 1 + smallest, color="#ececec", lw=0)
    axis.axvline(1, color="#555555", lw=0.8)
    for place, (label, rivals) in enumerate(reversed(ordered)):
        for i, (rival, (sign, ratio)) in enumerate(rivals.items()):
            y = place + 0.22 * ((len(rivals) - 1) / 2 - i)
            paired = sign.paired
            style: dict[str, Any] = {**mark(sign.rival), "ms": 4, **(NO_INTERVAL if paired is None else {})}
            if paired is not None:
                axis.plot([paired.interval.low, paired.interval.high], [y, y], color=style["color"], lw=1.3)
            axis.plot([ratio], [y], **style)
            handles.setdefault(f"{words.METHODS[rival]} / Ulysses", Line2D([], [], **mark(sign.rival, 0)))
            low, high = (paired.interval.low, paired.interval.high) if paired else (None, None)
            data.append({"place": label, "method": words.method(sign.rival), "over": words.method(sign.ulysses),
                         "ratio": ratio, "low": low, "high": high})  # fmt: skip
    numbers = [[ratio for _, ratio in rivals.values()] for _, rivals in reversed(ordered)]
    shown = [v for line in data for v in (line["ratio"], line["low"], line["high"]) if v is not None]
    low, high = min(*shown, 1 - smallest), max(*shown, 1 + smallest)
    _ratio_axis(axis, low, high, max(map(len, numbers)), look)
    for place, ratios in enumerate(numbers):
        text = " / ".join(f"{ratio:.{decimals(ratio)}f}" for ratio in ratios)
        axis.annotate(text, (1, place), (-1, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", va="center", fontsize=6.5)  # fmt: skip
    axis.set_yticks(range(len(ordered)), labels, fontsize=6.5)
    axis.set_ylim(-0.7, len(ordered) - 0.3)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(
        wrapped(
            f"step time over that of Ulysses (right: Ulysses is faster; grey: within {smallest:.0%})",
            int(look.width_in * 9),
        )
    )
    handles["fewer than 6 pairs, no interval"] = Line2D([], [], marker="o", color=GREY, ls="none", **NO_INTERVAL)
    legend(figure, handles, look)
    tallies = [f" {count.where}: {count.words}." for count in counts(settings)[:2]]
    caption = (
        "Step times over that of Ulysses, each method's fastest variant on one kernel. Lines: intervals of paired "
        "ratios. Numbers: of a line's marks, the upper one first."
    )
    drawn = [sign.rival for _, rivals in ordered for sign, _ in rivals.values()]
    return [Plot("ratios", "", figure, "".join([caption, explained(drawn), *tallies]), pd.DataFrame(data))]


def _ratio_axis(axis: Axes, low: float, high: float, numbers: int, look: Look) -> None:
    """Logarithmic: 2 and 0.5 are equally far from 1. numbers: how many are printed at its right end."""
    axis.set_xscale("log")
    room = (0.05 + 0.1 * numbers) * (1 if look.column == 2 else 2)
    axis.set_xlim(low * (low / high) ** 0.03, high * (high / low) ** room)
    steps = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 6)
    wide = [t for t in steps if low / 1.01 <= t <= high * 1.01]
    kept: list[float] = [1]
    apart = 0.075 if look.column == 2 else 0.16
    for tick in sorted(wide, key=lambda t: abs(math.log(t))):  # from 1 outwards, as far as labels have room
        if all(abs(math.log(tick / other)) > apart * math.log(high / low) for other in kept):
            kept.append(tick)
    axis.xaxis.set_major_locator(FixedLocator(kept))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _label(sign: Sign, settings: Sequence[Setting]) -> str:
    """The parts of the place in which places differ, and the campaign."""
    first = sign.place.first
    heads = {(c.asked["num_heads"], c.asked["num_kv_heads"]) for s in settings for p in s.contests for c in p.cells}
    sizes = {c.asked["sp_size"] for s in settings for p in s.contests for c in p.cells}
    packs = any(is_packed(c) for s in settings for p in s.contests for c in p.cells)
    parts = []
    if first.asked["workload"] == "train_step":
        beside = [s for s in settings if s.contests and s.cells[0].asked["workload"] == "train_step"]
        campaigns = ", ".join(sign.setting.campaigns)
        parts += ["training step", *(part for part in sign.setting.apart(beside) if part != campaigns)]
    parts += ["forward" if first.asked["pass_kind"] == "forward" else "", words.unusual(first, identifiers.LAUNCH)]
    parts.append(f"{first.asked['num_heads']}/{first.asked['num_kv_heads']} heads" if len(heads) > 1 else "")
    parts += [
        f"{tokens(first.asked['seq_len'])} tokens",
        drawn(first) if packs else "",
        pack(first),
        words.processors(first) if len(sizes) > 1 or not first.all_ranks_were_there else "",
        words.link(first),
        words.fabric(first.asked["fabric"]) if len(sign.setting.fabrics) > 1 else "",
        words.kernel(first),
    ]
    campaigns = sorted({str(row["folder"]) for row in sign.ulysses.rows})
    several = len({str(row["folder"]) for s in settings for c in s.cells for row in c.rows}) > 1
    return ", ".join(filter(None, parts)) + (f" ({', '.join(campaigns)})" if several else "")
