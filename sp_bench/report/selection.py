"""Rows of some campaign folders -> the rows that one page is about: last attempts of the newest environment."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from sp_bench import results

COLUMNS = (  # what the page shows; reading the raw samples of thousands of rows as well would take twice as long
    *("status", "reason", "phase", "oom_site", "flags", "schema_version", "cell_id", "trial_id", "env_id"),
    *("replicate", "attempt", "method", "implementation", "primitive", "layout", "placement", "dkv_dtype"),
    *(
        "head_stride",
        "head_chunks",
        "kernel",
        "workload",
        "pass_kind",
        "model",
        "fabric",
        "hardware",
        "device_memory_gib",
        "isolation",
    ),
    *("batch_size", "seq_len"),
    *("duration_s", "phase_s"),
    *("sp_size", "ulysses_degree", "ring_degree", "dp_replicate_size", "dp_shard_size", "world_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "causal", "dtype", "config", "warmup_steps", "timed_steps"),
    *("median_step_ms", "tokens_per_s", "mfu", "attention_flops_per_s"),
    *("compute_only_step_ms", "comm_only_step_ms", "exposed_comm_ms", "overlap_efficiency"),
    *("latency_us", "bandwidth_bytes_per_s", "energy_j", "device_state", "launched_kernels"),
    *("max_peak_allocated_bytes", "max_peak_host_bytes"),
    *(
        "comm_predicted_bytes",
        "comm_counted_bytes",
        "comm_wire_bytes",
        "comm",
        "correctness_seq_len",
        "rel_error_output",
    ),
    *("rel_error_dq", "rel_error_dk", "rel_error_dv", "error_budget", "sampled_rel_error", "rel_error_loss"),
    *("rel_error_grad_norm", "max_nll_difference", "started_at", "git_sha", "git_dirty", "environment"),
)
_IDENTITY = ("status", "trial_id", "env_id", "attempt")


@dataclass(frozen=True)
class Selection:
    """`rows` has the columns COLUMNS, `folder` (name of the row's campaign folder) and `file` (folder/file name)."""

    rows: pd.DataFrame
    env_id: str | None  # the one environment of `rows`; None without rows
    num_read: int
    num_superseded: int  # earlier attempts of trials whose last attempt counts
    left_out: Mapping[str, int]  # other env_id -> its rows, last attempts only
    problems: tuple[str, ...]


def select(folders: Sequence[Path]) -> Selection:
    """Read campaigns and choose. Rows of different env_id are never pooled: the newest `started_at` decides.

    Raises:
        OSError: a folder is missing or cannot be read.
    """
    read = [_read(name, folder) for name, folder in _named(folders).items()]
    frame = pd.concat([f for f, _ in read], ignore_index=True) if read else pd.DataFrame(columns=[*COLUMNS])
    problems = tuple(problem for _, lines in read for problem in lines)
    last = frame.sort_values(["attempt", "file"]).drop_duplicates(["folder", "trial_id", "env_id"], keep="last")
    env_id = _newest_environment(last)
    chosen = pd.DataFrame(last[last["env_id"] == env_id]).sort_values("file", ignore_index=True)
    others = Counter(str(other) for other in last["env_id"] if other != env_id)
    return Selection(chosen, env_id, len(frame), len(frame) - len(last), dict(sorted(others.items())), problems)


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """Each folder once, under its name, or under parent/name where two names are equal."""
    resolved = list(dict.fromkeys(folder.resolve() for folder in folders))
    clashes = Counter(folder.name for folder in resolved)
    return {f.name if clashes[f.name] == 1 else f"{f.parent.name}/{f.name}": f for f in resolved}


def _read(name: str, folder: Path) -> tuple[pd.DataFrame, list[str]]:
    table, problems = results.read(folder, COLUMNS)
    # Thousands of rows come as thousands of chunks, which pandas handles one by one.
    frame = table.combine_chunks().to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    whole = frame[list(_IDENTITY)].notna().all(axis=1)
    if not whole.all():
        problems.append(f"{(~whole).sum()} rows without {', '.join(_IDENTITY)}; skipped")
    frame = frame[whole].assign(folder=name)
    frame["file"] = [
        f"{name}/{results.RowName(trial, env, attempt, status).file_name}"
        for status, trial, env, attempt in frame[list(_IDENTITY)].itertuples(index=False)
    ]
    problems += _misnamed(name, folder, frame["file"])
    return frame, [f"{name}: {problem}" for problem in problems]


def _misnamed(name: str, folder: Path, files: pd.Series) -> list[str]:
    """Rows whose file has another name than they imply would be traced to a file that does not exist."""
    present = {f"{name}/{row.file_name}" for row in results.committed(folder)}
    return [f"no file is called {file.rsplit('/', 1)[1]}, as one row implies" for file in files if file not in present]


def _newest_environment(rows: pd.DataFrame) -> str | None:
    if rows.empty:
        return None
    newest = rows.sort_values(["started_at", "env_id"], na_position="first")["env_id"]
    return str(newest.iloc[-1])
