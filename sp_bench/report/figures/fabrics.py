"""Which method a slower fabric favours, and what a step is made of."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sp_bench.analysis import words
from sp_bench.analysis.cells import Cell
from sp_bench.analysis.fabric_model import places
from sp_bench.analysis.time_parts import Attribution, attributions, largest
from sp_bench.formats import GIB, number
from sp_bench.report.figures.panels import (
    LEAST_IN,
    MOST_PANELS,
    PANEL_IN,
    ROW_IN,
    abreast,
    grid,
    is_first,
    wrapped_title,
)
from sp_bench.report.figures.style import (
    BLACK,
    Look,
    Plot,
    about,
    beside,
    explained,
    is_plain,
    legend,
    mark,
    medians,
    places_axis,
    plain_log,
    tokens,
    trial_ids,
    wrapped,
)

OF_FABRICS = (
    "Step time by fabric, on a logarithmic axis; lower is better. Below a fabric's name: GiB/s that a rank sends with "
    "the primitive that is fastest there; others may be slower. Strokes: predicted from bytes, bandwidth and schedule, "
    "calibrated on the first fabric. "
)
PREDICTED: dict[str, Any] = {"marker": "_", "ms": 7, "mew": 0.9, "ls": "none", "color": BLACK}
MARK_IN = 0.12  # width of a mark beside others; panels with many marks take the whole width
MOST_SETTINGS = 4
OF_PARTS = "What a step is made of: the kernel alone, computing beyond it, and messages that nothing hides."
GREYS = (
    ("the kernel alone", "#bdbdbd", ""),
    ("computing beyond it", "#efefef", "////"),
    ("exposed messages", "#5a5a5a", ""),
)


def draw(cells: Sequence[Cell], look: Look) -> list[Plot]:
    return [*_fabrics(cells, look), *_parts(cells, look)]


def _fabrics(cells: Sequence[Cell], look: Look) -> list[Plot]:
    found = [place for place in places(cells) if len(place.fabrics) > 1][:MOST_PANELS]
    if not found:
        return []
    most = max(len(place.fabrics) * len({words.method(point.cell) for point in place.points}) for place in found)
    least_in = max(LEAST_IN, 0.5 + MARK_IN * most)
    across = abreast(look, len(found), least_in)
    figure, axes = grid(look, len(found), PANEL_IN if across == 1 else 2.3, least_in)
    cells = [point.cell for place in found for point in place.points]
    styles = _styles(cells)
    handles: dict[str, Line2D] = {}
    data: list[dict[str, object]] = []
    for place, axis in zip(found, axes, strict=True):
        of_place = {name: i for i, name in enumerate(place.fabrics)}
        here = [name for name in styles if name in {words.method(point.cell) for point in place.points}]
        for point in place.points:
            name = words.method(point.cell)
            style, x = styles[name], of_place[point.fabric] + beside(here.index(name), len(here))
            axis.plot([x], [point.predicted_ms], **PREDICTED | {"color": style["color"]})
            (handles[name],) = axis.plot([x], [point.measured_ms], **style)
            data.append({"place": place.title, **about(point.cell), "measured_ms": point.measured_ms,
                         "predicted_ms": point.predicted_ms, "bandwidth_gib_per_s": point.bandwidth.bytes_per_s / GIB,
                         "trial_ids": trial_ids(point.cell)})  # fmt: skip
        plain_log(axis, [ms for point in place.points for ms in (point.measured_ms, point.predicted_ms)])
        best = {f: max(p.bandwidth.bytes_per_s for p in place.on(f)) / GIB for f in place.fabrics}
        letters = max(8, int(20 * (look.width_in / across - 0.5) / len(best)))
        places_axis(axis, [f"{wrapped(words.fabric(f), letters)}\n{b:.3g}" for f, b in best.items()])
        axis.set_xlabel("fabric, GiB/s")
        axis.set_title(wrapped_title(place.title, look, across), loc="left")
        if is_first(axis):
            axis.set_ylabel("step, ms")
    legend(figure, {name: handles[name] for name in styles} | {"predicted": Line2D([], [], **PREDICTED)}, look)
    caption = OF_FABRICS + medians(cells) + explained(cells, "in parts")
    return [Plot("fabrics", "", figure, caption, pd.DataFrame(data))]


def _styles(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Name -> its mark; variants of a method differ in their fill."""
    firsts = {words.method(cell): cell for cell in cells}
    numbers: Counter[object] = Counter()
    styles = {}
    for name, cell in sorted(
        firsts.items(), key=lambda each: (words.plain_method(each[1]), not is_plain(each[1]), each[0])
    ):
        method = words.plain_method(cell)
        numbers[method] += not is_plain(cell)
        styles[name] = mark(cell, numbers[method])
    return styles


def _parts(cells: Sequence[Cell], look: Look) -> list[Plot]:
    """The parts of steps on GPUs; on a CPU they are noise."""
    grouped: dict[str, list[Attribution]] = {}
    for each in attributions([c for c in cells if c.processor == "GPU"]):
        known = None not in (each.alone_ms, each.beyond_kernel, each.exposed)
        if known and not each.cell.waits_for_host:
            grouped.setdefault(each.cell.setting, []).append(each)
    rows = [each for group in list(grouped.values())[:MOST_SETTINGS] for each in _of_fastest_kernel(largest(group))]
    if len(rows) < 2:
        return []
    figure = look.figure((ROW_IN + 0.05) * len(rows) + 0.95)
    axis = figure.subplots()
    data: list[dict[str, object]] = []
    for place, each in enumerate(reversed(rows)):
        exposed = each.exposed.ms if each.exposed else 0.0
        beyond = each.beyond_kernel.ms if each.beyond_kernel else 0.0
        left = 0.0
        for (what, face, hatch), ms in zip(GREYS, (each.alone_ms or 0.0, beyond, exposed), strict=True):
            if ms > 0:
                axis.barh(place, ms, left=left, color=face, hatch=hatch, edgecolor="#444444", lw=0.4, height=0.62)
            left += max(ms, 0.0)
            data.append({**about(each.cell), "part": what, "ms": ms, "trial_ids": trial_ids(each.cell)})
        axis.annotate(
            f"{_signed(beyond)} {_signed(exposed)}",
            (left, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
        )
    where = [_where(a.cell) for a in rows]
    several = len(set(where)) > 1
    names = [
        f"{words.method(a.cell)}{f' ({w})' if several else ''}"
        for a, w in zip(reversed(rows), reversed(where), strict=True)
    ]
    axis.set_yticks(range(len(rows)), [wrapped(n, 44 if look.width_in > 5 else 22) for n in names], fontsize=6.5)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xlim(0, axis.get_xlim()[1] * (1.08 if look.width_in > 5 else 1.2))
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("ms of a step")
    patches = [Patch(facecolor=face, hatch=hatch, edgecolor="#444444", lw=0.4) for _, face, hatch in GREYS]
    figure.legend(
        patches, [what for what, _, _ in GREYS], loc="outside lower center", ncols=3 if look.width_in > 5 else 1
    )
    place = f" {where[0]}." if not several else ""
    return [Plot("fabrics", "parts", figure, OF_PARTS + place, pd.DataFrame(data))]


def _of_fastest_kernel(group: Sequence[Attribution]) -> list[Attribution]:
    ordered = sorted(group, key=lambda a: a.cell.median_step_ms or 0.0)
    return [a for a in ordered if a.cell.asked["kernel"] == ordered[0].cell.asked["kernel"]]


def _where(cell: Cell) -> str:
    shape = f"{cell.asked['num_heads']}/{cell.asked['num_kv_heads']} heads"
    passes = "forward, " if cell.asked["pass_kind"] == "forward" else ""
    return f"{passes}{shape}, {tokens(cell.asked['seq_len'])} tokens, {words.kernel(cell)}"


def _signed(ms: float) -> str:
    return f"{'+' if ms >= 0 else chr(0x2212)}{number(abs(ms))}"
