"""Packed campaigns: one file for all rows, which everything reads as it reads files; nothing is lost on the way."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sp_bench
from sp_bench.config.parsing import ConfigError
from sp_bench.driver.claims import FOLDER, Claims
from sp_bench.look import pack
from sp_bench.rows import packed, removed, store
from sp_bench.testing.kill_points import PACKING, VARIABLE

from ..cli.console import console, refusal
from .rows import commit, row, smoke

ROWS = smoke()[::3]  # each is a file, which takes longer to write and to read than all that is tested here


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return commit(ROWS, tmp_path_factory.mktemp("written"))


@pytest.fixture
def campaign(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "results" / "night"))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.parquet"))


def identities(folder: Path) -> list[str]:
    return sorted(row.file_name for row in store.committed(folder))


def killed(campaign: Path, step: str) -> bool:
    """Whether packing was killed at this step."""
    command = [sys.executable, "-m", "sp_bench", "pack", str(campaign)]
    done = subprocess.run(command, env=os.environ | {VARIABLE: step}, capture_output=True)
    return done.returncode == -signal.SIGKILL


def test_a_packed_campaign_reads_as_before_and_is_a_tenth_as_large(campaign):
    rows, names = store.read(campaign)[0], identities(campaign)
    done = pack.pack(campaign)
    assert (done.num_rows, done.left) == (len(names), ())
    assert done.bytes_after < done.bytes_before / 10
    assert files(campaign) == [packed.PACK]
    assert identities(campaign) == names
    assert store.read(campaign) == (rows, [])
    assert store.read(campaign, ("status", "flags"))[0] == rows.select(["status", "flags"])
    assert store.read(campaign, names=names[3:5])[0] == rows.slice(3, 2)
    one = next(store.committed(campaign))
    assert store.is_committed(campaign, one.trial_id, one.env_id, one.attempt)
    assert not store.is_committed(campaign, one.trial_id, one.env_id, one.attempt + 1)
    assert pack.pack(campaign).bytes_after == done.bytes_after


def test_rows_that_come_later_are_packed_with_the_others(campaign):
    pack.pack(campaign)
    commit([row(method="ulysses", seq_len=9216)], campaign)
    rows = store.read(campaign)[0]
    assert len(files(campaign)) == 2
    assert pack.pack(campaign).num_rows == rows.num_rows
    assert (files(campaign), store.read(campaign)[0]) == ([packed.PACK], rows)


def test_a_file_stands_before_the_packed_row_of_its_name(campaign):
    pack.pack(campaign)
    first = store.read(campaign)[0].to_pylist()[0]
    commit([first | {"median_step_ms": 123.0}], campaign)
    assert len(identities(campaign)) == len(store.read(campaign)[0])
    assert store.read(campaign)[0].to_pylist()[0]["median_step_ms"] == 123.0
    pack.pack(campaign)
    assert store.read(campaign)[0].to_pylist()[0]["median_step_ms"] == 123.0


def test_unpacking_gives_back_a_file_a_row(campaign):
    rows, names = store.read(campaign)[0], identities(campaign)
    pack.pack(campaign)
    assert pack.unpack(campaign) == len(names)
    assert files(campaign) == names
    assert store.read(campaign) == (rows, [])
    assert pack.unpack(campaign) == 0


def test_columns_that_this_version_does_not_know_are_kept(campaign):
    name = identities(campaign)[0]
    table = pq.read_table(campaign / name)
    pq.write_table(table.append_column("of_tomorrow", pa.array([7])), campaign / name)
    pack.pack(campaign)
    assert sorted(packed.table(campaign)["of_tomorrow"].to_pylist(), key=str) == [7, *[None] * (len(ROWS) - 1)]
    assert "columns of another schema left out: of_tomorrow" in store.read(campaign)[1][0]
    pack.unpack(campaign)
    assert pq.read_table(campaign / name)["of_tomorrow"].to_pylist() == [7]
    assert len(store.read(campaign)[1]) == 1


def test_pandas_duckdb_and_polars_read_packs_and_files_alike(campaign):
    other = commit([row(method="ulysses", seq_len=9216)], campaign.parent / "day")
    rows = len(store.read(campaign)[0]) + 1
    pack.pack(campaign)
    pattern = f"{campaign.parent}/*/*.parquet"
    query = f"SELECT count(*), count(DISTINCT trial_id) FROM read_parquet('{pattern}', union_by_name=true)"
    assert duckdb.sql(query).fetchall() == [(rows, rows)]
    scanned = [pl.scan_parquet(path) for path in sorted(campaign.parent.glob("*/*.parquet"))]
    assert pl.concat(scanned, how="diagonal_relaxed").collect().height == rows
    assert len(pd.read_parquet(campaign)) == rows - 1
    assert len(sp_bench.load([campaign, other])) == rows


def test_what_is_no_row_stays_where_it_is_and_is_named(campaign):
    name = identities(campaign)[0]
    (campaign / name).write_bytes(b"torn")
    (campaign / "notes.parquet").write_bytes(b"mine")
    loop = "0123456789ab-01234567-0-ok.parquet"
    (campaign / loop).symlink_to(loop)
    rows = store.read(campaign)[0]
    done = pack.pack(campaign)
    assert sorted(line.split(":")[0] for line in done.left) == sorted([loop, name, "notes.parquet"])
    assert done.num_rows == len(rows)
    assert files(campaign) == sorted([loop, name, "notes.parquet", packed.PACK])
    assert store.read(campaign)[0] == rows


def test_a_pack_that_is_no_file_or_leads_out_of_the_results_is_named_and_not_read(campaign, tmp_path):
    pack.pack(campaign)
    outside = tmp_path / "elsewhere.parquet"
    (campaign / packed.PACK).rename(outside)
    (campaign / packed.PACK).symlink_to(outside)
    assert store.read(campaign)[1] == [f"{packed.PACK}: {packed.LEADS_OUT}; skipped"]
    assert identities(campaign) == []
    (campaign / packed.PACK).unlink()
    os.mkfifo(campaign / packed.PACK)
    assert store.read(campaign)[1] == [f"{packed.PACK}: {packed.NO_FILE}; skipped"]


@pytest.mark.parametrize("damage", [b"", b"PAR1 and no more", None])
def test_a_damaged_pack_is_named_and_neither_fatal_nor_replaced(campaign, damage):
    pack.pack(campaign)
    if damage is None:  # a parquet file, but no pack
        pq.write_table(pa.table({"a": [1]}), campaign / packed.PACK)
    else:
        (campaign / packed.PACK).write_bytes(damage)
    commit([row(method="ulysses", seq_len=9216)], campaign)
    rows, (problem,) = store.read(campaign)
    assert rows.num_rows == len(identities(campaign)) == 1
    assert problem.startswith(f"{packed.PACK}: ")
    assert [line.split(":")[0] for line in store.passed_over(campaign)] == [packed.PACK]
    before = (campaign / packed.PACK).read_bytes()
    with pytest.raises(ConfigError, match="move it away first"):
        pack.pack(campaign)
    assert (campaign / packed.PACK).read_bytes() == before


def test_a_packed_row_under_another_name_is_left_out_and_named(campaign):
    pack.pack(campaign)
    table = packed.table(campaign)
    names = table[packed.FILE_NAME].to_pylist()
    names[0], names[1] = names[1], names[0]
    column = table.schema.get_field_index(packed.FILE_NAME)
    pq.write_table(table.set_column(column, packed.FILE_NAME, pa.array(names)), campaign / packed.PACK)
    rows, problems = store.read(campaign)
    assert rows.num_rows == len(names) - 2
    assert sorted(problems) == [
        f"{packed.PACK}: {name} is not the row of this name; skipped" for name in sorted(names[:2])
    ]


def test_while_another_works_in_the_campaign_it_is_not_packed(campaign, capfd):
    before = files(campaign)
    command = [sys.executable, "-c", HOLDER, str(campaign / store.WORK / FOLDER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert f"is in use by process {holder.pid} on " in refusal(capfd, "pack", str(campaign))
        holder.communicate("")
    assert files(campaign) == before


HOLDER = """
import sys
from pathlib import Path
from sp_bench.driver.claims import Claims
with Claims(Path(sys.argv[1])) as claims:
    claims.take("0123456789ab-01234567-0", lambda: False)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("step", PACKING)
def test_killed_at_any_step_a_pack_loses_and_doubles_nothing_and_the_next_one_ends_it(campaign, capfd, step):
    for path in sorted(campaign.glob("*.parquet"))[5:]:  # where the kill strikes is the same with few rows
        path.unlink()
    rows, names = store.read(campaign)[0], identities(campaign)
    assert killed(campaign, step)
    assert identities(campaign) == names
    assert store.read(campaign) == (rows, [])
    code, printed, errors = console(capfd, "pack", str(campaign))
    assert code == 0, errors
    assert f"{len(names)} rows packed" in printed
    assert (files(campaign), store.read(campaign)) == ([packed.PACK], (rows, []))
    assert not (campaign / store.WORK / pack.PLACE).exists()


def test_the_commands_work_on_a_packed_campaign(campaign, capfd):
    folder = str(campaign)
    before = console(capfd, "status", folder, "--json")
    assert console(capfd, "pack", folder)[0] == 0
    assert console(capfd, "status", folder, "--json") == before
    trial = next(store.committed(campaign)).trial_id
    assert trial in console(capfd, "show", trial, folder)[1]
    remove = ("rm", folder, "--trial", trial, "--yes", "--force")
    code, _, errors = console(capfd, *remove)
    assert code == 2
    assert "--undo" in errors
    assert console(capfd, "pack", folder, "--undo")[0] == 0
    assert console(capfd, *remove)[0] == 0
    assert removed.FOLDER in os.listdir(campaign / store.WORK)


def test_the_claim_of_a_killed_pack_blocks_nobody(campaign):
    assert killed(campaign, "pack_written")
    with Claims(campaign / store.WORK / FOLDER) as claims:
        assert claims.holders() == []


def test_a_pack_is_limited_by_the_memory_that_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "MAX_BYTES", 2**26)
    num, text = 10_000, "a" * 50_000  # one text that all rows have: 500 MB in memory
    rows = {
        packed.FILE_NAME: pa.array([f"{i:012x}-01234567-0-ok.parquet" for i in range(num)]),
        "reason": pa.DictionaryArray.from_arrays(pa.array([0] * num, pa.int32()), pa.array([text])),
    }
    pq.write_table(pa.table(rows), tmp_path / packed.PACK, compression="zstd", store_schema=False)
    assert (tmp_path / packed.PACK).stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"it takes over 67,108,864 bytes in memory"):
        packed.table(tmp_path)
    assert len(packed.names(tmp_path)) == num  # which reads the names alone


def test_a_pack_in_which_rows_stand_four_times_has_each_once(campaign):
    pack.pack(campaign)
    once, rows = sp_bench.load(campaign), packed.table(campaign)
    with pq.ParquetWriter(campaign / packed.PACK, rows.schema, store_schema=False) as writer:
        for _ in range(4):
            writer.write_table(rows)
    with pytest.warns(UserWarning, match=rf"packed\.parquet: {3 * len(rows)} rows stand in it again"):
        again = sp_bench.load(campaign)
    pd.testing.assert_frame_equal(again, once)
    assert len(list(store.committed(campaign))) == len(rows)


@pytest.mark.parametrize(
    "name", ["../../x.parquet", "../other/{row}", "/tmp/{row}", "sub/{row}", "x.parquet", None, ""]
)
def test_a_pack_writes_no_file_whose_name_is_no_rows(campaign, name, capfd):
    other = campaign.parent / "other"
    other.mkdir()
    kept = next(iter(files(campaign)))
    (other / kept).write_text("of a sibling")
    pack.pack(campaign)
    rows = pq.read_table(campaign / packed.PACK)
    names = rows[packed.FILE_NAME].to_pylist()
    names[0] = name and name.format(row=kept)
    place = rows.schema.get_field_index(packed.FILE_NAME)
    pq.write_table(
        rows.set_column(place, packed.FILE_NAME, pa.array(names, pa.string())),
        campaign / packed.PACK,
        store_schema=False,
    )
    before = {path: path.read_bytes() for path in campaign.parents[1].rglob("*.parquet")}
    assert "names a file that is no row's" in refusal(capfd, "pack", str(campaign), "--undo")
    assert {path: path.read_bytes() for path in campaign.parents[1].rglob("*.parquet")} == before
