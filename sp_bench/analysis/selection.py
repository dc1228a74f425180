"""Selects the rows of campaign folders that a page shows, and which of them may be pooled.

The last attempt of a trial counts. In each campaign and environment, the rows of a cell's newest env_id count. An
environment is a core_id: libraries, device and shared measuring code. Rows of different environments or device models
are never pooled without --mix. An edit of one method's file leaves its rows in the pool.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa

from sp_bench.analysis import device_sets
from sp_bench.analysis.cells import listed
from sp_bench.formats import counted
from sp_bench.rows import consistency, plans, store
from sp_bench.rows.frame import of_shared
from sp_bench.rows.row import MEASURED
from sp_bench.rows.schema import SCHEMA

# Samples of every rank and step, which no page shows.
RAW = ("rank_step_ms", "compute_only_rank_ms", "host_step_ms", "curve", "grad_norm", "peak_host_bytes")
COLUMNS = tuple(name for name in SCHEMA.names if name not in RAW)
# What decides which rows are chosen.
KEYS = (
    *("folder", "file", "cell_id", "trial_id", "env_id", "core_id", "attempt", "status", "started_at"),
    "median_step_ms",
)
MACHINES_DIFFER = 0.06  # equal cells of equal code on healthy machines, over all committed rows
MIXED = ""  # the pool of all rows with --mix


@dataclass(frozen=True)
class Selection:
    """The selected rows, with the columns COLUMNS, `folder` (name of the campaign's folder), `file` (folder/file name),
    `pool` (rows of equal cell and pool are replicates), `probe` (tried by a search for the longest sequence) and
    `device_set` (device_sets.py)."""

    rows: pd.DataFrame
    num_read: int
    num_superseded: int  # earlier attempts of selected trials
    left_out: Mapping[
        str, int
    ]  # core_id -> number of rows left out because their cells have newer rows with another env_id
    problems: tuple[str, ...]
    unread: tuple[str, ...]  # folder/file name of unreadable rows; `problems` has the reasons
    campaigns: Mapping[str, str] = field(default_factory=dict)  # name -> name in `folder`, of anonymous rows

    @property
    def core_ids(self) -> tuple[str, ...]:
        return tuple(sorted(set(map(str, self.rows["core_id"]))))

    @property
    def core_id(self) -> str | None:
        """All core_ids in one text; None without rows."""
        return ", ".join(self.core_ids) or None


def select(
    folders: Sequence[Path],
    *,
    mix: bool = False,
    every_environment: bool = False,
    executor: Executor | None = None,
    progress: Callable[[int], None] = lambda num_files: None,
) -> Selection:
    """Read campaigns and select rows. mix: pool rows of all environments. every_environment: of each cell, not of the
    newest alone; they are no replicates of each other. executor, progress: as in `store.read`.

    Raises:
        OSError: a folder is missing or cannot be read.
    """
    read = [_read(name, folder, executor, progress) for name, folder in _named(folders).items()]
    frame = of_shared(pa.concat_tables([each.rows for each in read])) if read else pd.DataFrame(columns=[*COLUMNS])
    once, copies = _without_copies(pd.DataFrame(frame[[*KEYS]]))
    problems = [*(problem for each in read for problem in each.problems), *copies]
    unread = tuple(file for each in read for file in each.unread)
    last = once.sort_values(["attempt", "file"]).drop_duplicates(["folder", "trial_id", "env_id"], keep="last")
    newest = last if every_environment else pd.DataFrame(last[last["env_id"] == _newest(last, "folder")])
    newest = pd.DataFrame(newest[newest["env_id"] == _newest(newest, "core_id")])
    chosen = frame.loc[newest.sort_values("file").index].reset_index(drop=True)
    pools = [MIXED] * len(chosen) if mix else _pools(chosen)
    chosen["pool"] = [
        pool if evidence == MEASURED else f"{pool}; {evidence}"  # other kinds of evidence are never pooled
        for pool, evidence in zip(pools, chosen["evidence"], strict=True)
    ]
    chosen["device_set"] = device_sets.numbered(chosen["environment"])
    problems += _contradictions(chosen)
    others = Counter(map(str, last.drop(newest.index)["core_id"]))
    return Selection(chosen, len(frame), len(once) - len(last), dict(sorted(others.items())), tuple(problems), unread)


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """Name -> folder, each folder once. Equal names become parent/name."""
    resolved = list(dict.fromkeys(folder.resolve() for folder in folders))
    clashes = Counter(folder.name for folder in resolved)
    return {f.name if clashes[f.name] == 1 else f"{f.parent.name}/{f.name}": f for f in resolved}


class _Read(NamedTuple):
    rows: pa.Table
    problems: list[str]
    unread: list[str]


def _read(name: str, folder: Path, executor: Executor | None, progress: Callable[[int], None]) -> _Read:
    """The rows of a campaign, and their folder, their file, and whether they probe for a limit."""
    table, problems = consistency.read(folder, COLUMNS, executor=executor, progress=progress)
    identity = table.select(["trial_id", "env_id", "attempt", "status"]).to_pylist()
    files = [f"{name}/{store.RowName(**each).file_name}" for each in identity]
    probes = {trial_id for plan in plans.read(folder) for trial_id in plan.probes}
    table = table.append_column("folder", pa.array([name] * len(table), pa.string()))
    table = table.append_column("probe", pa.array([each["trial_id"] in probes for each in identity], pa.bool_()))
    table = table.append_column("file", pa.array(files, pa.string()))
    unread = sorted({f"{name}/{row.file_name}" for row in store.committed(folder)} - set(files))
    return _Read(table, [f"{name}: {problem}" for problem in problems], unread)


def _without_copies(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Each attempt once, and a line per folder that repeats rows: a copy of a campaign is no further evidence. Nor is a
    copy under another replicate's name."""
    attempt = ["trial_id", "env_id", "attempt", "started_at", "median_step_ms"]
    again = rows.duplicated(attempt) & rows["started_at"].notna()
    renamed = rows.index.isin(consistency.copies(pa.Table.from_pandas(rows, preserve_index=False)))
    lines = [
        f"{name}: {counted(n, 'row')} {problem}"
        for which, problem in (
            (again, "of another folder again; each counts once"),
            (renamed, "with the start of another replicate: a copy; skipped"),
        )
        for name, n in Counter(rows.loc[which, "folder"]).items()
    ]
    return pd.DataFrame(rows[~(again | renamed)]), lines


def _contradictions(rows: pd.DataFrame) -> list[str]:
    """A line per pair of campaigns that are pooled although the times of their equal cells differ by more than those of
    equal machines do."""
    lines = []
    for _, pooled in rows[rows["status"] == "ok"].groupby("pool"):
        times = pooled.pivot_table("median_step_ms", "cell_id", "folder", aggfunc="median")
        for a, b in itertools.combinations(times.columns, 2):
            ratios = pd.Series(times[b] / times[a]).dropna()
            middle = median(ratios) if len(ratios) else 1.0
            slower = max(middle, 1 / middle)
            if slower > 1 + MACHINES_DIFFER:
                slow, fast = (b, a) if middle > 1 else (a, b)
                lines.append(
                    f"{slow} takes {slower:.2f}x as long as {fast} in {counted(len(ratios), 'equal cell')}, and equal "
                    f"machines differ by {MACHINES_DIFFER:.0%}: a page of both pools them, `sp-bench compare` does not"
                )
    return lines


def _newest(rows: pd.DataFrame, within: str) -> pd.Series:
    """The newest env_id of each row's cell, among rows with equal `within`; the last by name if times are equal. An
    env_id with which the cell was only refused, say without a GPU, counts as older than any with which it ran."""
    dated = rows.assign(cell=rows["cell_id"].fillna(rows["trial_id"]), ran=rows["status"] != "unsupported")
    dated = dated.sort_values(["ran", "started_at", "env_id"], na_position="first")
    return pd.Series(dated.groupby([within, "cell"], sort=False)["env_id"].transform("last")).reindex(rows.index)


def _pools(rows: pd.DataFrame) -> list[str]:
    """Pools such as `env 36b06b82`, with the device model and its limits of power and clock if one has several. A row
    without limits, as one that ran out of memory, has those on which its campaign's other rows agree."""
    told = zip(rows["environment"], rows["power_limit_w"], rows["application_clock_mhz"], strict=True)
    models = [_device_words(*each) for each in told]
    kinds = list(zip(rows["core_id"], rows["folder"], map(_device_model, rows["environment"]), strict=True))
    limited: dict[tuple[str, str, str | None], set[str | None]] = {}
    for kind, model in zip(kinds, models, strict=True):
        limited.setdefault(kind, set()).update([model] if model != kind[-1] else [])
    known: dict[str, set[str]] = {}
    for number, (kind, model) in enumerate(zip(kinds, models, strict=True)):
        if model == kind[-1] and len(limited[kind]) == 1:
            (models[number],) = limited[kind]
        known.setdefault(kind[0], set()).update(filter(None, [models[number]]))
    several = {core_id for core_id, each in known.items() if len(each) > 1}
    pairs = zip(rows["core_id"], models, strict=True)
    return [f"env {e} on {m or 'an unknown device'}" if e in several else f"env {e}" for e, m in pairs]


def _device_words(environment: Any, power_limit_w: Any, application_clock_mhz: Any) -> str | None:
    """`NVIDIA H200 at 500 W and 1,200 MHz`: the device model, and the lowest limits that the ranks recorded."""
    limits = [
        f"{min(values):,.0f} {unit}"
        for recorded, unit in ((power_limit_w, "W"), (application_clock_mhz, "MHz"))
        if (values := [value for value in listed(recorded) if value is not None])
    ]
    model = _device_model(environment)
    return f"{model or 'a device'} at {' and '.join(limits)}" if limits else model


def _device_model(environment: Any) -> str | None:
    """The names of the devices, or of the CPU if there are none; None if neither is recorded."""
    recorded = environment if isinstance(environment, Mapping) else {}
    devices = recorded.get("device_names")
    names = sorted({str(name) for name in devices}) if devices is not None else []
    return " + ".join(names) or recorded.get("cpu")
