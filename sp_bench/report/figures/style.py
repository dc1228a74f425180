"""How figures look and are saved. In every figure a colour is a communication pattern (Ulysses, ring, all-gather, USP)
and a marker is a method. A library has the colour of its pattern and its own marker. What else a mark says is in CUES.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.pattern_bytes import kind
from sp_bench.formats import counted, csv_value
from sp_bench.report.latex_text import escape

BLACK, GREY = "#000000", "#8a8a8a"
# Okabe & Ito 2008; the last two by Paul Tol, 2021
COLOURS = {"single": BLACK, "ulysses": "#0072B2", "ring": "#D55E00", "all_gather": "#009E73", "usp": "#CC79A7",
           "upipe": "#44AA99", "double_ring": "#999933"}  # fmt: skip
OUTSIDE = ("#E69F00", "#56B4E9", "#332288", "#882255")  # of methods from outside, by name
MARKERS = {
    "single": "*", "ulysses": "o", "ring": "^", "all_gather": "D", "usp": "P", "upipe": "H", "double_ring": "8",
    "deepspeed_ulysses": "s",
    "deepspeed_ulysses_hf": "h", "ring_flash_attn": "v", "ring_flash_attn_llama3": "<", "yunchang": "X",
    "torch_context_parallel": ">", "transformer_engine": "p", "ring of latents": "v",
    "all_gather of latents": "d",
}  # fmt: skip
FILLS = ("full", "left", "top", "right", "bottom")  # of variants with one marker; the first is the plain one
NO_INTERVAL: Mapping[str, Any] = {"ms": 2.2}
CUES = {  # what marks and lines say beside colour and marker -> which cells, and in captions
    "modelled": (lambda cell: is_modelled(cell), "Hollow and dashed: one real rank, modelled messages."),
    "library": (lambda cell: cell.is_library, "Black edge: another library."),
    "in parts": (lambda cell: not is_plain(cell), "Half-filled: a variant, such as heads in parts."),
}
DPI, PNG_COLOURS = 150, 64
TITLE_LINES, LEGEND_LINES, LINE_IN = 2, 3, 0.14  # lines that a figure's height has room for; height of one more
FEWEST_TICKS = 3  # of a log axis with round numbers
TICK_IN = 0.36  # least distance of two labels of an axis
WIDTHS = {1: 3.25, 2: 6.75}  # inches of one column and of two, in the format of ICML and MLSys
VENUES = {  # one column, two columns; in a one-column format, half the text width and all of it
    "icml": (3.25, 6.75),
    "mlsys": (3.25, 6.75),
    "neurips": (2.7, 5.5),
    "iclr": (2.7, 5.5),
    "acm": (3.33, 7.0),  # acmart, sigconf
    "ieee": (3.5, 7.16),  # IEEE's guide to graphics: 21 and 43 picas
}
RC: Mapping[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "axes.titlesize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 4.5,
    "figure.facecolor": "white",
    "text.usetex": False,
    "text.parse_math": False,  # names are text: a dollar sign stays one
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType: venues refuse Type 3
}


@dataclass(frozen=True)
class Look:
    """The look of figures."""

    column: int = 2
    height_in: float | None = None  # of every figure; None: by its content
    venue: str | None = None

    @property
    def width_in(self) -> float:
        return VENUES[self.venue][self.column - 1] if self.venue else WIDTHS[self.column]

    @property
    def rc(self) -> dict[Any, Any]:
        """matplotlib's settings. Venues set their text in Times or a similar font."""
        return dict(RC) | ({"font.family": ["STIXGeneral", "DejaVu Sans"]} if self.venue else {})

    def figure(self, height_in: float) -> Figure:
        return Figure(figsize=(self.width_in, self.height_in or height_in), layout="constrained")


@dataclass(frozen=True)
class Plot:
    """A figure and its data, one line per mark. `part` distinguishes several figures with one name."""

    name: str
    part: str
    figure: Figure
    caption: str
    data: pd.DataFrame


@dataclass(frozen=True)
class Drawing:
    """A figure of the page. files: suffix (png, pdf, csv, tex) -> content. A file is called `stem` plus suffix."""

    name: str
    stem: str
    caption: str
    width: int  # CSS pixels at print size
    files: Mapping[str, bytes]


def colour(cell: Cell) -> str:
    of = kind(cell) or str(cell.asked["method"])
    return COLOURS.get(of) or OUTSIDE[sum(map(ord, of)) % len(OUTSIDE)]


def mark(cell: Cell, variant: int | None = None) -> dict[str, Any]:
    """The marker of a cell. variant: its number among the variants of its method; None: 0 if plain, else 1."""
    ink, of_latents = colour(cell), " of latents" if cell.asked["sends"] else ""
    face = "white" if is_modelled(cell) else ink
    return {
        "marker": MARKERS.get(f"{cell.asked['method']}{of_latents}", "d"),
        "color": ink,
        "mfc": face,
        "markerfacecoloralt": "white",
        "fillstyle": FILLS[(not is_plain(cell) if variant is None else variant) % len(FILLS)],
        "mec": BLACK if cell.is_library else ink,
        "mew": 0.9,
        "ls": "none",
    }


def bar(cell: Cell, ink: str) -> dict[str, Any]:
    """The face and edge of a cell's bar."""
    face, dashes = ("white", "--") if is_modelled(cell) else (ink, "-")
    return {"facecolor": face, "edgecolor": BLACK if cell.is_library else ink, "ls": dashes}


def is_modelled(cell: Cell) -> bool:
    return not cell.all_ranks_were_there


def explained(cells: Iterable[Cell], *but: str) -> str:
    """What a caption says of the cues that these cells have. but: cues that the figure does not use."""
    there = list(cells)
    return "".join(f" {text}" for cue, (has, text) in CUES.items() if cue not in but and any(map(has, there)))


def medians(cells: Iterable[Cell]) -> str:
    """A caption's sentence on how many replicates there are."""
    counts = sorted({len(cell.step_ms) for cell in cells if cell.ok})
    if counts[-1:] in ([], [1]):
        return "One replicate each, so no intervals."
    number = counted(counts[0], "replicate") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} replicates"
    return f"Medians over {number}."


def beside(number: int, total: int) -> float:
    """How far the mark of one of `total` lines is from the middle of its place on an axis of places 0, 1, 2."""
    return 0.72 * ((number + 0.5) / total - 0.5)


def places_axis(axis: Axes, names: Sequence[str]) -> None:
    """Named places 0, 1, 2, with lines between them."""
    axis.set_xticks(range(len(names)), names, fontsize=5.5)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.grid(axis="x", visible=False)
    for place in range(1, len(names)):
        axis.axvline(place - 0.5, color="#e2e2e2", lw=0.8, zorder=0.5)


def is_plain(cell: Cell) -> bool:
    """Whether it is its method's plain variant: one exchange or group, and a layout that balances the mask."""
    options = cell.options
    parts = options.get("method.head_chunks") not in (None, 1) or options.get("method.head_stride") not in (None, "all")
    unbalanced = cell.asked["method"] in ("ring", "double_ring", "all_gather") and cell.asked["layout"] == "contiguous"
    return not parts and not unbalanced and options.get("method.exchange") != "copy_engines"


def line(cell: Cell) -> dict[str, Any]:
    style = "--" if is_modelled(cell) else "-" if is_plain(cell) else "-."
    return {**mark(cell), "ls": style, "lw": 1.2 if style == "-" else 0.9}


def legend(figure: Figure, handles: Mapping[str, Artist], look: Look) -> None:
    """Draw the legend below the panels, with as many entries per line as fit."""
    if not handles:
        return
    longest = max(map(len, handles))
    abreast = max(1, min(len(handles), int(look.width_in / (0.052 * longest + 0.42))))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=abreast, handlelength=2,
                  columnspacing=1.2, labelspacing=0.3)  # fmt: skip
    if look.height_in is None:
        more = max(0, -(-len(handles) // abreast) - LEGEND_LINES)
        figure.set_figheight(figure.get_figheight() + LINE_IN * more)


def length_axis(axes: Axes, lengths: Iterable[int], width_in: float) -> None:
    """Label powers of two, such as 32K and 128K: the longest first, then those for which there is room."""
    known = sorted(set(lengths))
    kept = known[-1:]
    for length in reversed(known):
        span = math.log(1.6 * known[-1] / known[0])
        if all(abs(math.log(length / other)) / span * width_in > TICK_IN for other in kept):
            kept.append(length)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(round(value))))
    axes.set_xlim(known[0] / 1.25, known[-1] * 1.25)


def tokens_axis(axes: Axes, most: int, width_in: float, *, room: float) -> None:
    """A linear axis from zero to `most`, labelled at multiples of a power of two: 0, 128K, 256K. room: free space
    beyond `most`, as a share of it."""
    step = 1
    while most / step * TICK_IN > width_in:
        step *= 2
    axes.xaxis.set_major_locator(FixedLocator(range(0, most + 1, step)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(round(value))))
    axes.set_xlim(0, (1 + room) * most)


def tokens(number: int) -> str:
    """32K, 1M: by powers of two."""
    if number >= 1024**2 and number % 1024**2 == 0:
        return f"{number // 1024**2}M"
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else f"{number:,}"


def rank_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))


def plain_log(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic y axis with a few round numbers; none without values, as where the first line never fits."""
    axes.set_yscale("log")
    if not values:
        axes.set_yticks([])
        return
    low, high = min(values) * 0.85, max(values) * 1.18
    tried = [
        [tick for e in range(-3, 7) for m in round_numbers if low <= (tick := m * 10.0**e) <= high]
        for round_numbers in ((1, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8))
    ]
    ticks = next((each for each in tried if len(each) >= FEWEST_TICKS), None)
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(ticks[:: max(1, len(ticks) // 6)]) if ticks else MaxNLocator(5))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def wrapped(text: str, width: int) -> str:
    """Wrap text to `width` characters, after commas, or at any blank if that needs fewer lines."""
    parts = [" ".join(part.split()) for part in text.split(", ")]
    at_commas = _filled([*(f"{part}," for part in parts[:-1]), parts[-1]], width)
    at_blanks = _filled(text.split(), width)
    fits = max(map(len, at_commas)) <= width and len(at_commas) <= len(at_blanks)
    return "\n".join(at_commas if fits else at_blanks)


def _filled(atoms: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for atom in atoms:
        if lines[-1] and len(lines[-1]) + len(atom) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {atom}".strip()
    return lines


def about(cell: Cell) -> dict[str, Any]:
    """The leading columns of a figure's data."""
    asked = {name: cell.asked[name] for name in ("evidence", "kernel", "fabric", "sp_size", "seq_len")}
    return {"method": words.method(cell), **asked}


def trial_ids(cell: Cell) -> str:
    return " ".join(str(row["trial_id"]) for row in cell.measured or cell.rows)


def finish(plot: Plot, stem: str, look: Look) -> Drawing:
    """Save a figure in every format. Equal rows give equal bytes. Needs the rc that it was drawn with."""
    if look.height_in is None:
        _make_room_for_titles(plot.figure)
    png = _png(plot.figure)
    data = plot.data.map(csv_value).to_csv(index=False, lineterminator="\n")
    environment = "figure*" if look.column == 2 else "figure"
    tex = (
        f"\\begin{{{environment}}}\n\\includegraphics[width=\\linewidth]{{{stem}.pdf}}\n"
        f"\\caption{{{escape(plot.caption)}}}\n\\end{{{environment}}}\n"
    )
    files = {"png": png, "pdf": _pdf(plot.figure), "csv": data.encode(), "tex": tex.encode()}
    return Drawing(plot.name, stem, plot.caption, round(96 * look.width_in), files)


def _make_room_for_titles(figure: Figure) -> None:
    """Heights are of panels with titles of two lines: in a narrow column a title has more."""
    lines: dict[int, int] = {}
    for axis in figure.axes:
        if (spec := axis.get_subplotspec()) is not None:
            row = spec.rowspan.start
            lines[row] = max(lines.get(row, 0), axis.get_title(loc="left").count("\n") + 1)
    more = sum(max(0, number - TITLE_LINES) for number in lines.values())
    figure.set_figheight(figure.get_figheight() + LINE_IN * more)


def _png(figure: Figure) -> bytes:
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")
    drawn = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    few = drawn.quantize(PNG_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    few.save(buffer, "png", dpi=(DPI, DPI), optimize=True)
    return buffer.getvalue()


def _pdf(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasPdf(figure).print_pdf(buffer, metadata=dict.fromkeys(("Creator", "Producer", "CreationDate")))
    return buffer.getvalue()
