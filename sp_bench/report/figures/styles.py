"""How a series looks: its colour says the method, its line style the layout and placement, its marker is its own.

So that without colour, and without lines, series are told apart as long as there are no more of them than markers.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sp_bench.report.cells import Cell

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73"),
    *("#0072B2", "#D55E00", "#CC79A7"),
)  # Okabe & Ito 2008, without yellow, which is too light for lines on white
OWN = {"single": BLACK, "ulysses": BLUE, "ring": VERMILLION, "all_gather": GREEN, "usp": PURPLE}
OTHERS = (ORANGE, SKY, "#555555", "#332288", "#882255", "#999933", "#661100")  # the last four: Tol 2021, muted
UNEVEN, DENSE = (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1))
LINES: dict[tuple[str | None, str | None], Any] = {  # (layout, placement) -> line style, the same in every method
    ("zigzag", None): "--",
    ("striped", None): ":",
    ("zigzag", "ulysses_inner"): "--",
    ("striped", "ulysses_inner"): ":",
    ("contiguous", "ring_inner"): "-.",
    ("zigzag", "ring_inner"): UNEVEN,
    ("striped", "ring_inner"): DENSE,
}  # all others are solid
WANTED = {  # (method, layout, placement) -> marker, the same on every page
    ("single", "contiguous", None): "*",
    ("ulysses", "contiguous", None): "o",
    ("ring", "contiguous", None): "v",
    ("ring", "zigzag", None): "^",
    ("ring", "striped", None): "<",
    ("all_gather", "contiguous", None): "s",
    ("all_gather", "zigzag", None): "D",
    ("usp", "contiguous", "ulysses_inner"): "p",
    ("usp", "zigzag", "ulysses_inner"): "P",
    ("usp", "contiguous", "ring_inner"): "h",
    ("usp", "zigzag", "ring_inner"): "X",
}
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "<", ">", "d", "*", "p", "h")  # those most alike last
ALIKE = ("oph", "^v<>", "sDd", "PX*")  # at print size

RC: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "axes.titley": 1.0,
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "axes.titlesize": 8.5,
    "figure.titlesize": 8.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 7.5,
    "legend.handlelength": 3.2,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.usetex": False,
    "text.parse_math": False,  # names and reasons are text: a dollar sign stays one
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType: venues refuse Type 3
    "svg.hashsalt": "sp_bench",  # ids are random without one
}


# Site of an out of memory -> marker; nobody's own, so that a mark of it is never taken for a value.
OOM_MARKERS: dict[str | None, Any] = {"torch": "x", "nccl": "+", "host": (3, 2, 0)}
OOM_ELSEWHERE = (6, 2, 0)  # not known, or several sites


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


def styles(cells: Sequence[Cell], drawn: Collection[str] = ()) -> dict[str, Style]:
    """One look a series, the same in every figure of the page; those in `drawn` choose their markers first, and of them
    those with the most cells."""
    methods = sorted({str(c.asked["method"]) for c in cells}, key=lambda m: ([*OWN, m].index(m), m))
    foreign = [m for m in methods if m not in OWN]
    split = {c.series: (str(c.asked["method"]), c.asked["layout"], c.asked["placement"]) for c in cells}
    ordered = sorted(split, key=lambda name: (methods.index(split[name][0]), name))
    colours = {m: OWN.get(m) or OTHERS[foreign.index(m) % len(OTHERS)] for m in methods}
    lines = {name: LINES.get(split[name][1:], "-") for name in ordered}
    num_cells = Counter(c.series for c in cells)
    wanted = {name: WANTED.get(split[name]) for name in ordered}
    given: dict[str, str] = {}
    for name in sorted(ordered, key=lambda name: (name not in drawn, -num_cells[name])):
        if (marker := wanted[name]) is None or marker in given.values():
            taken = [*given.values(), *(m for other, m in wanted.items() if m and other not in given)]
            alike = [m for other, m in given.items() if lines[other] == lines[name]]
            own = [m for other, m in given.items() if split[other][0] == split[name][0]]
            near = ["".join(other for other in ALIKE if str(m) in other) for m in own]
            marker = min(
                MARKERS,
                key=lambda m: (own.count(m), sum(m in group for group in near), alike.count(m), taken.count(m)),
            )
        given[name] = marker
    return {name: Style(order, colours[split[name][0]], given[name], lines[name]) for order, name in enumerate(ordered)}
