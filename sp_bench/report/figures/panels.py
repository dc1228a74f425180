"""Panels of one quantity: lines over the length, or dots with values if there is one length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.settings import Setting
from sp_bench.formats import number
from sp_bench.report.figures.style import (
    BLACK,
    GREY,
    Look,
    Plot,
    about,
    explained,
    legend,
    length_axis,
    line,
    mark,
    trial_ids,
    wrapped,
)

MOST_PANELS = 12  # of one figure; the table has the rest
FEW = 3  # fewest lengths of a line
MOST_DOTTED = 8  # panels of dots
MOST_DOTS = 16  # lines of a panel of dots
MOST_APART = 4  # panels whose largest values differ by a larger factor have their own y axes
LEAST_SPREAD = 0.1  # least span of an axis of dots over its largest value, so that small differences look small
ROW_IN, PANEL_IN = 0.17, 1.75
LEAST_IN = 1.9  # width of a panel
OTHER = (
    {"marker": "|", "ms": 6, "mew": 1.3},
    {"marker": "+", "ms": 5},
)  # marks of a line's further values
Value = Callable[[Cell], float | None]
Interval = Callable[[Cell], tuple[float, float] | None]


@dataclass(frozen=True)
class Panel:
    title: str
    cells: tuple[Cell, ...]  # only those with the quantity
    roofs: Mapping[int, Cell]  # length -> the kernel alone
    limit: float | None = None  # draws a line across, such as the device's capacity
    edges: tuple[Cell, ...] = ()  # the shortest cell of each method that ran out of memory

    def at(self, length: int) -> "Panel":
        return replace(
            self,
            cells=tuple(c for c in self.cells if c.asked["seq_len"] == length),
            roofs={n: c for n, c in self.roofs.items() if n == length},
        )

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.asked["seq_len"] for cell in self.cells})


def panels(settings: Sequence[Setting], value: Value) -> list[Panel]:
    """One panel per setting, number of ranks, pack and kernel, on the fastest fabric; those with most cells first."""
    found = []
    for setting in settings:
        grouped: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in setting.cells:
            first = cell.asked["fabric"] == setting.fabrics[0] or (cell.asked["world_size"] or 1) == 1
            if cell.ok and cell.is_of_a_length and first and cell.is_comparable and value(cell) is not None:
                grouped.setdefault(_panel_key(cell), []).append(cell)
        failed = [limit.smallest_oom for limit in setting.limits if limit.smallest_oom and limit.is_bracket]
        for key, cells in sorted(grouped.items(), key=lambda item: (-len(item[1]), str(item[0]))):
            roofs = {c.asked["seq_len"]: setting.alone[c.cell_id] for c in cells if c.cell_id in setting.alone}
            first = cells[0]
            where = ", ".join(filter(None, [words.pack(first), words.processors(first), words.kernel(first)]))
            title = "\n".join(filter(None, [", ".join(setting.apart(settings)), where]))
            edges = tuple(cell for cell in failed if _panel_key(cell) == key)
            found.append(Panel(title, tuple(cells), roofs, edges=edges))
    return found


def _panel_key(cell: Cell) -> tuple[Any, ...]:
    return (cell.asked["world_size"], cell.asked["sp_size"], cell.name.pack, cell.asked["kernel"])


def shared_title(settings: Sequence[Setting]) -> str:
    """The options that all panels share, for the caption."""
    first, *others = settings
    shared = [part for part in first.parts if all(part in other.parts for other in others)]
    return f"{', '.join(shared)}. " if shared else ""


def methods_of(panel: Panel) -> dict[str, list[Cell]]:
    """Method -> the cells of its variant with the most lengths; among equals, the fastest at the longest."""
    variants: dict[str, dict[str, list[Cell]]] = {}
    for cell in panel.cells:
        variants.setdefault(words.plain_method(cell), {}).setdefault(words.method(cell), []).append(cell)
    chosen = {}
    for method, each in variants.items():
        name = min(
            each, key=lambda n: (-len(each[n]), max(each[n], key=lambda c: c.asked["seq_len"]).median_step_ms or 0, n)
        )
        chosen[method] = sorted(each[name], key=lambda c: c.asked["seq_len"])
    return chosen


def abreast(look: Look, count: int, least_in: float = LEAST_IN) -> int:
    """How many of `count` panels are side by side, each at least `least_in` inches wide if it can be."""
    return max(1, min(count, int(look.width_in / least_in)))


def grid(look: Look, count: int, height_in: float, least_in: float = LEAST_IN) -> tuple[Any, list[Axes]]:
    """A figure with `count` panels."""
    across = abreast(look, count, least_in)
    down = -(-count // across)
    figure = look.figure(height_in * down + 0.45)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for spare in axes[count:]:
        spare.remove()
    return figure, list(axes[:count])


def left_out(number_of_panels: int) -> str:
    """A caption's sentence on the panels beyond MOST_PANELS; empty without any."""
    return f" Panels that only the table has: {number_of_panels}." if number_of_panels > 0 else ""


def is_first(axis: Axes) -> bool:
    """Whether the axis is in the first column of its figure."""
    spec = axis.get_subplotspec()
    return spec is not None and spec.is_first_col()


def over_length(name: str, found: Sequence[Panel], value: Value, label: str, look: Look, caption: str) -> list[Plot]:
    """One figure of the panels with three lengths or more. The y axis begins at zero; panels share it unless their
    values differ much."""
    long = [panel for panel in found if len(panel.lengths) >= FEW]
    if not long:
        return []
    shown = long[:MOST_PANELS]
    caption += left_out(len(long) - MOST_PANELS) + explained(c for panel in shown for c in panel.cells)
    figure, axes = grid(look, len(shown), PANEL_IN)
    handles: dict[str, Line2D] = {}
    data = []
    for panel, axis in zip(shown, axes, strict=True):
        for method, cells in methods_of(panel).items():
            known = [(c, v) for c in cells if (v := value(c)) is not None]
            style = line(cells[0]) if cells[0].asked["method"] != "single" else {**line(cells[0]), "ls": ":"}
            (drawn,) = axis.plot([c.asked["seq_len"] for c, _ in known], [v for _, v in known], **style)
            handles.setdefault(method, drawn)
            edges = [edge for edge in panel.edges if words.method(edge) == words.method(cells[0])]
            for edge in edges:  # the line drops to it
                ends = [known[-1][0].asked["seq_len"], edge.asked["seq_len"]]
                axis.plot(ends, [known[-1][1], 0], color=style["color"], ls=":", lw=1.0)
                (cross,) = axis.plot(ends[1:], [0], color=style["color"], marker="x", mew=1.4, ls="none", clip_on=False)
                handles["out of memory"] = cross
            data += [
                {"panel": panel.title.replace("\n", ", "), **about(c), "value": v, "trial_ids": trial_ids(c)}
                for c, v in [*known, *((edge, None) for edge in edges)]
            ]
        if roofs := [(n, v) for n, c in sorted(panel.roofs.items()) if (v := value(c)) is not None]:
            (drawn,) = axis.plot([n for n, _ in roofs], [v for _, v in roofs], color=BLACK, lw=0.9, marker="*", ms=5)
            handles.setdefault("the kernel alone", drawn)
        if panel.limit is not None:
            axis.axhline(panel.limit, color=BLACK, lw=0.9)
        length_axis(axis, [*panel.lengths, *(c.asked["seq_len"] for c in panel.edges)], panel_in(look, len(axes)) - 0.5)
        axis.set_title(wrapped_title(panel.title, look, len(axes)), loc="left")
    tops = [axis.get_ylim()[1] for axis in axes]
    if max(tops) > MOST_APART * min(tops):
        caption += " The panels' y axes differ."
    else:
        tops = [max(tops)] * len(axes)
    for axis, top in zip(axes, tops, strict=True):
        axis.set_ylim(0, 1.06 * top)
        if is_first(axis):
            axis.set_ylabel(label)
        axis.set_xlabel("tokens")
    legend(figure, handles, look)
    return [Plot(name, "length", figure, caption, pd.DataFrame(data))]


def dots(name: str, found: Sequence[Panel], marks: Sequence[tuple[str, Value]], label: str, look: Look, caption: str,
         interval: Interval = lambda cell: None) -> list[Plot]:  # fmt: skip
    """One figure of the panels with one or two lengths, a panel for each: one line per method, values beside the dots.

    marks: (label, how to read it) of each dot of a line; the first is filled."""
    of_lengths = [panel.at(n) for panel in found if len(panel.lengths) < FEW for n in reversed(panel.lengths)]
    few = [panel for panel in of_lengths if len(panel.cells) > 1]
    if not few:
        return []
    shown = few[:MOST_DOTTED]
    caption += left_out(len(few) - MOST_DOTTED) + explained(c for panel in shown for c in panel.cells)
    main = marks[0][1]
    heights = []
    chosen = []
    names_in = 34 if look.width_in > 5 else 22
    for panel in shown:
        cells = sorted(panel.cells, key=lambda c: c.median_step_ms or 0.0)
        if len(cells) > MOST_DOTS:
            where = panel.title.replace("\n", ", ")
            caption += f" Slower ones that only the table has ({where}): {len(cells) - MOST_DOTS}."
            cells = cells[:MOST_DOTS]
        chosen.append(cells)
        tallest = max(wrapped(words.method(c), names_in).count("\n") for c in cells)
        heights.append((ROW_IN + 0.09 * tallest) * (len(cells) + bool(panel.roofs)) + 0.62)
    figure = look.figure(sum(heights) + 0.3)
    axes = figure.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": heights}).ravel()
    data = []
    handles: dict[str, Line2D] = {}
    for panel, cells, axis in zip(shown, chosen, axes, strict=True):
        alone = list({c.cell_id: c for c in panel.roofs.values()}.values())
        rows = [*cells, *(c for c in alone if main(c) is not None)]
        axis.set_xlim(*_span(panel, rows, marks, interval))
        for place, cell in enumerate(reversed(rows)):
            for i, (what, value, style) in enumerate(_dots_of(axis, place, cell, marks, interval(cell))):
                shape = {**style, "color": BLACK, "mfc": BLACK, "mec": BLACK} if i == 0 else style  # of any method
                handles.setdefault(what, Line2D([], [], **shape))
                line_of = {"panel": panel.title.replace("\n", ", "), **about(cell)}
                data.append({**line_of, "what": what, "value": value, "trial_ids": trial_ids(cell)})
        if panel.limit is not None:
            axis.axvline(panel.limit, color=BLACK, lw=0.9)
        axis.set_yticks(range(len(rows)), [wrapped(words.method(c), names_in) for c in reversed(rows)])
        axis.set_ylim(-0.6, len(rows) - 0.4)
        axis.grid(axis="y", visible=False)
        length = words.whole(panel.lengths[0])
        axis.set_title(wrapped_title(f"{panel.title}, {length} tokens", look, 1, 1.5), loc="left")
    axes[-1].set_xlabel(label)
    if len(marks) > 1:
        legend(figure, handles, look)
    return [Plot(name, "dots", figure, caption, pd.DataFrame(data))]


def _span(
    panel: Panel, rows: Sequence[Cell], marks: Sequence[tuple[str, Value]], interval: Interval
) -> tuple[float, float]:
    """Limits of an axis of dots: from 0 if the values differ much, with room for the text beside the largest."""
    values = [v for c in rows for _, read in marks if (v := read(c)) is not None]
    values += [bound for c in rows for bound in interval(c) or ()]
    if panel.limit is not None:
        values.append(panel.limit)
    low, high = min(values), max(values)
    spread = max(high - low, LEAST_SPREAD * high)
    begin = 0.0 if low < 0.6 * high else low - 0.35 * spread
    return begin, high + 0.22 * (max(high, low + spread) - begin)


def _dots_of(
    axis: Axes, place: int, cell: Cell, marks: Sequence[tuple[str, Value]], bounds: tuple[float, float] | None
) -> list[tuple[str, float, dict[str, Any]]]:
    """Draw a line of dots, with its interval and values. Returns (label, value, style) of each dot."""
    if bounds is not None:
        axis.plot(bounds, [place, place], color=mark(cell)["color"], lw=1.4, solid_capstyle="butt")
    known = [(what, v) for what, read in marks if (v := read(cell)) is not None]
    styles: list[dict[str, Any]] = [mark(cell), *({**other, "color": GREY, "ls": "none"} for other in OTHER)]
    styles = styles[: len(known)]
    for (_, value), style in zip(known, styles, strict=True):
        axis.plot([value], [place], **style)
    right = max([v for _, v in known] + ([bounds[1]] if bounds else []))
    text = " / ".join(number(v) for _, v in known)
    axis.annotate(text, (right, place), (5, 0), textcoords="offset points", va="center", fontsize=6.5)
    return [(what, value, style) for (what, value), style in zip(known, styles, strict=True)]


def panel_in(look: Look, number: int) -> float:
    """Width in inches of one of `number` panels."""
    return look.width_in / abreast(look, number)


def wrapped_title(title: str, look: Look, number: int, beside_in: float = 0.45) -> str:
    """The title of one of `number` panels."""
    share = panel_in(look, number)
    return "\n".join(wrapped(part, max(20, int((share - beside_in) * 15.5))) for part in title.split("\n"))
