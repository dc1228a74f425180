"""Whether the record that rank 0 handed over can be believed. It is checked here before it becomes a row.

A record says what ranks measured. What was asked for, who the trial is, and what follows from samples and config are
the driver's own columns: a record that has one of them is broken, whatever it says. So is one whose numbers do not fit
the config or each other.

Not seen here: times that are wrong by one factor in all steps and in the window.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import pyarrow as pa

from sp_bench import hardware
from sp_bench.config.parsing import shown
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import AUTO, COMPARED, FEWEST_TIMED_STEPS
from sp_bench.costs import message_sizes
from sp_bench.driver.derived import TIMES, Record, derived, internode_predicted_bytes, predicted_bytes
from sp_bench.methods import closed_forms, real_rank
from sp_bench.planning.plan import resolve
from sp_bench.rows.row import Outcome, asked_for
from sp_bench.rows.schema import COLUMNS, SCHEMA

# Between a rank's window and the sum of its steps. On a GPU the window has the launch of the first step too.
MAX_CLOCK_GAP, CLOCK_SLACK_MS = 0.1, 1.0

# What a record may have. Ranks have doubts of their own (flags); the driver adds its own to them.
OF_RANKS = {column.name: column for column in COLUMNS if column.source == "measured" or column.name == "flags"}
ARMS = tuple(name for name, column in OF_RANKS.items() if "arms" in column.required)  # all of them or none


def checked(outcome: Outcome, config: TrialConfig) -> Outcome:
    """What came of a trial, once its record is checked. An ok outcome then has the derived columns too; others stay as
    they are.

    A broken record is an `error`, and a rate above the device's peak is `incorrect`.
    """
    if outcome.status != "ok":
        return outcome
    record, resolved = outcome.measured, resolve(config)
    asked = asked_for(config, resolved)
    # attention pads within its shape, and only packed documents
    padded_len = config.seq_len if config.workload.name == "attention" else resolved.padded_seq_len
    if problem := next(_problems(config, padded_len, record), None):
        return _refused(outcome, problem)
    device_name = next(iter(record["environment"].get("device_names") or ()), None)
    columns = derived(config, padded_len, record, device_name)
    if problem := next(_overridden(record, asked, columns), None):
        return _refused(outcome, problem)
    dtypes = (config.dtype, config.dtype if config.workload.linear_dtype == "model" else "float8")
    peak, most = ((hardware.peak_flops(device_name or "", each) or 0) / 1e12 for each in dtypes)
    if columns["hfu"] is not None and columns["hfu"] * peak > most:
        reason = f"{columns['hfu'] * peak:.0f} TFLOP/s a device is above its peak of {most:.0f}: the step did not do "
        return replace(outcome, status="incorrect", reason=f"{reason}the work", measured={})
    measured = {name: value for name, value in record.items() if name != "environment"} | columns
    if not config.is_timed:
        measured |= dict.fromkeys(TIMES)
    return replace(outcome, environment=record["environment"], measured=measured)


def _refused(outcome: Outcome, problem: str) -> Outcome:
    return replace(outcome, status="error", reason=f"the record is broken: {problem}", measured={})


def _overridden(record: Record, asked: Mapping[str, Any], columns: Mapping[str, Any]) -> Iterator[str]:
    """Columns of the driver that the record has, and columns that no row has."""
    for name, value in record.items():
        if name not in SCHEMA.names:
            yield f"{shown(name)}={_short(value)}; expected no such column"
        elif name in asked:
            yield f"{name}={_short(value)}; expected no {name} from a rank, since {_short(asked[name])} was asked for"
        elif name not in OF_RANKS:
            own = _short(columns[name]) if name in columns else "its own"
            yield f"{name}={_short(value)}; expected no {name} from a rank, since the driver has {own}"


def _problems(config: TrialConfig, padded_len: int | None, record: Record) -> Iterator[str]:
    """What is wrong with what the ranks say: each names the column, its value and what was expected."""
    if not isinstance(record, Mapping):
        yield f"{_short(record)}; expected columns"
        return
    workload = config.workload
    trial = f"{workload.name} trial"
    trials = {"any": trial, workload.name: trial, workload.pass_kind: trial}
    # others perturb no attention of theirs
    own = workload.name not in COMPARED and config.engine.facts.decoder != "transformers"
    if workload.packing != "none" and own and config.world == "ranks":
        trials["perturbed"] = "trial of packed documents"
    if any(config.attention_shape(config.seq_len, kind).window for kind in config.kinds) and config.world == "ranks":
        trials |= {} if workload.name in COMPARED else {"perturbed": "trial under a window"}
    excused = {workload.name, *(("fits",) if workload.fit else ())}
    if config.world == "one_rank":  # its values are wrong by design; `proof` says where they are proven
        excused.add("one_rank")
    for name, column in OF_RANKS.items():
        needed_by = next((trials[case] for case in column.required if case in trials), None)
        if needed_by and record.get(name) is None and excused.isdisjoint(column.unless):
            yield f"{name}=null; expected a value, as every {needed_by} has"
    known = {name: value for name, value in record.items() if value is not None}
    measured = [(OF_RANKS[name], value) for name, value in known.items() if name in OF_RANKS]
    for column, value in measured:
        if not _has_type(value, column.type) or (isinstance(value, list) and None in value):
            yield f"{column.name}={_short(value)}; expected {column.type}"
        elif not all(map(math.isfinite, _numbers(value))):
            yield f"{column.name}={_short(value)}; expected finite numbers"
        elif column.positive and not all(ms > 0 for ms in _numbers(value, null=0)):
            yield f"{column.name}={_short(value)}; expected times above 0"
    timed_steps = workload.timed_steps
    if timed_steps == AUTO:  # on which the ranks agreed
        timed_steps = max(map(len, known["rank_step_ms"]), default=0)
        if not FEWEST_TIMED_STEPS <= timed_steps <= workload.most_timed_steps:
            limits = f"{FEWEST_TIMED_STEPS} to {workload.most_timed_steps}"
            yield f"rank_step_ms has {timed_steps} steps; expected {limits}, of timed_steps=auto"
    steps = timed_steps + (workload.warmup_steps if workload.name in COMPARED else 0)
    lengths = {"rank": config.num_processes, "step": steps}
    for column, value in measured:
        if column.per and len(value) != (length := lengths[column.per]):
            yield f"{column.name} has {len(value)} entries; expected {length}, one for each of the {column.per}s"
    for rank, step_ms in enumerate(known["rank_step_ms"]):
        if len(step_ms) != timed_steps:
            yield f"rank_step_ms of rank {rank} has {len(step_ms)} steps; expected timed_steps={timed_steps}"
    arms = [name for name in ARMS if excused.isdisjoint(OF_RANKS[name].unless)]
    if 0 < sum(name in known for name in arms) < len(arms):
        yield f"{', '.join(name for name in arms if name not in known)}=null; expected all arms or none"
    for rank, (step_ms, window_ms) in enumerate(zip(known["rank_step_ms"], known["window_ms"], strict=True)):
        if abs(sum(step_ms) - window_ms) > MAX_CLOCK_GAP * window_ms + CLOCK_SLACK_MS:
            yield f"rank_step_ms of rank {rank} adds up to {sum(step_ms):.3f}; expected its window_ms={window_ms:.3f}"
    yield from _problems_of_bytes(config, padded_len, known)
    yield from _problems_of_work(config, padded_len, known)
    if workload.name == "collective":
        yield from _problems_of_curve(config, known)
    stages = [(each.get("seq_len"), each.get("num_steps")) for each in known.get("stage_ends") or ()]
    if stages != config.stages:
        yield f"stage_ends={_short(known.get('stage_ends'))}; expected {config.stages}, its tokens and steps"


def _problems_of_bytes(config: TrialConfig, padded_len: int | None, known: Record) -> Iterator[str]:
    inside = [entry for entry in known["comm"] if entry.get("phase") != "other"]
    counted, of_entries = (math.fsum(e.get(f"{kind}_bytes") or 0 for e in inside) for kind in ("counted", "predicted"))
    total, predicted = known["comm_counted_bytes"], predicted_bytes(config, padded_len)
    if not _equal(total, counted):
        yield f"comm_counted_bytes={total}; expected {counted}, the sum of comm"
    if predicted is not None and not _equal(of_entries, predicted):
        yield f"predicted_bytes of comm add up to {of_entries}; expected {predicted}, the closed form"
    if predicted is not None and not _equal(total, predicted) and not closed_forms.traffic_is_mean(config.method.name):
        yield f"comm_counted_bytes={total}; expected {predicted}, the closed form"
    far, expected = known.get("internode_counted_bytes"), internode_predicted_bytes(config, padded_len)
    if (far is None) != (config.num_nodes == 1):
        yield f"internode_counted_bytes={_short(far)}; expected null of one node only, and num_nodes={config.num_nodes}"
    elif expected is not None and not all(map(_equal, far or (), expected)):
        yield f"internode_counted_bytes={_short(far)}; expected {_short(expected)}, the closed form"


def _problems_of_work(config: TrialConfig, padded_len: int | None, known: Record) -> Iterator[str]:
    rank = real_rank.real_place(config) or 0
    for name, value in closed_forms.expected_work(config, padded_len or config.seq_len, rank).columns.items():
        if known.get(name) != value:
            yield f"{name}={_short(known.get(name))}; expected {_short(value)}, the closed form"


def _problems_of_curve(config: TrialConfig, known: Record) -> Iterator[str]:
    got, sizes = known["curve"], [size.sent_bytes for size in message_sizes.message_sizes(config)]
    if [size.get("message_bytes") for size in got] != sizes:
        yield f"curve={_short(got)}; expected messages of {sizes} bytes"
    elif not all((size.get("ms") or 0) > 0 for size in got):
        yield f"curve={_short(got)}; expected times above 0"
    elif not _equal(got[-1]["ms"], slowest := median(map(max, zip(*known["rank_step_ms"], strict=True)))):
        yield f"curve ends with {got[-1]['ms']} ms; expected {slowest}, the median of its timed steps"


def _equal(a: float, b: float) -> bool:
    """But for the rounding of a sum."""
    return math.isclose(a, b, rel_tol=1e-9)


def _has_type(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def _numbers(value: Any, null: float | None = None) -> Iterator[float]:
    """All numbers in a value of JSON, and `null` for each null."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item, null)
    elif isinstance(value, int | float):
        yield value
    elif value is None and null is not None:
        yield null


def _short(value: Any) -> str:
    return shown("null" if value is None else value, 100)
