"""Whether a committed row agrees with itself: what follows from its samples and its config is derived again.

A row that does not is no evidence: somebody edited it, or what wrote it was wrong. Readers name it and leave it out.
A rule holds for all rows that were ever committed, unless it says from which schema version on.
"""

import math
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import compute

from sp_bench import hardware
from sp_bench.config.options import OPTIONS
from sp_bench.config.parsing import shown
from sp_bench.config.trial import AUTO, COMPARED, AttentionShape
from sp_bench.costs.attention import attention_forward_flops, backward_per_forward
from sp_bench.costs.flags import budget_of_timed, flags_of_leftover, flags_of_loss, flags_of_times
from sp_bench.costs.training import stage_times
from sp_bench.rows import store
from sp_bench.rows.names import cell_id, config_leaves, trial_id
from sp_bench.rows.schema import COLUMNS, SCHEMA, SCHEMA_VERSION
from sp_bench.rows.store import IDENTITY, RowName

# null unless the row is ok and timed
RESULTS = (
    *("step_ms", "median_step_ms", "tokens_per_s", "mfu", "hfu", "float8_mfu", "attention_flops_per_s"),
    "share_of_limit",
)
TENSORS = ("output", "dq", "dk", "dv")
WITH_FLAGS = 4  # the schema version whose rows have all flags of times, leftovers and loss
_REQUIRED = tuple(column for column in COLUMNS if column.required and column.name != "environment")  # not a result
PART = 2000  # rows that are Python objects at once
_RECORDS = tuple(
    field.name for field in SCHEMA if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type)
)
# Options that no trial lacks: all that a table says of a cell begins with them.
_OF_ALL = ("method", "workload", "pass_kind", "dtype", "sp_size", "dp_replicate_size", "dp_shard_size")
_OF_LENGTHS = ("kernel", "model", "causal", "batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim")
_SHAPE = ("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "causal", "dtype")
_FLAGGED = ("full_update_error", "last_update_error")  # an ok row above its budget has a flag
_PER = tuple((column.name, column.per) for column in COLUMNS if column.per)
_OF_CONFIG = tuple((option.path, option.column) for option in OPTIONS if option.column)


def read(folder: Path, columns: Sequence[str] = SCHEMA.names, **options: Any) -> tuple[pa.Table, list[str]]:
    """Like `store.read`, but without the rows that do not agree with themselves, which are named among the problems.

    Raises:
        OSError: `folder` is missing, not a folder or not readable.
    """
    table, problems = store.read(folder, **options)
    if found := breaches(table):
        identity = table.select(list(IDENTITY)).to_pylist()
        problems += [f"{RowName(**identity[i]).file_name}: {found[i]}; skipped" for i in sorted(found)]
        table = table.filter(pa.array([i not in found for i in range(table.num_rows)]))
    return table.select(list(columns)), problems


def breaches(table: pa.Table) -> dict[int, str]:
    """For each row that does not agree with itself: its place in `table` -> the first column that the others
    contradict, with its value and the one that follows. `table` has all columns of one campaign's rows."""
    configs = {text: _Config(config_leaves(text)) for text in table["config"].unique().to_pylist()}
    found: dict[int, str] = {}
    for start in range(0, table.num_rows, PART):
        found |= {start + i: problem for i, problem in _of_part(table.slice(start, PART), configs)}
    for i in _renamed(_Columns(table)):
        found.setdefault(i, "it has the start of another replicate of its cell: a copy")
    return found


def _of_part(table: pa.Table, configs: Mapping[str | None, "_Config"]) -> Iterator[tuple[int, str]]:
    columns, damaged = _Columns(table), _not_finite(table) | _with_gaps(table)
    for i, text in enumerate(columns["config"]):
        if problem := damaged.get(i) or _breach(_Row(columns, i, configs[text])):
            yield i, problem


def copies(trial_ids: Sequence[str], cells: Sequence[Hashable], started_at: Sequence[Any]) -> list[int]:
    """Places of the rows that began in the same microsecond as an earlier row of another replicate of their cell. No
    two launches do: such a row is a copy under another name."""
    first: dict[Hashable, str] = {}
    places = []
    for i, (trial, cell, start) in enumerate(zip(trial_ids, cells, started_at, strict=True)):
        if start is not None and first.setdefault((cell, start), trial) != trial:
            places.append(i)
    return places


def _renamed(columns: "_Columns") -> list[int]:
    cells = list(zip(columns["cell_id"], columns["env_id"], strict=True))
    return copies(columns["trial_id"], cells, columns["started_at"])


class _Columns(dict[str, list[Any]]):
    """Columns as Python has them, each converted when a rule first reads it: most are never read."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._lengths: dict[str, list[int | None]] = {}
        self.required = [column for column in _REQUIRED if table[column.name].null_count]  # others have a value

    def __missing__(self, name: str) -> list[Any]:
        self[name] = self._table[name].to_pylist()
        return self[name]

    @cached_property
    def device_names(self) -> list[list[str]]:
        """Of each row's environment, most of which no rule needs."""
        return compute.call_function(
            "struct_field", [self._table["environment"]], compute.StructFieldOptions(["device_names"])
        ).to_pylist()

    def lengths(self, name: str) -> list[int | None]:
        """Entries of each list, without converting it; None: the row has none."""
        if name not in self._lengths:
            self._lengths[name] = compute.call_function("list_value_length", [self._table[name]]).to_pylist()
        return self._lengths[name]


class _Config:
    """What a config, given by dotted name, asks for. Replicates share theirs."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        asked = ((path, column, leaves.get(path)) for path, column in _OF_CONFIG)
        self.asked = [each for each in asked if each[2] not in (None, AUTO)]  # auto: the column has what came of it
        self.fits = bool(leaves.get("workload.fit"))
        self.is_timed = not self.fits and (leaves.get("hardware.ranks_per_gpu") or 1) == 1  # as `TrialConfig.is_timed`
        self.timed_steps, self.warmup_steps = leaves.get("workload.timed_steps"), leaves.get("workload.warmup_steps", 0)


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of some columns, and its config."""

    columns: _Columns
    place: int
    config: _Config

    def __getitem__(self, name: str) -> Any:
        return self.columns[name][self.place]

    def length(self, name: str) -> int | None:
        return self.columns.lengths(name)[self.place]

    @property
    def device_name(self) -> str:
        return self.columns.device_names[self.place][0]

    @property
    def one_rank(self) -> bool:
        return self["evidence"] == "one_rank"


def _not_finite(table: pa.Table) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if column.null_count == len(column) or all(map(_all_finite, _leaves(column))):
            continue
        for i, value in enumerate(column.to_pylist()):
            if not all(map(math.isfinite, _numbers(value))):
                found.setdefault(i, f"{name} has a number that is not finite")
    return found


def _with_gaps(table: pa.Table) -> dict[int, str]:
    """The rows with a list of records of which one is null."""
    found: dict[int, str] = {}
    for name in _RECORDS:
        column = table[name].combine_chunks()
        if column.flatten().null_count:
            found |= {
                i: f"{name} has an entry that is null" for i, v in enumerate(column.to_pylist()) if v and None in v
            }
    return found


def _all_finite(numbers: pa.Array) -> bool:
    finite = compute.call_function("is_finite", [numbers])
    return compute.call_function("all", [finite]).as_py() is not False  # None: all are null


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """The arrays of numbers that a nested column is made of."""
    if pa.types.is_map(column.type):
        yield from _leaves(column.items)
    elif pa.types.is_list(column.type):
        yield from _leaves(column.flatten())
    elif pa.types.is_struct(column.type):
        for field in column.flatten():
            yield from _leaves(field)
    elif pa.types.is_floating(column.type):
        yield column


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


def _breach(row: _Row) -> str | None:
    try:
        return next(_breaches(row), None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"its columns do not fit each other ({shown(f'{type(error).__name__}: {error}')})"


def _breaches(row: _Row) -> Iterator[str]:
    version = row["schema_version"]
    if version is None or not 1 <= version <= SCHEMA_VERSION:
        yield f"schema_version={version}; this version of sp_bench reads 1 to {SCHEMA_VERSION}"
    yield from _identity(row)
    yield from _config(row)
    if row["status"] != "ok":
        yield from (f"{name} of a trial that is {row['status']}" for name in RESULTS if row[name] is not None)
        return
    yield from _options(row)
    yield from _required(row)
    yield from _lengths(row)
    yield from _proof(row)
    yield from _bytes(row)
    yield from _memory(row)
    if row.config.is_timed:
        yield from _times(row)
    else:
        yield from (f"{name} of a trial that is not timed" for name in RESULTS if row[name] is not None)


def _identity(row: _Row) -> Iterator[str]:
    """From the stored text of the config: parsed again, it would get the defaults of options that came later."""
    if row["config"] is None:  # no trial came of it
        return
    cell = cell_id(row["config"])
    yield from _differs(row, "cell_id", cell)
    yield from _differs(row, "trial_id", trial_id(cell, row["replicate"]))


def _config(row: _Row) -> Iterator[str]:
    for path, column, asked in row.config.asked:
        if row[column] not in (None, asked):
            yield f"{column}={shown(row[column])}; its config has {path}={shown(asked)}"


def _options(row: _Row) -> Iterator[str]:
    for name in _OF_ALL if row["workload"] == "collective" else _OF_ALL + _OF_LENGTHS:
        value = row[name]
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 1):
            yield f"{name}={value} of an ok row"


def _required(row: _Row) -> Iterator[str]:
    """What a record must have, proofs among it. Arms and proofs of packed documents are not judged here: whether a
    trial has them is up to the code of its method and engine."""
    trials = {"any", row["workload"], row["pass_kind"]}
    excused = {"fits"} if row.config.fits else set()
    excused |= {"one_rank"} if row.one_rank else set()
    if row.one_rank and not row["proof"]:
        yield "proof=null; a row of one rank names the row that proves it"
    for column in row.columns.required:
        if (
            row["schema_version"] >= column.since
            and not trials.isdisjoint(column.required)
            and excused.isdisjoint(column.unless)
            and (row.config.is_timed or not column.is_time)
            and row[column.name] is None
        ):
            yield f"{column.name}=null of an ok row"


def _lengths(row: _Row) -> Iterator[str]:
    """Lists by rank and by step have an entry for each."""
    steps = row.config.timed_steps
    if steps == AUTO:
        steps = row["timed_steps"]
    if steps is not None and row["workload"] in COMPARED:
        steps += row.config.warmup_steps
    wanted = {"rank": 1 if row.one_rank else row["world_size"], "step": steps}
    for name, per in _PER:
        found, length = row.length(name), wanted[per]
        if None not in (found, length) and found != length:
            yield f"{name} has {found} entries; expected {length}, one for each {per}"


def _times(row: _Row) -> Iterator[str]:
    rank_step_ms, window_ms = row["rank_step_ms"], row["window_ms"]
    if not min(map(min, [*rank_step_ms, window_ms])) > 0:
        yield "rank_step_ms or window_ms has a time that is not above 0"
    step_ms = [max(step) for step in zip(*rank_step_ms, strict=True)]
    if len(row["step_ms"]) != len(step_ms) or not all(map(_equal, row["step_ms"], step_ms)):
        yield "step_ms is not the max over ranks of rank_step_ms"
    median_ms = statistics.median(step_ms)
    yield from _differs(row, "median_step_ms", median_ms)
    seconds, world = median_ms / 1e3, row["world_size"]
    if row["workload"] not in ("collective", "stream"):
        tokens = _num_sequences(row) * row["seq_len"]
        yield from _differs(row, "tokens_per_s", tokens / seconds)
        yield from _differs(row, "tokens_per_s_per_gpu", tokens / seconds / world)
        if row["window_tokens_per_s"] is not None:
            yield from _differs(row, "window_tokens_per_s", 1e3 * tokens * len(step_ms) / max(window_ms))
    if row["workload"] == "stream":
        yield from _stages(row, step_ms)
    yield from _attribution(row, median_ms)
    if row["attention_flops_per_s"] is not None:
        flops = row["hardware_flops"] if row["kv_lora_rank"] is None else _latent_attention_flops(row)
        yield from _differs(row, "attention_flops_per_s", flops / seconds)
    if row["mfu"] is not None or row["hfu"] is not None:
        peak = hardware.peak_flops(row.device_name, row["dtype"])
        of_all = seconds * world * (peak or math.nan)
        yield from _differs(row, "mfu", row["model_flops"] / of_all)
        yield from _differs(row, "hfu", row["hardware_flops"] / of_all)
        in_float8 = row["linear_dtype"] not in (None, "model")
        most = hardware.peak_flops(row.device_name, "float8") if in_float8 else peak
        if row["hfu"] * (peak or math.nan) > (most or math.inf):
            yield f"hfu={row['hfu']:.3g} is above the device's peak"
        if in_float8 and most is not None:
            yield from _differs(row, "float8_mfu", row["model_flops"] / (seconds * world * most))
    if row["schema_version"] >= WITH_FLAGS:
        stage_ends = row["stage_ends"] or []
        wanted = flags_of_times(step_ms, window_ms, stage_ends) + flags_of_loss(row["loss"] or [], stage_ends)
        wanted += flags_of_leftover(row["leftover_bytes"], row["peak_allocated_bytes"])
        if missing := sorted(set(wanted) - set(row["flags"] or [])):
            yield f"flags lack {', '.join(missing)}, which its samples ask for"


def _latent_attention_flops(row: _Row) -> float:
    """FLOPs of attention in a step over latents. `hardware_flops` has their up-projections, too."""
    shape = AttentionShape(**{name: row[name] for name in _SHAPE})
    passes = 1 + (row["pass_kind"] != "forward") * backward_per_forward(shape)
    return float(attention_forward_flops(shape) * passes)


def _stages(row: _Row, step_ms: Sequence[float]) -> Iterator[str]:
    stages = [(each["seq_len"], each["num_steps"]) for each in row["stage_ends"]]
    earlier = ",".join(f"{seq_len}x{number}" for seq_len, number in stages[:-1])
    if earlier != row["stages"] or stages[-1] != (row["seq_len"], len(step_ms) - sum(n for _, n in stages[:-1])):
        yield f"stage_ends is of stages {stages}; expected {row['stages']}, then {row['seq_len']} tokens"
    elif row["stage_times"] != stage_times(stages, _num_sequences(row), step_ms):
        yield "stage_times is not what step_ms says of the stages"
    for name in ("tokens_per_s", "tokens_per_s_per_gpu", "window_tokens_per_s"):
        if row[name] is not None:
            yield f"{name} of a stream, of whose steps none stands for the others"


def _attribution(row: _Row, median_ms: float) -> Iterator[str]:
    """Checks the parts that a row has: old rows lack some."""
    if row["share_of_limit"] is not None:
        yield from _differs(row, "share_of_limit", max(row["limit_ms"]) / median_ms)
    if row["exposed_comm_ms"] is None:
        return
    compute_only_ms = statistics.median(row["compute_only_step_ms"])
    exposed_ms = median_ms - compute_only_ms
    yield from _differs(row, "exposed_comm_ms", exposed_ms)
    if row["imbalance_ms"] is not None:
        yield from _differs(row, "imbalance_ms", compute_only_ms - statistics.mean(row["compute_only_rank_ms"]))
    if row["overlap_efficiency"] is not None:
        yield from _differs(row, "overlap_efficiency", 1 - exposed_ms / statistics.median(row["comm_only_step_ms"]))


def _num_sequences(row: _Row) -> int:
    """Sequences of one step: all micro-batches of all data-parallel ranks."""
    factors = (row[name] or 1 for name in ("batch_size", "micro_batches", "dp_replicate_size", "dp_shard_size"))
    return math.prod(factors)


def _proof(row: _Row) -> Iterator[str]:
    budget = row["error_budget"] or {}
    for tensor in TENSORS:
        found = {f"rel_error_{tensor}": row[f"rel_error_{tensor}"]}
        found[f"kernel_rel_error of {tensor}"] = (row["kernel_rel_error"] or {}).get(tensor)
        yield from _above(found, allowed := budget.get(tensor))
        timed = {f"sampled_grad_error of {tensor}": (row["sampled_grad_error"] or {}).get(tensor)}
        if tensor == "output":
            timed["sampled_rel_error"] = row["sampled_rel_error"]
        if allowed is not None:
            allowed = budget_of_timed(
                allowed, row["dtype"], row["seq_len"], row["correctness_seq_len"] or row["seq_len"]
            )
        yield from _above(timed, allowed)
    for name in ("grad_error", "update_error", "fp32_grad_error", "full_update_error", "last_update_error"):
        if (worst := row[name]) is not None:
            if worst["error"] is None or not (worst["budget"] or 0) > 0:
                yield f"{name} has error={worst['error']} and budget={worst['budget']}; expected two numbers"
            if name not in _FLAGGED:
                yield from _above({name: worst["error"]}, worst["budget"])


def _above(found: Mapping[str, float | None], budget: float | None) -> Iterator[str]:
    for name, error in found.items():
        if error is not None and budget is not None and not 0 <= error <= budget:
            yield f"{name}={error:.3g} of an ok row; its budget is {budget:.3g}"


def _bytes(row: _Row) -> Iterator[str]:
    inside = [entry for entry in row["comm"] if entry["phase"] != "other"]
    yield from _differs(row, "comm_counted_bytes", math.fsum(entry["counted_bytes"] or 0 for entry in inside))
    if row["comm_predicted_bytes"] is not None:
        yield from _differs(row, "comm_predicted_bytes", math.fsum(entry["predicted_bytes"] or 0 for entry in inside))


def _memory(row: _Row) -> Iterator[str]:
    for name in ("peak_allocated_bytes", "peak_host_bytes"):
        if row[name] is not None:
            yield from _differs(row, f"max_{name}", max(row[name]))


def _differs(row: _Row, column: str, expected: Any) -> Iterator[str]:
    same = _equal if isinstance(expected, float) else lambda found, wanted: found == wanted
    if row[column] is None or not same(row[column], expected):
        yield f"{column}={shown(row[column])}; the row's other columns give {shown(expected)}"


def _equal(a: float, b: float) -> bool:
    """Whether both are the same but for the rounding of a sum."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
