"""Where a figure is printed: its exact width and its font sizes, for the page and for the venues of the field.

Fonts are those that matplotlib brings along, so that a figure is the same on every machine: DejaVu Sans on the page,
and for venues, which all set their text in Times or a relative of it, STIX with DejaVu for what it lacks.
"""

from typing import Any

import matplotlib as mpl
from tueplots import figsizes, fontsizes

from sp_bench.report.figures.styles import RC

PAGE_WIDTH_IN = 7.2
_PANEL_IN = 1.8  # least width of a panel with its labels
_POINTS_PER_INCH = 72.27  # of TeX
_TWO_COLUMNS = {"font.size": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7}
# Inches of a figure that spans the page's text.
_WIDTHS = {
    "neurips": figsizes.neurips2024()["figure.figsize"][0],
    "icml": figsizes.icml2024_full()["figure.figsize"][0],
    "iclr": figsizes.iclr2024()["figure.figsize"][0],
    "mlsys": 6.75,  # two columns, in the format of ICML's style
    "acm": 506.295 / _POINTS_PER_INCH,  # acmart, sigconf: \the\textwidth
    "ieee": 7.16,  # IEEE's guide to graphics: two columns, 43 picas
}
_SIZES = {
    "neurips": fontsizes.neurips2024(),
    "icml": fontsizes.icml2024(),
    "iclr": fontsizes.iclr2024(),
}
VENUES = tuple(_WIDTHS)


def rc(venue: str | None) -> dict[Any, Any]:
    """matplotlib's parameters of every figure; `figure.figsize` says the width in inches, each figure its own height.

    Raises:
        ValueError: no such venue.
    """
    if venue is None:
        return RC | {"figure.figsize": (PAGE_WIDTH_IN, PAGE_WIDTH_IN)}
    if venue not in VENUES:
        raise ValueError(f"venue={venue} is not known; use one of {', '.join(VENUES)}")
    sizes = _SIZES.get(venue, _TWO_COLUMNS)
    sizes = sizes | dict.fromkeys(("axes.labelsize", "axes.titlesize", "figure.titlesize"), sizes["font.size"])
    width = _WIDTHS[venue]
    return RC | sizes | {"font.family": ["STIXGeneral", "DejaVu Sans"], "figure.figsize": (width, width)}


def width_in() -> float:
    """Inches of every figure."""
    return mpl.rcParams["figure.figsize"][0]


def panels_abreast() -> int:
    """The most that fit the width of a figure."""
    return int(width_in() / _PANEL_IN)


def is_titled() -> bool:
    """Whether figures say their setting above them: those of the page do; in a paper the caption does."""
    return width_in() == PAGE_WIDTH_IN
