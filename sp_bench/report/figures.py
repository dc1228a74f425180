"""Figures of one setting each: throughput, memory, communication. Matplotlib's Agg canvas; pyplot is never touched."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from matplotlib import rc_context
from matplotlib.figure import Figure

from sp_bench.report.communication import draw_communication
from sp_bench.report.drawings import Drawing, finish
from sp_bench.report.formats import byte_unit
from sp_bench.report.panels import Quantity, draw_panels
from sp_bench.report.styles import RC, Style, styles
from sp_bench.report.tables import Cell

MAX_SETTINGS = 8  # figures of more settings would swamp the page; its tables hold them all


def plotted(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of a length on some ranks that were measured or were out of memory."""
    sized = [c for c in cells if None not in (c.asked["sp_size"], c.asked["seq_len"])]
    shown = [c for c in sized if c.asked["workload"] not in ("parity", "collective")]
    return [c for c in shown if c.ok or "oom" in c.statuses]


def draw(cells: Sequence[Cell]) -> tuple[list[Drawing], int]:
    """The figures of one setting each, and how many settings they leave out (those with the fewest cells)."""
    shown = plotted(cells)
    settings = {setting: list(group) for setting, group in groupby(shown, key=lambda c: c.setting)}
    kept = sorted(sorted(settings, key=lambda s: -len(settings[s]))[:MAX_SETTINGS])
    style = styles(shown)
    drawings, taken = [], set()
    with rc_context(RC):
        for setting in kept:
            for kind, make in _KINDS.items():
                if (made := make(settings[setting], style)) is not None:
                    drawings.append(finish(kind, setting, settings[setting][0], made, taken))
    return drawings, len(settings) - len(kept)


def _throughput(cells: Sequence[Cell], style: Mapping[str, Style]) -> tuple[Figure, str] | None:
    shown = [c for c in cells if not c.median_step_ms or c.rate(c.median_step_ms, per_rank=True) is not None]
    if not any(c.ok for c in shown):
        return None
    processor = shown[0].processor

    def rate(cell: Cell, step_ms: float) -> float:
        return cell.rate(step_ms, per_rank=True) or 0.0

    quantity = Quantity(
        label=f"tokens/s/{processor}",
        points=lambda c: [rate(c, ms) for ms in c.step_ms.values()],
        middle=lambda c: rate(c, c.median_step_ms) if c.median_step_ms else None,
        interval=lambda c: c.interval_ms and (rate(c, c.interval_ms.high), rate(c, c.interval_ms.low)),
    )
    caption = (
        f"Throughput per {processor}, from median step times, at fixed sp_size in each panel. From panel to panel, at "
        f"one seq_len, it is strong scaling: equal values would be ideal. {_reading(shown, intervals=True)}"
    )
    return draw_panels(shown, style, quantity), caption


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
    caption += _reading(shown, intervals=False)
    return draw_panels(shown, style, quantity), caption


def _reading(cells: Sequence[Cell], *, intervals: bool) -> str:
    measured = [c for c in cells if c.ok]
    words = ["Small dots are replicates, the marker their median"]
    if len({c.asked["seq_len"] for c in cells}) > 1:
        words.append("series of one length are set slightly apart")
    if any(len(c.step_ms) == 1 for c in measured):
        words.append("hollow markers are single replicates")
    if intervals and any(c.interval_ms for c in measured):
        words.append("bars are order-statistic intervals of the median, from 6 replicates on")
    if any("oom" in c.statuses for c in cells):
        words.append("out of memory is marked at its length and has no value")
    return "; ".join(words) + "."


_KINDS: Mapping[str, Callable[[Sequence[Cell], Mapping[str, Style]], tuple[Figure, str] | None]] = {
    "throughput": _throughput,
    "memory": _memory,
    "communication": draw_communication,
}
