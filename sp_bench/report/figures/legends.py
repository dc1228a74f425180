"""Legends that fit: columns from the widest label, and figures as wide as their longest name needs."""

from collections.abc import Mapping, Sequence
from functools import cache

from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from sp_bench.report.figures.styles import Style

LINE = 0.19  # inches of a line of a legend
BESIDE_NAMES = 4.2  # inches of a panel beside the names of its bars or dots
OUT_OF_MEMORY = "out of memory (a mark, not a value)"
SMALL = 0.833  # matplotlib's "small", of the font size


def text_inches(text: str, scale: float = 1.0) -> float:
    """Width of a line of text at `scale` times the font size."""
    return _points_wide(text, rcParams["font.family"][0], scale * rcParams["font.size"]) / 72


@cache
def _points_wide(text: str, family: str, size: float) -> float:
    return float(TextPath((0, 0), text, prop=FontProperties(family=family, size=size)).get_extents().width)


def wide_enough(names: Sequence[str], beside: float = BESIDE_NAMES) -> float:
    """Inches of a figure whose panels stand beside `names`."""
    return beside + 0.3 + max(map(text_inches, names), default=0.0)


def columns_within(labels: Sequence[str], width: float, most: int) -> tuple[int, float]:
    """(columns of a legend, at most `most`; inches of the figure, at least `width`): one column is never cut off."""
    em = SMALL * rcParams["font.size"] / 72
    column = max((text_inches(f" {label}", SMALL) for label in labels), default=0.0)
    column += em * (rcParams["legend.handlelength"] + rcParams["legend.handletextpad"] + 0.5)
    edge, gap = em * 2 * (rcParams["legend.borderpad"] + rcParams["legend.borderaxespad"]), em * 2.0
    fitting = int((width - edge + gap) / (column + gap))
    return max(1, min(most, fitting, len(labels))), max(width, column + edge)


def legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], columns: int) -> None:
    """Below the panels. A label that begins with an underscore would be left out, so none does."""
    figure.legend(handles, [f" {label}" for label in labels], loc="outside lower center", ncols=columns, frameon=False)


def series_handles(names: Sequence[str], style: Mapping[str, Style], *, joined: bool = True) -> list[Artist]:
    """A mark for each series, with its line where marks are `joined`."""
    width = 1.2 if joined else 0
    return [Line2D([], [], lw=width, **style[n].line, **style[n].marker(hollow=False)) for n in names]


def out_of_memory() -> Artist:
    return Line2D([], [], ls="", marker="x", mew=1.8, ms=6, color="0.3")
