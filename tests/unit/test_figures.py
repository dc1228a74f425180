"""Figures of a paper: whatever the width, titles, names and legends have room."""

import pytest

from sp_bench.analysis.settings import settings
from sp_bench.report import VENUES, Look, draw
from sp_bench.report.figures import throughput
from sp_bench.report.figures.style import LINE_IN, finish

from .rows import cells_of
from .test_report import ULYSSES, replicated


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
