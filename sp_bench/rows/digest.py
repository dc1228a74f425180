"""A row's digest: a hash of all its other values, by which a flipped bit or an edit of a committed row is found.

It hashes the row as JSON with sorted keys and without nulls, so that columns and fields of structs which a later
version adds change nothing. The text is made column by column: of rows as Python objects it takes twice as long.
"""

import hashlib
import json
from collections.abc import Sequence

import pyarrow as pa

from sp_bench.rows.schema import SCHEMA_VERSION

DIGEST = "digest"  # the column
SINCE = 5  # the schema version from which on rows have it
PART = 1000  # rows whose texts are in memory at once
NULL = "null"


def digests(table: pa.Table) -> list[str]:
    """16 hex digits for each row of a table."""
    # most columns are null in all rows, and each costs time
    names = sorted(n for n in table.column_names if n != DIGEST and table[n].null_count < table.num_rows)
    parts = (table.select(names).slice(i, PART) for i in range(0, table.num_rows, PART))
    return [
        hashlib.sha256(text.encode()).hexdigest()[:16]
        for part in parts
        for text in _objects(names, [column.combine_chunks() for column in part.columns])
    ]


def damaged(table: pa.Table) -> list[int]:
    """Places of the rows whose values are not those of their digest, or that lack one although their version has it.
    `table` has all columns, as they were written; a newer version may have more, so its rows are not judged here."""
    versions = table["schema_version"].to_pylist()
    judged = [i for i, version in enumerate(versions) if SINCE <= (version or 0) <= SCHEMA_VERSION]
    if len(judged) < len(versions):
        table = table.take(pa.array(judged, pa.int64()))
    found = zip(judged, digests(table), table[DIGEST].to_pylist(), strict=True)
    return [i for i, made, written in found if made != written]


def _texts(values: pa.Array) -> list[str]:
    """Each value as JSON."""
    if not len(values):
        return []
    kind = values.type
    if pa.types.is_map(kind):
        first, last = values.offsets[0].as_py(), values.offsets[-1].as_py()
        both = (_texts(each.slice(first, last - first)) for each in (values.keys, values.items))
        return _lists(values, [f"[{key},{item}]" for key, item in zip(*both, strict=True)])
    if pa.types.is_list(kind):
        first, last = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return _lists(values, _texts(values.values.slice(first, last - first)))
    if pa.types.is_struct(kind):
        order = sorted(range(kind.num_fields), key=lambda i: kind.field(i).name)
        fields = values.flatten()
        objects = _objects([kind.field(i).name for i in order], [fields[i] for i in order])
        return [text if there else NULL for text, there in zip(objects, values.is_valid().to_pylist(), strict=True)]
    if pa.types.is_string(kind):
        encoded = values.dictionary_encode()
        written = [*_written(encoded.dictionary), NULL]
        return [written[place] for place in encoded.indices.fill_null(-1).to_pylist()]
    return _written(values)


def _written(values: pa.Array) -> list[str]:
    """Each value as JSON, which has no line break inside a value that has no parts."""
    return json.dumps(values.to_pylist(), separators=("\n", ":"), default=str)[1:-1].split("\n")


def _objects(names: Sequence[str], columns: Sequence[pa.Array]) -> list[str]:
    """JSON objects with these keys, in their order, without those that are null."""
    entries = [_entries(f',"{name}":', column) for name, column in zip(names, columns, strict=True)]
    return [f"{{{''.join(each)[1:]}}}" for each in zip(*entries, strict=True)]


def _entries(key: str, values: pa.Array) -> list[str]:
    """The key before each value, and nothing for a null."""
    texts = _texts(values)
    return [key + text if text != NULL else "" for text in texts] if NULL in texts else [key + text for text in texts]


def _lists(values: pa.ListArray | pa.MapArray, texts: Sequence[str]) -> list[str]:
    """JSON lists of the entries that `values` has, of which `texts` are all."""
    ends = values.offsets.to_pylist()
    spans = zip(ends, ends[1:], values.is_valid().to_pylist(), strict=False)
    return [f"[{','.join(texts[a - ends[0] : b - ends[0]])}]" if there else NULL for a, b, there in spans]
