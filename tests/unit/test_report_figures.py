"""What a figure shows is what the rows say, in files that are equal for equal rows, with no word cut or covered."""

import io
import itertools
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import rc_context, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from sp_bench.report.cells import Cell
from sp_bench.report.fabric_model import foremost, places
from sp_bench.report.figures import draw
from sp_bench.report.figures.attribution import draw_time_parts
from sp_bench.report.figures.axes import is_close, scale_lengths, short
from sp_bench.report.figures.communication import draw_communication
from sp_bench.report.figures.drawings import DPI, Drawing, Plot, finish
from sp_bench.report.figures.fabrics import draw_fabrics
from sp_bench.report.figures.legends import MAX_LINES, columns_within, printable, text_inches, wrapped
from sp_bench.report.figures.quantities import draw_memory, draw_step_time, draw_throughput
from sp_bench.report.figures.reduction import MAX_SERIES, reduced
from sp_bench.report.figures.styles import MARKERS, styles
from sp_bench.report.figures.venues import VENUES, rc
from sp_bench.report.file_names import stems
from sp_bench.report.time_parts import attributions

from .rows import collective, read_cells, row

GIB = 2**30
RING = {"method": "ring", "layout": "zigzag", "sp_size": 4, "primitive": "send_recv"}
ULYSSES = {"method": "ulysses", "sp_size": 4, "ulysses_degree": 4, "ring_degree": 1}
LONG = "a_library_with_a_name_longer_than_any_that_is_known_of_so_far==1.2.3.dev20260401"
WIDTHS_IN = {  # None: the page. Sources: tueplots, mlsys2025.sty, acmart (sigconf), IEEE's guide to graphics
    None: 7.2,
    "neurips": 5.5,
    "icml": 6.75,
    "iclr": 5.5,
    "mlsys": 6.75,
    "acm": 506.295 / 72.27,
    "ieee": 7.16,
}


def config(method: str, exchange: str = "collectives", **options: Any) -> str:
    return json.dumps({"hardware": {"device": "cuda"}, "method": {"name": method, "exchange": exchange, **options}})


def names(rows: Sequence[Mapping[str, Any]], folder: Path) -> set[str]:
    return {c.series for c in read_cells(rows, folder)}


# names of series


def test_copy_engines_are_always_said_and_collectives_never(tmp_path: Path) -> None:
    engines = row(**ULYSSES, config=config("ulysses", "copy_engines"))
    assert names([engines, row(**RING, config=config("ring"))], tmp_path) == {
        "ulysses by copy engines",
        "ring zigzag",
    }


def test_options_come_after_copy_engines_and_are_told_apart_over_both_transports(tmp_path: Path) -> None:
    rows = [
        row(**ULYSSES, kernel="flash_attn", head_chunks=1, config=config("ulysses", head_chunks=1)),
        row(**ULYSSES, kernel="flash_attn_4", head_chunks=1, config=config("ulysses", head_chunks=1)),
        row(**ULYSSES, kernel="flash_attn_4", head_chunks=4, config=config("ulysses", "copy_engines", head_chunks=4)),
        row(**RING, kernel="flash_attn_4", config=config("ring")),
    ]
    assert names(rows, tmp_path) == {
        "ulysses flash_attn",
        "ulysses flash_attn_4",
        "ulysses by copy engines flash_attn_4 head_chunks=4",
        "ring zigzag flash_attn_4",
    }


def test_what_a_method_does_without_an_option_is_its_plain_name(tmp_path: Path) -> None:
    gather = {"method": "all_gather", "layout": "zigzag", "sp_size": 8, "ring_degree": 8}
    rows = [row(**gather, head_stride=n, config=config("all_gather", head_stride=n)) for n in (None, 4)]
    assert names(rows, tmp_path) == {"all_gather zigzag", "all_gather zigzag head_stride=4"}


def test_a_message_alone_says_copy_engines_once(tmp_path: Path) -> None:
    rows = [collective("nvlink", "all_to_all by copy engines", 300, config=config("ulysses", "copy_engines"))]
    assert names(rows, tmp_path) == {"all_to_all by copy engines"}


# the data behind a figure is what the rows say


def measured_rows() -> list[dict[str, Any]]:
    """Two methods at three lengths: seven replicates, a single one, and out of memory."""
    made = []
    for method, seq_len in itertools.product((RING, ULYSSES), (1024, 2048)):
        for replicate in range(7 if seq_len == 1024 else 1):
            memory = {"max_peak_allocated_bytes": GIB * seq_len // 1024 + replicate}
            ms = 10.0 + replicate + seq_len / 1024
            made.append(row(**method, seq_len=seq_len, replicate=replicate, median_ms=ms, **memory))
    made.append(row(**ULYSSES, seq_len=4096, status="oom", oom_site="nccl"))
    return made


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return measured_rows()


@pytest.fixture(scope="module")
def found(rows: Sequence[Mapping[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    return read_cells(rows, tmp_path_factory.mktemp("made") / "measured")


Draw = Callable[[Sequence[Cell], Mapping[str, Any]], Plot | None]


def plot_of(draw_kind: Draw, shown: Sequence[Cell], venue: str | None = None) -> Plot:
    with rc_context(rc(venue)):
        plot = draw_kind(shown, styles(shown))
    assert plot is not None
    assert plot.data.columns[-1] == "trial_ids"
    assert [*plot.data.columns[:6]] == ["setting", "series", "method", "kernel", "sp_size", "seq_len"]
    assert plot.data["trial_ids"].str.len().gt(0).all()
    return plot


@pytest.mark.parametrize(
    ("draw_kind", "shown", "column", "scale"),
    [
        (draw_throughput, "tokens_per_s_per_gpu", "tokens_per_s_per_gpu", 1),
        (draw_step_time, "step_ms", "median_step_ms", 1),
        (draw_memory, "max_peak_allocated_gib", "max_peak_allocated_bytes", GIB),
    ],
)
def test_every_replicate_is_a_mark_with_the_number_of_its_row(
    draw_kind: Draw, shown: str, column: str, scale: float, rows: Sequence[Mapping[str, Any]], found: Sequence[Cell]
) -> None:
    data = plot_of(draw_kind, found).data
    known = {r["trial_id"]: r[column] / scale for r in rows if r["status"] == "ok"}
    points = data[(data["mark"] == "replicate") | (data["num_replicates"] == 1)]
    assert dict(zip(points["trial_ids"], points[shown], strict=True)) == pytest.approx(known)
    medians = data[data["mark"] == "median"]
    for ids, value in zip(medians["trial_ids"], medians[shown], strict=True):
        assert value == pytest.approx(np.median([known[trial_id] for trial_id in ids.split()]))


def test_intervals_are_order_statistics_and_only_from_six_replicates_on(
    found: Sequence[Cell], rows: Sequence[Mapping[str, Any]]
) -> None:
    medians = plot_of(draw_throughput, found).data.query("mark == 'median'")
    low, high = (medians[f"interval_{end}_tokens_per_s_per_gpu"] for end in ("low", "high"))
    assert low.notna().tolist() == (medians["num_replicates"] == 7).tolist()
    known = {r["trial_id"]: r["tokens_per_s_per_gpu"] for r in rows if r["status"] == "ok"}
    for ids, *bounds in zip(medians["trial_ids"][low.notna()], low.dropna(), high.dropna(), strict=True):
        values = [known[trial_id] for trial_id in ids.split()]
        assert bounds == pytest.approx([min(values), max(values)])


@pytest.mark.parametrize("draw_kind", [draw_throughput, draw_step_time, draw_memory])
def test_out_of_memory_is_a_mark_at_its_length_with_its_site_and_without_a_value(
    draw_kind: Draw, found: Sequence[Cell], rows: Sequence[Mapping[str, Any]]
) -> None:
    plot = plot_of(draw_kind, found)
    (mark,) = plot.data[plot.data["mark"] == "out of memory"].to_dict("records")
    assert (mark["seq_len"], mark["series"], mark["oom_site"]) == (4096, "ulysses", "nccl")
    assert pd.isna(mark[plot.data.columns[7]])
    assert mark["trial_ids"] == next(r["trial_id"] for r in rows if r["status"] == "oom")
    crosses = [line for axes in plot.figure.axes for line in axes.lines if line.get_marker() == "+"]
    assert [float(line.get_xdata()[0]) for line in crosses] == pytest.approx([4096], rel=0.1)
    assert "out of memory (nccl)" in " ".join(t.get_text() for t in plot.figure.legends[0].get_texts())


def test_sites_of_out_of_memory_have_markers_of_their_own(tmp_path: Path) -> None:
    sites = ("torch", "nccl", "host", None)
    failed = [row(**RING, seq_len=1024 * 2**k, status="oom", oom_site=site) for k, site in enumerate(sites)]
    plot = plot_of(draw_step_time, read_cells([*failed, row(**ULYSSES)], tmp_path))
    marks = [h.get_marker() for h in plot.figure.legends[0].get_lines() if h.get_color() == "0.3"]  # type: ignore[attr-defined]
    assert len(marks) == len({str(mark) for mark in marks}) == 4
    assert not {str(mark) for mark in marks} & set(MARKERS)


def test_communication_shows_the_bytes_of_the_rows_by_phase_and_what_the_wire_saw(tmp_path: Path) -> None:
    comm = [
        {"phase": "forward", "op": "send", "calls": 1, "predicted_bytes": 100.0, "counted_bytes": 101.0},
        {"phase": "a_new_phase", "op": "send", "calls": 1, "predicted_bytes": 40.0, "counted_bytes": 40.0},
        {"phase": "other", "op": "all_reduce", "calls": 1, "predicted_bytes": None, "counted_bytes": 8.0},
    ]
    rows = [row(**RING, comm=comm, comm_wire_bytes=w, replicate=k) for k, w in enumerate((150.0, 152.0, 154.0))]
    plot = plot_of(draw_communication, read_cells([*rows, row(**ULYSSES)], tmp_path))
    ring = plot.data[plot.data["series"] == "ring zigzag"]
    shown = {(r["side"], r["phase"]): r["bytes_per_step"] for r in ring.to_dict("records")}
    assert shown.pop(("wire", "all")) == 152.0
    assert pd.isna(shown.pop(("predicted", "other")))
    assert shown == {
        ("predicted", "forward"): 100.0,
        ("counted", "forward"): 101.0,
        ("predicted", "a_new_phase"): 40.0,
        ("counted", "a_new_phase"): 40.0,
        ("counted", "other"): 8.0,
    }
    assert (ring["predicted_equals_counted"] == False).all()  # noqa: E712
    labels = [t.get_text().strip() for t in plot.figure.legends[0].get_texts()]
    assert "unknown phase: a_new_phase" in labels
    assert "wire (NVLink counters)" in labels


ARMS = {"compute_only_step_ms": [8.0], "comm_only_step_ms": [3.0], "exposed_comm_ms": 2.0}


def test_step_breakdown_shows_the_medians_of_the_arms_and_the_kernel_alone(tmp_path: Path) -> None:
    alone = row(method="single", sp_size=1, ring_degree=1, num_heads=2, num_kv_heads=1, median_ms=6.5)
    shown = read_cells([row(**RING, median_ms=10.0, **ARMS), alone], tmp_path)
    plot = plot_of(lambda cells, style: draw_time_parts(attributions(cells), style), shown)
    parts = dict(zip(plot.data["part"], plot.data["median_ms"], strict=True))
    assert parts == pytest.approx(
        {"step": 10, "kernel alone": 6.5, "compute only": 8, "communication only": 3, "exposed communication": 2}
        | {"compute beyond the kernel": 1.5}
    )
    labels = [text.get_text().strip() for text in plot.figure.legends[0].get_texts()]
    assert "compute only + communication only" in labels
    assert "compute only + communication only, in which packing and merging count twice" in plot.caption
    ids = dict(zip(plot.data["part"], plot.data["trial_ids"], strict=True))
    assert ids["kernel alone"] == alone["trial_id"] != ids["step"]


def test_fabrics_shows_measured_bandwidth_and_step_of_every_point(tmp_path: Path) -> None:
    speeds = {"nvlink": 300, "shm": 20}
    rows = [row(fabric=f, median_ms=10 + k, **m) for f in speeds for k, m in enumerate((RING, ULYSSES))]
    rows += [collective(f, p, speed, sp_size=4) for f, speed in speeds.items() for p in ("all_to_all", "send_recv")]
    found = read_cells(rows, tmp_path)
    data = plot_of(lambda cells, style: draw_fabrics(places(cells), style), found).data
    shown = data.set_index(["fabric", "method"])
    assert shown["step_ms"].to_dict() == {(f, m): ms for f in speeds for m, ms in (("ring", 10), ("ulysses", 11))}
    assert {key[0]: speed for key, speed in shown["bandwidth_gib_per_s"].items()} == pytest.approx(speeds)  # type: ignore[index]
    assert shown["fastest_on_its_fabric"].to_dict() == {
        (f, m): m == "ring" for f in speeds for m in ("ring", "ulysses")
    }


def test_of_methods_with_one_bandwidth_each_mark_is_seen_and_the_fastest_lies_on_top(tmp_path: Path) -> None:
    striped = RING | {"layout": "striped"}
    speeds = {"nvlink": 300, "shm": 20}
    rows = [row(fabric=f, median_ms=10 + 0.01 * k, **m) for f in speeds for k, m in enumerate((RING, striped))]
    rows += [collective(f, "send_recv", speed, sp_size=4) for f, speed in speeds.items()]
    plot = plot_of(lambda cells, style: draw_fabrics(places(cells), style), read_cells(rows, tmp_path))
    lines = [line for line in plot.figure.axes[0].lines if line.get_linestyle() == "None"]
    marks = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines if line.get_markersize() < 10]
    rings = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines if line.get_markersize() > 10}
    assert [y for _, y in marks] == [10.01, 10.01, 10, 10]
    assert rings == set(marks[2:])
    assert len({x for x, _ in marks}) == 4
    assert sorted(x for x, _ in marks) == pytest.approx([20, 20, 300, 300], rel=0.04)


def test_attention_is_drawn_in_tokens_and_its_data_say_the_flops_too(tmp_path: Path) -> None:
    plot = plot_of(draw_throughput, read_cells([row(attention_flops_per_s=8e12, **RING)], tmp_path))
    assert plot.figure.axes[0].get_xlabel() == "tokens/s/rank"
    assert plot.data["attention_tflops_per_s_per_gpu"].tolist() == pytest.approx([8 / 4])


# what is drawn


def test_lines_join_lengths_and_never_methods(found: Sequence[Cell]) -> None:
    figure = plot_of(draw_step_time, found).figure
    joined = [line for axes in figure.axes for line in axes.lines if line.get_linestyle() != "None"]
    assert [len(line.get_xdata()) for line in joined] == [2, 2]
    one_length = plot_of(draw_step_time, [c for c in found if c.asked["seq_len"] == 1024]).figure
    assert all(line.get_linestyle() == "None" for axes in one_length.axes for line in axes.lines)


def test_single_replicates_are_hollow(found: Sequence[Cell]) -> None:
    figure = plot_of(draw_step_time, found).figure
    hollow = [line for axes in figure.axes for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert sorted(x for line in hollow for x in line.get_xdata()) == pytest.approx([2048, 2048], rel=0.1)


def test_settings_on_several_fabrics_are_drawn_on_the_fastest_alone(tmp_path: Path) -> None:
    rows = [row(fabric=f, **m) for f in ("nvlink", "shm") for m in (RING, ULYSSES)]
    speeds = {"nvlink": 300, "shm": 20}
    for fabric, speed in speeds.items():
        rows += [collective(fabric, p, speed, sp_size=4) for p in ("all_to_all", "send_recv")]
    found = read_cells(rows, tmp_path)
    assert {c.asked["fabric"] for c in foremost(found, places(found)) if c.ok and c.asked["seq_len"]} == {"nvlink"}
    drawings, words = draw(found)
    assert {d.setting.split(", ")[-2] for d in drawings if d.kind != "fabrics"} == {"nvlink"}
    assert [d.kind for d in drawings].count("fabrics") == 1
    assert words == ["Of settings on several fabrics the fastest is drawn; shm are under Fabrics and in the tables."]


LENGTHS = (1024, 2048, 4096)


def joins_lengths(plot: Plot) -> bool:
    lines = [line for axes in plot.figure.axes for line in axes.lines]
    return any(line.get_linestyle() != "None" and min(line.get_xdata()) > 1000 for line in lines)


def test_many_series_at_two_lengths_are_dots_and_few_are_lines(tmp_path: Path) -> None:
    two = [row(seq_len=n, median_ms=10.0 + 5 * k, kernel=f"k{k}", **RING) for n in (1024, 4096) for k in range(5)]
    found = read_cells(two, tmp_path)
    assert not joins_lengths(plot_of(draw_step_time, found))
    assert joins_lengths(plot_of(draw_step_time, [c for c in found if c.series.endswith(("k0", "k4"))]))


def test_methods_that_lie_on_each_other_at_each_length_are_dots_on_scales_of_their_own(tmp_path: Path) -> None:
    def shown(name: str, apart: float, lengths: Sequence[int] = LENGTHS, sizes: Sequence[int] = (4,), **more: Any):
        asked = [
            {"seq_len": n, "median_ms": ms * n} | method | {"sp_size": p}
            for n in lengths
            for p in sizes
            for method, ms in ((RING, 1.0), (ULYSSES, apart))
        ]
        plot = plot_of(
            draw_step_time, read_cells([row(**each) for each in [*asked, *([more] if more else [])]], tmp_path / name)
        )
        assert len(plot.cells) == len(asked) + bool(more)
        return joins_lengths(plot)

    assert not shown("alike", 1.05)
    assert shown("apart", 1.2)
    assert shown("alone at one length", 1.05, **RING, seq_len=8192)
    assert shown("out of memory", 1.05, **(RING | {"layout": "striped"}), seq_len=1024, status="oom", oom_site="torch")
    assert shown("more than fits a page", 1.05, lengths=[2**k for k in range(10, 18)], sizes=(2, 4, 8))


def test_series_of_a_panel_that_lacks_lengths_stand_as_far_apart_as_elsewhere(tmp_path: Path) -> None:
    made = [
        row(seq_len=n, median_ms=ms * n, **(method | {"sp_size": p}))
        for p, lengths in ((2, (1024,)), (4, (1024, 2**18)))
        for n in lengths
        for method, ms in ((RING, 1.0), (ULYSSES, 3.0))
    ]
    small, large = plot_of(draw_step_time, read_cells(made, tmp_path)).figure.axes
    steps = [
        max(places) / min(places)
        for panel in (small, large)
        for places in [[line.get_xdata()[0] for line in panel.lines if line.get_xdata()[0] < 2000]]
    ]
    assert steps[0] == pytest.approx(steps[1])
    assert steps[0] > 1.05


@pytest.mark.parametrize("venue", [None, "neurips"])
def test_two_lengths_of_many_series_are_beside_each_other_each_on_its_scale(tmp_path: Path, venue: str | None) -> None:
    first_ms = {1024: 1.0, 4096: 100.0}
    two = [row(seq_len=n, median_ms=ms + k, kernel=f"k{k}", **RING) for n, ms in first_ms.items() for k in range(14)]
    plot = plot_of(draw_step_time, read_cells(two, tmp_path), venue)
    left, right = plot.figure.axes
    assert len(plot.cells) == 28
    assert left.get_xlim()[1] < 30 < 100 < right.get_xlim()[1]
    assert left.get_yticks().tolist() == right.get_yticks().tolist()
    assert "each seq_len has its own scale" in plot.caption


def test_an_axis_begins_above_zero_only_for_values_within_a_factor_of_two() -> None:
    assert is_close([500.0, 560.0])
    assert not is_close([200.0, 560.0])
    assert not is_close([])


def test_nothing_measured_gives_no_figure_of_values_and_no_error(tmp_path: Path) -> None:
    failed = [row(**RING, status=status) for status in ("error", "unsupported")]
    assert draw(read_cells(failed, tmp_path)) == ([], [])


def test_of_a_crowd_each_method_is_drawn_however_slow(tmp_path: Path) -> None:
    crowd = [row(kernel=f"k{k:03}", median_ms=10.0 + k, **RING) for k in range(20)]
    slow = RING | {"method": "ring_flash_attn", "implementation": "ring-flash-attn==0.1.8"}
    crowd += [row(kernel=f"k{k:03}", median_ms=90.0 + k, **slow) for k in range(2)]
    drawn = {c.series for c in reduced(read_cells(crowd, tmp_path))[0]}
    assert any("k000" in series and "ring-flash-attn" in series for series in drawn)
    assert not any("k001" in series and "ring-flash-attn" in series for series in drawn)
    assert len(drawn) == MAX_SERIES


def test_of_a_crowd_ours_on_the_kernel_of_a_library_are_drawn_however_slow(tmp_path: Path) -> None:
    crowd = [row(kernel=f"k{k:03}", median_ms=10.0 + k, **m) for k in range(20) for m in (RING, ULYSSES)]
    library = RING | {"method": "ring_flash_attn", "implementation": "ring-flash-attn==0.1.8", "kernel": "k019"}
    few, words = reduced(read_cells([*crowd, row(median_ms=29.0, **library)], tmp_path))
    drawn = {c.series for c in few}
    assert {"ring zigzag k019", "ulysses k019", "ring zigzag k000", "ulysses k000"} < drawn
    assert "ulysses k018" not in drawn
    assert "then ours on the kernels of libraries" in words


def test_of_a_crowd_the_fastest_series_are_drawn_and_the_rest_is_named(tmp_path: Path) -> None:
    crowd = [
        row(kernel=f"k{k:03}", seq_len=1024 * 2**n, median_ms=10.0 + (k * 37 + 11 * n) % 80, **RING)
        for k in range(40)
        for n in range(2)
    ]
    found = read_cells(crowd, tmp_path)
    few, words = reduced(found)
    assert len({c.series for c in few}) == MAX_SERIES
    for seq_len in (1024, 2048):
        here = [c for c in found if c.asked["seq_len"] == seq_len]
        assert min(here, key=lambda c: c.median_step_ms or 0.0) in few
    assert f"{MAX_SERIES} of 40 series" in words
    assert words.endswith(" and 14 more.")
    assert reduced(few) == (few, "")
    assert_fits(plot_of(draw_throughput, few, "neurips").figure)


# looks


def test_series_are_told_apart_by_their_marker_alone(tmp_path: Path) -> None:
    layouts = ("contiguous", "zigzag", "striped")
    rows = [row(**RING | {"layout": layout}, kernel=kernel) for layout in layouts for kernel in ("a", "b")]
    rows += [row(**ULYSSES, kernel=kernel) for kernel in ("a", "b")]
    looks = styles(read_cells(rows, tmp_path))
    assert len({look.shape for look in looks.values()}) == len(looks) == 8
    lines = {name.split()[1]: look.line_style for name, look in looks.items() if name.startswith("ring")}
    assert lines == {"contiguous": "-", "zigzag": "--", "striped": ":"}
    assert len({look.colour for look in looks.values()}) == 2


# text fits


@pytest.mark.parametrize(
    ("length", "words"),
    [(131072, "128Ki"), (2**20, "1Mi"), (1536, "1,536"), (98304, "96Ki"), (1000, "1,000"), (0, "0")],
)
def test_lengths_are_written_short_only_where_that_is_exact(length: int, words: str) -> None:
    assert short(length) == words


@given(st.integers(min_value=1, max_value=2**31))
def test_a_short_length_is_that_length(length: int) -> None:
    number, unit = re.fullmatch(r"([\d,]+)(Ki|Mi)?", short(length)).groups()  # type: ignore[union-attr]
    assert int(number.replace(",", "")) * {None: 1, "Ki": 2**10, "Mi": 2**20}[unit] == length


@pytest.mark.parametrize("room_in", [1.2, 5.0])
def test_every_one_of_lengths_an_octave_apart_is_labelled(room_in: float) -> None:
    lengths = [2**k for k in range(13, 21)]
    panel = Figure().subplots()
    with rc_context(rc(None)):
        scale_lengths(panel, lengths, room_in)
    labels = [panel.xaxis.get_major_formatter()(x, k) for k, x in enumerate(panel.xaxis.get_majorticklocs())]
    assert labels[::-1] == ["8Ki", "16Ki", "32Ki", "64Ki", "128Ki", "256Ki", "512Ki", "1Mi"]


@settings(max_examples=40)
@given(st.text(alphabet="abcW_=-/. \t", max_size=60), st.sampled_from([0.4, 1.0, 3.0]))
def test_a_wrapped_name_is_never_wider_than_its_room_and_loses_nothing_but_what_an_ellipsis_says(
    name: str, inches: float
) -> None:
    lines = wrapped(name, inches).split("\n")
    assert all(text_inches(line.rstrip("…")) <= inches for line in lines)
    assert len(lines) <= MAX_LINES
    kept, whole = "".join("".join(lines).split()), "".join(name.split())
    assert kept == whole or (kept.endswith("…") and whole.startswith(kept.rstrip("…")))


def test_characters_without_a_glyph_are_replaced_and_a_dollar_stays_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert printable("ring\n\N{CJK UNIFIED IDEOGRAPH-8F6E} $x^2$ ≠") == "ring \N{REPLACEMENT CHARACTER} $x^2$ ≠"


def test_a_legend_has_fewer_columns_for_longer_names_and_at_least_two() -> None:
    assert columns_within(["ring", "ulysses", "usp"], 7.2, 3) == 3
    assert columns_within(["ring", "x" * 40, "usp"], 7.2, 3) == 2
    assert columns_within(["ring", "x" * 120], 5.5, 3) == 2
    assert columns_within(["ring"], 5.5, 3) == 1


def drawn_texts(figure: Figure) -> list[Text]:
    """Every text that is really drawn: ticks beyond the limits have labels that are not."""
    figure.set_dpi(DPI)
    drawn: list[Text] = []
    draw_text = Text.draw

    def note(text: Text, *args: Any) -> None:
        drawn.append(text)
        draw_text(text, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", note)
        FigureCanvasAgg(figure).draw()
    return [text for text in drawn if text.get_visible() and text.get_text().strip()]


def assert_fits(figure: Figure) -> None:
    """No text smaller than 6 pt, cut off at the figure's edge, or over another."""
    texts = drawn_texts(figure)
    boxes = [(text.get_window_extent(), text.get_text()) for text in texts]
    width, height = figure.bbox.width, figure.bbox.height
    assert all(text.get_fontsize() >= 6 for text in texts)
    for box, words in boxes:
        assert -0.5 <= box.x0 <= box.x1 <= width + 0.5, f"{words!r} is cut: {box.x0:.0f} to {box.x1:.0f} of {width:.0f}"
        assert -0.5 <= box.y0 <= box.y1 <= height + 0.5, f"{words!r} is cut: {box.y0:.0f} to {box.y1:.0f}"
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        up = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, up) < 1.5, f"{first!r} and {second!r} overlap by {across:.1f} x {up:.1f} pixels"
    assert all(axes.get_window_extent().width > 0.2 * width for axes in figure.axes if axes.get_visible())


def crowded_rows() -> list[dict[str, Any]]:
    """Long names of many series on two sp_sizes and fabrics, lengths an octave apart, arms, wire, failures."""
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "attention_flops_per_s": 1e12}
    arms = {"compute_only_step_ms": [8.0], "comm_only_step_ms": [3.0], "exposed_comm_ms": 2.0}
    made = []
    for fabric, sp_size in (("nvlink", 2), ("nvlink", 4), ("shm", 4)):
        for seq_len in (16384, 32768, 65536, 131072)[0 if fabric == "nvlink" else 1 :]:
            for dtype, merge in itertools.product(("input", "float32"), repeat=2):
                options = {"dkv_dtype": dtype, "config": config("ring", "copy_engines", merge_dtype=merge)}
                transport = RING | {"primitive": "send_recv by copy engines", "sp_size": sp_size}
                made.append(row(seq_len=seq_len, fabric=fabric, **transport, **options, **shape, **arms))
            theirs = ULYSSES | {
                "method": "theirs",
                "primitive": "all_to_all",
                "implementation": LONG,
                "sp_size": sp_size,
            }
            made.append(row(seq_len=seq_len, fabric=fabric, **theirs, **shape, config=config("theirs")))
            ours = ULYSSES | {"sp_size": sp_size, "ulysses_degree": sp_size, "config": config("ulysses")}
            made.append(row(seq_len=seq_len, fabric=fabric, **ours, **shape, comm_wire_bytes=5e7))
        for primitive in ("send_recv by copy engines", "all_to_all"):
            made.append(collective(fabric, primitive, 300 if fabric == "nvlink" else 20, sp_size=sp_size))
    oom = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "config": config("ulysses"), "fabric": "nvlink"}
    made.append(row(status="oom", oom_site="torch", seq_len=262144, **ULYSSES, **oom))
    return made


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    return read_cells(crowded_rows(), tmp_path_factory.mktemp("crowded"))


KINDS: Mapping[str, Draw] = {
    "throughput": draw_throughput,
    "memory": draw_memory,
    "dots": lambda cells, style: draw_step_time([c for c in cells if c.asked["seq_len"] == 131072], style),
    "dots of two lengths": lambda cells, style: draw_step_time(
        [c for c in cells if c.asked["seq_len"] < 131072], style
    ),
    "communication": draw_communication,
    "attribution": lambda cells, style: draw_time_parts(attributions(cells), style),
    "fabrics": lambda cells, style: draw_fabrics(places(cells), style),
}


@pytest.mark.parametrize("venue", [None, "neurips"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_is_cut_covered_or_smaller_than_6_pt(kind: str, venue: str | None, crowded: Sequence[Cell]) -> None:
    one_setting = [c for c in crowded if c.asked["fabric"] == "nvlink" and c.asked["seq_len"]]
    plot = plot_of(KINDS[kind], crowded if kind == "fabrics" else one_setting, venue)
    with rc_context(rc(venue)):
        assert_fits(plot.figure)
    assert plot.figure.get_figheight() < 9.5


# files


@pytest.fixture(scope="module")
def drawings(found: Sequence[Cell]) -> list[Drawing]:
    return draw(found, "acm")[0]


def test_equal_rows_give_equal_bytes_in_every_format_whatever_their_order_and_process(
    tmp_path: Path, rows: Sequence[Mapping[str, Any]], drawings: Sequence[Drawing]
) -> None:
    class Pickling(Executor):
        """As a process would be given its work."""

        def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **how: Any) -> Iterator[Any]:
            work, jobs = pickle.loads(pickle.dumps((fn, [*iterables[0]])))  # noqa: S301
            return map(work, jobs)

    before = dict(rcParams)
    again, _ = draw(read_cells(rows[::-1], tmp_path / "measured"), "acm", Pickling())
    assert [d.stem for d in again] == [d.stem for d in drawings]
    for one, other in zip(drawings, again, strict=True):
        assert [*one.files] == ["png", "pdf", "svg", "csv"]
        assert one == other
    assert dict(rcParams) == before, "parameters of matplotlib that others use have changed"


def test_files_say_nothing_but_the_figure(drawings: Sequence[Drawing]) -> None:
    for drawing in drawings:
        pdf, svg, png = (drawing.files[suffix] for suffix in ("pdf", "svg", "png"))
        assert not re.findall(rb"/(?:Creator|Producer|CreationDate|ModDate|Author|Title)\b", pdf)
        assert b"/Type3" not in pdf
        assert re.findall(rb"/FontName /\w+\+?\w+", pdf)
        assert not re.findall(rb"<dc:(?:date|creator|title)>|matplotlib v", svg)
        image = Image.open(io.BytesIO(png))
        assert {*image.info} == {"dpi"}
        assert image.mode == "P"


def test_csv_is_the_data(found: Sequence[Cell], drawings: Sequence[Drawing]) -> None:
    drawn = next(d for d in drawings if d.kind == "step_time")
    read = pd.read_csv(io.BytesIO(drawn.files["csv"]))
    expected = plot_of(draw_step_time, found).data
    pd.testing.assert_frame_equal(read, expected, check_dtype=False)
    assert len(read) > 10


def test_the_last_digits_of_a_layout_are_in_no_file(found: Sequence[Cell]) -> None:
    def files(shift: float) -> Mapping[str, bytes]:
        figure = Figure()
        figure.add_axes((0.1 + shift, 0.1, 0.7, 0.7)).plot([1, 2], [1, 2])
        return finish("step_time", "a setting", {}, Plot(figure, "", pd.DataFrame(), (found[0],))).files

    with rc_context(rc(None)):
        assert files(0.0) == files(1e-15)


def test_a_reduced_palette_looks_the_same(found: Sequence[Cell]) -> None:
    with rc_context(rc(None)):
        plot = plot_of(draw_throughput, found)
        small = np.asarray(
            Image.open(io.BytesIO(finish("throughput", "a setting", {}, plot).files["png"])).convert("RGB")
        )
        canvas = FigureCanvasAgg(plot.figure)
        plot.figure.set_dpi(DPI)
        canvas.draw()
    full = np.asarray(canvas.buffer_rgba())[:, :, :3]
    difference = np.abs(small.astype(int) - full)
    assert difference.mean() < 0.5
    assert difference.max() <= 20


@pytest.mark.parametrize("venue", [None, *VENUES])
def test_a_figure_is_exactly_as_wide_as_its_venue(venue: str | None, found: Sequence[Cell]) -> None:
    width = WIDTHS_IN[venue]
    with rc_context(rc(venue)):
        plot = plot_of(draw_step_time, found, venue)
        drawing = finish("step_time", "a setting: of some model", {}, plot)
    assert drawing.width == round(96 * width)
    (media,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ", drawing.files["pdf"])
    assert float(media) == pytest.approx(72 * width, abs=0.01)
    (svg,) = re.findall(rb'<svg [^>]*?width="([\d.]+)pt"', drawing.files["svg"])
    assert float(svg) == pytest.approx(72 * width, abs=0.01)
    assert Image.open(io.BytesIO(drawing.files["png"])).width == int(DPI * width)
    titled = "a setting" in " ".join(t.get_text() for t in plot.figure.findobj(Text))
    assert titled == (venue is None)


def test_fonts_are_those_that_matplotlib_brings_along() -> None:
    import matplotlib as mpl
    from matplotlib.font_manager import FontProperties, findfont

    for venue in (None, *VENUES):
        for family in rc(venue)["font.family"]:
            found = findfont(FontProperties(family=family), fallback_to_default=False)
            assert Path(found).is_relative_to(mpl.get_data_path())


def test_an_unknown_venue_is_refused_with_those_there_are(found: Sequence[Cell]) -> None:
    with pytest.raises(ValueError, match="venue=nature is not known; use one of neurips, icml, iclr, mlsys, acm, ieee"):
        draw(found, "nature")


def test_files_of_one_kind_are_named_by_what_tells_their_settings_apart_and_else_numbered() -> None:
    of_7b = ("step_time-attention-forward", {"model": "llama2_7b", "num_kv_heads": 32, "causal": True})
    of_8b = ("step_time-attention-forward", {"model": "llama3_8b", "num_kv_heads": 8, "causal": True})
    assert stems([of_7b]) == ["step_time-attention-forward"]
    assert stems([of_7b, of_8b, ("memory-a/../b", {"model": "x"})]) == [
        "step_time-attention-forward-model=llama2_7b-num_kv_heads=32",
        "step_time-attention-forward-model=llama3_8b-num_kv_heads=8",
        "memory-a_b",
    ]
    capped = [("a", {"device_memory_gib": gib}) for gib in (None, 80.0)]
    assert stems(capped) == ["a", "a-device_memory_gib=80"]
    variables = [("a", {"fabric.env.NCCL_X": value}) for value in ("1/..", "2")]
    assert stems(variables) == ["a-NCCL_X=1", "a-NCCL_X=2"]
    assert stems([of_7b, of_7b, of_7b]) == [f"step_time-attention-forward{number}" for number in ("", "-2", "-3")]
    assert [len(stem) for stem in stems([("a", {"model": f"{n}{'b' * 300}"}) for n in (1, 2)])] == [160, 160]
