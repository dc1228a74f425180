"""Files beside rows that hang, lead elsewhere or never end are passed over."""

import json
import os
import zipfile
from pathlib import Path

import pytest

from sp_bench.rows import packed, plain_file, plans, proofs, store, submissions

from ..cli.console import console
from .rows import commit, row


def make(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "secret":
            (path.parents[2] / "secret.txt").write_text('{"sesame": 1}')
            path.symlink_to(path.parents[2] / "secret.txt")
        case "loop":
            path.symlink_to(path)
        case "folder":
            path.mkdir()
        case "deep":
            path.write_text("[" * 200_000 + "]" * 200_000)
        case "large":
            with path.open("wb") as file:
                file.truncate(plain_file.MAX_BYTES + 1)


KINDS = ("pipe", "device", "secret", "loop", "folder", "deep", "large")


@pytest.mark.parametrize("kind", KINDS)
def test_such_a_file_is_an_error_at_once(tmp_path, kind):
    path = tmp_path / "a" / "b" / "x.json"
    make(path, kind)
    with pytest.raises((ValueError, OSError)):
        plain_file.json_of(path)
    assert plain_file.is_plain(path) == (kind in ("deep", "large"))


@pytest.mark.parametrize("kind", KINDS)
def test_status_and_archive_pass_over_such_files(tmp_path, monkeypatch, capfd, kind):
    monkeypatch.chdir(tmp_path)
    folder = commit([row(), row(method="ulysses")], tmp_path / "night")
    make(folder / plans.FOLDER / "0123456789ab.json", kind)
    make(folder / proofs.FOLDER / f"{'a' * 12}-{'b' * 8}-{'c' * 8}.json", kind)
    make(folder / store.WORK / submissions.FOLDER / "20260101T000000Z-1.json", kind)
    code, printed, _ = console(capfd, "status", "night", "--json")
    assert code == 0
    assert json.loads(printed)[0]["planned"] is None
    assert submissions.jobs(folder) == {}
    assert console(capfd, "archive", "night", "--out", "night.zip")[0] == 0
    with zipfile.ZipFile("night.zip") as archive:
        assert not any(b"sesame" in archive.read(name) for name in archive.namelist() if name.endswith(".json"))


@pytest.mark.parametrize("kind", ["pipe", "device", "secret", "loop", "folder", "deep"])
def test_such_a_pack_is_named_by_all_that_read_it_and_is_in_no_archive(tmp_path, monkeypatch, capfd, kind):
    monkeypatch.chdir(tmp_path)
    folder = commit([row()], tmp_path / "all" / "night")
    make(folder / packed.PACK, kind)
    assert [line.partition(":")[0] for line in store.read(folder)[1]] == [packed.PACK]
    assert [line.partition(":")[0] for line in store.passed_over(folder)] == [packed.PACK]
    assert console(capfd, "status", "all/night")[0] == 0
    for words in (
        ("archive", "all/night", "--out", "night.zip"),
        ("pack", "all/night"),
        ("pack", "all/night", "--undo"),
    ):
        code, _, error = console(capfd, *words)
        assert code == 2
        assert f"{packed.PACK} cannot be read" in error
    assert not Path("night.zip").exists()
