"""`sp-bench compare` without its console: pairs, verdicts, statuses, bounds and what is printed."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sp_bench.analysis.comparison import NotComparable, Pair, compare, fail_bound
from sp_bench.analysis.ratios import median_ratio
from sp_bench.report.comparison_table import show
from sp_bench.rows.store import STATUSES

from .rows import commit, row

BASE_MS = (10.0, 10.2, 9.9, 10.1, 10.0, 9.8)


def replicates(times_ms, **columns):
    return [row(median_ms=ms, replicate=r, **columns) for r, ms in enumerate(times_ms)]


@pytest.fixture
def compared(tmp_path):
    """`compared(rows of A, rows of B)`."""

    def make(a, b):
        return compare(commit(a, tmp_path / "before"), commit(b, tmp_path / "after"))

    return make


def printed(comparison, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    show(comparison, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def with_packages(**versions):
    environment = row()["environment"]
    return {"environment": environment | {"packages": list(versions.items())}}


def test_six_equal_replicates_give_the_median_of_the_paired_ratios_with_its_interval(compared):
    factors = (1.10, 1.11, 1.12, 1.13, 1.14, 1.15)
    slower_ms = [ms * factor for ms, factor in zip(BASE_MS, factors, strict=True)]
    (pair,) = compared(replicates(BASE_MS), replicates(slower_ms)).pairs
    assert pair.paired is not None
    assert pair.points == pytest.approx(factors)
    assert pair.ratio == pytest.approx(1.125)
    assert (pair.paired.interval.low, pair.paired.interval.high) == pytest.approx((1.10, 1.15))
    assert pair.verdict == "slower"


def on(*uuids, **env):
    environment = row()["environment"]
    return {"environment": environment | {"device_uuids": list(uuids), "env": list(env.items())}}


def test_variables_that_shape_messages_are_among_the_differences(compared):
    before, after = on("a", NCCL_DEBUG="INFO"), on("a", NCCL_P2P_DISABLE="1")
    differences = compared(replicates(BASE_MS, **before), replicates(BASE_MS, **after)).differences()
    assert differences == ["NCCL_P2P_DISABLE none \N{RIGHTWARDS ARROW} 1"]


def test_replicates_pair_by_their_number_and_not_by_their_order(compared):
    doubled = [row(median_ms=2 * ms, replicate=r) for r, ms in reversed(list(enumerate(BASE_MS)))]
    (pair,) = compared(replicates(BASE_MS), doubled).pairs
    assert pair.points == pytest.approx([2.0] * 6)


def test_replicates_of_one_side_only_are_in_no_pair(compared):
    (pair,) = compared(replicates(BASE_MS), replicates(BASE_MS[:4])).pairs
    assert len(pair.points) == 4
    assert pair.paired is None


def test_a_verdict_is_given_only_where_the_interval_excludes_1(compared):
    factors = {
        "slower": [1.02] * 6,
        "faster": [0.9, 0.91, 0.92, 0.93, 0.94, 0.95],
        "not told apart": [0.98, 1.1, 1.1, 1.1, 1.1, 1.1],
        "no interval": [1.5] * 5,
    }
    sizes = {seq_len: verdict for verdict, seq_len in zip(factors, (512, 1024, 2048, 4096), strict=True)}
    a = [each for size in sizes for each in replicates(BASE_MS, seq_len=size)]
    b = [
        each
        for size, verdict in sizes.items()
        for each in replicates([ms * f for ms, f in zip(BASE_MS, factors[verdict], strict=False)], seq_len=size)
    ]
    assert {pair.a.asked["seq_len"]: pair.verdict for pair in compared(a, b).pairs} == sizes


def test_without_an_interval_the_ratio_is_that_of_the_medians_and_the_points_are_shown(compared):
    (pair,) = compared(replicates([10.0, 20.0, 30.0]), replicates([11.0, 18.0, 33.0])).pairs
    assert pair.ratio == pytest.approx(18.0 / 20.0)
    assert pair.words == "0.900x (1.100, 0.900, 1.100)"


def test_without_an_interval_the_medians_are_of_the_replicates_that_both_have(compared):
    comparison = compared(replicates([10.0, 10.2, 9.0, 8.0]), replicates([10.0, 10.2]))
    (pair,) = comparison.pairs
    assert pair.words == "1.000x (1.000, 1.000)"
    assert comparison.regressions(0.0) == []


@given(st.lists(st.floats(0.2, 5.0), min_size=6, max_size=40))
def test_the_other_way_round_the_interval_and_the_verdict_are_inverted(points):
    there, back = median_ratio(points), median_ratio([1 / point for point in points])
    assert there is not None
    assert back is not None
    assert (1 / back.interval.high, 1 / back.interval.low) == pytest.approx((there.interval.low, there.interval.high))
    assert there.interval.low <= there.ratio <= there.interval.high


def test_cells_are_sorted_with_the_slowest_first(compared):
    sizes = {512: 1.0, 1024: 1.4, 2048: 0.8}
    a = [each for size in sizes for each in replicates(BASE_MS, seq_len=size)]
    b = [each for size, f in sizes.items() for each in replicates([f * ms for ms in BASE_MS], seq_len=size)]
    assert [pair.a.asked["seq_len"] for pair in compared(a, b).pairs] == [1024, 512, 2048]


def test_an_ok_cell_that_runs_out_of_memory_is_a_regression_whatever_the_bound(compared):
    a = [row(), row(seq_len=2048)]
    b = [row(), row(seq_len=2048, status="oom", reason="tried 3 GiB")]
    comparison = compared(a, b)
    (change,) = comparison.changes
    assert (change.kind, change.words, change.reason) == ("regression", "1 ok → 1 oom", "tried 3 GiB")
    (line,) = comparison.regressions(10.0)
    assert "seq_len 2,048" in line
    assert len(comparison.pairs) == 1


def test_one_failed_replicate_of_six_is_a_regression_beside_the_ratio_of_the_others(compared):
    failures = [status for status in STATUSES if status != "ok"]
    sizes = {512 * 2**place: status for place, status in enumerate(failures)}
    a = [each for size in sizes for each in replicates(BASE_MS, seq_len=size)]
    b = [each for size in sizes for each in replicates(BASE_MS[:5], seq_len=size)]
    b += [row(replicate=5, status=status, seq_len=size) for size, status in sizes.items()]
    comparison = compared(a, b)
    assert sorted(change.words for change in comparison.changes) == sorted(f"6 ok → 5 ok, 1 {s}" for s in failures)
    assert len(comparison.regressions(0.05)) == len(comparison.pairs) == len(failures)


def test_a_cell_that_no_longer_fails_and_one_that_fails_otherwise_are_listed_and_fail_nothing(compared):
    a = [row(seq_len=512, status="oom"), row(status="error"), row(seq_len=2048, status="oom"), row(seq_len=4096)]
    b = [row(seq_len=512), row(status="timeout"), row(seq_len=2048, status="oom"), row(seq_len=4096)]
    comparison = compared(a, b)
    assert [change.kind for change in comparison.changes] == ["better", "changed"]
    assert comparison.num_unmeasured == 1
    assert comparison.regressions(0.0) == []


def test_cells_of_one_side_only_are_listed_and_fail_nothing(compared):
    comparison = compared([row(), row(seq_len=512)], [row(), row(seq_len=2048)])
    assert [cell.asked["seq_len"] for cell in comparison.only_a] == [512]
    assert [cell.asked["seq_len"] for cell in comparison.only_b] == [2048]
    assert comparison.regressions(0.0) == []
    text = printed(comparison, 200)
    assert "Only in A: 1 cell" in text
    assert "Only in B: 1 cell" in text


def test_only_a_ratio_above_the_bound_fails_and_the_worst_is_named_first(compared):
    factors = {512: 1.04, 1024: 1.06, 2048: 1.3}
    a = [each for size in factors for each in replicates(BASE_MS, seq_len=size)]
    b = [each for size, f in factors.items() for each in replicates([f * ms for ms in BASE_MS], seq_len=size)]
    comparison = compared(a, b)
    lines = comparison.regressions(0.05)
    assert ["seq_len 2,048" in lines[0], "seq_len 1,024" in lines[1], len(lines)] == [True, True, 2]
    assert comparison.regressions(0.3 + 1e-9) == []


def test_a_ratio_that_is_not_told_apart_from_1_fails_no_bound(compared):
    noisy = [ms * f for ms, f in zip(BASE_MS, (0.99, 1.2, 1.2, 1.2, 1.2, 1.2), strict=True)]
    comparison = compared(replicates(BASE_MS), replicates(noisy))
    assert comparison.pairs[0].ratio > 1.1
    assert comparison.regressions(0.05) == []


def test_without_an_interval_the_ratio_of_the_medians_is_held_against_the_bound(compared):
    (line,) = compared([row(median_ms=10.0)], [row(median_ms=11.0)]).regressions(0.05)
    assert line.endswith("1.100x, no interval")


@pytest.mark.parametrize(("text", "bound"), [("median:5%", 0.05), ("median:2.5%", 0.025), ("median:0%", 0.0)])
def test_a_bound_is_written_as_in_pytest_benchmark(text, bound):
    assert fail_bound(text) == pytest.approx(bound)


@pytest.mark.parametrize("text", ["5%", "mean:5%", "median:5", "median:-5%", "median:nan%", "median:5%,", ""])
def test_any_other_bound_is_refused_with_the_valid_form(text):
    with pytest.raises(NotComparable, match="median:NUMBER%, such as median:5%"):
        fail_bound(text)


def test_nothing_in_common_says_what_both_have_and_which_options_differ(compared):
    a = [row(config=json.dumps({"workload": {"timed_steps": 5, "name": "attention"}}))]
    nine = {"step_ms": [10.0] * 9, "method": "ulysses"}
    b = [row(config=json.dumps({"workload": {"timed_steps": 9, "name": "attention"}}), **nine)]
    with pytest.raises(NotComparable) as error:
        compared(a, b)
    words = str(error.value)
    assert "\n" not in words
    assert "1 cell (ring" in words
    assert "1 cell (ulysses" in words
    assert "workload.timed_steps=5 against 9" in words
    assert "workload.name" not in words


def test_steps_that_ranks_agreed_on_pair_with_a_fixed_number(compared):
    def steps(timed_steps, **columns):
        config = json.dumps({"workload": {"timed_steps": timed_steps, "name": "attention"}})
        return [row(config=config, **columns)]

    (pair,) = compared(steps(5, median_ms=2.0), steps("auto", median_ms=3.0)).pairs
    assert pair.points == pytest.approx([1.5])


def test_a_folder_without_rows_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotComparable, match="empty has no rows"):
        compare(commit([row()], tmp_path / "before"), tmp_path / "empty")


def test_what_the_two_sides_did_not_run_on_alike_is_named(compared):
    a = [row(**with_packages(torch="2.11.0", numpy="2.4"))]
    b = [row(**with_packages(torch="2.13.0", numpy="2.4"), env_id="e1e1e1e1")]
    comparison = compared(a, b)
    assert comparison.differences() == ["torch 2.11.0 → 2.13.0"]
    assert "warning: A and B differ in torch 2.11.0 → 2.13.0" in printed(comparison, 200)


def test_core_ids_that_nothing_recorded_explains_differ_in_the_code_that_measures(compared):
    assert compared([row()], [row(env_id="e1e1e1e1")]).differences() == ["the code that measures"]


def test_whose_own_code_differs_is_named_where_the_shared_code_is_the_same(compared):
    ulysses = row(method="ulysses", core_id="c0c0c0c0", env_id="e1e1e1e1")
    a, b = ([row(core_id="c0c0c0c0", env_id=env_id), ulysses] for env_id in ("aaaaaaaa", "bbbbbbbb"))
    (difference,) = compared(a, b).differences()
    assert difference.startswith("the code of the method, kernel or engine of ring")
    assert "ulysses" not in difference


def test_equal_environments_are_not_warned_about(compared):
    comparison = compared([row()], [row()])
    assert comparison.differences() == []
    assert "warning" not in printed(comparison, 200)


def test_older_environments_of_a_cell_are_left_out_and_counted(compared):
    old = [row(env_id="0d0d0d0d", median_ms=99.0, started_at=row()["started_at"].replace(year=2025))]
    comparison = compared([*old, row(median_ms=10.0)], [row(median_ms=10.0)])
    assert comparison.pairs[0].ratio == 1.0
    assert "1 row of core_id 0d0d0d0d left out" in printed(comparison, 200)


def test_80_columns_fold_names_and_cut_none(compared):
    method = "a_method_with_a_name_that_no_line_of_eighty_columns_can_hold_beside_seven_more_columns"
    asked = {"method": method, "primitive": "send_recv"}
    text = printed(compared(replicates(BASE_MS, **asked), replicates(BASE_MS, **asked)), 80)
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("series"))
    table = lines[start + 1 : lines.index("", start)]
    assert "…" not in text
    assert max(map(len, table)) <= 80
    assert "".join(line.partition(" ")[0] for line in table).startswith(method)


def test_reasons_and_names_are_text_and_never_markup(compared):
    reason = "[red]tried[/red] [link=file:///etc]3 GiB[/link]"
    comparison = compared([row(model="[bold]tiny")], [row(model="[bold]tiny", status="oom", reason=reason)])
    text = printed(comparison, 200)
    assert reason in text
    assert "[bold]tiny" in text


def test_rows_without_environment_git_or_config_compare(compared):
    bare = {"environment": None, "git_sha": None, "git_dirty": None, "config": None}
    comparison = compared([row(**bare)], [row(**bare)])
    assert comparison.differences() == []
    assert "git" not in printed(comparison, 200)


def test_above_the_table_stands_where_the_numbers_of_both_come_from(compared):
    first, second, *_ = printed(compared([row()], [row(git_dirty=True)]), 300).splitlines()
    for line, side in ((first, "A ("), (second, "B (")):
        assert line.startswith(side)
        for word in ("1 row", "1 replicate", "git 0123456", "a CPU", "torch 2.13.0", "core_id e0e0e0e0"):
            assert word in line
    assert "before): before: 1 row" in first
    assert "with uncommitted changes" in second


def test_pairs_without_a_common_replicate_say_so(compared):
    (pair,) = compared([row(replicate=0, median_ms=10.0)], [row(replicate=1, median_ms=12.0)]).pairs
    assert isinstance(pair, Pair)
    assert (pair.points, pair.verdict, pair.words) == ((), "no interval", "1.200x")


def test_a_folder_beside_itself_is_told_apart_nowhere(tmp_path):
    folder = commit(replicates(BASE_MS), Path(tmp_path / "same"))
    (pair,) = compare(folder, folder).pairs
    assert (pair.ratio, pair.verdict) == (1.0, "not told apart")


@pytest.mark.parametrize(("chunks", "num_pairs"), [(1, 1), (2, 0)])
def test_a_row_of_before_an_option_is_the_cell_that_has_its_default(compared, chunks, num_pairs):
    """The option is part of a cell's identity, so that its cell_id is another one from then on."""

    def usp(**options):
        config = json.dumps({"method": {"name": "usp", **options}, "seq_len": 1024})
        return replicates(BASE_MS, method="usp", config=config)

    alike = row(method="ring", config=json.dumps({"method": {"name": "ring"}, "seq_len": 1024}))
    comparison = compared([*usp(), alike], [*usp(head_chunks=chunks), alike])
    assert len(comparison.pairs) == 1 + num_pairs
    assert len(comparison.only_a) == len(comparison.only_b) == 1 - num_pairs
