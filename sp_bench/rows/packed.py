"""Many rows in one file: `packed.parquet` in the campaign's folder, compressed, with the columns as they were written.

A packed row goes by the name of the file that it was in, column `file_name`. New rows stay files of their own, and a
file of a packed row's name stands before it. So a pack is replaced whole: a killed process leaves files whose rows are
packed too, and nothing else.
"""

import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute

from sp_bench.rows.schema import SCHEMA
from sp_bench.testing.kill_points import reach

PACK = "packed.parquet"
FILE_NAME = "file_name"  # the column
MAX_BYTES = 2**31  # in memory, of what is read of a pack; ours of 256 rows takes 3 MB, 100,000 rows 1 GB
MIN_BATCH = 1000  # rows that are decoded at once; fewer would take longer than their decoding
LEADS_OUT = "a link that leads out of the results"
NO_FILE = "not a file"
TIMES = tuple(field.name for field in SCHEMA if pa.types.is_timestamp(field.type))
LEVEL = 19  # of zstd: a pack is written once


def names(folder: Path) -> frozenset[str]:
    """File names of the packed rows; none without a pack.

    Raises:
        ValueError: the pack cannot be read.
    """
    if not stands_in(folder):
        return frozenset()
    _require_own(folder / PACK)
    found = os.stat(folder / PACK)
    return _names(folder / PACK, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)  # a run asks after each attempt
def _names(path: Path, *_version: int) -> frozenset[str]:
    return frozenset(_read(path, [FILE_NAME])[FILE_NAME].to_pylist())


def stands_in(folder: Path) -> bool:
    """Whether a campaign has a pack, or something else of its name, as a link that leads nowhere."""
    return os.path.lexists(folder / PACK)


def table(folder: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows with these columns and their file names, as far as the pack has them; None: all that it has.

    Raises:
        ValueError: the pack cannot be read.
    """
    return _read(folder / PACK, columns)


def opened(source: Path | pa.BufferReader) -> pq.ParquetFile:
    """A parquet file whose pages are held against their checksums as they are read. Older files have none."""
    return pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)


def require_in_order(metadata: pq.FileMetaData) -> None:
    """Each column of a file of ours begins where the one before it ends: another place may hold another's values.
    All columns were read before: asked for one that cannot be, pyarrow 26 crashes.

    Raises:
        ValueError: one begins elsewhere.
    """
    end = len(b"PAR1")
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            begin = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            if begin != end:
                raise ValueError(f"damaged: {column.path_in_schema} begins at byte {begin:,} instead of {end:,}")
            end = begin + column.total_compressed_size


def stays(path: Path, root: Path) -> bool:
    """Whether `path` is inside `root` once links are followed; a loop of links leads nowhere."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _require_own(path: Path) -> None:
    if path.is_symlink() and not stays(path, path.parent.parent):
        raise ValueError(LEADS_OUT)
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(NO_FILE)


def columns(folder: Path) -> set[str]:
    """The names of all columns of the pack."""
    return set(pq.read_schema(folder / PACK).names)


def _read(path: Path, columns: Sequence[str] | None) -> pa.Table:
    _require_own(path)
    try:
        file = opened(path)
        present = file.schema_arrow.names
        if FILE_NAME not in present:
            raise ValueError(f"not a pack (it has no column {FILE_NAME})")
        wanted = None if columns is None else [name for name in present if name in {*columns, FILE_NAME}]
        found = _within_limit(file, wanted)
        found.validate(full=True)
        require_dates(found)
        if found.num_columns == len(present):
            require_in_order(file.metadata)
    except (pa.ArrowException, OSError, OverflowError) as error:
        raise ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    return found


def _within_limit(file: pq.ParquetFile, columns: Sequence[str] | None) -> pa.Table:
    """The rows, decoded batch by batch: a few bytes can stand for one long text in each of many rows.

    Raises:
        ValueError: they take more than MAX_BYTES in memory.
    """
    encoded = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
    if encoded > MAX_BYTES:
        raise ValueError(f"it unpacks to {encoded:,} bytes; at most {MAX_BYTES:,}")
    batches, size = [], 0
    rows = max(MIN_BATCH, MAX_BYTES // max(encoded, 1))  # a text of each, as long as all that is encoded, fits
    for batch in file.iter_batches(min(rows, 2**16), columns=columns, use_threads=False):
        batches.append(batch)
        size += batch.nbytes
        if size > MAX_BYTES:
            raise ValueError(f"it takes over {MAX_BYTES:,} bytes in memory")
    if not batches:
        return file.read(columns=columns, use_threads=False)
    return pa.Table.from_batches(batches)


def require_dates(rows: pa.Table) -> None:
    """
    Raises:
        OverflowError: a time is none that Python has a date for, as a flipped bit makes them.
    """
    for place in map(rows.schema.get_field_index, TIMES):  # looking at the type of each column would take 1 ms
        if place >= 0:
            compute.call_function("min_max", [rows.column(place)]).as_py()


def replace(folder: Path, rows: pa.Table, place: Path, verify: Callable[[Path], None]) -> None:
    """Make `rows`, with their file names, the pack of a campaign: whole or not at all. `place`: a folder of the same
    file system, where the new pack lies first. `verify` reads it there, and raises if it does not hold what it should.
    """
    place.mkdir(parents=True, exist_ok=True)
    try:
        with open(place / PACK, "wb") as file:
            pq.write_table(
                rows, file, compression="zstd", compression_level=LEVEL, store_schema=False, write_page_checksum=True
            )
            file.flush()
            os.fsync(file.fileno())
        reach("pack_written")
        verify(place)
        os.replace(place / PACK, folder / PACK)
        reach("pack_replaced")
    finally:
        shutil.rmtree(place)  # with what a killed process left there
    sync(folder)


def sync(folder: Path) -> None:
    """Make the names of a folder's files survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unlink(folder: Path, files: Collection[str]) -> None:
    """Remove files whose rows are elsewhere too."""
    for name in sorted(files):
        with suppress(FileNotFoundError):
            os.unlink(folder / name)
        reach("pack_unlinked")
