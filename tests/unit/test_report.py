import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench import results
from sp_bench.report import build
from sp_bench.report.cells import Cell, baseline, cells
from sp_bench.report.figures import draw
from sp_bench.report.formats import in_bytes, number
from sp_bench.report.page.verdict import judge
from sp_bench.report.selection import select
from sp_bench.report.statistics import median_interval

from .rows import STARTED_AT, commit, row, smoke


class Page(HTMLParser):
    """Text, tags and addresses of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.tags, self.sources = "", set[str](), list[str]()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def cells_of(folder: Path) -> list[Cell]:
    return cells(select([folder]).rows)


def comparisons(folder: Path) -> list[str]:
    words = judge(cells_of(folder), select([folder]))
    return [sentence for sentences in words.comparisons.values() for sentence in sentences]


@pytest.fixture(scope="module")
def smoke_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = commit(smoke(), tmp_path_factory.mktemp("results") / "smoke")
    return build([folder]).page


def test_smoke_campaign_gives_a_page_and_three_kinds_of_figures_apart_by_workload_and_pass(smoke_report: Path) -> None:
    assert sorted(path.name for path in smoke_report.parent.iterdir()) == sorted(
        ["index.html"]
        + [
            f"{kind}-{what}.png"
            for kind in ("throughput", "memory", "communication")
            for what in ("attention-forward", "attention-forward_backward", "train_step-step")
        ]
    )
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in smoke_report.parent.glob("*.png"))


def test_report_leaves_only_rows_beside_its_work_folder(smoke_report: Path) -> None:
    campaign = smoke_report.parents[2]
    assert {path.name for path in campaign.iterdir() if path.suffix != ".parquet"} == {"_work"}
    assert len(pd.read_parquet(campaign, columns=["status"])) == len(smoke())


def test_page_needs_no_network_and_no_script(smoke_report: Path) -> None:
    page = Page(smoke_report)
    assert "script" not in page.tags
    assert all(source.startswith(("data:", "#")) for source in page.sources)


def test_page_names_every_row_file_so_that_numbers_can_be_traced(smoke_report: Path) -> None:
    text = Page(smoke_report).text
    assert all(name.file_name in text for name in results.committed(smoke_report.parents[2]))


def test_page_claims_no_interval_for_single_replicates(smoke_report: Path) -> None:
    text = Page(smoke_report).text
    assert "1 replicate each: no interval is claimed" in text
    assert "is fastest" not in text


def test_fastest_is_named_with_the_ratio_of_medians(tmp_path: Path) -> None:
    rows = [row(median_ms=10.0, method="ulysses", ulysses_degree=2, ring_degree=1), row(median_ms=12.5)]
    (sentence,) = comparisons(commit(rows, tmp_path))
    assert sentence.startswith("1,024 tokens on 2 ranks: ulysses has the lowest median step time, 1.25x ahead of ring")
    assert "10.0 ms against 12.5 ms" in sentence


@pytest.mark.parametrize(
    ("slower", "claim"),
    [([11.0, 11.1, 11.2, 11.3, 11.4, 11.5], True), ([9.9, 9.8, 10.5, 10.6, 10.7, 10.8], False)],
)
def test_a_method_is_called_fastest_only_when_the_paired_interval_excludes_1(
    tmp_path: Path, slower: list[float], claim: bool
) -> None:
    rows = [row(median_ms=10.0, method="ulysses", ring_degree=1, replicate=r) for r in range(6)]
    rows += [row(median_ms=ms, replicate=r) for r, ms in enumerate(slower)]
    (sentence,) = comparisons(commit(rows, tmp_path))
    assert ("is fastest" in sentence) == claim
    assert ("neither is called faster" in sentence) != claim
    assert "coverage 96.9%" in sentence


def test_rate_comes_from_the_median_time_and_not_from_a_mean_of_rates(tmp_path: Path) -> None:
    (cell,) = cells_of(commit([row(median_ms=ms, replicate=r) for r, ms in enumerate((10.0, 20.0))], tmp_path))
    assert cell.median_step_ms == 15.0
    assert cell.rate(15.0, per_rank=False) == pytest.approx(1024 / 0.015)
    assert cell.rate(15.0, per_rank=True) == pytest.approx(1024 / 0.015 / 2)


def test_provenance_says_which_commit_was_measured_and_whether_it_was_clean(tmp_path: Path) -> None:
    commit([row(), row(seq_len=2048, git_dirty=True), row(status="timeout", seq_len=4096)], tmp_path)
    text = Page(build([tmp_path]).page).text
    assert "0123456789ab, 0123456789ab with uncommitted changes" in text
    assert "3 read, 3 used (2 ok, 1 timeout)" in text
    assert "sp-bench 0.1.0, torch 2.13.0" in text


def test_the_last_attempt_of_a_trial_counts(tmp_path: Path) -> None:
    commit([row(status="error", attempt=0), row(median_ms=7.0, attempt=10), row(median_ms=9.0, attempt=9)], tmp_path)
    selection = select([tmp_path])
    assert (selection.num_read, selection.num_superseded) == (3, 2)
    (cell,) = cells(selection.rows)
    assert cell.median_step_ms == 7.0


def test_rows_of_an_older_environment_are_left_out_and_counted(tmp_path: Path) -> None:
    newer = STARTED_AT.replace(year=STARTED_AT.year + 1)
    commit([row(median_ms=1.0, replicate=r) for r in range(3)], tmp_path)
    commit([row(median_ms=5.0, env_id="0000000f", started_at=newer)], tmp_path)
    selection = select([tmp_path])
    assert selection.env_id == "0000000f"
    assert selection.left_out == {"e0e0e0e0": 3}
    assert [cell.median_step_ms for cell in cells(selection.rows)] == [5.0]
    assert "3 rows of env_id e0e0e0e0" in Page(build([tmp_path]).page).text


def test_two_campaigns_of_one_environment_pool_their_launches(tmp_path: Path) -> None:
    folders = [commit([row(median_ms=ms)], tmp_path / name) for name, ms in (("monday", 10.0), ("tuesday", 12.0))]
    (cell,) = cells(select([*folders, folders[0]]).rows)
    assert dict(cell.step_ms) == {"monday/0": 10.0, "tuesday/0": 12.0}


def test_failures_are_listed_with_their_reason_and_no_number(tmp_path: Path) -> None:
    commit([row(), row(status="oom", oom_site="torch", seq_len=4096), row(status="timeout", seq_len=8192)], tmp_path)
    assert [cell.median_step_ms for cell in cells_of(tmp_path)] == [10.0, None, None]
    text = Page(build([tmp_path]).page).text
    assert all(words in text for words in ("oom (torch)", "made up: oom", "made up: timeout"))
    assert "Out of memory first" in text
    assert "nan" not in text.lower()


@pytest.mark.parametrize("status", ["error", "oom", "unsupported"])
def test_a_campaign_in_which_all_failed_still_gives_a_page(tmp_path: Path, status: str) -> None:
    commit([row(status=status, seq_len=n, environment=None, started_at=None) for n in (1024, 2048)], tmp_path)
    assert f"2 trials: 2 {status}." in Page(build([tmp_path]).page).text


def test_a_campaign_without_rows_gives_a_page_that_says_so(tmp_path: Path) -> None:
    assert "There are no rows" in Page(build([tmp_path]).page).text


def test_one_row_gives_figures_and_nothing_to_compare(tmp_path: Path) -> None:
    page = build([commit([row()], tmp_path)]).page
    assert "nothing to compare" in Page(page).text
    assert len(list(page.parent.glob("*.png"))) == 3


def test_markup_in_a_reason_or_name_stays_text(tmp_path: Path) -> None:
    reason = "<script>alert(1)</script> & \x1b[31mred\x1b[0m \x00"
    commit([row(status="error", reason=reason), row(method="<b>$x_1$</b>"), row(method="_ring")], tmp_path)
    page = Page(build([tmp_path]).page)
    assert "<script>alert(1)</script> & red \N{REPLACEMENT CHARACTER}" in page.text
    assert "<b>$x_1$</b>" in page.text
    assert not page.tags & {"script", "b"}


def test_unknown_statuses_and_missing_columns_of_other_schemas_are_shown_as_they_are(tmp_path: Path) -> None:
    commit([row()], tmp_path)
    foreign = {"status": "throttled", "reason": "hot", "trial_id": "a" * 12, "env_id": "e0e0e0e0", "attempt": 0}
    pq.write_table(pa.Table.from_pylist([foreign]), tmp_path / f"{'a' * 12}-e0e0e0e0-0-error.parquet")
    built = build([tmp_path])
    assert "1 ok, 1 throttled" in Page(built.page).text
    assert any("throttled.parquet" in problem for problem in built.problems)


def test_files_that_are_not_rows_are_named_as_problems(tmp_path: Path) -> None:
    commit([row()], tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / f"{'b' * 12}-e0e0e0e0-0-ok.parquet").write_bytes(b"torn")
    built = build([tmp_path])
    assert len(built.problems) == 2
    assert "notes.txt" in Page(built.page).text


def test_bytes_that_differ_in_one_phase_are_marked_even_if_totals_agree(tmp_path: Path) -> None:
    comm = [
        {"phase": "forward", "op": "send", "calls": 1, "predicted_bytes": 10.0, "counted_bytes": 12.0},
        {"phase": "backward", "op": "send", "calls": 1, "predicted_bytes": 12.0, "counted_bytes": 10.0},
    ]
    commit([row(comm=comm), row(seq_len=2048)], tmp_path)
    assert [cell.communication.equal for cell in cells_of(tmp_path)] == [False, True]
    assert "differ from the closed form in 1 of 2 cells" in Page(build([tmp_path]).page).text


def test_traffic_of_phase_other_is_outside_the_comparison(tmp_path: Path) -> None:
    other = {"phase": "other", "op": "all_reduce", "calls": 1, "predicted_bytes": None, "counted_bytes": 8.0}
    (cell,) = cells_of(commit([row(comm=[other])], tmp_path))
    assert cell.communication.equal is True
    assert cell.communication.phases == {"other": (None, 8.0)}


def test_kernels_are_never_on_one_line_nor_models_in_one_figure(tmp_path: Path) -> None:
    commit([row(kernel="math"), row(kernel="cpu_flash", seq_len=2048), row(model="other")], tmp_path)
    found = cells_of(tmp_path)
    assert {c.series for c in found if "tiny" in c.setting} == {
        "ring contiguous math",
        "ring contiguous cpu_flash",
    }
    assert len({c.setting for c in found}) == 2


def test_cells_that_differ_only_deep_in_their_config_get_settings_of_their_own(tmp_path: Path) -> None:
    configs = [f'{{"workload": {{"activation_checkpointing": "{kind}"}}}}' for kind in ("none", "full")]
    found = cells_of(commit([row(config=config) for config in configs], tmp_path))
    assert sorted(c.setting.rpartition("; ")[2] for c in found) == [
        "workload.activation_checkpointing=full",
        "workload.activation_checkpointing=none",
    ]


def test_speed_up_starts_from_single_on_one_rank_at_the_same_length(tmp_path: Path) -> None:
    one = {"method": "single", "sp_size": 1, "ring_degree": 1}
    commit([row(median_ms=20.0, **one), row(median_ms=80.0, seq_len=2048, **one), row(median_ms=8.0)], tmp_path)
    found = cells_of(tmp_path)
    ring = next(c for c in found if c.asked["method"] == "ring")
    start = baseline(ring, found)
    assert start is not None
    assert start.median_step_ms == 20.0


def test_memory_is_the_devices_where_it_is_known_and_the_hosts_elsewhere(tmp_path: Path) -> None:
    commit([row(), row(hardware="h100", max_peak_allocated_bytes=5 * 2**30)], tmp_path)
    assert {c.asked["hardware"]: c.memory_column for c in cells_of(tmp_path)} == {
        "cpu": "max_peak_host_bytes",
        "h100": "max_peak_allocated_bytes",
    }
    captions = {d.setting: d.caption for d in draw(cells_of(tmp_path))[0] if d.kind == "memory"}
    assert sorted(caption.split(" of the rank")[0] for caption in captions.values()) == [
        "Peak allocated device memory",
        "Peak host memory (resident set)",
    ]


def test_out_of_memory_is_a_mark_at_its_length_and_never_a_value(tmp_path: Path) -> None:
    lengths = (1024, 2048, 4096)
    commit(
        [row(status="oom" if n == 4096 else "ok", oom_site="torch" if n == 4096 else None, seq_len=n) for n in lengths],
        tmp_path,
    )
    drawings, _ = draw(cells_of(tmp_path))
    assert {d.kind: "out of memory" in d.caption for d in drawings} == {
        "throughput": True,
        "memory": True,
        "communication": False,
    }


def test_more_settings_than_are_drawn_are_counted_and_stay_in_the_tables(tmp_path: Path) -> None:
    commit([row(model=f"model_{i}", comm=[], max_peak_host_bytes=None) for i in range(10)], tmp_path)
    built = build([tmp_path])
    assert len(list(built.page.parent.glob("throughput-*.png"))) == 8
    text = Page(built.page).text
    assert "2 settings more are in the tables only" in text
    assert all(f"model_{i}" in text for i in range(10))


def test_cells_do_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = select([commit(smoke(2), tmp_path)]).rows
    assert cells(rows) == cells(rows.sample(frac=1, random_state=1))


def test_a_second_report_replaces_the_first_and_removes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "page"
    build([commit([row()], tmp_path / "full")], out)
    (out / "mine.png").write_bytes(b"kept")
    build([commit([row(status="error")], tmp_path / "failed")], out)
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "mine.png"]


def test_a_folder_that_cannot_be_written_or_read_raises_os_error(tmp_path: Path) -> None:
    folder = commit([row(status="error")], tmp_path / "rows")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        build([folder], tmp_path / "file" / "report")
    with pytest.raises(FileNotFoundError, match="absent"):
        build([tmp_path / "absent"])


def test_figures_do_not_touch_global_matplotlib_state(tmp_path: Path) -> None:
    commit([row()], tmp_path / "rows")
    program = (
        "import sys, pathlib, matplotlib; before = matplotlib.rcParams.copy()\n"
        "from sp_bench.report import build; build([pathlib.Path(sys.argv[1])])\n"
        "assert matplotlib.rcParams.copy() == before\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "rows")], check=True)


@pytest.mark.parametrize(("n", "coverage"), [(0, None), (5, None), (6, 0.96875), (9, 0.9609375)])
def test_interval_needs_6_replicates_and_states_its_coverage(n: int, coverage: float | None) -> None:
    interval = median_interval(list(range(n)))
    assert (interval and interval.coverage) == (coverage and pytest.approx(coverage))


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 1e6), min_size=6, max_size=60))
def test_interval_encloses_the_median_whatever_the_order(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert interval is not None
    assert interval.low <= float(np.median(samples)) <= interval.high
    assert interval.coverage >= 0.95
    assert interval == median_interval(samples[::-1])


def test_interval_covers_the_true_median_of_skewed_samples_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).lognormal(size=(4000, 11))
    intervals = [median_interval(list(sample)) for sample in draws]
    hits = np.mean([i is not None and i.low <= 1.0 <= i.high for i in intervals])  # the median of exp(N(0, 1)) is 1
    assert intervals[0] is not None
    assert hits == pytest.approx(intervals[0].coverage, abs=0.012)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00123456, "0.00123"), (12.0, "12.0"), (99.96, "100"), (1234.4, "1,234"), (3.2e-7, "3.20e-07")],
)
def test_numbers_have_three_significant_digits_and_no_more(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("size", "text"), [(None, "\N{EN DASH}"), (0.0, "0 B"), (16.0, "16 B"), (1376256, "1.31 MiB")])
def test_bytes_have_binary_units(size: float | None, text: str) -> None:
    assert in_bytes(size) == text
