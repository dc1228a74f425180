"""A row's digest: a hash of all its other values, by which a flipped bit or an edit of a committed row is found."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from sp_bench.rows.schema import SCHEMA_VERSION

DIGEST = "digest"  # the column
SINCE = 5  # the schema version from which on rows have it


def digest(row: Mapping[str, Any]) -> str:
    """16 hex digits of a row as Arrow gives it. Nulls are left out, so that columns and fields of structs which a later
    version adds change nothing."""
    values = _without_nulls({name: value for name, value in row.items() if name != DIGEST})
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)  # str: a time
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return [_without_nulls(each) for each in value]
    return value


def damaged(table: pa.Table) -> list[int]:
    """Places of the rows whose values are not those of their digest, or that lack one although their version has it.
    `table` has all columns, as they were written; a newer version may have more, so its rows are not judged here."""
    has_one = [SINCE <= (version or 0) <= SCHEMA_VERSION for version in table["schema_version"].to_pylist()]
    if not any(has_one):
        return []
    written = table[DIGEST].to_pylist()
    # most columns are null in all rows, and each costs time
    names = [name for name in table.column_names if table[name].null_count < table.num_rows]
    rows = table.select(names).to_pylist()
    return [i for i, row in enumerate(rows) if has_one[i] and digest(row) != written[i]]
