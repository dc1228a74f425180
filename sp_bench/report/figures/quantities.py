"""The figures of one quantity over seq_len by method: throughput, step time and peak memory."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sp_bench.report.cells import Cell
from sp_bench.report.figures.axes import is_close
from sp_bench.report.figures.dots import draw_dots, is_dots
from sp_bench.report.figures.drawings import Plot
from sp_bench.report.figures.panels import Quantity, data, draw_panels
from sp_bench.report.figures.styles import Style
from sp_bench.report.formats import byte_unit

STRONG = "From panel to panel, at one seq_len, it is strong scaling: equal values would be ideal. "
MEMORY = {  # column -> its name in the data without its unit, its words in a caption and on an axis
    "max_peak_allocated_bytes": (
        *("max_peak_allocated", "Peak allocated device memory"),
        "peak device memory,\nallocated",
    ),
    "max_peak_host_bytes": (
        *("max_peak_host", "Peak host memory (resident set)"),
        "peak host memory,\nresident set",
    ),
}
TFLOPS = "attention_tflops_per_s_per_gpu"  # of medians, in the data only: MFU has a figure


def draw_throughput(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """Tokens/s of one device over seq_len. None where nothing was measured."""
    shown = [c for c in cells if not c.median_step_ms or c.rate(c.median_step_ms, per_rank=True) is not None]
    if not any(c.ok for c in shown):
        return None

    def rate(cell: Cell, step_ms: float) -> float:
        return cell.rate(step_ms, per_rank=True) or 0.0

    processor = _processor(shown)
    quantity = Quantity(
        column="tokens_per_s_per_gpu",
        label=f"tokens/s/{processor}",
        points=lambda c: {key: rate(c, ms) for key, ms in c.step_ms.items()},
        middle=lambda c: rate(c, c.median_step_ms) if c.median_step_ms else None,
        interval=lambda c: c.interval_ms and (rate(c, c.interval_ms.high), rate(c, c.interval_ms.low)),
    )
    plot = _plot(shown, style, quantity, f"Throughput per {processor}, from median step times", STRONG)
    return Plot(plot.figure, plot.caption, _with_tflops(plot.data, plot.cells), plot.cells)


def draw_step_time(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """Milliseconds of a step over seq_len. None where nothing was measured."""
    if not any(c.ok for c in cells):
        return None
    quantity = Quantity(
        column="step_ms",
        label="step time (ms)",
        points=lambda c: c.step_ms,
        middle=lambda c: c.median_step_ms,
        interval=lambda c: c.interval_ms and (c.interval_ms.low, c.interval_ms.high),
    )
    return _plot(cells, style, quantity, "Step time: of each step the slowest rank's, of those the median", "")


def draw_memory(cells: Sequence[Cell], style: Mapping[str, Style]) -> Plot | None:
    """Peak memory of the rank that needs most, over seq_len. None where it is not known."""
    column = next((c.memory_column for c in cells if c.memory_column), None)
    shown = [c for c in cells if (c.memory_bytes and c.memory_column == column) or not c.ok]
    if column is None:
        return None
    name, what, label = MEMORY[column]
    scale, unit = byte_unit(max(max(c.memory_bytes) for c in shown if c.memory_bytes))

    quantity = Quantity(
        column=f"{name}_{unit.lower()}",
        label=f"{label} ({unit})",
        points=lambda c: {key: value / scale for key, value in c.of_launches(column).items()},
        middle=lambda c: None if c.median_memory_bytes is None else c.median_memory_bytes / scale,
        interval=lambda c: None,
    )
    return _plot(shown, style, quantity, f"{what} of the rank that needs most", "")


def _processor(cells: Sequence[Cell]) -> str:
    return next((c.processor for c in cells if c.ok), "rank")


def _plot(cells: Sequence[Cell], style: Mapping[str, Style], quantity: Quantity, what: str, strong: str) -> Plot:
    dots = is_dots(cells, quantity)
    figure, shown = (draw_dots if dots else draw_panels)(cells, style, quantity)
    caption = f"{what}, at fixed sp_size in each panel. "
    if len({c.asked["sp_size"] for c in shown}) > 1:
        caption += strong
    caption += _reading(shown, quantity, dots=dots)
    if others := len(cells) - len(shown):
        caption += f" {others:,} cells at smaller sp_size or seq_len are in the tables only."
    return Plot(figure, caption, data(shown, quantity), tuple(shown))


def _with_tflops(lines: pd.DataFrame, cells: Sequence[Cell]) -> pd.DataFrame:
    """With the attention TFLOP/s of one device beside the medians of cells that know their FLOPs."""
    by_name = {(c.series, c.asked["sp_size"], c.asked["seq_len"]): c for c in cells if c.attention_flops_per_step}
    if not by_name:
        return lines
    found = []
    for mark, *key in lines[["mark", "series", "sp_size", "seq_len"]].itertuples(index=False):
        cell = by_name.get(tuple(key)) if mark == "median" else None
        found.append(cell.attention_tflops(cell.median_step_ms) if cell and cell.median_step_ms else None)
    with_tflops = lines.copy()
    with_tflops.insert(list(lines.columns).index("num_replicates"), TFLOPS, found)
    return with_tflops


def _reading(cells: Sequence[Cell], quantity: Quantity, *, dots: bool) -> str:
    measured = [c for c in cells if c.ok]
    several = any(len(c.step_ms) > 1 for c in measured)
    words = ["Small dots are replicates, the marker their median"] if several else ["A marker is a cell"]
    if not dots:
        words.append("markers of one length are set slightly apart, lines are not")
    else:
        values: dict[int, list[float]] = {}  # of each length
        for cell in cells:
            values.setdefault(cell.asked["seq_len"], []).extend(quantity.points(cell).values())
        if len(values) > 1:
            words.append("each seq_len has its own scale")
        if any(map(is_close, values.values())):
            words.append("an axis of close values begins above zero")
    if any(len(c.step_ms) == 1 for c in measured):
        words.append("hollow markers are single replicates")
    if any(quantity.interval(c) for c in measured):
        words.append("bars are order-statistic intervals of the median, from 6 replicates on")
    if any("oom" in c.statuses for c in cells):
        words.append("out of memory is marked at its length, by the site that ran out, and has no value")
    if any("oom" in c.statuses for c in measured):
        words.append("a cell with both a value and such a mark ran in some replicates only")
    return f"{'; '.join(words)}."
