"""Figures of one setting each: throughput, memory, communication. Matplotlib's Agg canvas; pyplot is never touched."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from matplotlib import rc_context
from matplotlib.figure import Figure

from sp_bench.report.cells import Cell
from sp_bench.report.fabric_model import foremost, places
from sp_bench.report.figures.communication import draw_communication
from sp_bench.report.figures.drawings import Drawing, finish
from sp_bench.report.figures.panels import Quantity, draw_panels, is_close, is_dots
from sp_bench.report.figures.styles import RC, Style, styles
from sp_bench.report.formats import byte_unit, counted

MAX_SETTINGS = 8  # figures of more settings would swamp the page; its tables hold them all


def plotted(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of a length on some ranks that were measured or were out of memory."""
    sized = [c for c in cells if None not in (c.asked["sp_size"], c.asked["seq_len"])]
    shown = [c for c in sized if c.asked["workload"] not in ("parity", "collective")]
    return [c for c in shown if c.ok or "oom" in c.statuses]


def draw(cells: Sequence[Cell]) -> tuple[list[Drawing], list[str]]:
    """The figures of one setting each, and sentences on the settings that they leave out: slower fabrics, which have a
    section of their own, and those with the fewest cells."""
    every = plotted(cells)
    shown = foremost(every, places(cells))
    settings = {setting: list(group) for setting, group in groupby(shown, key=lambda c: c.setting)}
    kept = sorted(sorted(settings, key=lambda s: -len(settings[s]))[:MAX_SETTINGS])
    style = styles(every)
    drawings, taken = [], set()
    with rc_context(RC):
        for setting in kept:
            for kind, make in _KINDS.items():
                if (made := make(settings[setting], style)) is not None:
                    drawings.append(finish(kind, setting, settings[setting][0], made, taken))
    return drawings, [*_slower_fabrics(every, shown), *_undrawn(len(settings) - len(kept))]


def _slower_fabrics(every: Sequence[Cell], shown: Sequence[Cell]) -> list[str]:
    kept = {c.cell_id for c in shown}
    names = sorted({str(c.asked["fabric"]) for c in every if c.cell_id not in kept})
    if not names:
        return []
    return [
        f"Of settings on several fabrics the fastest is drawn; {', '.join(names)} are under Fabrics and in the tables."
    ]


def _undrawn(num_settings: int) -> list[str]:
    if not num_settings:
        return []
    words = f"Figures are drawn for the {MAX_SETTINGS} settings with the most cells; {counted(num_settings, 'setting')}"
    return [f"{words} more are in the tables only."]


def _throughput(cells: Sequence[Cell], style: Mapping[str, Style]) -> tuple[Figure, str] | None:
    shown = [c for c in cells if not c.median_step_ms or c.rate(c.median_step_ms, per_rank=True) is not None]
    if not any(c.ok for c in shown):
        return None
    processor = shown[0].processor
    in_flops = all(c.attention_flops_per_step for c in shown if c.ok)

    def rate(cell: Cell, step_ms: float) -> float:
        return (cell.attention_tflops(step_ms) if in_flops else cell.rate(step_ms, per_rank=True)) or 0.0

    quantity = Quantity(
        label=f"attention TFLOP/s/{processor}" if in_flops else f"tokens/s/{processor}",
        points=lambda c: [rate(c, ms) for ms in c.step_ms.values()],
        middle=lambda c: rate(c, c.median_step_ms) if c.median_step_ms else None,
        interval=lambda c: c.interval_ms and (rate(c, c.interval_ms.high), rate(c, c.interval_ms.low)),
    )
    work = " (causal pairs only, forward 1 and backward 2.5; tokens/s are in the tables)" if in_flops else ""
    caption = f"Throughput per {processor}{work}, from median step times, at fixed sp_size in each panel. "
    if len({c.asked["sp_size"] for c in shown}) > 1:
        caption += "From panel to panel, at one seq_len, it is strong scaling: equal values would be ideal. "
    return draw_panels(shown, style, quantity), caption + _reading(shown, quantity)


def _memory(cells: Sequence[Cell], style: Mapping[str, Style]) -> tuple[Figure, str] | None:
    column = next((c.memory_column for c in cells if c.memory_column), None)
    shown = [c for c in cells if (c.memory_bytes and c.memory_column == column) or not c.ok]
    if column is None:
        return None
    what = {
        "max_peak_allocated_bytes": "peak allocated device memory",
        "max_peak_host_bytes": "peak host memory (resident set)",
    }[column]
    scale, unit = byte_unit(max(max(c.memory_bytes) for c in shown if c.memory_bytes))
    quantity = Quantity(
        label=f"{what},\nlargest rank ({unit})",
        points=lambda c: [value / scale for value in c.memory_bytes],
        middle=lambda c: c.median_memory_bytes and c.median_memory_bytes / scale,
        interval=lambda c: None,
    )
    caption = f"{what.capitalize()} of the rank that needs most, at fixed sp_size in each panel. "
    caption += _reading(shown, quantity)
    return draw_panels(shown, style, quantity), caption


def _reading(cells: Sequence[Cell], quantity: Quantity) -> str:
    measured = [c for c in cells if c.ok]
    several = any(len(c.step_ms) > 1 for c in measured)
    words = ["Small dots are replicates, the marker their median"] if several else ["A marker is a cell"]
    if not is_dots(cells):
        words.append("series of one length are set slightly apart")
    elif is_close([value for c in cells for value in quantity.points(c)]):
        words.append("the axis begins above zero")
    if any(len(c.step_ms) == 1 for c in measured):
        words.append("hollow markers are single replicates")
    if any(quantity.interval(c) for c in measured):
        words.append("bars are order-statistic intervals of the median, from 6 replicates on")
    if any("oom" in c.statuses for c in cells):
        words.append("out of memory is marked at its length and has no value")
    return "; ".join(words) + "."


_KINDS: Mapping[str, Callable[[Sequence[Cell], Mapping[str, Style]], tuple[Figure, str] | None]] = {
    "throughput": _throughput,
    "memory": _memory,
    "communication": draw_communication,
}
