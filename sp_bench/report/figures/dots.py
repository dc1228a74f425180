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
ALIKE_RATIO = 1.1  # lines of values within it lie on each other
FEW_TICKS = 3  # of panels beside each other
PANEL_IN = 1.7  # least width of one of several
TITLE_IN = 0.5  # of a panel's title and the labels of its axis
SPARE_IN = 0.75  # title, and what the axis shows
Key = tuple[int, int]  # sp_size, seq_len


def is_dots(cells: Sequence[Cell], quantity: Quantity) -> bool:
    """Whether each length has a panel with a row for each series, and no lines over lengths are drawn: there are none,
    or they would hide each other and all their cells fit."""
    lengths, names = {c.asked["seq_len"] for c in cells}, {c.series for c in cells}
    if len(lengths) == 1 or (len(lengths) == 2 and len(names) > FEW_SERIES):
        return True
    lines = _lines(cells)
    return len(_fitting(lines, fitted_names([*names])[1])) == len(lines) and _alike(cells, quantity)


def _alike(cells: Sequence[Cell], quantity: Quantity) -> bool:
    """Whether several series ran at each place, with about the same value, and none ran out of memory: over lengths,
    lines say better where that is."""
    places: dict[Key, list[float | None]] = {}
    for cell in cells:
        places.setdefault((cell.asked["sp_size"], cell.asked["seq_len"]), []).append(quantity.middle(cell))
    alike = all(_about_equal([v for v in values if v is not None]) for values in places.values())
    return alike and not any("oom" in c.statuses for c in cells)


def _about_equal(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) < ALIKE_RATIO * min(values)


def _lines(cells: Sequence[Cell]) -> list[dict[Key, list[Cell]]]:
    """Panels in lines: lengths beside each other, or below each other where the figure is too narrow."""
    groups: dict[Key, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.asked["sp_size"], cell.asked["seq_len"]), []).append(cell)
    lengths = sorted({seq_len for _, seq_len in groups})
    if (1 - NAMES_SHARE) * width_in() > PANEL_IN * len(lengths):
        sizes = sorted({sp_size for sp_size, _ in groups})
        return [{(n, seq_len): groups.get((n, seq_len), []) for seq_len in lengths} for n in sizes]
    return [{key: groups[key]} for key in sorted(groups)]


def _names(line: Mapping[Key, Sequence[Cell]]) -> set[str]:
    return {c.series for cells in line.values() for c in cells}


def _fitting(lines: Sequence[Mapping[Key, Sequence[Cell]]], row_in: float) -> list[int]:
    rows = {place: len(_names(line)) for place, line in enumerate(lines)}
    return fitting(rows, row_in, TITLE_IN + 0.6 * row_in, SPARE_IN)


def draw_dots(cells: Sequence[Cell], style: Mapping[str, Style], quantity: Quantity) -> tuple[Figure, list[Cell]]:
    """The figure, and the cells that it shows: those of the largest sp_sizes and lengths that fit one page. Each length
    has its own scale."""
    lines = _lines(cells)
    texts, row_in = fitted_names([c.series for c in cells])
    lines = [lines[place] for place in _fitting(lines, row_in)]
    shown = [c for line in lines for group in line.values() for c in group]
    heights = [len(_names(line)) + 0.6 for line in lines]
    height = row_in * sum(heights) + TITLE_IN * len(heights) + SPARE_IN
    figure = Figure(figsize=(width_in(), height), layout="constrained")
    axes = figure.subplots(len(lines), len(lines[0]), squeeze=False, height_ratios=heights)
    for panels, line in zip(axes, lines, strict=True):
        names = sorted(_names(line), key=lambda name: style[name].order)
        for panel, (key, group) in zip(panels, line.items(), strict=True):
            panel.set_title(f"sp_size {key[0]}, {whole(key[1])} tokens", loc="left")
            _draw_panel(panel, group, name_rows(panel, texts, names), style, quantity)
            panel.tick_params(axis="y", labelleft=panel is panels[0])
            values = [p for c in shown if c.asked["seq_len"] == key[1] for p in quantity.points(c).values()]
            scale_values(panel, "x", values, ticks=TICKS if len(line) == 1 else FEW_TICKS)
    for panel in axes[-1]:
        panel.set_xlabel(quantity.label.replace("\n", " "))
    return figure, shown


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
