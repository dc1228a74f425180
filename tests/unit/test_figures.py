"""Figures of a paper: whatever the width, titles, names and legends have room."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from sp_bench.analysis.fabric_model import Place
from sp_bench.analysis.settings import settings
from sp_bench.report import VENUES, Look, draw
from sp_bench.report.figures import fabrics, steps, throughput, windows
from sp_bench.report.figures.style import LINE_IN, Plot, finish

from .rows import cells_of
from .test_report import GATHER, ULYSSES, campaign, on_gpus, one_of, replicated


def legend_of(plot: Plot) -> list[str]:
    (legend,) = plot.figure.legends
    return [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize("column", [1, 2])
@pytest.mark.parametrize("venue", VENUES)
def test_titles_of_many_lines_lie_on_no_axis(venue: str, column: int) -> None:
    long = {"model": "a_model_with_a_name_that_is_long", "isolation": "group", "device_memory_gib": 79.6}
    rows = [*replicated(10.0, [1.0] * 6, **ULYSSES), *replicated(11.0, [1.0] * 6)]
    rows += [*replicated(10.0, [1.0] * 6, **ULYSSES, **long), *replicated(11.0, [1.0] * 6, **long)]
    look = Look(column, None, venue)
    (plot,) = throughput.draw(settings(cells_of(rows)), look)
    before = plot.figure.get_figheight()
    most = max(axis.get_title(loc="left").count("\n") + 1 for axis in plot.figure.axes)
    finish(plot, "throughput", look)  # a layout that does not fit is a warning, and so an error here
    assert plot.figure.get_figheight() >= before + LINE_IN * max(0, most - 2)
    boxes = [axis.get_window_extent() for axis in plot.figure.axes]
    titles = [axis._left_title.get_window_extent() for axis in plot.figure.axes]
    assert not any(title.overlaps(box) for title in titles for box in boxes)
    assert all(title.y1 <= plot.figure.bbox.y1 for title in titles)


def test_a_height_that_the_reader_gave_stays() -> None:
    found = cells_of([*replicated(10.0, [1.0] * 6, **ULYSSES), *replicated(11.0, [1.0] * 6)])
    (drawing,) = draw(settings(found), found, Look(1, 1.5, "icml"), ["throughput"])
    assert drawing.width == round(96 * 3.25)


def test_the_legend_of_steps_names_the_black_line_and_no_part_that_nobody_sees() -> None:
    found = settings(cells_of(campaign()))
    kernels, phases = steps.draw(found, Look())
    assert legend_of(kernels)[-1] == "limit: attention and products alone"
    assert {"attention", "copies from or to the host that nothing hides"} <= set(legend_of(kernels))
    assert legend_of(phases) == ["forward", "recomputation", "backward", "optimizer"]
    parts = {"attention": 99.9, "exposed_host_copies": 0.1}
    bars = [steps.Bar(found[0], found[0].cells[0], parts, None)]
    figure, _, _ = steps.stacked(bars, steps.KERNELS, "ms", "limit", Look())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["attention"]


@pytest.mark.parametrize(("step_ms", "idle"), [(100.0, 0.6), (20.0, 0.0)])
def test_shares_of_a_step_are_of_the_timed_one_or_of_the_traced_work_if_that_is_longer(step_ms, idle) -> None:
    """Not of the traced one, in which the profiler makes the host late."""
    cell = SimpleNamespace(middle=lambda _: 0.25, median_step_ms=step_ms)
    parts = {"attention": 30.0, "exposed_messages": 10.0, "idle": 400.0}
    found = steps._bar(None, cell, parts, in_ms=False, with_limit=True)  # pyright: ignore[reportArgumentType]
    busy = 1 - idle
    assert found.parts == pytest.approx({"attention": 0.75 * busy, "exposed_messages": 0.25 * busy, "idle": idle})
    assert found.line == 0.25


def test_panels_of_windows_share_one_legend_of_numbers_of_gpus() -> None:
    rows = [
        one_of(8, **method, window=window, num_nodes=hosts, fabric="network" if hosts > 1 else "nvlink")
        for method in ({}, ULYSSES)
        for window in (128, 4096)
        for hosts in (1, 2, 8)
    ]
    (plot,) = windows.draw(cells_of(rows), Look())
    assert legend_of(plot) == ["8 GPUs"]
    ends = [axis.get_title(loc="left").rpartition(", ")[2] for axis in plot.figure.axes]
    assert sorted(ends) == ["1 GPU a host", "4 GPUs a host", "one host"]


def test_marks_of_many_methods_on_many_fabrics_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = cells_of([on_gpus(**method) for method in ({}, ULYSSES, GATHER)])
    points = [
        SimpleNamespace(
            cell=cell, fabric=f"{n}", measured_ms=1.0, predicted_ms=1.0, bandwidth=SimpleNamespace(bytes_per_s=1.0)
        )
        for cell in cells
        for n in range(9)
    ]
    monkeypatch.setattr(fabrics, "places", lambda cells: [Place("", 4096, 2, tuple(points))] * 3)  # pyright: ignore
    plot = fabrics.draw(cells, Look())[0]
    finish(plot, "fabrics", Look())
    assert len(plot.figure.axes) == 3
    for axis in plot.figure.axes:
        marks = [line for line in axis.lines if line.get_marker() not in ("_", "None")]
        at = sorted(axis.transData.transform((line.get_xdata()[0], 1))[0] for line in marks)
        assert min(b - a for a, b in pairwise(at)) > marks[0].get_markersize() / 72 * plot.figure.dpi
