"""Rows of one real rank are shown as what they are, beside measured ones and never among them."""

import csv
import io
import json

import matplotlib.colors
import pytest

from sp_bench.analysis.cells import cells
from sp_bench.analysis.chosen import chosen
from sp_bench.analysis.limits import limits
from sp_bench.analysis.selection import select
from sp_bench.analysis.settings import settings
from sp_bench.analysis.signs import counts
from sp_bench.report import EXPORTS, explorer, paper
from sp_bench.report.figures import draw_lines, memory, over_ranks, steps, throughput, traffic, windows
from sp_bench.report.figures.style import BLACK, Look, explained, line, mark
from sp_bench.report.findings import findings
from sp_bench.report.setting_tables import VALUES, lines, tables

from .pages import page_of
from .rows import cells_of, commit, row

GPU = {"hardware": "h200", "fabric": "nvlink", "kernel": "cudnn", "sp_size": 4, "dtype": "bfloat16"}
KIND = {"name": "h200", "device": "cuda"}
WHITE = matplotlib.colors.to_rgba("white")
SPLITS = ({"method": "ring", "layout": "zigzag"}, {"method": "ulysses", "ring_degree": 1, "ulysses_degree": 4})


def measured(**columns):
    return row(**{**GPU, "config": json.dumps({"hardware": KIND, "seed": 0}), **columns})


def one(**columns):
    config = {"hardware": KIND, "seed": 0, "world": "one_rank", "link": {"name": "nvlink"}}
    made = row(**{**GPU, "config": json.dumps(config), **columns})
    per_rank = ("rank_step_ms", "window_ms", "peak_host_bytes")
    lists = {name: made[name][:1] for name in per_rank if made.get(name)}
    return made | lists | {"evidence": "one_rank", "link": "nvlink", "proof": "c/0-0"}


def both(**columns):
    return [make(**split, **columns) for make in (measured, one) for split in SPLITS]


def test_hollow_marks_and_dashed_lines_are_modelled_and_nothing_else():
    library = {"implementation": "ring-flash-attn==0.1.8", "method": "ring_flash_attn"}
    parts = {"config": json.dumps({"hardware": KIND, "seed": 0, "method": {"name": "ulysses", "head_chunks": 4}})}
    found = cells_of([*both(), measured(**library), measured(**SPLITS[1] | parts)])
    for cell in found:
        assert (mark(cell)["mfc"] == "white") == (line(cell)["ls"] == "--") == (not cell.all_ranks_were_there)
    assert sum(mark(cell)["mec"] == BLACK for cell in found) == sum(cell.is_library for cell in found) == 1
    assert sum(mark(cell)["fillstyle"] != "full" for cell in found) == 1
    assert explained(found).count(":") == 3


@pytest.mark.parametrize("lengths", [(1024,), (1024, 2048, 4096)])
def test_figures_of_throughput_and_bytes_say_what_is_hollow(lengths):
    found = cells_of([each for n in lengths for each in both(seq_len=n)])
    for plot in (*throughput.draw(settings(found), Look()), *traffic.draw(settings(found), Look())):
        assert "Hollow and dashed: one real rank, modelled messages." in plot.caption
        assert {"measured", "one_rank"} <= set(plot.data["evidence"])
    of_ranks = [cell for cell in found if cell.all_ranks_were_there]
    assert all("one real rank" not in plot.caption for plot in throughput.draw(settings(of_ranks), Look()))


def test_bars_of_steps_are_hollow():
    parts = {"attention": 4.0, "matmul": 3.0, "other": 1.0, "exposed_messages": 1.0, "exposed_host_copies": 0.0}
    trace = {"messages": 1.0, "host_copies": 0.0, "idle": 0.0, **parts}
    step = {"workload": "train_step", "pass_kind": "step", "num_layers": 2, "kernel_ms": [trace]}
    (plot,) = steps.draw(settings(cells_of(both(**step))), Look())
    faces = {bar.get_facecolor() for bar in plot.figure.axes[0].patches}
    assert WHITE in faces
    assert len(faces) > 1
    assert "one real rank, modelled messages" in plot.caption


def test_the_longest_sequence_of_one_real_rank_is_a_line_of_its_own():
    step = {"workload": "train_step", "pass_kind": "step", "num_layers": 2}
    failed = {"status": "oom", "oom_site": "torch", "reason": "out of memory"}
    rows = [each for make in (measured, one) for each in (make(**step), make(**step, seq_len=2048, **failed))]
    found = settings(cells_of(rows))
    assert len({limit.setting for setting in found for limit in limits(setting.cells)}) == 2
    (plot,) = [plot for plot in memory.draw(found, Look()) if plot.part == "longest"]
    (axis,) = plot.figure.axes
    assert sum("one real rank" in text.get_text() for text in axis.get_yticklabels()) == 1
    assert any("by one real rank" in text.get_text() for text in plot.figure.legends[0].get_texts())


def test_tables_exports_findings_and_page_name_it_and_no_ratio_is_of_both_kinds():
    rows = both()
    made = tables(settings(cells_of(rows)))
    for table in made:
        for group in table.groups:
            assert len({line.cell.asked["evidence"] for line in group.lines}) == 1
            assert ("one real rank of 4" in group.title) == (not group.lines[0].cell.all_ranks_were_there)
    exported = list(csv.DictReader(io.StringIO(EXPORTS["csv"](VALUES, lines(made)))))
    assert sorted(line["evidence"] for line in exported) == ["measured", "measured", "one_rank", "one_rank"]
    assert {line["link"] for line in exported if line["evidence"] == "one_rank"} == {"nvlink"}
    found = cells_of(rows)
    assert "one real rank of all, messages modelled as nvlink" in findings(settings(found), found)
    assert "one real rank of 4" in page_of(rows).text


@pytest.mark.parametrize("mix", [False, True])
def test_equal_options_are_never_pooled_with_measured_ones(tmp_path, mix):
    for i, folder in enumerate(("monday", "tuesday")):
        commit([*both(replicate=i), *both(replicate=i, seq_len=2048)], tmp_path / folder)
    found = cells(select([tmp_path / "monday", tmp_path / "tuesday"], mix=mix).rows)
    assert len(found) == 8
    assert all(len({r["evidence"] for r in cell.rows}) == 1 for cell in found)
    for place in (place for setting in settings(found) for place in setting.places):
        assert len({cell.asked["evidence"] for cell in place.cells}) == 1
    assert all("one real rank" in count.where or count.first.all_ranks_were_there for count in counts(settings(found)))


def test_a_figure_over_ranks_is_of_ratios_to_the_fastest_and_crosses_what_waits_for_the_host():
    rows = [
        one(**split, median_ms=10.0 / size, sp_size=size)
        | {"attention_flops_per_s": 4e15 * size / slower, "flags": ["host_bound"] * (size >= waits)}
        for split, slower, waits in zip(SPLITS, (1.5, 1), (64, 256), strict=True)
        for size in (8, 64, 256)
    ]
    (plot,) = over_ranks.draw(cells_of(rows), Look())
    assert [*zip(plot.data["sp_size"], plot.data["over_fastest"], plot.data["host_bound"], strict=True)] == [
        (8, 1.5, False), (8, 1.0, False), (64, 1.5, True), (64, 1.0, False)
    ]  # fmt: skip
    assert "One replicate each" in plot.caption
    (axis,) = plot.figure.axes
    assert axis.get_xticklabels()[0].get_text().split("\n")[:2] == ["8", "1 host"]
    assert "waits for the host" in {text.get_text() for text in plot.figure.legends[0].get_texts()}
    assert over_ranks.draw(cells_of([measured(**split) for split in SPLITS]), Look()) == []


@pytest.mark.parametrize("flag", ["host_bound", "lower_bound"])
def test_one_real_rank_that_waits_for_the_host_or_for_others_is_not_comparable(flag):
    rows = [*(one(**split, flags=[flag]) for split in SPLITS), *(measured(**split) for split in SPLITS)]
    for setting in settings(cells_of(rows)):
        there = setting.cells[0].all_ranks_were_there
        assert [len(place.cells) for place in setting.places] == ([2] if there else [])
        assert len(setting.cells) == 2
        assert setting.smallest_for(setting.cells[0]) == (0.02 if there else 0.03)
        (table,) = tables([setting])
        assert [line.ratio is not None and line.ratio.ratio is not None for line in lines([table])] == [False, there]
        assert all(("lower bound" in line.name) == (flag == "lower_bound" and not there) for line in lines([table]))


@pytest.mark.parametrize(
    ("workload", "works_ms", "waits"),
    [("train_step", 9.5, False), ("train_step", 8.5, True), ("attention", 8.5, False), ("attention", 7.0, True)],
)
def test_one_real_rank_waits_for_the_host_if_its_kernels_take_much_less(workload, works_ms, waits):
    parts = dict.fromkeys(("messages", "exposed_messages", "host_copies", "exposed_host_copies", "other", "idle"), 0.0)
    traced = [parts | {"attention": works_ms - 1, "matmul": 1.0}]
    passes = {"pass_kind": "step"} if workload == "train_step" else {}
    (cell,) = cells_of([one(workload=workload, **passes, median_ms=10.0, kernel_ms=traced)])
    assert (cell.waits_for_host, cell.is_comparable) == (waits, not waits)


def test_a_lower_bound_leads_nobody_and_the_page_says_what_it_is():
    rows = [one(**SPLITS[0], flags=["lower_bound"], median_ms=1.0), one(**SPLITS[1], median_ms=2.0)]
    ((place,),) = (setting.places for setting in settings(cells_of(rows)))
    assert [cell.asked["method"] for cell in place.cells] == ["ulysses"]
    (table,) = tables(settings(cells_of(rows)))
    assert [line.ratio.ratio for line in lines([table]) if line.ratio] == [None]
    page = page_of(rows).text
    assert "lower bound" in page
    assert "Only Ulysses can be compared here." in page


def test_a_lower_bound_is_named_in_an_authors_table_and_figure_and_in_the_explorer():
    found = cells_of([one(**SPLITS[0], flags=["lower_bound"]), one(**SPLITS[1])])
    asked = [("ours", {"method": ["ulysses"]}), ("theirs", {"method": ["ring"]})]
    lines_of_authors = chosen(found, asked)
    ((ours, theirs),) = (group.lines for group in paper.table_of(lines_of_authors).groups)
    assert (ours.name, theirs.name, theirs.beside) == ("ours", "theirs, lower bound", None)
    assert "Lower bounds: theirs at 1,024 tokens." in draw_lines(lines_of_authors, Look()).caption
    names = [line["name"] for line in explorer.data(settings(found), {})["lines"]]
    assert sorted(names) == ["Ulysses", "zigzag ring, lower bound"]


def test_a_figure_over_windows_has_how_many_times_as_long_ulysses_takes():
    """Of the ring's layouts the faster one; a place with one method, or without a window, is left out."""
    at = {"sp_size": 8, "seq_len": 131072}
    zigzag, ulysses = ({**split, **at} for split in SPLITS)
    contiguous = zigzag | {"layout": "contiguous"}
    rows = [
        one(**ulysses, median_ms=9.0, window=128),
        one(**zigzag, median_ms=2.0, window=128),
        one(**contiguous, median_ms=1.0, window=128),
        one(**ulysses, median_ms=10.0, window=4096),
        one(**contiguous, median_ms=4.0, window=4096),
        one(**ulysses, median_ms=10.0),
        one(**zigzag, median_ms=12.5),
        one(**ulysses, median_ms=10.0, window=1024),
        *both(sp_size=4, seq_len=131072),
    ]
    (plot,) = windows.draw(cells_of(rows), Look())
    assert [*plot.data["ratio"]] == [9.0, 2.5, 0.8]
    assert [*plot.data["layout"]] == ["contiguous", "contiguous", "zigzag"]
    assert set(plot.data["link"]) == {"modelled: NVLink, one host"}
    assert "one real rank" in plot.caption
    (axis,) = plot.figure.axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["128", "4,096", "none"]
    assert "the one with most replicates counts" in plot.caption
    for other in ({"causal": False}, {"dtype": "float32"}, {"batch_size": 2}):
        rows = [one(**s, window=w, **o) for s in (ulysses, zigzag) for w in (None, 128) for o in ({}, other)]
        (apart,) = windows.draw(cells_of(rows), Look())
        assert len({axis.get_title(loc="left") for axis in apart.figure.axes}) == 2  # a panel for each
    assert windows.draw(cells_of(both()), Look()) == []
    alone = [one(**ulysses, window=128), one(**ulysses), measured(**zigzag, window=128), measured(**zigzag)]
    assert windows.draw(cells_of(alone), Look()) == []  # a measured ring is not held against a modelled Ulysses
