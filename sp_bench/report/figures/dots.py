"""Dots: a panel for each sp_size and seq_len and in it a row for each series. Nothing is joined, nothing overlaps."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sp_bench.report.cells import Cell
from sp_bench.report.figures.axes import NAMES_SHARE, TICKS, fitted_names, fitting, name_rows, scale_values
from sp_bench.report.figures.legends import oom_site, oom_words
from sp_bench.report.figures.marks import draw_marks
from sp_bench.report.figures.panels import Quantity, marks
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import width_in
from sp_bench.report.formats import whole

FEW_SERIES = 4  # more of them at two lengths would hide each other
FEW_LENGTHS = 4  # panels of more would be many, and lines over them say how a quantity grows
ALIKE_RATIO = 1.1  # lines of values within it lie on each other
FEW_TICKS = 3  # of panels beside each other
PANEL_IN = 1.7  # least width of one of several
TITLE_IN = 0.5  # of a panel's title and the labels of its axis
SPARE_IN = 0.75  # title, and what the axis shows
Key = tuple[int, int]  # sp_size, seq_len


def is_dots(cells: Sequence[Cell], quantity: Quantity) -> bool:
    """Whether each length has a panel with a row for each series, and no lines over lengths are drawn: they would hide
    each other, or there are none."""
    lengths, names = {c.asked["seq_len"] for c in cells}, {c.series for c in cells}
    few = len(lengths) <= FEW_LENGTHS and _alike(cells, quantity)
    return few or len(lengths) == 1 or (len(lengths) == 2 and len(names) > FEW_SERIES)


def _alike(cells: Sequence[Cell], quantity: Quantity) -> bool:
    """Whether all that ran at one place have about the same value there; where memory ran out, lines say it better."""
    places: dict[Key, list[float]] = {}
    for cell in cells:
        if (middle := quantity.middle(cell)) is not None:
            places.setdefault((cell.asked["sp_size"], cell.asked["seq_len"]), []).append(middle)
    several = [values for values in places.values() if len(values) > 1]
    alike = all(max(values) < ALIKE_RATIO * min(values) for values in several)
    return bool(several) and alike and not any("oom" in c.statuses for c in cells)


def draw_dots(cells: Sequence[Cell], style: Mapping[str, Style], quantity: Quantity) -> tuple[Figure, list[Cell]]:
    """The figure, and the cells that it shows: those of the largest sp_sizes and lengths that fit one page.

    Lengths are beside each other, or below each other where the figure is too narrow; each has its own scale."""
    groups: dict[Key, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.asked["sp_size"], cell.asked["seq_len"]), []).append(cell)
    lengths = sorted({seq_len for _, seq_len in groups})
    if (1 - NAMES_SHARE) * width_in() > PANEL_IN * len(lengths):
        lines = [[(n, seq_len) for seq_len in lengths] for n in sorted({sp_size for sp_size, _ in groups})]
    else:
        lines = [[key] for key in sorted(groups)]
    names = [_names([c for key in line for c in groups.get(key, [])], style) for line in lines]
    texts, row_in = fitted_names([c.series for c in cells])
    kept = fitting({place: len(each) for place, each in enumerate(names)}, row_in, TITLE_IN + 0.6 * row_in, SPARE_IN)
    shown = [c for place in kept for key in lines[place] for c in groups.get(key, [])]
    heights = [len(names[place]) + 0.6 for place in kept]
    height = row_in * sum(heights) + TITLE_IN * len(heights) + SPARE_IN
    figure = Figure(figsize=(width_in(), height), layout="constrained")
    axes = figure.subplots(len(kept), len(lines[0]), squeeze=False, height_ratios=heights)
    for line, place in zip(axes, kept, strict=True):
        for panel, key in zip(line, lines[place], strict=True):
            panel.set_title(f"sp_size {key[0]}, {whole(key[1])} tokens", loc="left")
            _draw_panel(panel, groups.get(key, []), name_rows(panel, texts, names[place]), style, quantity)
            panel.tick_params(axis="y", labelleft=panel is line[0])
            values = [p for c in shown if c.asked["seq_len"] == key[1] for p in quantity.points(c).values()]
            scale_values(panel, "x", values, ticks=TICKS if len(line) == 1 else FEW_TICKS)
    for panel in axes[-1]:
        panel.set_xlabel(quantity.label.replace("\n", " "))
    return figure, shown


def _names(cells: Sequence[Cell], style: Mapping[str, Style]) -> list[str]:
    return sorted({c.series for c in cells}, key=lambda name: style[name].order)


def _draw_panel(
    panel: Axes, cells: Sequence[Cell], rows: Mapping[str, int], style: Mapping[str, Style], quantity: Quantity
) -> None:
    for cell in cells:
        look, row = style[cell.series], rows[cell.series]
        draw_marks(panel, marks(cell, quantity, row), look, across=True)
        if "oom" in cell.statuses:
            where = {"transform": panel.get_yaxis_transform(), "ha": "right", "va": "center"}
            panel.text(0.99, row, oom_words(oom_site(cell)), color=look.colour, size=7, **where)
    panel.grid(axis="y", visible=True)
