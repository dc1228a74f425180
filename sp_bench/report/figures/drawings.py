"""A finished figure: PNG bytes that are equal for equal rows, a file name and a caption."""

import io
from dataclasses import dataclass
from textwrap import fill

from matplotlib.figure import Figure

from sp_bench.report.cells import Cell

DPI = 144
CHARACTERS_PER_INCH = 12  # of a title


@dataclass(frozen=True)
class Drawing:
    """A figure of the page; its file name begins with `kind`."""

    kind: str
    setting: str
    file_name: str
    caption: str
    width: int  # CSS pixels at print size
    png: bytes


def finish(kind: str, setting: str, cell: Cell, made: tuple[Figure, str], taken: set[str]) -> Drawing:
    """Give a figure its title and a name that is not yet in `taken`; `cell` is one of those it shows."""
    figure, caption = made
    figure.suptitle(fill(setting, round(CHARACTERS_PER_INCH * figure.get_figwidth())), fontsize="medium")
    name = _file_name(f"{kind}-{cell.asked['workload']}-{cell.asked['pass_kind']}", taken)
    return Drawing(kind, setting, name, caption, round(96 * figure.get_figwidth()), _png(figure))


def _file_name(words: str, taken: set[str]) -> str:
    stem = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "_" for c in words)
    name = next(n for n in (stem, *(f"{stem}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)
    taken.add(name)
    return f"{name}.png"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the Software tag equal rows give equal bytes for every version of matplotlib that draws the same.
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
