"""Text that fits: names wrapped to the room there is, and legends with as many columns as their labels allow.

A figure is never widened for a name: `wrapped` breaks it where it must.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil
from typing import Any, Literal

from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D

from sp_bench.report.cells import Cell
from sp_bench.report.figures.styles import OOM_ELSEWHERE, OOM_MARKERS, Style

LINE = 0.17  # inches of a line of a legend
TIED = "\N{NO-BREAK SPACE}"
LEADING = 1.25  # of the font size, from line to line
MAX_LINES = 4  # of a wrapped name
LEAST_ROW_IN = 0.2
_LARGE = 100.0  # points
OUT_OF_MEMORY = "out of memory"
FontSize = Literal[
    "font.size", "figure.titlesize", "axes.titlesize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize"
]


def points(parameter: FontSize) -> float:
    """Font size that a parameter such as legend.fontsize stands for."""
    return FontProperties(size=rcParams[parameter]).get_size_in_points()


def text_inches(text: str, parameter: FontSize = "font.size") -> float:
    """Width of the longest line of a text in the font size of `parameter`."""
    lines = text.split("\n")
    return max(_points_wide(line, tuple(rcParams["font.family"]), points(parameter)) for line in lines) / 72


@cache
def _points_wide(line: str, families: tuple[str, ...], size: float) -> float:
    font = get_font([findfont(FontProperties(family=[family])) for family in families])
    font.set_size(_LARGE, 72)  # large, so that hinting rounds little away
    font.set_text(line)
    return font.get_width_height()[0] / 64 * size / _LARGE  # 26.6 fixed point


def printable(text: str) -> str:
    """One line, without what the fonts cannot show: those characters become the replacement character."""
    known = _characters(tuple(rcParams["font.family"]))
    return "".join(c if ord(c) in known else "\N{REPLACEMENT CHARACTER}" for c in re.sub(rf"[^\S{TIED}]+", " ", text))


@cache
def _characters(families: tuple[str, ...]) -> frozenset[int]:
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in families]
    return frozenset(code for font in fonts for code in font.get_charmap() if code >= 32)


def wrapped(name: str, inches: float, parameter: FontSize = "font.size") -> str:
    """On as many lines of at most `inches` as it needs, broken at spaces, then after punctuation, then anywhere; what
    is left after MAX_LINES is given up for an ellipsis."""
    lines, line = [], ""
    for piece in _pieces(printable(name), inches, parameter):
        if line and text_inches(f"{line}{piece}".strip(), parameter) > inches:
            lines.append(line.strip())
            line = ""
        line += piece
    lines.append(line.strip())
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], f"{lines[MAX_LINES - 1][:-1]}…"]
    return "\n".join(lines)


def balanced(text: str, inches: float, parameter: FontSize = "font.size") -> str:
    """Wrapped to lines of about the same length: on no more of them than `inches` take. `batch 1` is not broken, where
    a comma is near enough."""
    phrases = ", ".join(phrase.replace(" ", TIED) for phrase in printable(text).split(", "))
    best = wrapped(phrases, inches, parameter)
    for share in range(95, 50, -5):
        narrower = wrapped(phrases, inches * share / 100, parameter)
        if narrower.count("\n") > best.count("\n"):
            break
        best = narrower
    return best.replace(TIED, " ")


def _pieces(name: str, inches: float, parameter: FontSize) -> list[str]:
    """What a line may end after; each fits a line."""
    made: list[str] = []
    for word in re.findall(r"[^ ]+ *| +", name):
        fits = text_inches(word, parameter) <= inches
        parts = [word] if fits else re.findall(rf"[^{TIED}_=/.,:-]+[{TIED}_=/.,:-]*|[{TIED}_=/.,:-]+", word)
        for part in parts:
            made += [part] if text_inches(part, parameter) <= inches else list(part)
    return made


def row_inches(names: Sequence[str]) -> float:
    """Height of a bar or row of dots, of which each has one of these wrapped names beside it."""
    num_lines = max(name.count("\n") + 1 for name in names)
    return max(LEAST_ROW_IN, (num_lines * LEADING + 0.3) * points("ytick.labelsize") / 72)


def columns_within(labels: Sequence[str], width: float, most: int) -> int:
    """Columns of a legend of that many inches, at most `most`, so that no label is wrapped if two columns allow it;
    two are better than one even so."""
    widest = max((text_inches(printable(label), "legend.fontsize") for label in labels), default=0.0)
    fitting = next((n for n in range(most, 1, -1) if widest <= _label_inches(width, n)), 2)
    return max(1, min(most, fitting, len(labels)))


def _label_inches(width: float, columns: int) -> float:
    """Room for the text of one label."""
    em = points("legend.fontsize") / 72
    handle = em * (rcParams["legend.handlelength"] + rcParams["legend.handletextpad"] + 0.4)
    edges = em * 2 * (rcParams["legend.borderpad"] + rcParams["legend.borderaxespad"])
    return (width - edges - (columns - 1) * em * rcParams["legend.columnspacing"]) / columns - handle - 0.05


def legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], most: int) -> None:
    """Below the panels, in at most `most` columns; the figure becomes higher by what it takes."""
    columns = columns_within(labels, figure.get_figwidth(), most)
    room = _label_inches(figure.get_figwidth(), columns)
    # A label that begins with an underscore would be left out, so none does.
    texts = [" " + wrapped(label, room, "legend.fontsize").replace("\n", "\n ") for label in labels]
    rows = ceil(len(texts) / columns)
    lines = sum(max(text.count("\n") + 1 for text in texts[row::rows]) for row in range(rows))
    figure.set_figheight(figure.get_figheight() + LINE * lines)
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, frameon=False)


def series_handles(names: Sequence[str], style: Mapping[str, Style], *, joined: bool = True) -> list[Artist]:
    """A mark for each series, with its line where marks are `joined`."""
    width = 1.2 if joined else 0
    return [Line2D([], [], lw=width, **style[n].line, **style[n].marker(hollow=False)) for n in names]


def oom_site(cell: Cell) -> str | None:
    """torch, nccl or host, where its rows agree on one."""
    sites = {row["oom_site"] for row in cell.rows if row["status"] == "oom"}
    return str(sites.pop()) if len(sites) == 1 and None not in sites else None


def oom_words(site: str | None) -> str:
    return OUT_OF_MEMORY if site is None else f"{OUT_OF_MEMORY} ({site})"


def oom_look(site: str | None) -> dict[str, Any]:
    return {"marker": OOM_MARKERS.get(site, OOM_ELSEWHERE), "ms": 6, "mew": 1.6, "ls": ""}


def oom_handles(cells: Sequence[Cell]) -> tuple[list[Artist], list[str]]:
    """Marks and labels of the sites at which any of these were out of memory."""
    sites = sorted({oom_site(c) for c in cells if "oom" in c.statuses}, key=lambda s: (s is None, s or ""))
    return [Line2D([], [], color="0.3", **oom_look(site)) for site in sites], [
        f"{oom_words(site)}: a mark, not a value" for site in sites
    ]
