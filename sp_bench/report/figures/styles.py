"""How a series looks: colour says the method, marker and line style its layout and placement. Okabe-Ito colours."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from sp_bench.report.cells import Cell

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73"),
    *("#0072B2", "#D55E00", "#CC79A7"),
)  # Okabe & Ito 2008, without yellow, which is too light for lines on white
OWN = {"single": BLACK, "ulysses": BLUE, "ring": VERMILLION, "all_gather": GREEN, "usp": PURPLE}
OTHERS = (ORANGE, SKY, "#555555")
Look = tuple[str, Any]  # marker, line style
DENSE, UNEVEN = (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1))
LOOKS: dict[tuple[str, str | None], Look] = {  # (layout, placement): the same in every method
    ("contiguous", None): ("o", "-"),
    ("zigzag", None): ("^", "--"),
    ("striped", None): ("s", ":"),
    ("contiguous", "ulysses_inner"): ("o", "-"),
    ("zigzag", "ulysses_inner"): ("^", "--"),
    ("striped", "ulysses_inner"): ("s", ":"),
    ("contiguous", "ring_inner"): ("D", "-."),
    ("zigzag", "ring_inner"): ("v", UNEVEN),
    ("striped", "ring_inner"): ("P", DENSE),
}
MARKERS, LINES = ("X", "<", ">", "p", "h", "*", "d", "8"), ("-", "--", "-.", ":")
# All pairs, markers first: where no line joins them they alone tell series apart.
MORE = tuple(
    (marker, LINES[(place + turn) % len(LINES)]) for turn in range(len(LINES)) for place, marker in enumerate(MARKERS)
)

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": "medium",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": "small",
    "legend.handlelength": 3.2,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.usetex": False,
    "text.parse_math": False,  # names and reasons are text: a dollar sign stays one
    "hatch.linewidth": 0.5,
}


@dataclass(frozen=True)
class Style:
    order: int  # place in legends
    colour: str
    shape: str
    line_style: Any

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "ls": self.line_style}

    def marker(self, *, hollow: bool) -> dict[str, Any]:
        face = "white" if hollow else self.colour
        return {"marker": self.shape, "ms": 5, "mfc": face, "mec": self.colour, "mew": 1.1}


def styles(cells: Sequence[Cell]) -> dict[str, Style]:
    """One look a series, the same in every figure of the page."""
    methods = sorted({str(c.asked["method"]) for c in cells}, key=lambda m: ([*OWN, m].index(m), m))
    foreign = [m for m in methods if m not in OWN]
    split = {c.series: (c.asked["layout"], c.asked["placement"]) for c in cells}
    used: set[tuple[str, Look]] = set()
    more = cycle(MORE)
    made: dict[str, Style] = {}
    for method in methods:
        colour = OWN.get(method) or OTHERS[foreign.index(method) % len(OTHERS)]
        for name in sorted({c.series for c in cells if str(c.asked["method"]) == method}):
            look = LOOKS.get(split[name])
            if look is None or (colour, look) in used:  # told apart by something else than layout and placement
                look = next(more)
            used.add((colour, look))
            made[name] = Style(len(made), colour, *look)
    return made
