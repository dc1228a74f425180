"""What variables of the shell hold, and what of it is kept."""

import io
import os
import re
import zipfile
from pathlib import Path

import sp_bench

from .conftest import SMALL, Command

TOKEN = "hf-planted-7c1d"
VARIABLES = {name: f"{TOKEN}-of-{name}" for name in ("NCCL_SOCKET_IFNAME", "GLOO_OF_SITE", "NVTE_KEY", "TORCH_NCCL_X")}


def holders(content: bytes, name: str) -> list[str]:
    """The files that hold the token, in archives too."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return [f"{name}/{found}" for each in archive.namelist() for found in holders(archive.read(each), each)]
    return [name] if TOKEN.encode() in content else []


def test_a_token_in_a_variable_of_a_library_is_in_no_row_record_page_or_archive(
    command: Command, tmp_path: Path, monkeypatch
) -> None:
    for name, value in {**VARIABLES, "NCCL_DEBUG": "WARN"}.items():
        monkeypatch.setenv(name, value)
    ran = command("run", "method=single", "sp_size=1", "seq_len=96", "campaign=a", *SMALL)
    assert (ran.returncode, "1 ok" in ran.stdout) == (0, True), ran.stderr
    for made in (
        ("report", "--out", "page"),
        ("report", "--anonymous", "--out", "hidden"),
        ("archive", "--out", "a.zip"),
    ):
        done = command(made[0], "results/a", *made[1:])
        assert done.returncode == 0, done.stderr

    (row,) = sp_bench.load(tmp_path / "results" / "a").to_dict("records")
    kept = dict(row["environment"]["env"])
    assert kept["NCCL_DEBUG"] == "WARN"
    assert all(re.fullmatch("sha256:[0-9a-f]{8}", kept[name]) for name in VARIABLES), kept
    assert len({kept[name] for name in VARIABLES}) == len(VARIABLES)
    assert TOKEN not in str(row)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"record.json", "index.html", "a.zip"} <= {path.name for path in files}
    assert [name for path in files for name in holders(path.read_bytes(), os.fspath(path))] == []
    assert "NCCL_SOCKET_IFNAME sha256:" in (tmp_path / "page" / "index.html").read_text()
    assert "NCCL_SOCKET_IFNAME" not in (tmp_path / "hidden" / "index.html").read_text()
