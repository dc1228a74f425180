"""One row, typed: who it is, what was asked for and what came of it; and what the rows of older versions mean today.

A row's columns are joined here and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from sp_bench.config.options import BY_COLUMN, OPTIONS, canonical
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import AUTO
from sp_bench.rows.arrays import Arrays, alike
from sp_bench.rows.names import config_leaves

MEASURED = "measured"  # the evidence of old rows
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
    inner_ring_degree: int | None
    outer_ring_degree: int | None
    padded_seq_len: int | None
    engine_implementation: str | None
    batch_loading: str | None
    loss_gradients: str | None
    ran_rank: int | None


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt. The fields are columns; `measured` maps further columns to their values."""

    status: str
    phase: str
    reason: str | None = None
    oom_site: str | None = None
    started_at: datetime | None = None
    duration_s: float | None = None
    phase_s: Mapping[str, float] | None = None
    environment: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "measured"}
        return {**self.measured, **own}


@dataclass(frozen=True)
class Row:
    identity: Identity
    config: TrialConfig
    resolved: Resolved
    outcome: Outcome

    def columns(self) -> dict[str, Any]:
        """All that the row has, by column; absent columns are null."""
        return self.outcome.columns() | asked_for(self.config, self.resolved) | vars(self.identity)


def asked_for(config: TrialConfig, resolved: Resolved) -> dict[str, Any]:
    """The columns that say what was asked for; known without running it, and so without `timed_steps` that the ranks
    agree on."""
    options = {option.column: option.cell(config) for option in OPTIONS if option.column}
    if config.workload.timed_steps == AUTO:
        del options["timed_steps"]
    ranks = {"world_size": config.world_size, "ranks_per_node": config.ranks_per_node, "evidence": config.evidence}
    return options | vars(resolved) | ranks | {"config": canonical(config)}


_LATER = {name: option for name, option in BY_COLUMN.items() if option.old_rows is not None}
_OF_OLD_ROWS = (
    *_LATER,
    "primitive",
    "core_id",
    "env_id",
    "evidence",
    "workload",
    "config",
)  # say what is to be read otherwise
_OF_WINDOW = ("tokens_per_s", "median_step_ms", "timed_steps", "window_ms")  # what window_tokens_per_s follows from


def needed_to_read(columns: Sequence[str]) -> list[str]:
    """`columns`, and those that `as_written_today` has to know for them."""
    affected = {*_LATER, "primitive", "core_id", "evidence"} & set(columns)
    of_window = _OF_WINDOW if "window_tokens_per_s" in columns else ()
    return list(dict.fromkeys([*columns, *(_OF_OLD_ROWS if affected else ()), *of_window]))


def as_written_today(table: pa.Table) -> pa.Table:
    """Old rows as they would be written today.

    An option that came later has the value that the config has, or that null means. What moved the tensors is no part
    of `primitive`. The core_id of a row without one is its env_id, which covered all code. The throughput of the window
    follows from other columns. All ranks of rows from before one rank could stand for them were there.
    """
    if {"window_tokens_per_s", *_OF_WINDOW} <= set(table.column_names):
        table = _with_window_rate(table)
    if not set(_OF_OLD_ROWS) <= set(table.column_names):
        return table
    groups, firsts = alike([table[name] for name in _OF_OLD_ROWS])  # replicates share what is said here
    known = {name: table[name].take(firsts).to_pylist() for name in _OF_OLD_ROWS}
    for i, primitive in enumerate(known["primitive"]):
        if primitive and primitive.endswith(BY_COPY_ENGINES):
            known["primitive"][i] = primitive.removesuffix(BY_COPY_ENGINES)
            known["exchange"][i] = "copy_engines"
    known["evidence"] = [evidence or MEASURED for evidence in known["evidence"]]
    for i, core_id in enumerate(known["core_id"]):
        known["core_id"][i] = core_id or known["env_id"][i]
    leaves = cache(config_leaves)
    for name, option in _LATER.items():
        for i, workload in enumerate(known["workload"]):
            if known[name][i] is None and (not option.of or workload in option.of):
                in_config = leaves(known["config"][i]).get(option.path)
                known[name][i] = option.old_rows if in_config is None else in_config
    for name in (*_LATER, "primitive", "core_id", "evidence"):
        table = _replaced(table, name, pa.array(known[name], table.schema.field(name).type).take(pa.array(groups)))
    return table


def _with_window_rate(table: pa.Table) -> pa.Table:
    rows = Arrays(table)
    longest, shortest = (rows.of_lists("window_ms", reduce) for reduce in (np.max, np.min))
    with np.errstate(all="ignore"):  # an odd row is no warning of this program's
        tokens = rows.numbers("tokens_per_s") * rows.numbers("median_step_ms") * rows.numbers("timed_steps")
        found = tokens / longest
    absent = ~rows.has("window_tokens_per_s") & (shortest != 0) & ~np.isnan(found)
    rates = np.where(absent, found, rows.numbers("window_tokens_per_s"))
    return _replaced(table, "window_tokens_per_s", pa.array(rates, mask=~absent & ~rows.has("window_tokens_per_s")))


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), values)
