"""The row (schema.py has its columns): atomic write, listing by name, and read.

One parquet file an attempt: results/<campaign>/<trial_id>-<env_id>-<attempt>-<status>.parquet, or a line of the
campaign's pack (packed.py), before which a file of its name stands. Plans (plans.py) lie in _plans beside them, proofs
(proofs.py) in _proofs, and all else in _work; pandas and this reader ignore them.
"""

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from sp_bench.config.parsing import ConfigError, nearest, shown
from sp_bench.rows import packed, plans, proofs
from sp_bench.rows.digest import DIGEST, SINCE, damaged, digests
from sp_bench.rows.packed import LEADS_OUT, NO_FILE, stays
from sp_bench.rows.row import as_written_today, needed_to_read
from sp_bench.rows.schema import RETIRED, SCHEMA, SCHEMA_VERSION
from sp_bench.testing.kill_points import reach

WORK = "_work"  # where all lies that is not a row
UNCOMMITTED = "row.parquet"  # a row's file inside its claim
STATUSES = ("ok", "unsupported", "oom", "timeout", "incorrect", "error", "preempted")

IDENTITY = ("status", "trial_id", "env_id", "attempt")  # what a file's name says of its row
VERSION = "schema_version"  # the column
PART = 200  # files that are read as one piece
DAMAGED = "its values are not those that were written (its digest differs)"
FOREIGN = "not a row (its name has another form)"
_LEFT_OUT = "columns of another schema left out"
MAX_ROW_BYTES = 64 * 2**20  # the largest file of ours has 50 kB
MARK = b"sp_bench.schema_version"  # of every file that `write` made
# With any status: those of a newer schema are read too.
_FILE = re.compile(
    r"(?P<trial_id>[0-9a-f]{12})-(?P<env_id>[0-9a-f]{8})-(?P<attempt>0|[1-9][0-9]{0,8})-(?P<status>[a-z_]+)\.parquet"
)


@dataclass(frozen=True)
class RowName:
    """What a row's file name says, so that status, plan and resume need not open it."""

    trial_id: str  # 12 hex digits
    env_id: str  # 8 hex digits
    attempt: int
    status: str

    @property
    def file_name(self) -> str:
        return f"{self.trial_id}-{self.env_id}-{self.attempt}-{self.status}.parquet"


def committed(folder: Path) -> Iterator[RowName]:
    """The rows of a campaign, from file names alone; other files are passed over."""
    return (row for _, row in _listing(folder) if isinstance(row, RowName))


def latest(rows: Iterable[RowName]) -> dict[tuple[str, str], RowName]:
    """The last attempt at each trial in each environment."""
    return {(row.trial_id, row.env_id): row for row in sorted(rows, key=lambda row: row.attempt)}


def passed_over(folder: Path) -> Iterator[str]:
    """One line for each file among the rows that is none by its name, or leads elsewhere; none is opened."""
    return (f"{shown(name)}: {problem}; skipped" for name, problem in _listing(folder) if isinstance(problem, str))


def _listing(folder: Path) -> Iterator[tuple[str, RowName | str]]:
    """(file name, what it says of its row or why it is none), the packed ones last. Nothing for a folder that is not
    there."""
    if not folder.is_dir():
        return
    files = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] in "._" or entry.name == packed.PACK:
                continue
            files.add(entry.name)
            row = _row_name(entry.name)
            if row is None:
                yield entry.name, FOREIGN
            elif row.status not in STATUSES:
                yield entry.name, f"not a row that this version knows (status {row.status})"
            elif entry.is_symlink() and not stays(Path(entry), folder.parent):
                yield entry.name, LEADS_OUT
            elif not (entry.is_file(follow_symlinks=False) or os.path.isfile(entry)):  # asks the disk for links only
                yield entry.name, NO_FILE
            else:
                yield entry.name, row
    try:
        in_pack = packed.names(folder)
    except ValueError as error:
        yield packed.PACK, str(error)
        return
    for name in in_pack - files:
        row = _row_name(name)
        yield (name, row) if row and row.status in STATUSES else (f"{packed.PACK}: {name}", FOREIGN)


def _row_name(file_name: str) -> RowName | None:
    match = _FILE.fullmatch(file_name)
    return RowName(match["trial_id"], match["env_id"], int(match["attempt"]), match["status"]) if match else None


def is_row_name(name: str | None) -> bool:
    """Whether a file of that name could be a row's. Such a name stays within its folder."""
    return name is not None and _row_name(name) is not None


def is_committed(folder: Path, trial_id: str, env_id: str, attempt: int) -> bool:
    """Whether `committed` would list a row of that attempt, without listing thousands of names.

    The folder is opened for that: an NFS client then forgets which files it thought absent.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        names = {RowName(trial_id, env_id, attempt, status).file_name for status in STATUSES}
        return any(_is_row(folder, name, descriptor) for name in names) or not names.isdisjoint(_in_pack(folder))
    finally:
        os.close(descriptor)


def _in_pack(folder: Path) -> frozenset[str]:
    """File names of the packed rows; of a pack that cannot be read, which `passed_over` names, none."""
    try:
        return packed.names(folder)
    except ValueError:
        return frozenset()


def _is_row(folder: Path, name: str, descriptor: int) -> bool:
    try:
        mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(mode):
        return stays(folder / name, folder.parent) and (folder / name).is_file()
    return stat.S_ISREG(mode)


def require_contained(campaign: Path) -> None:
    """Neither the campaign's folder nor what we write to below it is a link to somewhere else.

    Raises:
        ConfigError: such a link, or a folder that is none or cannot be read.
    """
    if campaign.is_symlink() and not stays(campaign, campaign.parent):
        raise ConfigError(
            f"{campaign} is a link that leads out of {campaign.parent}; give the folder {os.path.realpath(campaign)} "
            "itself, or move it here"
        )
    try:
        if campaign.exists():
            os.scandir(campaign).close()
        work = campaign / WORK
        entries = [work, *work.iterdir()] if work.is_dir() else [work]
    except OSError as error:
        raise ConfigError(f"{campaign} cannot be read: {error.strerror}") from error
    for path in (campaign / plans.FOLDER, campaign / proofs.FOLDER, *entries):
        if path.is_symlink() and not stays(path, campaign):
            raise ConfigError(f"{path} is a link that leads out of {campaign}; remove it, or use another campaign")


def require_campaigns(folders: Sequence[Path]) -> list[Path]:
    """Folders of results that a user named, each of which can be read.

    Raises:
        ConfigError: one is none, cannot be read, leads elsewhere, or holds campaigns instead of rows.
    """
    for folder in folders:
        try:
            is_folder = folder.is_dir()
        except OSError as error:  # a name that no file system takes
            raise ConfigError(f"{shown(folder)} cannot be read: {error.strerror}") from None
        if not is_folder:
            hint = nearest(folder.name, [each.name for each in folder.parent.glob("*/")], f"{folder.parent}/")
            raise ConfigError(f"{shown(folder)} is not a folder of results{f'; {hint}' if hint else ''}".rstrip())
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(f"{folder} cannot be read: permission denied")
        require_contained(folder)
        inside = {} if any(folder.glob("*.parquet")) else {row.parent.name for row in folder.glob("[!._]*/*.parquet")}
        if inside:  # its report would be empty
            several = ", ".join(sorted(inside)[:5]) + (", ..." if len(inside) > 5 else "")
            raise ConfigError(f"{shown(folder)} holds campaigns, not rows: name one or more of {shown(several)}")
    return list(folders)


def write(row: Mapping[str, Any], folder: Path, within: Path | None = None) -> Path:
    """Commit one row atomically: temp file, fsync, rename, fsync of the folder.

    `within`: a directory of the same file system for the temp file; while it is there the row may be committed
    (see claims.py).

    Raises:
        ValueError: unknown column, unknown status, or a status and reason that do not fit each other.
        FileNotFoundError: `within` is gone, or `folder`; nothing is committed.
        OSError: the folder cannot be written; a row that is there is whole.
    """
    unknown = sorted(set(row) - set(SCHEMA.names))
    if unknown:
        raise ValueError(f"no such columns: {', '.join(unknown)}")
    if row["status"] not in STATUSES:
        raise ValueError(f"status {row['status']!r}; use one of {', '.join(STATUSES)}")
    if (row["status"] == "ok") != (row.get("reason") is None):
        raise ValueError(f"status {row['status']} with reason {row.get('reason')!r}: a reason is given when not ok")
    table = _table(row)
    name = RowName(row["trial_id"], row["env_id"], row["attempt"], row["status"])
    target = folder / name.file_name
    temporary = within / UNCOMMITTED if within else folder / f".{name.file_name}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            write_table(table, file)
            file.flush()
            reach("row_written")
            os.fsync(file.fileno())
        reach("row_synced")
        os.replace(temporary, target)
        reach("row_replaced")
    except BaseException:
        with suppress(OSError):  # what stopped the writing counts; the file is in nobody's way
            os.unlink(temporary)
        raise
    packed.sync(folder)  # not `within`: at worst a crash brings back a file that nobody commits
    reach("row_committed")
    return target


def write_table(row: pa.Table, file: BinaryIO, schema: pa.Schema = SCHEMA) -> None:
    """Write a row as its file has it. `schema`: of a row of another version, its own."""
    # of a single value, dictionaries and statistics are larger than the value; Arrow's own schema, of which the file's
    # says all that a reader needs, would be a third of the file
    with pq.ParquetWriter(
        file, schema, use_dictionary=False, write_statistics=False, store_schema=False, write_page_checksum=True
    ) as writer:
        writer.write_table(row)
        writer.add_key_value_metadata(SCHEMA.metadata)


def _table(row: Mapping[str, Any]) -> pa.Table:
    """The row as its file has it, with the digest of its values as Arrow keeps them."""
    table = pa.Table.from_pylist([{**row, "schema_version": SCHEMA_VERSION, DIGEST: None}], schema=SCHEMA)
    place = SCHEMA.get_field_index(DIGEST)
    return table.set_column(place, SCHEMA.field(place), pa.array(digests(table)))


def read(
    folder: Path,
    columns: Sequence[str] = SCHEMA.names,
    *,
    executor: Executor | None = None,
    progress: Callable[[int], None] = lambda num_files: None,
    names: Collection[str] | None = None,
) -> tuple[pa.Table, list[str]]:
    """Rows of a campaign in file-name order, and one line for each file that is not a row of ours.

    Where all columns are read, a row whose values are not those of its digest is none.
    Old rows are returned as they would be written today; further columns that one lacks are null. Columns and fields of
    a newer schema that we do not know are dropped and named; a row from before digests that has one is damaged. Only
    `columns` are read. `executor`: processes that share the files; threads do not help. `progress` hears of files read.
    `names`: of the files that are read; None: of all.

    Raises:
        OSError: `folder` is missing, not a folder or not readable.
    """
    schema = pa.schema([SCHEMA.field(name) for name in needed_to_read(columns)], SCHEMA.metadata)
    found = (p for p in folder.iterdir() if p.name[0] not in "._" and p.name != packed.PACK)
    paths = sorted(path for path in found if names is None or path.name in names)
    parts = [paths[i : i + PART] for i in range(0, len(paths), PART)]
    tables, problems, files = [], [], []
    read_parts = (executor.map if executor else map)(partial(_read_part, schema), parts)
    for part, (table, read_files, lines) in zip(parts, read_parts, strict=True):
        tables.append(table)
        files += read_files
        problems += lines
        progress(len(part))
    if packed.stands_in(folder):
        table, read_files, lines = _read_pack(folder, schema, names, {path.name for path in paths})
        tables.append(table)
        files += read_files
        problems += lines
        progress(len(read_files))
    whole = joined(tables, schema)
    if files != (ordered := sorted(files)):
        at = {name: i for i, name in enumerate(files)}
        whole = whole.take([at[name] for name in ordered])
    if len(schema) == len(SCHEMA) and (wrong := dict.fromkeys(damaged(whole))):
        problems += [f"{shown(ordered[i])}: {DAMAGED}; skipped" for i in wrong]
        whole = whole.filter(pa.array([i not in wrong for i in range(whole.num_rows)]))
    return as_written_today(whole).select(list(columns)), problems


def _read_pack(
    folder: Path, schema: pa.Schema, names: Collection[str] | None, files: Collection[str]
) -> tuple[pa.Table, list[str], list[str]]:
    """The packed rows that are not among `files`, their names, and problems."""
    try:
        rows = packed.table(folder, [*schema.names, *IDENTITY, VERSION])
        if absent := [column for column in IDENTITY if column not in rows.column_names]:
            raise ValueError(f"not a pack of rows (it has no {', '.join(absent)})")
        every = rows[packed.FILE_NAME].to_pylist()
        identities = zip(
            *(rows[column].to_pylist() for column in ("trial_id", "env_id", "attempt", "status")), strict=True
        )
        wanted = [RowName(*identity).file_name for identity in identities]
        first: dict[str, int] = {}
        for i, name in enumerate(every):
            first.setdefault(name, i)
        kept = [
            i
            for i, (name, expected) in enumerate(zip(every, wanted, strict=True))
            if name == expected and first[name] == i and name not in files and (names is None or name in names)
        ]
        wrong = [name for name, expected in zip(every, wanted, strict=True) if name != expected]
        versions = _versions(rows)
        conformed, fields = _conform(rows, schema, max(versions, default=0))
        unknown = _unknown(packed.columns(folder) - {packed.FILE_NAME}, fields, min(versions, default=0))
        older = {i for i in kept if unknown and versions[i] < SINCE}
        kept = [i for i in kept if i not in older]
        table = conformed.take(pa.array(kept, pa.int64())) if len(kept) < len(every) else conformed
    except (ValueError, pa.ArrowException) as error:
        return schema.empty_table(), [], [f"{packed.PACK}: {shown(str(error))}; skipped"]
    lines = [f"{packed.PACK}: {shown(str(name))} is not the row of this name; skipped" for name in wrong]
    if again := len(every) - len(first):
        lines.append(f"{packed.PACK}: {again:,} rows stand in it again; each counts once")
    if unknown:
        lines.append(f"{packed.PACK}: {_LEFT_OUT}: {shown(', '.join(unknown))}")
    if older:
        rows_are = "1 row is" if len(older) == 1 else f"{len(older):,} rows are"
        lines.append(f"{packed.PACK}: damaged: {rows_are} older than these columns; skipped")
    return table, [every[i] for i in kept], lines


def joined(tables: Sequence[pa.Table], schema: pa.Schema = SCHEMA) -> pa.Table:
    return pa.concat_tables(tables) if tables else schema.empty_table()  # to make an empty one, pyarrow imports pandas


def _read_part(schema: pa.Schema, paths: Sequence[Path]) -> tuple[pa.Table, list[str], list[str]]:
    """The rows of some files as one table, as many small ones take ten times its memory; the files' names, and
    problems."""
    tables, files, problems = [], [], []
    for path in paths:
        try:
            table, unknown = _read_file(path, schema)
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(f"{shown(path.name)}: {shown((reason or type(error).__name__).splitlines()[0])}; skipped")
        else:
            tables.append(table)
            files.append(path.name)
            problems += [f"{shown(path.name)}: {_LEFT_OUT}: {shown(', '.join(unknown))}"] if unknown else []
    return joined(tables, schema).combine_chunks(), files, problems


def as_written(path: Path) -> pa.Table:
    """The row of a file with all columns that it has.

    Raises:
        ValueError, OSError, OverflowError, pa.ArrowException: it is no row of ours.
    """
    if damaged(_read_file(path, SCHEMA)[0]):
        raise ValueError(DAMAGED)
    return packed.opened(pa.BufferReader(path.read_bytes())).read(use_threads=False)


def _read_file(path: Path, schema: pa.Schema) -> tuple[pa.Table, list[str]]:
    """The row of a file, and the names of its columns that we do not know."""
    name = _row_name(path.name)
    if name is None:
        raise ValueError(FOREIGN)
    if path.is_symlink() and not stays(path, path.parent.parent):
        raise ValueError(LEADS_OUT)
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(NO_FILE)
    if (size := path.stat().st_size) > MAX_ROW_BYTES:
        raise ValueError(f"not a row ({size:,} bytes; a row has at most {MAX_ROW_BYTES:,})")
    file = packed.opened(pa.BufferReader(path.read_bytes()))
    columns = set(file.schema_arrow.names)
    if absent := [column for column in IDENTITY if column not in columns]:
        raise ValueError(f"not a row (it has no {', '.join(absent)})")
    metadata = file.metadata
    if (metadata.num_rows, metadata.num_row_groups) != (1, 1):
        raise ValueError(f"not a row (it has {metadata.num_rows:,} of them in {metadata.num_row_groups:,} groups)")
    if (size := metadata.row_group(0).total_byte_size) > MAX_ROW_BYTES:
        raise ValueError(f"not a row (it unpacks to {size:,} bytes; at most {MAX_ROW_BYTES:,})")
    if MARK not in (metadata.metadata or {}):
        file.scan_contents()  # raises where another tool's metadata is damaged; asked for it, pyarrow 26 would crash
    wanted = [column for column in (*schema.names, *IDENTITY, VERSION) if column in columns]
    table = file.read(columns=list(dict.fromkeys(wanted)), use_threads=False)
    packed.require_dates(table)
    table.validate(full=True)  # text that is no UTF-8 would be found where no file is known any more
    if table.num_columns == len(columns):
        packed.require_in_order(metadata)
    (version,) = _versions(table)
    row, fields = _conform(table, schema, version)
    unknown = _unknown(columns, fields, version)
    if unknown and version < SINCE:
        raise ValueError(f"damaged: no row of schema version {version} has {shown(', '.join(unknown))}")
    says = RowName(*(table[column][0].as_py() for column in ("trial_id", "env_id", "attempt", "status")))
    if says != name:
        raise ValueError(f"not a row of this name (its columns say {shown(says.file_name)})")
    return row, unknown


def _versions(rows: pa.Table) -> list[int]:
    """The schema version of each row; 0: it says none."""
    if VERSION not in rows.column_names or rows[VERSION].type != SCHEMA.field(VERSION).type:
        return [0] * rows.num_rows
    return rows[VERSION].fill_null(0).to_pylist()


def _unknown(columns: Collection[str], fields: Collection[str], version: int) -> list[str]:
    """Which of a file's columns and fields (`column.field`) no row of this version has. A newer row may have them. Rows
    from before digests get no new ones: there it is damage, which nothing else would find."""
    names = {*columns, *fields}.difference(SCHEMA.names)
    return sorted(name for name in names if version >= RETIRED.get(name, 0))


def _conform(table: pa.Table, schema: pa.Schema, version: int) -> tuple[pa.Table, list[str]]:
    """The table with the columns of `schema`, and the fields (`column.field`) that it left out. Rows of a version that
    we know have its types.

    Raises:
        ValueError: a column is there twice, or has values of another type.
    """
    if table.schema.equals(schema):  # casting column by column takes longer than reading the file
        return table, []
    found = dict(zip(table.column_names, table.columns, strict=True))  # pyarrow takes 0.2 ms to find a name
    if len(found) < table.num_columns:
        raise ValueError("not a row (it has a column twice)")
    columns, left_out = [], []
    for field in schema:
        column = found.get(field.name)
        if column is None:
            column = pa.nulls(table.num_rows, field.type)
        elif column.type != field.type:
            if version <= SCHEMA_VERSION:
                left_out += _beyond(field.name, column.type, field.type)
            elif not _same_kind(column.type, field.type):
                raise _of_another_type(field.name, column.type, field.type)
            column = _cast(column, field.type)
        columns.append(column)
    return pa.table(columns, schema=schema), left_out


def _beyond(name: str, found: pa.DataType, wanted: pa.DataType) -> Iterator[str]:
    """The fields of structs that only the type that was found has, by dotted name.

    Raises:
        ValueError: what both have is of another type, or a field is there twice.
    """
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        yield from _beyond(name, found.value_type, wanted.value_type)
    elif pa.types.is_struct(found) and pa.types.is_struct(wanted):
        if len({field.name for field in found}) < found.num_fields:
            raise ValueError(f"not a row (its {name} has a field twice)")
        kinds = {field.name: field.type for field in wanted}
        for field in found:
            path = f"{name}.{field.name}"
            if field.name in kinds:
                yield from _beyond(path, field.type, kinds[field.name])
            else:
                yield path
    elif found != wanted:
        raise _of_another_type(name, found, wanted)


def _of_another_type(name: str, found: pa.DataType, wanted: pa.DataType) -> ValueError:
    return ValueError(f"not a row (its {name} is {shown(str(found))}, not {wanted})")


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Fields that a newer schema adds to a struct are null. Not every pyarrow casts a struct to one of more fields."""
    if pa.types.is_struct(wanted.value_type if pa.types.is_list(wanted) else wanted):
        return pa.chunked_array([pa.array(column.to_pylist(), wanted)])
    return column.cast(wanted)


def _same_kind(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a cast keeps the meaning: of a number's width or a time's unit, and of what a newer schema adds."""
    kinds = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_timestamp,
        pa.types.is_map,
        pa.types.is_struct,
        lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
        lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind),
    )
    return pa.types.is_null(found) or any(of_kind(found) and of_kind(wanted) for of_kind in kinds)


def campaigns_of(root: Path) -> list[Path]:
    """The folders below a folder of results; none if there is no such folder."""
    return sorted(path for path in root.glob("[!._]*") if path.is_dir())
