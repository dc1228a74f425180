"""Rows as pandas has them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd
import pyarrow as pa

from sp_bench.rows import consistency


def of_table(table: pa.Table, *, maps_as: Literal["lossy", "strict"] | None = None) -> pd.DataFrame:
    """A table of rows. Whole numbers stay whole where some are null. maps_as: as `maps_as_pydicts` of pyarrow; None:
    lists of (key, value)."""
    return table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get, maps_as_pydicts=maps_as)


def load(folders: Sequence[str | Path]) -> pd.DataFrame:
    """As `sp_bench.load` has it."""
    if not folders:
        raise ValueError("load needs at least one campaign folder, such as results/smoke")
    tables = []
    for folder in map(Path, folders):
        table, problems = consistency.read(folder)
        for problem in problems:
            warnings.warn(f"{folder}: {problem}", stacklevel=3)
        place = table.schema.get_field_index("campaign")
        as_run = table["campaign"]
        table = table.set_column(place, "campaign", pa.array([folder.resolve().name] * len(table), pa.string()))
        tables.append(table.add_column(place + 1, "campaign_as_run", as_run))
    return of_table(pa.concat_tables(tables), maps_as="strict")  # lists of pairs cannot be written to a file again
