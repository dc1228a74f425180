"""One row, typed: who it is, what was asked for and what came of it; and what the rows of older versions mean today.

A row's columns are joined here and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Self

import pyarrow as pa

from sp_bench.config.options import BY_COLUMN, OPTIONS, canonical
from sp_bench.config.trial import TrialConfig

BY_COPY_ENGINES = " by copy engines"  # ended the primitive of old rows, which had no column `exchange`


@dataclass(frozen=True)
class Identity:
    """Which attempt at which trial the row is of. The fields are columns."""

    campaign: str
    cell_id: str
    trial_id: str
    env_id: str
    core_id: str
    method_source: str | None
    replicate: int
    attempt: int
    order_index: int
    order_seed: int
    git_sha: str | None
    git_dirty: bool | None


@dataclass(frozen=True)
class Resolved:
    """What the code of the method and of the engine makes of the options. The fields are columns; None: the workload
    has no such thing."""

    implementation: str
    primitive: str
    dkv_dtype: str | None
    ulysses_degree: int
    ring_degree: int
    padded_seq_len: int | None
    engine_implementation: str | None


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt. The fields are columns; `measured` maps further columns to their values."""

    status: str
    phase: str
    reason: str | None = None
    oom_site: str | None = None
    started_at: datetime | None = None
    duration_s: float | None = None
    environment: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Self:
        own = {each.name for each in fields(cls)} - {"measured"}
        measured = {name: value for name, value in columns.items() if name not in own}
        return cls(**{name: value for name, value in columns.items() if name in own}, measured=measured)


@dataclass(frozen=True)
class Row:
    identity: Identity
    config: TrialConfig
    resolved: Resolved
    outcome: Outcome

    def columns(self) -> dict[str, Any]:
        """All that the row has, by column; absent columns are null."""
        outcome = {name: value for name, value in vars(self.outcome).items() if name != "measured"}
        return asked_for(self.config, self.resolved) | dict(self.outcome.measured) | outcome | vars(self.identity)


def asked_for(config: TrialConfig, resolved: Resolved) -> dict[str, Any]:
    """The columns that say what was asked for; known without running it."""
    options = {option.column: option.cell(config) for option in OPTIONS if option.column}
    return options | vars(resolved) | {"world_size": config.world_size, "config": canonical(config)}


def needed_to_read(columns: Sequence[str]) -> list[str]:
    """`columns`, and those that say what their nulls mean in old rows."""
    more = {"exchange": ["primitive"], "primitive": ["exchange"], "core_id": ["env_id"]}
    needed = [*columns, *(other for name in columns for other in more.get(name, []))]
    if any(option.old_rows is not None and option.of for name in columns if (option := BY_COLUMN.get(name))):
        needed.append("workload")
    return list(dict.fromkeys(needed))


def as_written_today(table: pa.Table) -> pa.Table:
    """Old rows as they would be written today: an option that came later has the value that their null means, and what
    moved the tensors is no part of `primitive` but the column `exchange`."""
    later = [o for o in OPTIONS if o.column in table.column_names and o.old_rows is not None]
    beside = ("primitive", "workload", "env_id", "core_id")
    known = {name: table[name].to_pylist() for name in beside if name in table.column_names}
    known |= {option.column: table[option.column].to_pylist() for option in later}
    for i, primitive in enumerate(known.get("primitive", [])):
        if primitive and primitive.endswith(BY_COPY_ENGINES):
            known["primitive"][i] = primitive.removesuffix(BY_COPY_ENGINES)
            known["exchange"][i] = "copy_engines"
    for i, core_id in enumerate(known.get("core_id", [])):
        known["core_id"][i] = core_id or known["env_id"][i]  # which covered all code
    for option in later:
        for i, value in enumerate(known[option.column]):
            if value is None and (not option.of or known["workload"][i] in option.of):
                known[option.column][i] = option.old_rows
    for name, values in known.items():
        place = table.schema.get_field_index(name)
        column = table.schema.field(place)
        table = table.set_column(place, column, pa.array(values, column.type))
    return table
