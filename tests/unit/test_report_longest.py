"""The table and the figure of the longest sequence that fits."""

import json
from pathlib import Path
from typing import Any

import pytest

from sp_bench.analysis.cells import cells, of_equal_steps
from sp_bench.analysis.longest import ends, is_fit_only, longest
from sp_bench.analysis.settings import settings
from sp_bench.report import read
from sp_bench.report.cards import memory_words
from sp_bench.report.figures import memory
from sp_bench.report.figures.style import Look
from sp_bench.report.findings import findings
from sp_bench.report.setting_tables import tables
from sp_bench.rows import plans

from .rows import cells_of, commit, row, selection_of


def test_where_memory_runs_out_each_line_names_the_options_that_move_the_edge():
    """Titles of settings leave out what comes along with an engine: its kernel, its tiles, its compiled layers."""
    folders = [Path(__file__).parents[2] / "results" / name for name in ("h200x2_longest", "h200x2_theirs")]
    found = longest(settings(read(folders)))
    assert found is not None
    ours, theirs = ([name for name in found.names if (": fsdp2" in name) == own] for own in (True, False))
    assert len(ours) == 5
    assert all("compiled, loss_tile_tokens=2048, mlp_tile_tokens=4096" in name and "cuDNN" in name for name in ours)
    assert sum("allocator=expandable_segments" in name for name in ours) == 4
    assert sorted(name.partition("trl_sft, ")[2] for name in theirs) == [
        "",
        "FlashAttention-2, eager",
        "liger, cuDNN, allocator=expandable_segments",
    ]


def test_findings_have_each_bracket_with_its_tries_and_no_line_where_nothing_ran_out():
    root = Path(__file__).parents[2] / "results"
    cells = read([root / "h200x2_longest", root / "h200x2_step_long"])
    told = findings(settings(cells), cells)
    (upipe,) = [line for line in told.splitlines() if line.startswith("| UPipe")]
    assert "| 425,984 | 442,368 | fit only, tries: 1 and 1, code 7681aa8 | h200x2_longest |" in upipe  # once refused
    assert sum("tries:" in line for line in told.splitlines()) == 5


def test_a_length_that_only_fit_is_said_once():
    cells = read([Path(__file__).parents[2] / "results" / "h100x2_longest"])
    found = settings(cells)
    told = [line for line in findings(found, cells).splitlines() if "fit only, tries" in line]
    (drawn,) = [plot for plot in memory.draw(found, Look()) if plot.part == "longest"]
    (labels,) = [[text.get_text() for text in axis.get_yticklabels()] for axis in drawn.figure.axes]
    assert len(told) == sum("fit only" in label for label in labels) == 6
    assert not any("fit=" in text for text in [*told, *labels])


def test_a_search_in_which_nothing_ran_out_says_at_least_and_never_a_bracket():
    cells = read([Path(__file__).parents[2] / "results" / "h200x2_theirs"])
    found = settings(cells)
    (told,) = [line for line in findings(found, cells).splitlines() if "liger" in line and "at least" in line]
    assert "| at least 249,856 | not reached | fit only, tries: 1, code 814f061 | h200x2_theirs |" in told
    table = tables(found)[0]
    (line,) = [texts for texts in map(table.texts, table.lines) if "liger" in texts]
    fits = line.index("at least 249,856 (fit only)")
    assert line[fits : fits + 3] == ("at least 249,856 (fit only)", "not reached", "1")
    (drawn,) = [plot for plot in memory.draw(found, Look()) if plot.part == "longest"]
    assert [bool(reached) for reached in drawn.data["edge_reached"]].count(False) == 1
    assert any("the edge is not reached" in text.get_text() for text in drawn.figure.legends[0].get_texts())
    drawn.figure.draw_without_rendering()


STEP = {"workload": "train_step", "pass_kind": "step", "method": "ulysses", "sp_size": 2}


def ended(seq_len: int, site: str | None = None, replicate: int = 0) -> dict[str, Any]:
    failed = {"status": "oom", "oom_site": site, "reason": "out of memory"} if site else {}
    return row(**STEP, seq_len=seq_len, replicate=replicate, **failed)


@pytest.mark.parametrize(
    ("failed", "shown"),
    [
        ([ended(8192, "torch")], ("4,096", "8,192")),
        ([ended(8192, "host"), ended(8192, "host", 1)], ("4,096", "8,192 (host memory)")),
        ([ended(8192, "host"), ended(8192, "torch", 1)], ("4,096", "8,192 (at times host memory)")),
        ([ended(2048, "torch")], ("at least 4,096", "not reached, but 2,048 did not fit")),
        ([ended(2048, "host")], ("at least 4,096", "not reached, but 2,048 (host memory) did not fit")),
    ],
)
def test_an_upper_end_says_whose_memory_it_was_where_it_was_the_hosts(failed, shown):
    found = settings(cells_of([ended(4096), *failed]))
    where = longest(found)
    assert where is not None
    assert [ends(limit) for limit in where.limits] == [shown]
    (plot,) = [plot for plot in memory.draw(found, Look()) if plot.part == "longest"]
    assert list(plot.data["out_of"]) == [where.limits[0].exhausted_memory]
    marks = [text.get_text() for text in plot.figure.legends[0].get_texts()]
    assert any("host memory" in mark for mark in marks) == ("host memory" in shown[1])
    assert ("host memory" in memory_words(found[0])) == ("host memory" in shown[1])


def asked(seq_len: int, *, oom: bool = False, fit: bool = False, single_step: bool = True) -> dict[str, Any]:
    """A row of replicate 0, which asks whether a step fits, or is a whole one."""
    steps = {"single_step": True, "warmup_steps": 0, "timed_steps": 1} if single_step else {}
    config = {"hardware": {"name": "cpu", "device": "cpu"}, "seed": 0, "workload": {"fit": fit} | steps}
    failed = {"status": "oom", "oom_site": "torch", "reason": "out of memory"} if oom else {}
    timed = {"median_step_ms": None, "step_ms": None, "tokens_per_s": None} if fit and not oom else {}
    return row(**STEP, seq_len=seq_len, config=json.dumps(config), **failed) | steps | {"fit": fit} | timed


@pytest.mark.parametrize(
    ("rows", "bracket", "tried", "fit_only"),
    [
        ([asked(2048, fit=True), asked(4096, fit=True), asked(4096, oom=True)], ("2,048", "4,096"), (1, 2), True),
        ([asked(2048, fit=True), asked(2048), asked(4096, fit=True, oom=True)], ("2,048", "4,096"), (2, 1), False),
        (
            [asked(2048), asked(2048, single_step=False), asked(4096), asked(4096, single_step=False, oom=True)],
            ("2,048", "4,096"),
            (2, 2),
            False,
        ),
        (
            [asked(2048, fit=True), asked(2048), asked(2048, single_step=False), asked(4096, fit=True, oom=True)],
            ("2,048", "4,096"),
            (3, 1),
            False,
        ),
    ],
)
def test_steps_of_one_replicate_are_one_bracket_whether_whole_or_asked_if_they_fit(rows, bracket, tried, fit_only):
    """A search that begins with rows of whole steps has a length once each way, and calls it failing if one fails."""
    for each in (rows, rows[::-1]):
        found = longest(settings(cells(of_equal_steps(selection_of(each).rows))))
        assert found is not None
        (limit,) = found.limits
        assert (ends(limit), limit.tried, is_fit_only(limit)) == (bracket, tried, fit_only)
        assert found.names == ("Ulysses, 2 CPU ranks",)


def test_a_search_of_whole_steps_is_known_by_its_plan(tmp_path):
    rows = [ended(2048), ended(4096)]
    commit(rows, tmp_path)
    assert longest(settings(read([tmp_path]))) is None  # a list of lengths asks how fast they are
    plans.write(tmp_path, [], {"ulysses": True}, [each["trial_id"] for each in rows])
    found = longest(settings(read([tmp_path])))
    assert found is not None
    assert [ends(limit) for limit in found.limits] == [("at least 4,096", "not reached")]
    plans.write(tmp_path, [], {"ulysses": False})  # another run begins, and is killed before it comes to the search
    assert longest(settings(read([tmp_path]))) is not None
    plans.write(tmp_path, [], {"ulysses": True}, ["another"])
    (plan,) = plans.read(tmp_path)
    assert plan.probes == {"another", *(each["trial_id"] for each in rows)}
