"""`world=one_rank` by the command line: without a proof it is refused, and with one its row says what it is."""

import shutil
from pathlib import Path

import pytest

from sp_bench.driver import campaign
from sp_bench.report import read
from sp_bench.rows import store

from ..unit.rows import collective, commit
from .conftest import sp_bench
from .console import console

SHORT = (
    "workload.correctness_seq_len=48",
    "workload.warmup_steps=1",
    "workload.timed_steps=2",
    "workload.attribution=false",
)
WORDS = ("method=ring", "campaign=one", *SHORT)
ONE = ("world=one_rank", "link=nvlink", "sp_size=8", "seq_len=512,1024")
COLUMNS = (
    "status",
    "reason",
    "evidence",
    "proof",
    "link",
    "world_size",
    "rank_step_ms",
    "peak_host_bytes",
    "link_busy_ms",
    "ran_rank",
)


@pytest.fixture(scope="module")
def proven(tmp_path_factory) -> Path:
    """Results in which the method is proven with two ranks."""
    folder = tmp_path_factory.mktemp("proven")
    done = sp_bench(folder, "run", *WORDS, "sp_size=2", "seq_len=512", "--no-report")
    assert done.returncode == 0, done.stderr
    return folder / "results"


def test_one_rank_runs_once_its_method_is_proven_and_shares_no_setting_with_real_ranks(
    proven, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert console(capfd, "run", *WORDS, *ONE)[0] == 1
    refused = store.read(tmp_path / "results" / "one", COLUMNS)[0].to_pylist()
    assert {row["status"] for row in refused} == {"unsupported"}
    assert all("run one first: sp-bench run method=ring" in row["reason"] for row in refused)

    shutil.copytree(proven, tmp_path / "results", dirs_exist_ok=True)
    code, _, err = console(capfd, "run", *WORDS, *ONE)
    assert code == 0, err
    rows = [row for row in store.read(tmp_path / "results" / "one", COLUMNS)[0].to_pylist() if row["status"] == "ok"]
    (proof,) = (row for row in rows if row["evidence"] == "measured")
    assert (proof["world_size"], proof["proof"], proof["link"], proof["ran_rank"]) == (2, None, "none", None)
    ones = [row for row in rows if row["evidence"] == "one_rank"]
    assert len(ones) == 2
    for row in ones:
        assert (row["world_size"], row["link"], row["ran_rank"]) == (8, "nvlink", 0)
        assert row["proof"].startswith("one/")
        assert len(row["rank_step_ms"]) == len(row["peak_host_bytes"]) == 1
        assert row["link_busy_ms"] > 0

    cells = [cell for cell in read([tmp_path / "results" / "one"]) if cell.ok]
    by_evidence = {cell.asked["evidence"]: cell for cell in cells}
    measured, one = by_evidence["measured"], by_evidence["one_rank"]
    assert one.over_fabrics != measured.over_fabrics
    assert one.pool != measured.pool
    assert "one real rank of all, messages modelled as nvlink" in one.setting
    assert "one real rank" not in measured.setting


LINKS = ("workload=collective", "method=all_gather", "sp_size=2", "campaign=links", "--no-report", "--link")


def test_a_run_writes_the_link_that_it_measured_and_refuses_its_name_before(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code, _, err = console(capfd, "run", *LINKS, "conf/link/Our link.yaml")
    assert (code, "lower-case letters" in err) == (2, True)
    assert not (tmp_path / "results").exists()
    curve = [{"message_bytes": size, "ms": size / 1e6} for size in (10**6, 10**7)]
    commit([collective("gloo", "all_gather", 10, sp_size=2) | {"curve": curve}], tmp_path / "results" / "links")
    monkeypatch.setattr(campaign, "run", lambda *_, **__: {"ok": 1})
    code, out, err = console(capfd, "run", *LINKS, "conf/link/ours.yaml")
    assert (code, out) == (0, "link: conf/link/ours.yaml\n"), err
    assert 'all_gather 2: "1000000:1000 10000000:10000"' in (tmp_path / "conf/link/ours.yaml").read_text()


@pytest.mark.parametrize("link", ["none", "nvlink"])
def test_the_longest_sequence_is_searched_for_with_one_rank(proven, tmp_path, monkeypatch, capfd, link):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(proven, tmp_path / "results")
    length = ("seq_len=max", "search.start=512", "search.longest=1024")
    code, out, err = console(capfd, "run", *WORDS, "world=one_rank", f"link={link}", "sp_size=4", *length)
    assert code == 0, err
    assert "1,024 tokens fit" in out + err
