"""The report as a whole: from rows to the page and the files beside it. Most pages here are made without figures."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sp_bench.report import build
from sp_bench.report.cells import cells
from sp_bench.report.formats import in_bytes, number
from sp_bench.report.page.parts import plain
from sp_bench.report.page.verdict import judge
from sp_bench.report.ratios import baseline
from sp_bench.report.selection import select
from sp_bench.rows import store

from .pages import Page, page_of, rendered
from .rows import STARTED_AT, cells_of, commit, row, selection_of, smoke

ULYSSES = {"method": "ulysses", "ulysses_degree": 2, "ring_degree": 1}
GATHER = {"method": "all_gather"}
SINGLE = {"method": "single", "sp_size": 1, "ring_degree": 1}
CELL = re.compile(r"#c(\d+)")


@pytest.fixture(scope="module")
def small_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [row(seq_len=n, **m) for n in (1024, 2048) for m in ({}, ULYSSES)]
    rows.append(row(status="oom", oom_site="torch", seq_len=4096))
    return build([commit(rows, tmp_path_factory.mktemp("results") / "small")]).page


@pytest.fixture(scope="module")
def smoke_page() -> Page:
    return page_of(smoke())


# the folder


def test_a_report_is_a_page_with_its_figures_and_tables_beside_it(small_report: Path) -> None:
    made = {path.relative_to(small_report.parent).as_posix() for path in small_report.parent.rglob("*.*")}
    for suffix in ("png", "pdf", "svg", "csv"):
        assert f"figures/throughput-attention-forward_backward.{suffix}" in made
    assert {Path(name).suffix for name in made if name.startswith("tables/")} == {".tex", ".md", ".csv"}


def test_every_figure_and_table_beside_the_page_is_named_on_it_and_the_reverse(small_report: Path) -> None:
    text = Page(small_report.read_text("utf-8")).text
    for folder, suffix in (("figures", ".png"), ("tables", ".tex")):
        stems = {path.stem for path in (small_report.parent / folder).glob(f"*{suffix}")}
        assert stems
        assert set(re.findall(rf"Files: {folder}/([\w-]+)\.", text)) == stems


def test_report_leaves_only_rows_beside_its_work_folder(small_report: Path) -> None:
    campaign = small_report.parents[2]
    assert {path.name for path in campaign.iterdir() if path.suffix != ".parquet"} == {"_work"}
    assert len(pd.read_parquet(campaign, columns=["status"])) == 5


def test_out_of_memory_is_in_the_verdict_and_in_the_caption_of_memory(small_report: Path) -> None:
    page = Page(small_report.read_text("utf-8"))
    assert "Out of memory first: ring contiguous at 4,096 tokens on 2 ranks; longest that ran: ring" in page.text
    captions = re.findall(r"<figcaption>(Peak host memory[^<]*)", page.html)
    assert any("out of memory" in caption.lower() for caption in captions)


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


# links


def test_the_page_loads_nothing_and_links_only_within_itself(small_report: Path) -> None:
    page = Page(small_report.read_text("utf-8"))
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert {source[1:] for source in page.sources if source.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "default-src 'none'; img-src data:; style-src 'sha256-" in unescape(page.html)
    assert "unsafe-inline" not in page.html


def test_every_row_is_in_the_appendix_with_its_trial_file_and_status(smoke_page: Page) -> None:
    appendix = smoke_page.text[smoke_page.text.rindex("Where the numbers above link to") :]
    for made in smoke():
        name = store.RowName(made["trial_id"], made["env_id"], made["attempt"], made["status"])
        assert f"made_up/{name.file_name}" in appendix
        assert made["trial_id"] in appendix.replace(name.file_name, "")


def test_every_cell_has_an_anchor_of_its_own(smoke_page: Page) -> None:
    numbers = [int(i[1:]) for i in smoke_page.ids if re.fullmatch(r"c\d+", i)]
    assert numbers == list(range(1, len(cells_of(smoke())) + 1))


def test_a_number_links_to_the_cell_that_it_is_of_and_a_ratio_to_both(tmp_path: Path) -> None:
    page = page_of([row(median_ms=12.5), row(median_ms=10.0, **ULYSSES)])
    verdict = {text: address for address, text in reversed(page.links)}
    order = {"ring": "#c1", "ulysses": "#c2"}
    assert (verdict["12.5 ms"], verdict["10.0 ms"]) == (order["ring"], order["ulysses"])
    assert verdict["1.25x"] == "#rows"  # both cells are all there are
    more = page_of([row(median_ms=12.5), row(median_ms=10.0, **ULYSSES), row(seq_len=2048)])
    address = next(address for address, text in more.links if text == "1.25x")
    assert re.fullmatch(r"#s\d+", address)
    assert f'id="{address[1:]}">Set {address[2:]}: <a href="#c1">cell 1</a> to <a href="#c2">2</a>' in more.html


def test_numbers_of_tables_link_to_their_cells(smoke_page: Page) -> None:
    numbers = re.findall(r"<td>(?:<a href=\"#[cs]\d+\">)?([^<]+)", smoke_page.html.split('id="failures"')[0])
    linked = re.findall(r"<td><a href=\"#[cs]\d+\">([^<]+)", smoke_page.html)
    measured = [text for text in numbers if text != "\N{EN DASH}" and "." in text]
    assert measured
    assert set(measured) <= set(linked)


# the verdict


def comparisons(rows: list[dict[str, object]]) -> list[str]:
    selection = selection_of(rows)
    words = judge(cells(selection.rows), selection)
    return [plain(sentence) for sentences in words.comparisons.values() for sentence in sentences]


def test_page_claims_no_interval_for_single_replicates(smoke_page: Page) -> None:
    assert "by medians of 1 replicate, no interval" in smoke_page.text
    assert "as fast as" not in smoke_page.text
    assert "for want of pairs (1 replicate a cell; an interval takes 6 pairs on the same devices)" in smoke_page.text


def test_the_lowest_median_is_named_with_the_ratio_of_medians() -> None:
    (sentence,) = comparisons([row(median_ms=10.0, **ULYSSES), row(median_ms=12.5)])
    assert sentence == (
        "1,024 tokens on 2 ranks, lowest median step time of 2 methods: ulysses takes 10.0 ms and ring contiguous "
        "12.5 ms, 1.25x, by medians of 1 replicate, no interval."
    )


SLOWER = [11.0, 11.1, 11.2, 11.3, 11.4, 11.5]
AROUND = [9.9, 9.8, 10.5, 10.6, 10.7, 10.8]


def paired(slower: list[float]) -> list[dict[str, object]]:
    rows = [row(median_ms=10.0, replicate=r, **ULYSSES) for r in range(6)]
    return rows + [row(median_ms=ms, replicate=r) for r, ms in enumerate(slower)]


@pytest.mark.parametrize(("slower", "claim"), [(SLOWER, True), (AROUND, False)])
def test_a_method_is_called_faster_only_when_the_paired_interval_excludes_1(slower: list[float], claim: bool) -> None:
    (sentence,) = comparisons(paired(slower))
    assert ("fastest of 2 methods: ulysses is" in sentence) == claim
    assert ("neither ulysses (10.0 ms) nor ring" in sentence) != claim
    assert "paired over 6 replicates, coverage 96.9%" in sentence
    assert ("since the paired interval to the next one holds 1" in page_of(paired(slower)).text) != claim


def test_whoever_has_the_smaller_median_is_not_called_faster_against_the_pairs() -> None:
    first, second = [10.0, 10.0, 10.0, 20.0, 20.0, 20.0], [9.0, 9.0, 9.0, 19.9, 19.9, 19.9]
    rows = [row(median_ms=ms, replicate=r, **ULYSSES) for r, ms in enumerate(first)]
    rows += [row(median_ms=ms, replicate=r) for r, ms in enumerate(second)]
    (sentence,) = comparisons(rows)
    assert "ring contiguous is 1.0" in sentence
    assert "as fast as ulysses" in sentence


def test_the_headline_sets_ulysses_against_the_ring_at_the_largest_place_of_a_setting() -> None:
    rows = [row(median_ms=ms, seq_len=n, **m) for n, ms, m in ((1024, 10, ULYSSES), (1024, 11, {}))]
    rows += [
        row(median_ms=ms, seq_len=4096, **m) for ms, m in ((30, ULYSSES), (33, {}), (20, {"method": "all_gather"}))
    ]
    selection = selection_of(rows)
    ((first, second),) = judge(cells(selection.rows), selection).headlines.values()
    assert plain(first).startswith("At 4,096 tokens on 2 ranks, ulysses takes 30.0 ms and ring contiguous 33.0")
    assert plain(second).startswith(
        "4,096 tokens on 2 ranks, lowest median step time of 3 methods: all_gather contiguous takes 20.0 ms"
    )


def test_a_headline_compares_on_one_kernel() -> None:
    rows = [row(median_ms=5, kernel="fast", **ULYSSES), row(median_ms=9, kernel="math", **ULYSSES)]
    rows.append(row(median_ms=10, kernel="math"))
    selection = selection_of(rows)
    ((only,),) = judge(cells(selection.rows), selection).headlines.values()
    assert "ulysses math takes 9.00 ms and ring contiguous math 10.0 ms" in plain(only)


def test_series_of_one_method_do_not_compete_and_nothing_is_unclaimed_between_them() -> None:
    zigzag = [row(median_ms=10.0 + (-1) ** r, replicate=r, layout="zigzag") for r in range(6)]
    rows = [row(median_ms=20.0, replicate=r, **ULYSSES) for r in range(6)]
    rows += [row(median_ms=10.0, replicate=r) for r in range(6)]
    selection = selection_of([*rows, *zigzag])
    verdict = judge(cells(selection.rows), selection)
    assert not any("Not claimed" in plain(words) for words in verdict.caveats)
    ((sentence,),) = verdict.comparisons.values()
    assert "fastest of 2 methods: ring" in plain(sentence)
    assert judge(cells(selection_of(zigzag).rows), selection_of(zigzag)).comparisons == {}


def test_strong_scaling_names_its_baseline_and_the_ideal() -> None:
    text = page_of([row(median_ms=20.0, **SINGLE), row(median_ms=8.0), row(median_ms=10.0, **ULYSSES)]).text
    assert (
        "Strong scaling: ring contiguous on 2 ranks has a speed-up of 2.50x over its baseline, single on 1 rank at"
        in text
    )
    assert "ideal is 2x." in text


def test_every_section_and_table_that_speaks_of_scaling_says_which_and_from_what(smoke_page: Page) -> None:
    bases = re.findall(r'<p class="basis">([^<]+)', smoke_page.html)
    assert len(bases) == 1 + len(re.findall(r"<h2", smoke_page.html)) - 6  # the verdict's, and one a further section
    assert all("scaling" in basis and ("baseline" in basis or "no ratio" in basis) for basis in bases)
    assert "Speed-up is strong scaling: step time of its baseline, single on one rank" in smoke_page.text


def test_the_shortest_length_out_of_memory_is_named_for_each_setting_and_number_of_ranks() -> None:
    rows = [row(seq_len=n, **m) for n in (1024, 4096) for m in (ULYSSES, {})]
    rows += [row(status="oom", seq_len=n, method="all_gather") for n in (2048, 4096)]
    rows += [row(status="oom", seq_len=8192), row(status="oom", seq_len=1024, sp_size=4, method="all_gather")]
    selection = selection_of(rows)
    sentences = [plain(words) for words in judge(cells(selection.rows), selection).out_of_memory]
    assert [sentence.partition(" (attention")[0] for sentence in sentences] == [
        "Out of memory first: all_gather contiguous at 1,024 tokens on 4 ranks",
        "Out of memory first: all_gather contiguous at 2,048 tokens on 2 ranks; longest that ran: ring contiguous, "
        "ulysses at 4,096",
    ]


def test_bytes_of_a_cell_are_equal_only_if_those_of_every_replicate_are() -> None:
    comm = [{"phase": "forward", "op": "send", "calls": 1, "predicted_bytes": 10.0, "counted_bytes": 12.0}]
    for strays in (0, 1):
        (cell,) = cells_of([row(replicate=r, comm=comm) if r == strays else row(replicate=r) for r in (0, 1)])
        assert cell.communication.equal is False


def test_bytes_that_differ_in_one_phase_are_marked_even_if_totals_agree() -> None:
    comm = [
        {"phase": "forward", "op": "send", "calls": 1, "predicted_bytes": 10.0, "counted_bytes": 12.0},
        {"phase": "backward", "op": "send", "calls": 1, "predicted_bytes": 12.0, "counted_bytes": 10.0},
    ]
    rows = [row(comm=comm), row(seq_len=2048)]
    assert [cell.communication.equal for cell in cells_of(rows)] == [False, True]
    page = page_of(rows)
    assert "differ from the closed form in 1 of 2 cells" in page.text
    assert page.text.count("bytes predicted and counted differ") == 1
    assert "forward 10 B predicted, 12 B counted" in page.text


# what failed


def test_failures_are_listed_with_their_reason_and_no_number() -> None:
    rows = [row(), row(status="oom", oom_site="torch", seq_len=4096), row(status="timeout", seq_len=8192)]
    assert [cell.median_step_ms for cell in cells_of(rows)] == [10.0, None, None]
    text = page_of(rows).text
    assert all(words in text for words in ("oom (torch)", "made up: oom", "made up: timeout"))
    assert "nan" not in text.lower()


def test_trials_of_one_reason_share_a_line_and_a_long_reason_is_cut() -> None:
    rows = [row(status="error", reason="the same " + "x" * 5000, seq_len=1024 * n) for n in range(1, 8)]
    page = page_of(rows)
    assert page.text.count("the same xxx") == 1
    assert "3,009 more characters in the row" in page.text
    assert "and 3 cells more" in page.text


@pytest.mark.parametrize("status", ["error", "oom", "unsupported"])
def test_a_campaign_in_which_all_failed_still_gives_a_page(status: str) -> None:
    rows = [row(status=status, seq_len=n, environment=None, started_at=None) for n in (1024, 2048)]
    text = page_of(rows).text
    assert f"2 trials: 2 {status}." in text
    assert "Nothing was measured" in text


def test_a_campaign_without_rows_gives_a_page_that_says_so(tmp_path: Path) -> None:
    text = rendered(select([tmp_path])).text
    assert "There are no rows" in text
    assert "There are no cells." in text


def test_one_row_gives_nothing_to_compare() -> None:
    assert "nothing to compare" in page_of([row()]).text


ASKED = ("model", "layout", "kernel", "fabric", "hardware", "sp_size", "seq_len", "ulysses_degree", "config", "dtype")


@pytest.mark.parametrize("status", ["ok", "oom"])
@pytest.mark.parametrize("absent", [ASKED, ("num_heads", "num_kv_heads", "head_dim", "world_size", "environment")])
def test_columns_that_an_older_schema_lacks_leave_a_page(absent: tuple[str, ...], status: str) -> None:
    rows = [row(status=status) | dict.fromkeys(absent), row(status=status, **ULYSSES) | dict.fromkeys(absent)]
    text = page_of(rows).text
    assert f"2 trials: 2 {status}" in text
    assert "None" not in text
    assert "nan" not in text.lower()


def test_every_metric_but_the_time_may_be_missing() -> None:
    asked = {name for name, value in row(status="error").items() if value is not None}
    bare = [{k: v for k, v in row(**m).items() if k in asked or k == "median_step_ms"} for m in ({}, ULYSSES)]
    text = page_of(bare).text
    assert "10.0 ms" in text
    assert "None" not in text


def test_markup_in_a_reason_or_name_stays_text() -> None:
    reason = "<script>alert(1)</script> & \x1b[31mred\x1b[0m \x00 \\input{secret} {{ 7 * 7 }}"
    page = page_of([row(status="error", reason=reason), row(method="<b>$x_1$</b>\x07\u202e"), row(method="_ring")])
    assert "<script>alert(1)</script> & red \N{REPLACEMENT CHARACTER} \\input{secret} {{ 7 * 7 }}" in page.text
    assert "<b>$x_1$</b>\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}" in page.text
    assert "<b>$x_1$" not in page.html
    assert page.html.count("<script") == 1
    assert not set(page.html) & {"\x00", "\x07", "\x1b", "\u202e"}


def test_unknown_statuses_and_missing_columns_of_other_schemas_are_shown_as_they_are(tmp_path: Path) -> None:
    commit([row()], tmp_path)
    foreign = {"status": "throttled", "reason": "hot", "trial_id": "a" * 12, "env_id": "e0e0e0e0", "attempt": 0}
    pq.write_table(pa.Table.from_pylist([foreign]), tmp_path / f"{'a' * 12}-e0e0e0e0-0-throttled.parquet")
    text = rendered(select([tmp_path])).text
    assert "2 trials: 1 ok, 1 throttled" in text
    assert "hot" in text


def test_files_that_are_not_rows_are_named_as_problems(tmp_path: Path) -> None:
    commit([row()], tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / f"{'b' * 12}-e0e0e0e0-0-ok.parquet").write_bytes(b"torn")
    selection = select([tmp_path])
    assert len(selection.problems) == 2
    assert "notes.txt" in rendered(selection).text


# size


def many(num_cells: int) -> list[dict[str, object]]:
    known = {"compute_only_step_ms": [9.0], "exposed_comm_ms": 1.0, "energy_j": [3.0, 3.0], "hfu": 0.5, "mfu": 0.4}
    return [row(method=f"method_{i}", median_ms=10.0 + i, **known) for i in range(num_cells)]


def test_a_page_of_thousands_of_cells_has_every_row_and_leaves_room_for_its_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sp_bench.report.page.MAX_DETAILED", 30)
    monkeypatch.setattr("sp_bench.report.page.sections.MAX_LINES", 30)
    rows = many(100)
    page = page_of(rows)
    assert len(page.html) - len(page_of(rows[:50]).html) < 50 * 770  # 5,000 rows of 5,000 cells: below 4 MB
    assert all(str(made["trial_id"]) in page.html for made in rows)
    assert "a line of a table links by its first entry" in page.text
    assert "The last 30 of 100 lines; the rows hold the others." in page.text


# cells and rows


def test_rate_comes_from_the_median_time_and_not_from_a_mean_of_rates() -> None:
    (cell,) = cells_of([row(median_ms=ms, replicate=r) for r, ms in enumerate((10.0, 20.0))])
    assert cell.median_step_ms == 15.0
    assert cell.rate(15.0, per_rank=False) == pytest.approx(1024 / 0.015)
    assert cell.rate(15.0, per_rank=True) == pytest.approx(1024 / 0.015 / 2)


def test_provenance_says_which_commit_was_measured_and_whether_it_was_clean() -> None:
    text = page_of([row(), row(seq_len=2048, git_dirty=True), row(status="timeout", seq_len=4096)]).text
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
    assert selection.core_id == "0000000f"
    assert selection.left_out == {"e0e0e0e0": 3}
    assert [cell.median_step_ms for cell in cells(selection.rows)] == [5.0]
    assert "3 rows of core_id e0e0e0e0" in rendered(selection).text


def test_two_campaigns_of_one_environment_pool_their_launches(tmp_path: Path) -> None:
    folders = [commit([row(median_ms=ms)], tmp_path / name) for name, ms in (("monday", 10.0), ("tuesday", 12.0))]
    (cell,) = cells(select([*folders, folders[0]]).rows)
    assert sorted(cell.step_ms.values()) == [10.0, 12.0]


def test_traffic_of_phase_other_is_outside_the_comparison() -> None:
    other = {"phase": "other", "op": "all_reduce", "calls": 1, "predicted_bytes": None, "counted_bytes": 8.0}
    (cell,) = cells_of([row(comm=[other])])
    assert cell.communication.equal is True
    assert cell.communication.phases == {"other": (None, 8.0)}


def test_kernels_are_never_on_one_line_nor_models_in_one_figure() -> None:
    found = cells_of([row(kernel="math"), row(kernel="cpu_flash", seq_len=2048), row(model="other")])
    assert {c.series for c in found if "tiny" in c.setting} == {
        "ring contiguous math",
        "ring contiguous cpu_flash",
    }
    assert len({c.setting for c in found}) == 2


def test_cells_that_differ_only_deep_in_their_config_get_settings_of_their_own() -> None:
    configs = [f'{{"workload": {{"optimizer": "{kind}"}}}}' for kind in ("sgd", "adamw")]
    found = cells_of([row(config=config) for config in configs])
    assert sorted(c.setting.rpartition("; ")[2] for c in found) == [
        "optimizer=adamw",
        "optimizer=sgd",
    ]


def test_speed_up_starts_from_single_on_one_rank_at_the_same_length() -> None:
    found = cells_of([row(median_ms=20.0, **SINGLE), row(median_ms=80.0, seq_len=2048, **SINGLE), row(median_ms=8.0)])
    ring = next(c for c in found if c.asked["method"] == "ring")
    start = baseline(ring, found)
    assert start is not None
    assert start.median_step_ms == 20.0


def test_memory_is_the_devices_where_it_is_known_and_the_hosts_elsewhere() -> None:
    rows = [row(), row(hardware="h100", max_peak_allocated_bytes=5 * 2**30)]
    assert {c.asked["hardware"]: c.memory_column for c in cells_of(rows)} == {
        "cpu": "max_peak_host_bytes",
        "h100": "max_peak_allocated_bytes",
    }
    assert all(f"Memory: {where}," in page_of(rows).text for where in ("allocated on the device", "host, resident set"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00123456, "0.00123"), (12.0, "12.0"), (99.96, "100"), (1234.4, "1,234"), (3.2e-7, "3.20e-07")],
)
def test_numbers_have_three_significant_digits_and_no_more(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("size", "text"), [(None, "\N{EN DASH}"), (0.0, "0 B"), (16.0, "16 B"), (1376256, "1.31 MiB")])
def test_bytes_have_binary_units(size: float | None, text: str) -> None:
    assert in_bytes(size) == text
