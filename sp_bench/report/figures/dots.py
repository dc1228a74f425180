"""Dots: a panel for each sp_size and seq_len and in it a row for each series. Nothing is joined, nothing overlaps."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from sp_bench.report.cells import Cell
from sp_bench.report.figures.axes import fitted_names, fitting, name_rows, scale_values
from sp_bench.report.figures.legends import oom_site, oom_words
from sp_bench.report.figures.marks import draw_marks
from sp_bench.report.figures.panels import Quantity, marks
from sp_bench.report.figures.styles import Style
from sp_bench.report.figures.venues import width_in
from sp_bench.report.formats import whole

FEW_SERIES = 4  # more of them at two lengths would hide each other
PANEL_IN = 0.34  # of a panel's title
SPARE_IN = 0.9  # title and label of the axis


def is_dots(cells: Sequence[Cell]) -> bool:
    """Whether each length has a panel with a row for each series, and no lines over lengths are drawn."""
    lengths, names = {c.asked["seq_len"] for c in cells}, {c.series for c in cells}
    return len(lengths) == 1 or (len(lengths) == 2 and len(names) > FEW_SERIES)


def draw_dots(cells: Sequence[Cell], style: Mapping[str, Style], quantity: Quantity) -> tuple[Figure, list[Cell]]:
    """The figure, and the cells that it shows: those of the largest sp_sizes and lengths that fit one page."""
    keys = sorted({(c.asked["sp_size"], c.asked["seq_len"]) for c in cells})
    groups = [[c for c in cells if (c.asked["sp_size"], c.asked["seq_len"]) == key] for key in keys]
    names = [sorted({c.series for c in group}, key=lambda s: style[s].order) for group in groups]
    texts, row_in = fitted_names([name for each in names for name in each])
    kept = fitting({place: len(each) for place, each in enumerate(names)}, row_in, PANEL_IN + 0.6 * row_in, SPARE_IN)
    heights = [len(names[place]) + 0.6 for place in kept]
    shown = [c for place in kept for c in groups[place]]
    height = row_in * sum(heights) + PANEL_IN * len(heights) + SPARE_IN
    figure = Figure(figsize=(width_in(), height), layout="constrained")
    axes = figure.subplots(len(kept), 1, sharex=True, squeeze=False, height_ratios=heights).flat
    for panel, place in zip(axes, kept, strict=True):
        rows = name_rows(panel, texts, names[place])
        for cell in groups[place]:
            look, row = style[cell.series], rows[cell.series]
            draw_marks(panel, marks(cell, quantity, row), look, across=True)
            if "oom" in cell.statuses:
                where = {"transform": panel.get_yaxis_transform(), "ha": "right", "va": "center"}
                panel.text(0.99, row, oom_words(oom_site(cell)), color=look.colour, size=7, **where)
        panel.grid(axis="y", visible=True)
        panel.set_title(f"sp_size {keys[place][0]}, seq_len {whole(keys[place][1])} tokens", loc="left")
    scale_values(figure.axes[0], "x", [p for c in shown for p in quantity.points(c).values()])
    figure.axes[-1].set_xlabel(quantity.label.replace("\n", " "))
    return figure, shown
