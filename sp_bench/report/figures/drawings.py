"""A figure before and after it is saved: what it shows with the data behind it, and its files, equal for equal rows."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from sp_bench.report.cells import Cell
from sp_bench.report.figures.legends import balanced
from sp_bench.report.figures.venues import is_titled
from sp_bench.report.file_names import stems
from sp_bench.report.provenance import words
from sp_bench.rows.names import Values

DPI = 144
COLOURS = 256  # of a PNG; figures have about ten and their blends with white
UNTIMED = ("memory", "max_context", "communication")  # kinds of figures that show no times
MARGIN_IN = 0.2  # on both sides of a title together
POSITION_DIGITS = 9  # of an axes' place, in widths and heights of its figure


@dataclass(frozen=True)
class Plot:
    """What a figure shows. `data` has one line a mark or bar in a fixed order; its last column is `trial_ids`."""

    figure: Figure
    caption: str
    data: pd.DataFrame
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Drawing:
    """A figure of the page. `files`: png, pdf, svg, csv -> content; the file's name is `stem` and that suffix."""

    kind: str
    setting: str
    values: Values  # of the setting, for the names of the files
    stem: str
    caption: str
    provenance: str
    width: int  # CSS pixels at print size
    files: Mapping[str, bytes]


def about(cell: Cell) -> dict[str, Any]:
    """The leading columns of a figure's data."""
    asked = {name: cell.asked[name] for name in ("method", "kernel", "sp_size", "seq_len")}
    return {"setting": cell.setting, "series": cell.series} | asked


def trial_ids(cell: Cell) -> str:
    """Of the rows that the cell's numbers come from; where it has none, of all its rows."""
    return joined_ids(cell.measured or cell.rows)


def joined_ids(rows: Iterable[Mapping[str, Any]]) -> str:
    return " ".join(str(row["trial_id"]) for row in rows)


def finish(kind: str, setting: str, values: Values, plot: Plot) -> Drawing:
    """Title a figure and save it in every format.

    Under the same `venues.rc` as it was drawn with, for formats read their parameters when they are written.
    """
    figure, asked = plot.figure, plot.cells[0].asked
    width = figure.get_figwidth()
    if is_titled():
        figure.suptitle(balanced(setting, width - MARGIN_IN, "figure.titlesize"))
    stem = f"{kind}-{asked['workload']}-{asked['pass_kind']}"
    files = {"png": _png(figure), "pdf": _pdf(figure), "svg": _svg(figure), "csv": _csv(plot.data)}
    provenance = words(plot.cells, of_times=kind not in UNTIMED)
    return Drawing(kind, setting, values, stem, plot.caption, provenance, round(96 * width), files)


def named(drawings: Sequence[Drawing]) -> list[Drawing]:
    """The same with different stems."""
    names = stems([(drawing.stem, drawing.values) for drawing in drawings])
    return [replace(drawing, stem=name) for drawing, name in zip(drawings, names, strict=True)]


def _png(figure: Figure) -> bytes:
    """Lays the figure out, once for all formats."""
    figure.set_dpi(DPI)
    for text in figure.findobj(Text):
        if hasattr(text, "set_fontfeatures"):  # matplotlib shapes text since 3.11
            text.set_fontfeatures(("-liga",))  # the one glyph of a ligature would make a PDF embed its font twice
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")
    for axes in figure.axes:  # the layout's last digits depend on what its process drew before; an SVG's names on them
        left, bottom, width, height = (round(v, POSITION_DIGITS) for v in axes.get_position(original=True).bounds)
        axes.set_position((left, bottom, width, height))
    drawn = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    few = drawn.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    few.save(buffer, "png", dpi=(DPI, DPI))
    return buffer.getvalue()


# The canvases are called themselves: Figure.savefig draws vector formats twice, first without output, for the layout.
def _pdf(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasPdf(figure).print_pdf(buffer, metadata=dict.fromkeys(("Creator", "Producer", "CreationDate")))
    return buffer.getvalue()


def _svg(figure: Figure) -> bytes:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date")))
    return buffer.getvalue().encode()


def _csv(data: pd.DataFrame) -> bytes:
    return data.to_csv(index=False, lineterminator="\n").encode()
