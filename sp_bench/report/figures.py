"""Figures of one setting each: throughput, memory, communication. Matplotlib's Agg canvas; pyplot is never touched."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import fill

from matplotlib import rc_context
from matplotlib.figure import Figure

from sp_bench.report.communication import draw_communication
from sp_bench.report.formats import byte_unit
from sp_bench.report.panels import Quantity, draw_panels
from sp_bench.report.styles import RC, Style, styles
from sp_bench.report.tables import Cell

MAX_SETTINGS = 8  # figures of more settings would swamp the page; its tables hold them all
DPI = 144


@dataclass(frozen=True)
class Drawing:
    """A figure of the page; `kind` is throughput, memory or communication."""

    kind: str
    setting: str
    file_name: str
    caption: str
    width: int  # CSS pixels at print size
    png: bytes


def draw(cells: Sequence[Cell]) -> tuple[list[Drawing], int]:
    """The figures, and how many settings they leave out (those with the fewest cells)."""
    plotted = [c for c in cells if c.asked["workload"] != "parity" and (c.ok or "oom" in c.statuses)]
    plotted = [c for c in plotted if None not in (c.asked["sp_size"], c.asked["seq_len"])]
    settings = {setting: list(group) for setting, group in groupby(plotted, key=lambda c: c.setting)}
    kept = sorted(sorted(settings, key=lambda s: -len(settings[s]))[:MAX_SETTINGS])
    style = styles(plotted)
    drawings, taken = [], set()
    with rc_context(RC):
        for setting in kept:
            for kind, make in _KINDS.items():
                made = make(settings[setting], style)
                if made is None:
                    continue
                figure, caption = made
                figure.suptitle(fill(setting, round(CHARACTERS_PER_INCH * figure.get_figwidth())), fontsize="medium")
                name = _file_name(kind, settings[setting][0], taken)
                drawings.append(Drawing(kind, setting, name, caption, round(96 * figure.get_figwidth()), _png(figure)))
    return drawings, len(settings) - len(kept)


def _file_name(kind: str, cell: Cell, taken: set[str]) -> str:
    words = f"{kind}-{cell.asked['workload']}-{cell.asked['pass_kind']}"
    stem = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "_" for c in words)
    name = next(n for n in (stem, *(f"{stem}-{i}" for i in range(2, MAX_SETTINGS + 2))) if n not in taken)
    taken.add(name)
    return f"{name}.png"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the Software tag equal rows give equal bytes for every version of matplotlib that draws the same.
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


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


CHARACTERS_PER_INCH = 12  # of a title
_KINDS: Mapping[str, Callable[[Sequence[Cell], Mapping[str, Style]], tuple[Figure, str] | None]] = {
    "throughput": _throughput,
    "memory": _memory,
    "communication": draw_communication,
}
