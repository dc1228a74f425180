"""Scaling, utilisation, largest lengths, winners and gradient errors: data equals the rows', and nothing overlaps."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sp_bench.report.cells import Cell
from sp_bench.report.figures.drawings import Plot
from sp_bench.report.figures.errors import draw_errors
from sp_bench.report.figures.marks import Mark, draw_marks, side_by_side
from sp_bench.report.figures.max_context import draw_max_context
from sp_bench.report.figures.scaling import draw_scaling
from sp_bench.report.figures.styles import Style, styles
from sp_bench.report.figures.utilization import draw_utilization
from sp_bench.report.figures.venues import rc
from sp_bench.report.figures.winners import _text, draw_winners
from sp_bench.report.gradient_errors import point
from sp_bench.report.ratios import paired_ratio
from sp_bench.report.speed_ups import scalings
from sp_bench.report.winners import places

from .rows import read_cells, row

Draw = Callable[[Sequence[Cell], Mapping[str, Style]], Plot | None]
ALL: tuple[Draw, ...] = (draw_scaling, draw_utilization, draw_max_context, draw_winners, draw_errors)
RING = {"method": "ring", "layout": "zigzag"}
FLOPS = 1e6  # model FLOPs of a token pair


def ulysses(sp_size: int) -> dict[str, Any]:
    return {"method": "ulysses", "sp_size": sp_size, "ulysses_degree": sp_size, "ring_degree": 1}


def ring(sp_size: int) -> dict[str, Any]:
    return {**RING, "sp_size": sp_size}


SINGLE = {"method": "single", "sp_size": 1, "ring_degree": 1}


def measured(asked: Mapping[str, Any], seq_len: int, median_ms: float, replicates: int = 1) -> list[dict[str, Any]]:
    flops = FLOPS * seq_len**2
    known = {"mfu": 0.4, "hfu": 0.5, "model_flops": flops, "attention_flops_per_s": flops / median_ms * 1e3}
    return [
        row(seq_len=seq_len, median_ms=median_ms * (1 + 0.001 * r), replicate=r, **{**asked, **known})
        for r in range(replicates)
    ]


def drawn(draw: Draw, shown: Sequence[Cell]) -> Plot:
    with rc_context(rc(None)):
        plot = draw(shown, styles(shown))
    assert plot is not None
    return plot


def campaign() -> list[dict[str, Any]]:
    """Two methods on 2 and 4 ranks at three lengths, the ring out of memory at the longest on 2, and `single`."""
    rows = [*measured(SINGLE, 1024, 40.0, 6), *measured(SINGLE, 2048, 160.0, 6)]
    for place, seq_len in enumerate((1024, 2048, 4096)):
        for sp_size in (2, 4):
            ms = 40.0 * 4**place / sp_size
            rows += measured(ulysses(sp_size), seq_len, 1.1 * ms, 6)
            if (sp_size, seq_len) == (2, 4096):
                rows.append(row(status="oom", oom_site="torch", seq_len=seq_len, **ring(sp_size)))
            else:
                rows += measured(ring(sp_size), seq_len, 1.25 * ms, 6)
    return rows


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    return read_cells(campaign(), tmp_path_factory.mktemp("campaign"))


@pytest.fixture(scope="module")
def plots(found: list[Cell]) -> Mapping[Draw, Plot]:
    return {draw: drawn(draw, found) for draw in ALL}


# all of them


def ticks(axes: Axes) -> tuple[list[Any], list[Any]]:
    """Labels in view, along x and along y."""
    (left, right), (low, high) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
    xs = [t for t in axes.get_xticklabels() if t.get_text() and left <= t.get_position()[0] <= right]
    return xs, [t for t in axes.get_yticklabels() if t.get_text() and low <= t.get_position()[1] <= high]


def texts(figure: Figure) -> Iterator[Any]:
    yield from figure.legends
    for axes in figure.axes:
        yield from (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label)  # type: ignore[attr-defined]
        yield from (*axes.texts, *ticks(axes)[0], *ticks(axes)[1])


def holds(outer: Any, inner: Any) -> bool:
    """Whether a box lies within another; a pixel is for rounding."""
    across = outer.x0 - 1 <= inner.x0 and inner.x1 <= outer.x1 + 1
    return across and outer.y0 - 1 <= inner.y0 and inner.y1 <= outer.y1 + 1


def assert_is_legible(figure: Figure) -> None:
    """Nothing is cut off, no legend lies over a panel, and labels of one axis do not meet."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for text in texts(figure):
        box = text.get_window_extent(renderer)
        assert box.width <= 1 or holds(figure.bbox, box), text
    (key,) = [legend.get_window_extent(renderer) for legend in figure.legends]
    for axes in figure.axes:
        assert not key.overlaps(axes.get_window_extent(renderer))
        assert axes.get_window_extent(renderer).height > 20
        for labels in ticks(axes):
            boxes = [t.get_window_extent(renderer) for t in labels if t.get_visible()]
            assert not any(a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[place + 1 :])


@pytest.mark.parametrize("draw", ALL)
def test_a_figure_is_as_wide_as_the_page_and_legible(plots: Mapping[Draw, Plot], draw: Draw) -> None:
    figure = plots[draw].figure
    assert figure.get_figwidth() == rc(None)["figure.figsize"][0]
    assert_is_legible(figure)


@pytest.mark.parametrize("draw", ALL)
def test_data_leads_with_the_cell_and_ends_with_the_trials(plots: Mapping[Draw, Plot], draw: Draw) -> None:
    plot = plots[draw]
    assert list(plot.data)[:6] == ["setting", "series", "method", "kernel", "sp_size", "seq_len"]
    assert list(plot.data)[-1] == "trial_ids"
    known = {row["trial_id"] for cell in plot.cells for row in cell.rows}
    named = {trial for ids in plot.data["trial_ids"] for trial in ids.split()}
    assert named
    assert named <= known


@pytest.mark.parametrize("draw", [draw_scaling, draw_utilization])
def test_every_line_of_the_data_is_a_mark_of_the_figure(plots: Mapping[Draw, Plot], draw: Draw) -> None:
    plot, panels = plots[draw], 2 if draw is draw_scaling else 1  # speed-up and efficiency of the same lines
    marks = {"replicate": 0, "median": 0}
    for line in (line for axes in plot.figure.axes for line in axes.get_lines()):
        if line.get_linestyle() == "None" and line.get_marker() not in ("_", "|"):
            marks["replicate" if line.get_marker() == "." else "median"] += len(line.get_xdata())
    assert {mark: number // panels for mark, number in marks.items()} == dict(plot.data["mark"].value_counts())


@pytest.mark.parametrize("draw", ALL)
def test_nothing_to_say_is_no_figure(tmp_path: Path, draw: Draw) -> None:
    shown = read_cells([row(rel_error_dq=None, rel_error_dk=None, rel_error_dv=None)], tmp_path)
    assert draw(shown, styles(shown)) is None
    assert draw([], {}) is None


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    """200 series with long names at two lengths, each out of memory at a third, on two sp_sizes."""
    template = read_cells(campaign(), tmp_path_factory.mktemp("many"))
    shape = {c.asked["seq_len"]: c for c in template if c.series == "ring zigzag" and c.asked["sp_size"] == 4}
    failed = next(c for c in template if not c.ok)
    made = []
    for number in range(200):
        series = f"a_rather_long_name_of_a_method_{number} float32 merge_dtype=float32"
        for sp_size in (2, 4):
            for seq_len, cell in {**shape, 8192: failed}.items():
                name = replace(cell.name, series=series, series_but_kernel=series)
                asked = {**cell.asked, "method": f"method_{number}", "sp_size": sp_size, "seq_len": seq_len}
                made.append(replace(cell, cell_id=f"{number}/{sp_size}/{seq_len}", asked=asked, name=name))
    return made


@pytest.mark.parametrize("draw", ALL)
def test_200_series_are_legible_and_those_left_out_are_counted(many: list[Cell], draw: Draw) -> None:
    plot = drawn(draw, many)
    assert_is_legible(plot.figure)
    assert plot.figure.get_figheight() < 14
    if draw is not draw_winners:
        assert "in the tables only" in plot.caption


# marks


def test_series_of_one_place_stand_beside_each_other_and_one_alone_on_the_place() -> None:
    marks = {*((name, 4) for name in "abc"), ("b", 2), ("not drawn", 8)}
    drawn = side_by_side(marks, ["a", "b", "c"], 6.0, 6.0)
    assert drawn["b", 2] == 2
    assert drawn["a", 4] < drawn["b", 4] == 4 < drawn["c", 4]
    assert [drawn["a", 4], drawn["c", 4]] == pytest.approx([4, 4], rel=0.02)
    crowd = side_by_side({(str(k), n) for k in range(16) for n in (2, 4)}, [str(k) for k in range(16)], 1.0, 6.0)
    assert max(x for (_, n), x in crowd.items() if n == 2) < min(x for (_, n), x in crowd.items() if n == 4)
    assert side_by_side(set(), [], 6.0, 6.0) == {}


def test_a_line_passes_where_its_values_are_and_not_where_their_markers_stand() -> None:
    panel = Figure().subplots()
    marks = [Mark(place, value, None, [value], False, joint) for place, value, joint in ((2.1, 3, 2), (4.2, 12, 4))]
    draw_marks(panel, marks, Style(0, "black", "o", "-"), joined=True)
    line, *_, markers = (each.get_xydata() for each in panel.lines)
    assert [[*map(float, point)] for point in line] == [[2, 3], [4, 12]]
    assert [[*map(float, point)] for point in markers] == [[2.1, 3], [4.2, 12]]


# scaling


def test_speed_up_over_single_is_the_ratio_of_step_times_and_efficiency_its_share_of_the_ideal(
    found: list[Cell], plots: Mapping[Draw, Plot]
) -> None:
    data = plots[draw_scaling].data
    strong = data[(data.scaling == "strong") & (data.seq_len == 2048) & (data["mark"] == "median")]
    assert set(strong.baseline_series) == {"single"}
    assert set(strong.baseline_sp_size) == {1}
    by_place = {(s, n): line for s, n, line in zip(strong.series, strong.sp_size, strong.itertuples(), strict=True)}
    single = next(c for c in found if c.series == "single" and c.asked["seq_len"] == 2048)
    for cell in (c for c in found if c.asked["seq_len"] == 2048 and c.series != "single"):
        line, paired = by_place[cell.series, cell.asked["sp_size"]], paired_ratio(single, cell)
        assert paired is not None
        assert line.ideal_speed_up == cell.asked["sp_size"]
        assert (line.speed_up, line.interval_low_speed_up) == (paired.ratio, paired.interval.low)
        assert line.efficiency == pytest.approx(paired.ratio / cell.asked["sp_size"])
        assert line.interval_high_efficiency == pytest.approx(paired.interval.high / cell.asked["sp_size"])


def test_the_ideal_line_is_the_ratio_of_ranks_and_every_panel_names_its_question_and_baseline(
    plots: Mapping[Draw, Plot],
) -> None:
    upper = plots[draw_scaling].figure.axes[::2]
    assert [axes.get_title(loc="left") for axes in upper] == [
        "strong scaling,\nseq_len 1,024,\nover single on 1 rank",
        "strong scaling,\nseq_len 2,048,\nover single on 1 rank",
        "weak scaling,\n1,024 tokens a rank,\nover single on 1 rank",
    ]
    for axes in upper:
        (ideal,) = [line for line in axes.get_lines() if line.get_color() == "0.55"]
        assert list(ideal.get_xdata()) == list(ideal.get_ydata()) == [1, 2, 4]
    assert "seq_len 4,096" in plots[draw_scaling].caption


def test_without_single_each_series_starts_from_its_own_fewest_ranks(found: list[Cell]) -> None:
    (strong,) = [s for s in scalings(found, "strong") if s.tokens == 4096] or [None]
    assert strong is not None
    assert (strong.over_single, strong.start_size) == (False, 2)
    assert {s.start.series for s in strong.speed_ups} == {"ulysses"}  # the ring ran on 4 only
    assert [s.ideal for s in strong.speed_ups] == [1, 2]
    assert [s.value for s in strong.speed_ups] == pytest.approx([1, 2])


def test_weak_scaling_compares_rates_of_model_flops_at_fixed_tokens_a_rank(found: list[Cell]) -> None:
    weak = next(s for s in scalings(found, "weak") if s.tokens == 1024)
    assert weak.over_single
    by_size = {s.cell.asked["sp_size"]: s for s in weak.speed_ups if s.cell.series == "ulysses"}
    assert {n: s.cell.asked["seq_len"] for n, s in by_size.items()} == {2: 2048, 4: 4096}
    for size, s in by_size.items():  # four times the work at twice the length, in 1.1 times the ideal time
        assert s.value == pytest.approx(size / 1.1)


def test_cells_without_known_work_have_no_weak_scaling(found: list[Cell]) -> None:
    unknown = [replace(c, rows=tuple({**r, "model_flops": None} for r in c.rows)) for c in found]
    assert scalings(unknown, "weak") == []
    assert len(scalings(unknown, "strong")) == len(scalings(found, "strong"))


def test_fewer_than_6_replicates_have_points_and_no_interval_and_single_ones_are_hollow(tmp_path: Path) -> None:
    rows = [*measured(ring(2), 1024, 20.0, 3), *measured(ring(4), 1024, 11.0, 3)]
    (strong,) = scalings(read_cells(rows, tmp_path / "three"), "strong")
    assert strong.speed_ups[1].interval is None
    assert len(strong.speed_ups[1].replicates) == 3
    one = read_cells([*measured(ring(2), 1024, 20.0), *measured(ring(4), 1024, 11.0)], tmp_path / "one")
    plot = drawn(draw_scaling, one)
    faces = {line.get_markerfacecolor() for line in plot.figure.axes[0].get_lines() if line.get_marker() == "^"}
    assert faces == {"white"}
    assert len(plot.data) == 2


# utilisation


def test_utilisation_is_the_rows_mfu_and_hfu_in_percent_over_median_times(
    found: list[Cell], plots: Mapping[Draw, Plot]
) -> None:
    data = plots[draw_utilization].data
    medians = data[data["mark"] == "median"]
    assert len(medians) == 2 * sum(c.ok for c in found)
    columns = medians[["series", "sp_size", "seq_len", "quantity", "percent_of_peak"]].to_numpy()
    shares = {(series, n, length, name): percent for series, n, length, name, percent in columns}
    for cell in (c for c in found if c.ok):
        place = (cell.series, cell.asked["sp_size"], cell.asked["seq_len"])
        assert shares[*place, "MFU"] == pytest.approx(100 * (cell.mfu or 0))
        assert shares[*place, "HFU"] == pytest.approx(100 * (cell.hfu or 0))
        assert cell.mfu == pytest.approx(0.4, rel=0.01)


def test_utilisation_begins_at_none_of_the_peak_and_names_it(tmp_path: Path, plots: Mapping[Draw, Plot]) -> None:
    assert plots[draw_utilization].figure.axes[0].get_ylim()[0] == 0
    env = dict(row()["environment"]) | {"device_names": ["NVIDIA H200"] * 2}
    rows = [r | {"environment": env, "dtype": "bfloat16"} for r in measured(ring(2), 1024, 20.0)]
    plot = drawn(draw_utilization, read_cells(rows, tmp_path))
    assert "989 TFLOP/s of NVIDIA H200 in bfloat16" in plot.caption
    (left, right), mfu = plot.figure.axes[0].get_xlim(), 100 * rows[0]["mfu"]
    assert left == 0 < mfu < right


def test_equal_mfu_and_hfu_are_both_seen(tmp_path: Path) -> None:
    rows = [r | {"pass_kind": "forward", "hfu": r["mfu"]} for r in measured(ring(2), 1024, 20.0)]
    (panel,) = drawn(draw_utilization, read_cells(rows, tmp_path)).figure.axes
    places = {str(line.get_marker()): line.get_ydata()[0] for line in panel.lines if line.get_marker() in ("o", "D")}
    assert places["D"] < 0 < places["o"]


def test_an_unknown_peak_has_no_utilisation(found: list[Cell]) -> None:
    assert draw_utilization([replace(c, mfu=None, hfu=None) for c in found], styles(found)) is None


# the largest lengths


def test_largest_and_smallest_lengths_are_the_rows_and_what_lies_between_is_unknown(plots: Mapping[Draw, Plot]) -> None:
    plot = plots[draw_max_context]
    lines = {(m, s, n): length for m, s, n, length in plot.data[["mark", "series", "sp_size", "seq_len"]].to_numpy()}
    assert lines == {
        ("largest that ran", "single", 1): 2048,
        ("largest that ran", "ulysses", 2): 4096,
        ("largest that ran", "ring zigzag", 2): 2048,
        ("smallest out of memory", "ring zigzag", 2): 4096,
        ("largest that ran", "ulysses", 4): 4096,
        ("largest that ran", "ring zigzag", 4): 4096,
    }
    (unknown,) = [patch for axes in plot.figure.axes for patch in axes.patches]
    assert (unknown.get_x(), unknown.get_x() + unknown.get_width()) == (2048, 4096)


def test_one_length_that_ran_everywhere_has_no_figure_of_lengths(tmp_path: Path) -> None:
    shown = read_cells([*measured(ring(2), 1024, 20.0), *measured(ring(4), 1024, 11.0)], tmp_path)
    assert draw_max_context(shown, styles(shown)) is None


# winners


@given(st.lists(st.tuples(st.floats(1, 3), st.floats(1, 3)), min_size=1, max_size=12))
def test_a_winner_is_proven_exactly_when_the_interval_of_the_paired_ratio_is_above_1(
    pairs: list[tuple[float, float]],
) -> None:
    first, second = _contest(*zip(*pairs, strict=True))
    (place,) = places([first, second])
    assert place.win is not None
    winner, loser = sorted((first, second), key=lambda c: (c.median_step_ms or 0, c.series))
    assert (place.win.winner, place.win.second) == (winner, loser)
    paired = paired_ratio(loser, winner)
    assert place.win.proven == (paired is not None and paired.interval.low > 1)
    assert paired is not None or len(pairs) < 6


_TEMPLATES: dict[str, Cell] = {}


def _contest(*times: Sequence[float]) -> list[Cell]:
    """A cell a sequence of times, of methods a, b, ... at one place."""
    cell = _TEMPLATES["cell"]
    return [
        replace(
            cell,
            cell_id=name,
            name=replace(cell.name, series=name, series_but_kernel=name),
            asked={**cell.asked, "method": name, "kernel": "math"},
            step_ms={f"c/e/{r}": ms for r, ms in enumerate(each)},
            median_step_ms=median(each),
        )
        for name, each in zip("abcdefgh", times, strict=False)
    ]


@pytest.fixture(scope="module", autouse=True)
def _template(found: list[Cell]) -> None:
    _TEMPLATES["cell"] = next(c for c in found if c.series == "ulysses")


def test_a_winner_must_be_proven_against_every_other_method() -> None:
    contest = _contest([1.0] * 6, [1.1] * 6, [0.9, 0.9, 1.3, 1.3, 1.3, 1.3])
    (place,) = places(contest)
    assert place.win is not None
    assert (place.win.second.series, place.win.lead) == ("b", pytest.approx(1.1))
    assert [c.series for c in place.win.unproven_against] == ["c"]
    assert not place.win.proven


def test_series_of_one_method_and_steps_of_different_kernels_do_not_compete() -> None:
    a, b, c = _contest([1.0] * 6, [1.1] * 6, [1.2] * 6)
    same_method = replace(b, asked={**b.asked, "method": "a"})
    (place,) = places([a, same_method])
    assert place.win is None
    fast = replace(a, asked={**a.asked, "kernel": "fast"})
    (place,) = places([fast, b, c])
    assert place.win is not None
    assert (place.win.winner.series, place.win.second.series) == ("b", "c")


def test_the_map_has_a_tile_a_place_says_the_lead_and_who_was_out_of_memory(plots: Mapping[Draw, Plot]) -> None:
    plot = plots[draw_winners]
    lines = plot.data.set_index(["sp_size", "seq_len"])
    assert lines.loc[(4, 2048), "series"] == "ulysses"
    assert lines.loc[(4, 2048), "lead"] == pytest.approx(1.25 / 1.1)
    assert lines.loc[(4, 2048), "proven"]
    assert pd.isna(lines.loc[(2, 4096), "series"])
    assert lines.loc[(2, 4096), "ran"] == "ulysses"
    assert lines.loc[(2, 4096), "out_of_memory"] == "ring zigzag"
    (axes,) = plot.figure.axes
    words = {text.get_text() for text in axes.texts}
    assert words == {"ulysses\n1.14x ahead of ring zigzag", "only ulysses\nout of memory: ring"}
    assert len(axes.patches) == len(plot.data) == 6  # on one rank there is no contest


def test_words_stay_in_their_tiles(many: list[Cell]) -> None:
    figure = drawn(draw_winners, many).figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (axes,) = figure.axes
    tiles = [patch.get_window_extent(renderer) for patch in axes.patches]
    for text, tile in zip(axes.texts, tiles, strict=True):
        assert holds(tile, text.get_window_extent(renderer)), text


def test_what_is_not_proven_is_hatched_and_in_the_legend(tmp_path: Path) -> None:
    rows = [r for n in (1024, 2048) for asked in (ring(2), ulysses(2)) for r in measured(asked, n, 10.0 + n)]
    figure = drawn(draw_winners, read_cells(rows, tmp_path)).figure
    assert {patch.get_hatch() for patch in figure.axes[0].patches} == {"////"}
    legend = {text.get_text().strip() for text in figure.legends[0].get_texts()}
    assert legend == {"ring", "lead not proven"}
    assert {text.get_text() for text in figure.axes[0].texts} == {"ring zigzag\nulysses: 1.000x, no interval"}


def test_none_is_ahead_of_what_it_is_not_told_apart_from(tmp_path: Path) -> None:
    rows = []
    for n in (1024, 2048):
        rows += [
            row(**asked, seq_len=n, replicate=r, median_ms=ms)
            for asked, each in ((ring(2), [10.0] * 6), (ulysses(2), [9.0, 9.0, 11.0, 11.0, 11.0, 11.0]))
            for r, ms in enumerate(each)
        ]
    figure = drawn(draw_winners, read_cells(rows, tmp_path)).figure
    assert {text.get_text() for text in figure.axes[0].texts} == {"ring zigzag\nulysses: 1.10x, not told apart"}


def test_the_second_may_be_proven_slower_and_a_third_not() -> None:
    (place,) = places(_contest([1.0] * 6, [1.1] * 6, [0.9, 0.9, 1.3, 1.3, 1.3, 1.3]))
    assert _text(place, 7.0, lambda cell: cell.series) == "a\n1.10x ahead of b, not proven against c"


# gradient errors


def test_errors_are_the_most_wrong_gradient_of_each_series_and_sp_size(tmp_path: Path) -> None:
    wrong = {"rel_error_dq": 1e-3, "rel_error_dk": 3e-3, "rel_error_dv": 2e-3}
    rows = [r | wrong for r in measured(ring(2), 1024, 20.0)]
    rows += [r | wrong | {"rel_error_dv": 4e-3} for r in measured(ring(2), 2048, 80.0)]
    rows += [r | wrong for r in measured(ulysses(4), 2048, 80.0)]
    data = drawn(draw_errors, read_cells(rows, tmp_path)).data
    over_sizes = data[data.panel == "error over sp_size"]
    kept = over_sizes[["series", "sp_size", "seq_len", "gradient", "rel_error"]].to_numpy().tolist()
    assert kept == [["ring zigzag", 2, 2048, "dv", 4e-3], ["ulysses", 4, 2048, "dk", 3e-3]]
    over_speed = data[data.panel == "error over speed"]
    assert set(over_speed.seq_len) == {2048}
    expected = [FLOPS * 2048**2 / 0.08 / n / 1e12 for n in over_speed.sp_size]
    assert list(over_speed.attention_tflops_per_s_per_gpu) == pytest.approx(expected)


def test_errors_of_options_are_drawn_at_the_length_that_has_them(tmp_path: Path) -> None:
    made = []
    for travelling in ("input", "float32"):
        options = json.dumps({"method": {"name": "ring", "merge_dtype": "input"}})
        made += measured({**ring(2), "dkv_dtype": travelling, "config": options}, 1024, 20.0)
    made += [*measured(ulysses(2), 1024, 21.0), *measured(ulysses(2), 2048, 90.0)]
    shown = read_cells(made, tmp_path)
    data = drawn(draw_errors, shown).data
    assert set(data[data.panel == "error over speed"].seq_len) == {1024}


def test_an_error_of_zero_has_no_place_and_training_steps_are_compared_in_tokens(tmp_path: Path) -> None:
    zero = dict.fromkeys(("rel_error_dq", "rel_error_dk", "rel_error_dv"), 0.0)
    shown = read_cells([r | zero for r in measured(ring(2), 1024, 20.0)], tmp_path / "zero")
    assert point(shown[0]) is None
    step = {"workload": "train_step", "pass_kind": "step", "num_layers": 2, "comm": []}
    rows = [row(seq_len=1024, **asked, **step) for asked in (ring(2), ulysses(2))]
    figure = drawn(draw_errors, read_cells(rows, tmp_path / "step")).figure
    assert "tokens/s/rank" in {axes.get_xlabel() for axes in figure.axes}


def test_an_error_with_nothing_beside_it_is_not_drawn_and_close_errors_are_told_apart(tmp_path: Path) -> None:
    def cells(name: str, **errors: float) -> list[Cell]:
        worst = {"rel_error_dq": 1e-3, "rel_error_dv": 1e-3}
        sizes = {"one": ring(1), "two": ring(2)}
        made = [row | worst | {"rel_error_dk": e} for n, e in errors.items() for row in measured(sizes[n], 1024, 20.0)]
        return read_cells(made, tmp_path / name)

    several = cells("several", one=2.991e-3, two=3.000e-3)
    assert draw_errors(cells("lone", two=3e-3), styles(several)) is None
    plot = drawn(draw_errors, several)
    assert set(plot.data.panel) == {"error over sp_size"}  # at one size over speed there is a single one
    (panel,) = plot.figure.axes
    assert len({label.get_text() for label in panel.get_yticklabels()}) >= 3
