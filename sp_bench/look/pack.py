"""Packs the rows of a campaign into one file (rows/packed.py), and unpacks them. No run may work there meanwhile."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.driver.claims import FOLDER, Claims
from sp_bench.rows import packed, store
from sp_bench.rows.schema import SCHEMA

KEY = "pack"  # the claim's key
PLACE = "packing"  # in the campaign's WORK


@dataclass(frozen=True)
class Packed:
    num_rows: int
    bytes_before: int  # of files and pack
    bytes_after: int
    left: tuple[str, ...]  # a line per file that is no row of ours


def pack(campaign: Path) -> Packed:
    """Put all rows of a campaign into its pack. Their files are removed once the pack was read back and compared.

    Raises:
        ConfigError: a run or another pack is working, rows do not fit in one file, or the folder cannot be written.
    """
    before = _size(campaign)
    with _alone(campaign):
        tables, files, left = [], [], [*store.passed_over(campaign)]
        in_pack = _packed_table(campaign)
        for row in sorted(store.committed(campaign), key=lambda row: row.file_name):
            path = campaign / row.file_name
            if not path.exists():  # it is in the pack already
                continue
            try:
                table = store.as_written(path)
            except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
                left.append(f"{shown(row.file_name)}: {shown(str(error).splitlines()[0])}; left as it is")
                continue
            tables.append(table.append_column(packed.FILE_NAME, pa.array([row.file_name], pa.string())))
            files.append(row.file_name)
        if in_pack is not None:
            again = set(files)
            stands = [name not in again for name in in_pack[packed.FILE_NAME].to_pylist()]
            tables.append(in_pack.filter(pa.array(stands, pa.bool_())))
        if files:
            rows = _joined(tables)
            names = rows[packed.FILE_NAME].to_pylist()
            want, _ = store.read(campaign, names=names)
            packed.replace(campaign, rows, campaign / store.WORK / PLACE, lambda place: _require_equal(place, want))
            packed.unlink(campaign, files)
            packed.sync(campaign)
    return Packed(len(packed.names(campaign)), before, _size(campaign), tuple(left))


def unpack(campaign: Path) -> int:
    """Write each packed row to its own file and remove the pack. Returns the number of rows.

    Raises:
        ConfigError: as in `pack`, or a name in the pack is not that of a row.
    """
    with _alone(campaign):
        rows = _packed_table(campaign)
        if rows is None:
            return 0
        want, _ = store.read(campaign)
        names = rows[packed.FILE_NAME].to_pylist()
        if foreign := [name for name in names if not store.is_row_name(name)]:  # it could lie outside the campaign
            raise ConfigError(
                f"{campaign / packed.PACK} names a file that is no row's: {shown(str(foreign[0]))}; nothing was written"
            )
        place = campaign / store.WORK / PLACE
        place.mkdir(exist_ok=True)  # a killed process may have left it
        for i, name in enumerate(names):
            if not (campaign / name).exists():
                row = rows.slice(i, 1)
                # columns of another version are those of the rows that have them
                kept = [n for n in row.column_names if n in SCHEMA.names or row[n].null_count == 0]
                with open(place / name, "wb") as file:
                    row = row.select([n for n in kept if n != packed.FILE_NAME])
                    store.write_table(row, file, row.schema)
                    file.flush()
                    os.fsync(file.fileno())
                (place / name).replace(campaign / name)
        shutil.rmtree(place)
        packed.sync(campaign)
        (campaign / packed.PACK).rename(aside := campaign / store.WORK / packed.PACK)
        try:
            _require_equal(campaign, want)
        except ConfigError:
            aside.rename(campaign / packed.PACK)
            raise
        aside.unlink()
    return len(names)


@contextmanager
def _alone(campaign: Path) -> Iterator[None]:
    """A context in which this process holds the claim on the campaign's pack.

    Raises:
        ConfigError: another process works in the campaign, or its folder cannot be written.
    """
    try:
        with Claims(campaign / store.WORK / FOLDER) as claims:
            claim = claims.take(KEY, lambda: False)
            others = ", ".join(claims.holders())
            if claim is None or others:
                raise ConfigError(f"{campaign} is in use by {others or 'another pack'}; pack it when that has ended")
            yield
            claims.release(claim)
    except OSError as error:
        raise ConfigError(f"{campaign} cannot be packed: {error.strerror or error} ({error.filename})") from error


def _packed_table(campaign: Path) -> pa.Table | None:
    if not packed.stands_in(campaign):
        return None
    try:
        return packed.table(campaign)
    except ValueError as error:
        raise ConfigError(
            f"{campaign / packed.PACK} cannot be read ({shown(str(error))}): move it away first"
        ) from error


def _joined(tables: list[pa.Table]) -> pa.Table:
    """One table with the columns of all, sorted by file name."""
    try:
        rows = pa.concat_tables([t.replace_schema_metadata(None) for t in tables], promote_options="permissive")
    except pa.ArrowException as error:
        raise ConfigError(f"rows of several versions do not fit in one file: {shown(str(error))}") from error
    return rows.combine_chunks().sort_by(packed.FILE_NAME)


def _require_equal(folder: Path, want: pa.Table) -> None:
    """Check that the rows of `folder` equal `want` in every known column."""
    got, problems = store.read(folder)
    if not (got.equals(want) or repr(got.to_pylist()) == repr(want.to_pylist())):  # NaN equals nothing
        reason = "; ".join(problems[:1]) or "values differ"
        raise ConfigError(f"rows were not written as they were read ({reason}); nothing was removed")


def _size(campaign: Path) -> int:
    return sum(path.lstat().st_size for path in campaign.glob("[!._]*.parquet"))  # a link may lead nowhere
