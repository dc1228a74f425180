"""Rows read by pandas, DuckDB and polars: the lines of docs/RUNNING.md, over all committed campaigns."""

import warnings
from glob import glob
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

import sp_bench
from sp_bench.rows import store

from .rows import commit, row

ROOT = Path(__file__).parents[2]


def result(begins: str, **names: Any) -> Any:
    """What the line of docs/RUNNING.md that begins so gives, in the root of the tree."""
    found = [
        line.strip() for line in (ROOT / "docs/RUNNING.md").read_text().splitlines() if line.strip().startswith(begins)
    ]
    assert len(found) == 1, f"docs/RUNNING.md has {len(found)} lines that begin with {begins}"
    return eval(found[0], {"glob": glob} | names)  # noqa: S307


@pytest.fixture(scope="module", autouse=True)
def in_the_root() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    """The rows of each method over all campaigns, as this package reads them."""
    folders = [Path(folder) for folder in glob("results/*/")]
    table = pa.concat_tables([store.read(folder, ("method",))[0] for folder in folders])
    return {str(method): number for method, number in table.to_pandas().groupby("method").size().items()}


def test_pandas_reads_all_campaigns(counts):
    assert dict(result("sp_bench.load", sp_bench=sp_bench).items()) == counts


def test_duckdb_reads_all_campaigns(counts):
    duckdb = pytest.importorskip("duckdb")
    assert dict(result("duckdb.sql", duckdb=duckdb).fetchall()) == counts


def test_polars_reads_all_campaigns(counts):
    polars = pytest.importorskip("polars")
    assert dict(result("pl.concat", pl=polars).rows()) == counts


def test_rows_have_what_is_recomputed_and_the_tiles():
    rows = sp_bench.load("results/h200x2_step_memory_2")
    assert {*rows.activation_checkpointing} == {"none", "selective", "full"}
    assert {*rows.loss_tile_tokens.fillna(0)} == {0, 2048}
    assert sp_bench.load("results/h200x2_headline").activation_checkpointing.isna().all()


def test_ratios_compare_two_methods_where_both_ran():
    found = result("sp_bench.ratios", sp_bench=sp_bench, glob=lambda _: glob("results/h200x2_libraries*/"))
    assert len(found) > 20
    place = (found.campaign == "h200x2_libraries_2") & (found.kernel == "cudnn") & (found.seq_len == 131072)
    (line,) = found[place & (found.num_kv_heads == 8)].itertuples()
    assert (round(1 / line.ratio, 3), line.pairs, line.verdict, line.grade) == (1.034, 6, "behind", "A")
    assert line.low <= line.ratio <= line.high
    assert found[found.pairs < 6].low.isna().all()
    with pytest.raises(ValueError, match="no folders"):
        sp_bench.ratios([], slow="ring", fast="ulysses")


def test_a_row_has_the_name_of_its_folder_and_the_one_that_it_was_run_under():
    rows = sp_bench.load("results/h200x2_isolation")
    assert set(rows["campaign"]) == {"h200x2_isolation"}
    assert set(rows["campaign_as_run"]) == {"isolation"}
    assert list(rows.columns[:8])[-2:] == ["campaign", "campaign_as_run"]
    assert rows["timed_steps"].dtype == pd.Int64Dtype()


def test_campaigns_of_old_and_of_new_rows_are_one_frame(tmp_path):
    """An old row has no throughput of its window; it follows from others."""
    new = commit([row(median_ms=10.0, window_tokens_per_s=102_400.0)], tmp_path / "new")
    old = commit([row(median_ms=10.0, window_ms=[60.0, 80.0], flags=["window_disagrees"])], tmp_path / "old")
    rows = sp_bench.load([new, old])
    assert list(rows["campaign"]) == ["new", "old"]
    assert list(rows["campaign_as_run"]) == ["made_up", "made_up"]
    assert list(rows["window_tokens_per_s"]) == [102_400.0, pytest.approx(1e3 * 1024 * 5 / 80)]


def test_the_window_of_an_old_row_is_read_only_where_it_is_asked_for(tmp_path):
    folder = commit([row(median_ms=10.0)], tmp_path / "old")
    table, _ = store.read(folder, ("window_tokens_per_s",))
    assert table.to_pylist() == [{"window_tokens_per_s": pytest.approx(1e3 * 1024 / 10)}]
    failed = commit([row(status="oom")], tmp_path / "failed")
    assert store.read(failed, ("window_tokens_per_s",))[0].to_pylist() == [{"window_tokens_per_s": None}]


def test_what_is_no_row_is_left_out_with_a_warning(tmp_path):
    folder = commit([row()], tmp_path / "c")
    (folder / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"notes\.txt: not a row"):
        assert len(sp_bench.load(folder)) == 1
    (folder / "notes.txt").unlink()
    with warnings.catch_warnings(action="error"):
        assert len(sp_bench.load(str(folder))) == 1


def test_without_a_folder_nothing_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="at least one campaign folder, such as results/smoke"):
        sp_bench.load([])
    with pytest.raises(FileNotFoundError):
        sp_bench.load(tmp_path / "nowhere")
