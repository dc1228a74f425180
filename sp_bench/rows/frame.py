"""Rows as pandas has them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd
import pyarrow as pa

from sp_bench.config.options import OPTIONS
from sp_bench.rows import consistency
from sp_bench.rows.arrays import alike
from sp_bench.rows.digest import alike_values
from sp_bench.rows.names import option_values

TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
# Options that tell cells apart and have no column: what is recomputed, the tiles, an engine's own. A model's are in
# its name.
OF_CONFIG = tuple(o for o in OPTIONS if not o.column and not o.protocol and o.group != "model" and o.type in TYPES)


def of_table(table: pa.Table, *, maps_as: Literal["lossy", "strict"] | None = None) -> pd.DataFrame:
    """A table of rows. Whole numbers stay whole where some are null. maps_as: as `maps_as_pydicts` of pyarrow; None:
    lists of (key, value)."""
    return table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get, maps_as_pydicts=maps_as)


def of_shared(table: pa.Table) -> pd.DataFrame:
    """Like `of_table`, for readers who change no value: equal structs, maps and lists of them are one object, as most
    rows of a campaign have one environment."""
    shared = {field.name for field in table.schema if _has_fields(field.type)}
    plain = of_table(table.drop_columns([*shared]))
    columns = {}
    for name in table.column_names:
        if name in shared:
            groups, firsts = alike_values(table[name])
            of_groups = of_table(table.select([name]).take(firsts))[name]
            columns[name] = of_groups.to_numpy()[groups]
        else:
            columns[name] = plain[name]
    return pd.DataFrame(columns)


def _has_fields(kind: pa.DataType) -> bool:
    inside = kind.value_type if pa.types.is_list(kind) else kind
    return pa.types.is_struct(inside) or pa.types.is_map(inside)


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
        tables.append(_with_options(table.add_column(place + 1, "campaign_as_run", as_run)))
    return of_table(pa.concat_tables(tables), maps_as="strict")  # lists of pairs cannot be written to a file again


def _with_options(table: pa.Table) -> pa.Table:
    """The table with a column for each of OF_CONFIG, from the rows' configs; null if a workload has no such option."""
    asked = table.select(["config", "workload", "implementation"])
    groups, firsts = alike(asked.columns)  # replicates share theirs
    values = [option_values(row, OF_CONFIG) for row in asked.take(firsts).to_pylist()]
    for option in OF_CONFIG:
        of_known = pa.array([each[option.path] for each in values], TYPES[option.type])
        table = table.append_column(option.name, of_known.take(pa.array(groups)))
    return table
