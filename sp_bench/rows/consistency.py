"""Whether a committed row agrees with itself: what follows from its samples and its config is derived again.

A row that does not is no evidence: somebody edited it, or what wrote it was wrong. Readers name it and leave it out.
A rule holds for all rows that were ever committed, unless it says from which schema version on.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from sp_bench import hardware
from sp_bench.config.parsing import shown
from sp_bench.config.shape import AttentionShape
from sp_bench.config.workload import Stage, parse_stages
from sp_bench.costs.attention import attention_forward_flops, backward_per_forward
from sp_bench.costs.flags import budget_of_timed, flags_of_leftover, flags_of_loss
from sp_bench.costs.step_flags import OF_TIMES, doubts_of_times, flags_of_times
from sp_bench.costs.training import stage_times
from sp_bench.rows import store
from sp_bench.rows.arrays import CLOSE, Arrays, Floats, Places, Truths, alike, close, floats, inside, nested_groups
from sp_bench.rows.forms import first_of, forms
from sp_bench.rows.names import trial_id
from sp_bench.rows.schema import PARAMETER_ERRORS, SCHEMA
from sp_bench.rows.store import IDENTITY, RowName

# null unless the row is ok and timed
RESULTS = (
    *("step_ms", "median_step_ms", "tokens_per_s", "mfu", "hfu", "float8_mfu", "attention_flops_per_s"),
    "share_of_limit",
)
TENSORS = ("output", "dq", "dk", "dv")
WITH_FLAGS = 4  # the schema version whose rows have all flags of times, leftovers and loss
_RECORDS = tuple(
    field.name for field in SCHEMA if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type)
)
_SHAPE = ("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "causal", "dtype")
_FLAGGED = ("full_update_error", "last_update_error")  # an ok row above its budget has a flag
Breach = tuple[Truths, Callable[[int], str]]  # the rows that break a rule, and what to say of each


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
    found = _not_finite(table) | _with_gaps(table) | _with_keys_twice(table)
    rows = _Rows(table)
    with np.errstate(all="ignore"):  # a value that a row lacks is nan
        for wrong, words in _breaches(rows):
            for i in np.flatnonzero(wrong).tolist():
                if i not in found:
                    found[i] = words(i)
    for i in copies(table).tolist():
        found.setdefault(i, "it has the start of another replicate of its cell: a copy")
    return found


def copies(table: pa.Table) -> Places:
    """Places of the rows that began in the same microsecond as an earlier row of another replicate of their cell. No
    two launches do: such a row is a copy under another name."""
    together, firsts = alike([table[name] for name in ("cell_id", "env_id", "started_at")])
    trials, _ = alike([table["trial_id"]])
    return np.flatnonzero((trials != trials[firsts[together]]) & table["started_at"].is_valid().to_numpy())


class _Rows(Arrays):
    """All rows of a table, and what rules ask of them."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__(table)
        self.forms = forms(table)
        self.ok = self.equal("status", "ok")
        self.timed = self.ok & np.array([form.config.is_timed for form in self.forms], bool)
        self.num_sequences = np.ones(self.num_rows)  # of one step: of all micro-batches of all data-parallel ranks
        for name in ("batch_size", "micro_batches", "dp_replicate_size", "dp_shard_size"):
            of_row = self.numbers(name)
            self.num_sequences *= np.where(np.isnan(of_row) | (of_row == 0), 1, of_row)


@dataclass(frozen=True, slots=True)
class _Row:
    """One row, for a rule that few are asked."""

    rows: _Rows
    place: int

    def __getitem__(self, name: str) -> Any:
        return self.rows.objects(name)[self.place]


def _not_finite(table: pa.Table) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, part, places in _parts(table):
        if pa.types.is_floating(part.type):
            finite = compute.call_function("is_finite", [part]).fill_null(True).to_numpy(zero_copy_only=False)
            for i in places[~finite].tolist():
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


def _with_keys_twice(table: pa.Table) -> dict[int, str]:
    """The rows with a map in which a key stands twice: no dict can have both."""
    found: dict[int, str] = {}
    for name, part, places in _parts(table):
        if pa.types.is_map(part.type):
            keys = inside(part, part.keys).dictionary_encode().indices.to_numpy()
            of_map = np.repeat(np.arange(len(part)), np.diff(part.offsets))
            _, firsts = np.unique(of_map * (len(keys) + 1) + keys, return_index=True)
            if len(firsts) < len(keys):
                found |= dict.fromkeys(places[np.delete(of_map, firsts)].tolist(), f"{name} has a key twice")
    return found


def _parts(table: pa.Table) -> Iterator[tuple[str, pa.Array, Places]]:
    """The columns and all that they are made of: a column's name, an array, and the row of each of its values."""
    for name in table.column_names:
        left = [(table[name].combine_chunks(), np.arange(table.num_rows))]
        while left:
            part, places = left.pop()
            if part.null_count < len(part):
                yield name, part, places
                if pa.types.is_struct(part.type):
                    left += [(field, places) for field in part.flatten()]
                elif pa.types.is_list(part.type) or pa.types.is_map(part.type):
                    entries = inside(part, part.items if pa.types.is_map(part.type) else part.values)
                    left.append((entries, np.repeat(places, np.diff(part.offsets))))


def _breaches(rows: _Rows) -> Iterator[Breach]:
    """Which rows break a rule, and what to say of each, rule by rule."""
    yield from _identity(rows)
    breaches = [form.breach for form in rows.forms]
    yield np.array([breach is not None for breach in breaches], bool), lambda i: str(breaches[i])
    for name in RESULTS:
        has = rows.has(name)
        yield has & ~rows.ok, lambda i, name=name: f"{name} of a trial that is {rows.value('status', i)}"
        yield has & rows.ok & ~rows.timed, lambda i, name=name: f"{name} of a trial that is not timed"
    of_one_rank = rows.ok & rows.equal("evidence", "one_rank")
    unproven = ~rows.has("proof") | rows.equal("proof", "")
    yield of_one_rank & unproven, lambda i: "proof=null; a row of one rank names the row that proves it"
    yield from _proof(rows)
    yield from _bytes(rows)
    yield from _memory(rows)
    yield from _times(rows)


def _identity(rows: _Rows) -> Iterator[Breach]:
    """From the stored text of the config: parsed again, it would get the defaults of options that came later."""
    cells = [form.cell_id for form in rows.forms]
    wanted = {"cell_id": cells, "trial_id": [None] * rows.num_rows}
    numbers = rows.objects("replicate")
    for i, (cell, replicate) in enumerate(zip(cells, numbers, strict=True)):
        wanted["trial_id"][i] = None if cell is None else trial_id(cell, replicate)
    for name, texts in wanted.items():
        found = rows.objects(name)
        wrong = [text is not None and text != each for text, each in zip(texts, found, strict=True)]
        yield np.array(wrong, bool), lambda i, name=name, texts=texts: _other(rows, name, i, texts[i])


def _proof(rows: _Rows) -> Iterator[Breach]:
    of_timed = _growth_of_budgets(rows)
    for tensor in TENSORS:
        budget = rows.numbers(f"error_budget.{tensor}")
        yield rows.ok & ~np.isnan(budget) & np.isnan(of_timed), lambda i: f"dtype={shown(rows.value('dtype', i))}"
        yield _above(rows, f"rel_error_{tensor}", budget)
        yield _above(rows, f"kernel_rel_error.{tensor}", budget)
        yield _above(rows, f"sampled_grad_error.{tensor}", budget * of_timed)
        if tensor == "output":
            yield _above(rows, "sampled_rel_error", budget * of_timed)
    for name in PARAMETER_ERRORS:
        error, budget = rows.numbers(f"{name}.error"), rows.numbers(f"{name}.budget")
        given = rows.ok & rows.has(name)
        yield given & ~(~np.isnan(error) & (budget > 0)), lambda i, name=name: _no_budget(rows.value(name, i), name)
        if name not in _FLAGGED:
            yield _above(rows, f"{name}.error", budget)


def _growth_of_budgets(rows: _Rows) -> Floats:
    """By how much the budget at the timed length is larger than that at the reduced one; nan of an unknown dtype."""
    known: dict[tuple[Any, ...], float] = {}
    names = ("dtype", "seq_len", "correctness_seq_len")
    keys = list(zip(*map(rows.objects, names), strict=True))
    for dtype, seq_len, reduced_len in set(keys):
        try:
            growth = budget_of_timed(1.0, dtype, seq_len, reduced_len or seq_len)
        except (KeyError, TypeError, ZeroDivisionError):
            growth = math.nan
        known[dtype, seq_len, reduced_len] = growth
    return np.array([known[key] for key in keys], float)


def _above(rows: _Rows, name: str, budget: Floats) -> Breach:
    error = rows.numbers(name)
    wrong = rows.ok & ~np.isnan(error) & ~np.isnan(budget) & ~((error >= 0) & (error <= budget))
    return wrong, lambda i: f"{name}={error[i]:.3g} of an ok row; its budget is {budget[i]:.3g}"


def _no_budget(found: Mapping[str, Any], name: str) -> str:
    return f"{name} has error={found['error']} and budget={found['budget']}; expected two numbers"


def _bytes(rows: _Rows) -> Iterator[Breach]:
    yield rows.ok & ~rows.has("comm"), lambda i: "comm=null of an ok row"
    comm = rows.column("comm")
    entries = comm.flatten()
    of_row = np.repeat(np.arange(rows.num_rows), rows.lengths("comm"))
    phases = entries.field("phase").fill_null("")
    inside = compute.call_function("not_equal", [phases, pa.scalar("other")]).to_numpy(zero_copy_only=False)
    for name in ("counted_bytes", "predicted_bytes"):
        each = np.nan_to_num(floats(entries.field(name)))
        expected = np.bincount(of_row[inside], each[inside], rows.num_rows).astype(float)
        where = rows.ok if name == "counted_bytes" else rows.ok & rows.has("comm_predicted_bytes")
        yield _differs(rows, f"comm_{name}", expected, where)


def _memory(rows: _Rows) -> Iterator[Breach]:
    for name in ("peak_allocated_bytes", "peak_host_bytes"):
        yield _differs(rows, f"max_{name}", rows.of_lists(name, np.max), rows.ok & rows.has(name), exact=True)


def _times(rows: _Rows) -> Iterator[Breach]:
    timed, steps = rows.timed, _Steps(rows)
    shortest = np.fmin(steps.shortest, rows.of_lists("window_ms", np.min))
    yield timed & ~(shortest > 0), lambda i: "rank_step_ms or window_ms has a time that is not above 0"
    yield timed & ~steps.found, lambda i: "rank_step_ms or window_ms lacks a time"
    yield timed & ~steps.agree, lambda i: "step_ms is not the max over ranks of rank_step_ms"
    yield _differs(rows, "median_step_ms", steps.median_ms, timed)
    seconds, world, longest = steps.median_ms / 1e3, rows.numbers("world_size"), rows.of_lists("window_ms", np.max)
    tokens = rows.num_sequences * rows.numbers("seq_len")
    of_stream = timed & rows.equal("workload", "stream")
    of_tokens = timed & ~rows.equal("workload", "collective") & ~rows.has("stages")
    yield _differs(rows, "tokens_per_s", tokens / seconds, of_tokens)
    yield _differs(rows, "tokens_per_s_per_gpu", tokens / seconds / world, of_tokens)
    where = of_tokens & rows.has("window_tokens_per_s")
    yield _differs(rows, "window_tokens_per_s", 1e3 * tokens * steps.number / longest, where)
    yield from _one_by_one(rows, of_stream, _stages)
    yield from _attribution(rows, steps.median_ms)
    rated, of_latents = timed & rows.has("attention_flops_per_s"), rows.has("kv_lora_rank")
    flops = rows.numbers("hardware_flops")
    yield _differs(rows, "attention_flops_per_s", flops / seconds, rated & ~of_latents)
    yield from _one_by_one(rows, rated & of_latents, _rate_of_latents)
    yield from _utilisation(rows, seconds * world)
    flagged = timed & (rows.numbers("schema_version") >= WITH_FLAGS)
    lacks = {flag: applies & ~rows.lists_with("flags", flag) for flag, applies in steps.doubts.items()}
    wrong = flagged & ~rows.has("stage_ends") & np.any([*lacks.values()], axis=0)
    yield wrong, lambda i: _lacks(sorted(flag for flag, which in lacks.items() if which[i]))
    doubtful = rows.has("stage_ends") | rows.has("loss") & ~(rows.of_lists("loss", _rise) < 0)
    doubtful |= rows.has("leftover_bytes") & ~(rows.of_lists("leftover_bytes", np.max) <= 0)
    yield from _one_by_one(rows, flagged & doubtful, _flags)


def _rise(losses: Floats, axis: int) -> Floats:
    return losses[:, -1] - losses[:, 0]


class _Steps:
    """What follows from rank_step_ms."""

    def __init__(self, rows: _Rows) -> None:
        self.number, self.shortest, self.median_ms = (np.full(rows.num_rows, np.nan) for _ in range(3))
        self.agree = np.zeros(rows.num_rows, bool)  # with step_ms
        self.doubts = {flag: np.zeros(rows.num_rows, bool) for flag in OF_TIMES}  # the flags that rows should have
        written, window_ms = rows.column("step_ms"), rows.of_lists("window_ms", np.max)
        lengths, starts = rows.lengths("step_ms"), written.offsets.to_numpy()
        values = floats(written.values)
        for places, of_ranks in nested_groups(rows.column("rank_step_ms")):
            step_ms = of_ranks.max(axis=1)  # nan where an entry is null
            num_steps = step_ms.shape[1]
            self.number[places] = num_steps
            self.shortest[places] = of_ranks.min(axis=(1, 2))
            self.median_ms[places] = np.median(step_ms, axis=1)
            for flag, applies in doubts_of_times(step_ms, window_ms[places]).items():
                self.doubts[flag][places] = applies
            alike = lengths[places] == num_steps
            same = close(values[starts[places[alike]][:, None] + np.arange(num_steps)], step_ms[alike])
            self.agree[places[alike]] = same.all(axis=1)
        self.found = ~np.isnan(self.median_ms) & ~np.isnan(window_ms)


def _one_by_one(rows: _Rows, where: Truths, rule: Callable[[_Row], Iterator[str]]) -> Iterator[Breach]:
    """A rule that few rows are asked."""
    found = {i: problem for i in np.flatnonzero(where).tolist() if (problem := first_of(rule(_Row(rows, i))))}
    wrong = np.zeros(rows.num_rows, bool)
    wrong[list(found)] = True
    yield wrong, found.__getitem__


def _flags(row: _Row) -> Iterator[str]:
    stage_ends = row["stage_ends"] or []
    wanted = flags_of_times(row["step_ms"], row["window_ms"], stage_ends) if stage_ends else []
    wanted += flags_of_loss(row["loss"] or [], stage_ends)
    wanted += flags_of_leftover(row["leftover_bytes"], row["peak_allocated_bytes"])
    if missing := sorted(set(wanted) - set(row["flags"] or [])):
        yield _lacks(missing)


def _lacks(flags: Sequence[str]) -> str:
    return f"flags lack {', '.join(flags)}, which its samples ask for"


def _rate_of_latents(row: _Row) -> Iterator[str]:
    """`hardware_flops` has the up-projections of latents, too."""
    shape = AttentionShape(**{name: row[name] for name in _SHAPE})
    passes = 1 + (row["pass_kind"] != "forward") * backward_per_forward(shape)
    rate = 1e3 * attention_forward_flops(shape) * passes / row["median_step_ms"]
    if not math.isclose(row["attention_flops_per_s"], rate, rel_tol=CLOSE):
        yield _other(row.rows, "attention_flops_per_s", row.place, rate)


def _stages(row: _Row) -> Iterator[str]:
    step_ms = [max(step) for step in zip(*row["rank_step_ms"], strict=True)]
    stages = [(each["seq_len"], each["num_steps"]) for each in row["stage_ends"]]
    if row["stages"] is None:
        if stages != [(row["seq_len"], 1)] * len(step_ms):
            yield f"stage_ends is of stages {stages}; expected {len(step_ms)} batches of {row['seq_len']} tokens"
        for imbalance in (each["imbalance"] for each in row["batches"] or []):
            if not 1 - CLOSE <= imbalance <= row["world_size"] * (1 + CLOSE):
                yield f"imbalance={imbalance} of a batch; from 1 to its {row['world_size']} ranks"
        return
    asked, sequences = parse_stages(row["stages"]), int(row.rows.num_sequences[row.place])
    earlier = [(each.seq_len, each.steps) for each in asked]
    if stages != [*earlier, (row["seq_len"], len(step_ms) - sum(steps for _, steps in earlier))]:
        yield f"stage_ends is of stages {stages}; expected {row['stages']}, then {row['seq_len']} tokens"
    elif len(row["stage_loss_errors"] or asked) != len(asked):
        yield f"stage_loss_errors has {len(row['stage_loss_errors'])} entries; expected {len(asked)}, one a change"
    elif row["stage_times"] != stage_times(stages, [*_of_stages(row, asked, sequences), sequences], step_ms):
        yield "stage_times is not what step_ms says of the stages"
    for name in ("tokens_per_s", "tokens_per_s_per_gpu", "window_tokens_per_s"):
        if row[name] is not None:
            yield f"{name} of a stream, of whose steps none stands for the others"


def _of_stages(row: _Row, stages: Sequence[Stage], sequences: int) -> Iterator[int]:
    """Sequences of a step of each stage; `sequences`: of the last one."""
    micro_batches, sp_size = row["micro_batches"] or 1, row["sp_size"]
    for stage in stages:
        more = sp_size // (stage.sp_size or sp_size)
        yield sequences // micro_batches * (stage.micro_batches or micro_batches) * more


def _attribution(rows: _Rows, median_ms: Floats) -> Iterator[Breach]:
    """Checks the parts that a row has: old rows lack some."""
    given = {name: rows.timed & rows.has(name) for name in ("share_of_limit", "exposed_comm_ms")}
    yield _differs(rows, "share_of_limit", rows.of_lists("limit_ms", np.max) / median_ms, given["share_of_limit"])
    compute_only_ms = rows.of_lists("compute_only_step_ms", np.median)
    exposed_ms = median_ms - compute_only_ms
    parts = {
        "exposed_comm_ms": exposed_ms,
        "imbalance_ms": compute_only_ms - rows.of_lists("compute_only_rank_ms", np.mean),
        "overlap_efficiency": 1 - exposed_ms / rows.of_lists("comm_only_step_ms", np.median),
    }
    for name, expected in parts.items():
        yield _differs(rows, name, expected, given["exposed_comm_ms"] & rows.has(name))


def _utilisation(rows: _Rows, seconds: Floats) -> Iterator[Breach]:
    """seconds: of all devices."""
    rated = rows.timed & (rows.has("mfu") | rows.has("hfu"))
    in_float8 = rated & rows.has("linear_dtype") & ~rows.equal("linear_dtype", "model")
    peak, float8_peak = _peaks(rows, rated, rows.objects("dtype")), _peaks(rows, in_float8, ["float8"] * rows.num_rows)
    model_flops, hfu = rows.numbers("model_flops"), rows.numbers("hfu")
    yield _differs(rows, "mfu", model_flops / (seconds * peak), rated)
    yield _differs(rows, "hfu", rows.numbers("hardware_flops") / (seconds * peak), rated)
    above = hfu * peak > np.where(in_float8, float8_peak, peak)
    yield rated & above, lambda i: f"hfu={hfu[i]:.3g} is above the device's peak"
    yield _differs(rows, "float8_mfu", model_flops / (seconds * float8_peak), in_float8 & ~np.isnan(float8_peak))


def _peaks(rows: _Rows, where: Truths, dtypes: Sequence[str]) -> Floats:
    """FLOP/s of the first device of each row in a dtype; nan where no source has it."""
    known: dict[tuple[str, str], float | None] = {}
    found = np.full(rows.num_rows, np.nan)
    for i in np.flatnonzero(where).tolist():
        device = (rows.device_names[i] or [""])[0], dtypes[i]
        if device not in known:
            known[device] = hardware.peak_flops(*device)
        found[i] = known[device] or math.nan
    return found


def _differs(rows: _Rows, name: str, expected: Floats, where: Truths, *, exact: bool = False) -> Breach:
    found = rows.numbers(name)
    same = found == expected if exact else close(found, expected)
    whole = int if exact else float
    return where & ~same, lambda i: _other(rows, name, i, whole(np.nan_to_num(expected[i])))


def _other(rows: _Rows, name: str, place: int, expected: Any) -> str:
    return f"{name}={shown(rows.value(name, place))}; the row's other columns give {shown(expected)}"
