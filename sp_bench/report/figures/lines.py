"""An author's figure: chosen lines, by their names, over the length or the number of GPUs, on log axes."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.chosen import AXES, Line, Lines
from sp_bench.analysis.metrics import memory_gib, tflops, tokens_per_s_per_gpu
from sp_bench.analysis.settings import Difference
from sp_bench.analysis.statistics import Interval
from sp_bench.config.workload import TRAINING
from sp_bench.formats import whole
from sp_bench.report.figures.panels import PANEL_IN, grid
from sp_bench.report.figures.style import (
    BLACK,
    Look,
    Plot,
    about,
    colour,
    explained,
    is_modelled,
    legend,
    length_axis,
    mark,
    medians,
    plain_log,
    rank_axis,
    trial_ids,
)

LEAST_IN = 1.7
DASHES = ("-", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # of lines with one colour
Read = Callable[[Cell], tuple[float | None, Interval | None]]


def draw(lines: Lines, look: Look) -> Plot:
    """A panel each for speed, memory and the time over that of the first line. Bars are intervals."""
    first = lines.lines[0]
    speed, read_speed = speed_of(lines)
    values: Mapping[str, Read] = {
        speed: lambda cell: (read_speed(cell), None),
        "peak GiB a GPU": lambda cell: (memory_gib(cell), None),
        f"time over that of {first.name}": lambda cell: _beside(first, cell, lines.over),
    }
    figure, axes = grid(look, len(values), PANEL_IN, LEAST_IN)
    styles = [_style(lines, number) for number in range(len(lines.lines))]
    handles: dict[str, Line2D] = {}
    data: list[dict[str, Any]] = []
    for (what, read), axis in zip(values.items(), axes, strict=True):
        drawn: list[float] = []
        for line, style in zip(lines.lines, styles, strict=True):
            points = [(place, value) for place, cell in line.cells.items() if (value := read(cell)[0]) is not None]
            (handle,) = axis.plot([place for place, _ in points], [value for _, value in points], **style)
            handles.setdefault(line.name, handle)
            drawn += [value for _, value in points]
            for place, cell in line.cells.items():
                value, bounds = read(cell)
                data.append({"what": what, "line": line.name, **about(cell), "value": value,
                             "low": bounds and bounds.low, "high": bounds and bounds.high,
                             "replicates": len(cell.step_ms), "trial_ids": trial_ids(cell)})  # fmt: skip
                if bounds is not None:
                    axis.plot([place, place], [bounds.low, bounds.high], color=style["color"], lw=1.1)
                    drawn += [bounds.low, bounds.high]
        plain_log(axis, drawn)
        if what.startswith("time"):
            axis.axhline(1, color=BLACK, lw=0.6, zorder=0.9)
        for line, style in zip(lines.lines, styles, strict=True):
            lost = [place for place, cell in line.cells.items() if not cell.ok]
            if lost and not what.startswith("time"):
                low = [axis.get_ylim()[0]] * len(lost)
                axis.plot(lost, low, color=style["color"], marker="x", mew=1.4, ls="none", clip_on=False)
                handles["out of memory"] = Line2D([], [], color=BLACK, marker="x", mew=1.4, ls="none")
        if lines.over == "seq_len":
            length_axis(axis, lines.places, look.width_in / len(axes))
        else:
            rank_axis(axis, lines.places)
        axis.set_title(what, loc="left")
        axis.set_xlabel(AXES[lines.over])
    legend(figure, handles, look)
    return Plot("lines", "", figure, _caption(lines), pd.DataFrame(data))


def speed_of(lines: Lines) -> tuple[str, Callable[[Cell], float | None]]:
    """What stands for the speed: tokens/s of steps, TFLOP/s of attention."""
    trains = all(cell.asked["workload"] in TRAINING for cell in lines.cells)
    return ("tokens/s a GPU", tokens_per_s_per_gpu) if trains else ("TFLOP/s a GPU", tflops)


def shared(lines: Lines) -> str:
    """The options that all lines share."""
    return ", ".join(_shared(lines))


def apart(lines: Lines) -> str:
    """The options in which lines differ: `Ulysses: cuDNN; DeepSpeed: cuDNN, all recomputed.`; empty if they do not."""
    common = {*_shared(lines), *(words.processors(cell) for cell in lines.cells if lines.over == "sp_size")}
    own = []
    for line in lines.lines:
        parts = (part for cell in line.cells.values() for part in _parts(cell) if part not in {*common, line.name})
        own += [f"{line.name}: {options}" for options in [", ".join(dict.fromkeys(parts))] if options]
    return f" {'; '.join(own)}." if own else ""


def replicates(lines: Lines) -> str:
    several = any(len(cell.step_ms) > 1 for cell in lines.cells)
    return medians(lines.cells) + " Paired by number; 95% intervals from 6 pairs on." * several


def _shared(lines: Lines) -> list[str]:
    return [part for part in _parts(lines.cells[0]) if all(part in _parts(cell) for cell in lines.cells)]


def _caption(lines: Lines) -> str:
    return f"{shared(lines)}.{apart(lines)} {replicates(lines)}{explained(lines.cells, 'in parts')}{_bounds(lines)}"


def _bounds(lines: Lines) -> str:
    """Lower bounds: the ring at 8,192 and 32,768 tokens."""
    bounds = [
        (line.name, [whole(at) for at, cell in line.cells.items() if cell.is_lower_bound]) for line in lines.lines
    ]
    named = [f"{name} at {words.listed_words(places)} {AXES[lines.over]}" for name, places in bounds if places]
    return f" Lower bounds: {'; '.join(named)}." if named else ""


def _parts(cell: Cell) -> list[str]:
    fabric = words.fabric(cell.asked["fabric"]) if cell.asked["sp_size"] > 1 else ""
    where = (words.processors(cell), words.kernel(cell), fabric, words.method(cell))
    return list(filter(None, [*words.setting(cell), *where]))


def _beside(first: Line, cell: Cell, over: str) -> tuple[float | None, Interval | None]:
    """Step time over that of the first line at the same place, with its interval."""
    under = first.cells.get(cell.asked[over])
    if under is None or not under.ok or not cell.ok:
        return None, None
    if under is cell:
        return 1.0, None
    found = Difference(under, cell)
    return found.ratio, found.paired.interval if found.paired else None


def _style(lines: Lines, number: int) -> dict[str, Any]:
    """The colour and marker of the method. Lines of one colour differ in their dashes, of one marker in their fill."""
    cell = next(iter(lines.lines[number].cells.values()))
    before = [next(iter(line.cells.values())) for line in lines.lines[:number]]
    alike = sum(colour(each) == colour(cell) for each in before)
    of_method = sum(mark(each)["marker"] == mark(cell)["marker"] for each in before)
    dashes = "--" if is_modelled(cell) and not alike else DASHES[alike % len(DASHES)]
    return {**mark(cell, of_method), "ls": dashes, "lw": 1.1}
