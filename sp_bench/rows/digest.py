"""A row's digest: a hash of all its other values, by which a flipped bit or an edit of a committed row is found.

It hashes the row as JSON with sorted keys and without nulls, so that columns and fields of structs which a later
version adds change nothing. Most values of a column are alike: the text of each is made once, and so is that of several
columns together while few of their combinations differ.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sp_bench.rows.arrays import Places, alike_codes, by_length, inside
from sp_bench.rows.schema import SCHEMA_VERSION

DIGEST = "digest"  # the column
SINCE = 5  # the schema version from which on rows have it
PART = 10_000  # rows whose texts are in memory at once
NULL = "null"


class _Texts(NamedTuple):
    """A text for each value. Equal values share theirs."""

    codes: Places  # of each value: where its text is
    words: list[str]

    def each(self) -> Iterator[str]:
        return map(self.words.__getitem__, self.codes.tolist())


def digests(table: pa.Table) -> list[str]:
    """16 hex digits for each row of a table."""
    # most columns are null in all rows, and each costs time
    columns = zip(table.column_names, table.columns, strict=True)
    names = sorted(name for name, column in columns if name != DIGEST and column.null_count < table.num_rows)
    found = []
    for start in range(0, table.num_rows, PART):
        part = table.select(names).slice(start, PART)
        pieces: list[list[_Texts]] = [[]]
        combinations = 1
        for name, column in zip(names, part.columns, strict=True):
            entries = _entries(name, column.combine_chunks())
            combinations *= len(entries.words)
            if combinations > part.num_rows:
                combinations = len(entries.words)
                pieces.append([])
            pieces[-1].append(entries)
        rows = zip(*(_joined(piece).each() for piece in pieces if piece), strict=True)
        found += [hashlib.sha256(f"{{{''.join(row)[1:]}}}".encode()).hexdigest()[:16] for row in rows]
    return found


def damaged(table: pa.Table) -> list[int]:
    """Places of the rows whose values are not those of their digest, or that lack one although their version has it.
    `table` has all columns, as they were written; a newer version may have more, so its rows are not judged here."""
    versions = table["schema_version"].to_pylist()
    judged = [i for i, version in enumerate(versions) if SINCE <= (version or 0) <= SCHEMA_VERSION]
    if len(judged) < len(versions):
        table = table.take(pa.array(judged, pa.int64()))
    found = zip(judged, digests(table), table[DIGEST].to_pylist(), strict=True)
    return [i for i, made, written in found if made != written]


def alike_values(column: pa.ChunkedArray) -> tuple[Places, Places]:
    """Like `arrays.alike`, of one column that may be nested."""
    return alike_codes([_texts(column.combine_chunks()).codes])


def _texts(values: pa.Array) -> _Texts:
    """Each value as JSON."""
    kind = values.type
    if pa.types.is_map(kind):
        parts = (_after_comma(_texts(inside(values, part))) for part in (values.keys, values.items))
        return _lists(values, _list([*parts]))
    if pa.types.is_list(kind):
        return _lists(values, _texts(inside(values, values.values)))
    if pa.types.is_struct(kind):
        fields = sorted(zip((field.name for field in kind), values.flatten(), strict=True), key=lambda field: field[0])
        found = _joined([_entries(*field) for field in fields])
        return _with_nulls(values, found.codes, [f"{{{word[1:]}}}" for word in found.words])
    encoded = values.dictionary_encode()
    # a value that has no parts has no line break inside its JSON
    text = json.dumps(encoded.dictionary.to_pylist(), separators=("\n", ":"), default=str)[1:-1]
    codes = encoded.indices.fill_null(0) if values.null_count else encoded.indices
    return _with_nulls(values, codes.to_numpy(), text.split("\n"))


def _with_nulls(values: pa.Array, codes: Places, words: list[str]) -> _Texts:
    if not values.null_count:
        return _Texts(codes, words)
    return _Texts(np.where(values.is_valid().to_numpy(False), codes, len(words)), [*words, NULL])


def _entries(name: str, values: pa.Array) -> _Texts:
    """The values in a JSON object, each after a comma; nothing for a null."""
    codes, words = _texts(values)
    return _Texts(codes, [f',"{name}":{word}' if word != NULL else "" for word in words])


def _joined(parts: Sequence[_Texts]) -> _Texts:
    """The texts of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    codes, firsts = alike_codes([part.codes for part in parts])
    columns = (_Texts(part.codes[firsts], part.words).each() for part in parts)
    return _Texts(codes, ["".join(each) for each in zip(*columns, strict=True)])


def _after_comma(texts: _Texts) -> _Texts:
    return _Texts(texts.codes, [f",{word}" for word in texts.words])


def _list(entries: Sequence[_Texts]) -> _Texts:
    """JSON lists whose n-th entries, each after a comma, are the n-th of `entries`."""
    codes, words = _joined(entries)
    return _Texts(codes, [f"[{word[1:]}]" for word in words])


def _lists(values: pa.ListArray | pa.MapArray, entries: _Texts) -> _Texts:
    codes, words, entries = np.zeros(len(values), np.int64), ["[]"], _after_comma(entries)
    for places, of_entries in by_length(values):
        found = _list([_Texts(entries.codes[each], entries.words) for each in of_entries.T])
        codes[places] = found.codes + len(words)
        words += found.words
    return _with_nulls(values, codes, words)
