"""`sp-bench archive`: what goes with a paper."""

import hashlib
import os
import zipfile

import pyarrow.parquet as pq
import pytest

import sp_bench
from sp_bench.rows import campaign_file, git, plans, proofs, store
from sp_bench.rows.plans import PlannedTrial
from sp_bench.rows.proofs import Proof

from ..unit.rows import ENVIRONMENT, commit, row
from .console import console, refusal


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = commit([row(), row(method="ulysses")], tmp_path / "night")
    plans.write(folder, [PlannedTrial("a" * 12, "b" * 8, "ring")])
    proofs.write(Proof("a" * 12, "b" * 8, "c" * 8, "row.parquet", 1.0, {"columns": {}}, {}), folder)
    return folder


def test_an_archive_holds_rows_plans_report_and_their_checksums(campaign, capfd, tmp_path):
    code, printed, _ = console(capfd, "archive", "night", "--out", "night.zip")
    assert code == 0
    assert printed.startswith("archive: night.zip, ")
    with zipfile.ZipFile("night.zip") as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "there")
    there = tmp_path / "there"
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    rows = {f"rows/night/{name.file_name}" for name in store.committed(campaign)}
    assert len(rows) == 2
    assert names >= rows | {"report/index.html", "environment.txt", "CITATION.cff", "README.txt", "SHA256SUMS"}
    assert any(name.startswith("rows/night/_plans/") for name in names)
    assert f"commit: {row()['git_sha']}\n" in (there / "CITATION.cff").read_text()
    assert f"rows/night/_proofs/{'a' * 12}-{'b' * 8}-{'c' * 8}.json" in names
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "there" / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == names - {"SHA256SUMS"}
    for name, wanted in sums.items():
        assert hashlib.sha256((tmp_path / "there" / name).read_bytes()).hexdigest() == wanted
    assert len(sp_bench.load(tmp_path / "there" / "rows" / "night")) == 2


def test_an_archive_has_the_campaigns_file_and_the_commits_of_trees(campaign, capfd, monkeypatch):
    tree = "tree:" + "b" * 40
    monkeypatch.setattr(git, "commits_of_trees", lambda git_shas: {tree: "e" * 40} if tree in git_shas else {})
    commit([row(method="usp", git_sha=tree, git_dirty=None)], campaign)
    (campaign / campaign_file.NAME).write_text("remarks: a quiet night\n")
    for name, has in (("night.zip", True), ("blind.zip", False)):
        assert console(capfd, "archive", "night", "--out", name, *(["--anonymous"] * (not has)))[0] == 0
        with zipfile.ZipFile(name) as archive:
            assert (f"rows/night/{campaign_file.NAME}" in archive.namelist()) == has
            assert (b"a quiet night" in archive.read("report/index.html")) == has
            told = archive.read("environment.txt").decode()
        assert (f"commit of {tree}: {'e' * 40}\n" in told) == has


def test_an_archive_says_how_to_measure_it_again(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = ENVIRONMENT | {"device_names": ["NVIDIA H200"] * 2}
    rows = [
        row(replicate=n, median_ms=ms, duration_s=90.0, environment=environment) for n, ms in ((0, 10.0), (1, 10.3))
    ]
    folder = commit([*rows, row(method="ulysses", duration_s=60.0)], tmp_path / "night")
    (folder / campaign_file.NAME).write_text("commands:\n- words: sp-bench run method=ring sp_size=2\n")
    for name, is_named in (("night.zip", True), ("blind.zip", False)):
        assert console(capfd, "archive", "night", "--out", name, *(["--anonymous"] * (not is_named)))[0] == 0
        with zipfile.ZipFile(name) as archive:
            told = archive.read("REPRODUCE.md").decode()
        assert ("    sp-bench run method=ring sp_size=2\n" in told) == is_named
        assert ("night" in told) == is_named
        assert "- Hardware: 2 x NVIDIA H200\n" in told
        assert "- Tolerance: the slowest replicate takes 3.0% longer than the fastest in the median of 1 cell" in told
        assert "- Time: 4.00 minutes in 3 trials\n" in told


def test_a_campaigns_file_that_is_a_pipe_is_named_and_left_out(campaign, capfd):
    os.mkfifo(campaign / campaign_file.NAME)
    assert console(capfd, "archive", "night", "--out", "night.zip")[0] == 0
    with zipfile.ZipFile("night.zip") as archive:
        assert f"rows/night/{campaign_file.NAME}" not in archive.namelist()
        assert f"{campaign_file.NAME}: not a plain file" in archive.read("report/index.html").decode()


@pytest.mark.usefixtures("campaign")
def test_equal_rows_give_equal_bytes(capfd, tmp_path):
    for name in ("one.zip", "two.zip"):
        assert console(capfd, "archive", "night", "--out", name)[0] == 0
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_an_anonymous_archive_has_rows_that_measure_the_same_and_name_nobody(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parameter = {"parameter": "alice.weight", "error": 0.1, "budget": 0.2}
    proof = "_proofs/0123abcd-89abcdef.json"
    secret = {"campaign": "alices", "proof": f"alices/{proof}", "full_update_error": parameter, "git_sha": "a" * 40}
    secret |= {"environment": ENVIRONMENT | {"hostname": "alicebox", "device_uuids": ["GPU-alice"]}}
    folder = commit([row(**secret), row(method="ulysses", median_ms=5.0, **secret)], tmp_path / "alices")
    assert console(capfd, "archive", "alices", "--out", "blind.zip", "--anonymous")[0] == 0
    with zipfile.ZipFile("blind.zip") as archive:
        archive.extractall("there")
        names = archive.namelist()
    assert [name for name in names if name.startswith("rows/")] == ["rows/campaign 1/packed.parquet"]
    hidden, plain = (sp_bench.load(each) for each in (tmp_path / "there" / "rows" / "campaign 1", folder))
    for column in ("trial_id", "method", "median_step_ms", "tokens_per_s"):
        assert sorted(hidden[column]) == sorted(plain[column])
    assert "commit:" not in (tmp_path / "there" / "CITATION.cff").read_text()
    assert "_proofs" not in (tmp_path / "there" / "README.txt").read_text()
    told = str(pq.read_table("there/rows/campaign 1/packed.parquet").to_pylist())
    assert "alice" in str(pq.read_table(next(folder.glob("*.parquet"))).to_pylist())
    assert "alice" not in told
    assert f"campaign 1/{proof}" in told
    assert "a" * 40 not in told


def test_a_hidden_name_of_a_config_is_in_no_id_of_an_anonymous_archive_and_its_rows_are_read(
    capfd, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [row(model="alice_8b", proof="alices/home/alice/x", replicate=n) for n in range(2)]
    folder = commit(rows, tmp_path / "alices")
    assert console(capfd, "archive", "alices", "--out", "blind.zip", "--anonymous")[0] == 0
    with zipfile.ZipFile("blind.zip") as archive:
        archive.extractall("there")
    hidden, plain = (sp_bench.load(each) for each in (tmp_path / "there" / "rows" / "campaign 1", folder))
    assert len(hidden) == len(plain) == 2
    assert not {*hidden["cell_id"], *hidden["trial_id"]} & {*plain["cell_id"], *plain["trial_id"]}
    assert "alice" not in str(pq.read_table("there/rows/campaign 1/packed.parquet").to_pylist())


def test_an_archive_that_would_lack_a_row_is_refused(campaign, capfd, tmp_path):
    broken = next(campaign.glob("*.parquet"))
    broken.write_bytes(broken.read_bytes()[:50])
    assert f"night/{broken.name} cannot be read" in refusal(capfd, "archive", "night", "--out", "night.zip")
    assert "ends so" in refusal(capfd, "archive", "night", "--out", "night.tar")
    assert not (tmp_path / "night.zip").exists()
