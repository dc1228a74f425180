"""Rows without nested columns: what spreadsheets, databases and loggers take."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from sp_bench.config.options import BY_COLUMN
from sp_bench.formats import csv_value
from sp_bench.rows.names import config_leaves
from sp_bench.rows.schema import SCHEMA

FLAT = tuple(field.name for field in SCHEMA if not pa.types.is_nested(field.type))
_MEASURED = tuple(
    field.name
    for field in SCHEMA
    if field.name not in BY_COLUMN and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type))
)


def options(row: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, by dotted name; what says nothing is left out."""
    return {name: value for name, value in config_leaves(row["config"]).items() if value is not None}


def measurements(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that the row has but for its options, by column."""
    return {name: float(row[name]) for name in _MEASURED if row.get(name) is not None}


def as_csv(rows: pa.Table) -> str:
    """Empty where a value is null. Times are as ISO 8601 has them."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows.column_names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_value(value) for name, value in row.items()} for row in _texts(rows))
    return text.getvalue()


def as_json(rows: pa.Table) -> str:
    """A list of objects; numbers that JSON lacks are null."""
    found = [{k: None if v != v else v for k, v in row.items()} for row in _texts(rows)]
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


FORMATS = {"csv": as_csv, "json": as_json}


def _texts(rows: pa.Table) -> Sequence[dict[str, Any]]:
    return [{k: v.isoformat() if hasattr(v, "isoformat") else v for k, v in row.items()} for row in rows.to_pylist()]
