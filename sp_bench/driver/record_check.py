"""Whether the record that rank 0 handed over can be believed. It is checked here before it becomes a row.

A record says what ranks measured. What was asked for, who the trial is, and what follows from samples and config are
the driver's own columns: a record that has one of them is broken, whatever it says. So is one whose numbers do not fit
the config or each other.

Not seen here: times that are wrong by one factor in all steps and in the window.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

import pyarrow as pa

from sp_bench import hardware, methods
from sp_bench.config.parsing import shown
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import message_sizes
from sp_bench.costs.training import HUGGING_FACE
from sp_bench.driver.derived import DERIVED, TIMES, Record, derived, internode_predicted_bytes, predicted_bytes
from sp_bench.driver.plan import resolve
from sp_bench.rows.row import Identity, Outcome, asked_for
from sp_bench.rows.schema import SCHEMA

# Between a rank's window and the sum of its steps. On a GPU the window has the launch of the first step too.
MAX_CLOCK_GAP, CLOCK_SLACK_MS = 0.1, 1.0

PROOF = ("correctness_seq_len", "rel_error_output", "error_budget", "kernel_rel_error", "sampled_rel_error")
PROOF_OF_GRADIENTS = ("sampled_grad_error", "identity_error")
PERTURBED = ("repeat_difference", "outside_difference", "inside_difference")
TRAINED = ("loss", "grad_norm")
REQUIRED: Mapping[str, Sequence[str]] = {  # by workload and pass_kind
    "any": ("rank_step_ms", "window_ms", "peak_host_bytes", "comm", "comm_counted_bytes", "environment"),
    "attention": PROOF,
    "forward_backward": ("rel_error_dq", "rel_error_dk", "rel_error_dv", *PROOF_OF_GRADIENTS),
    "train_step": (
        *(*PROOF, *PROOF_OF_GRADIENTS, "rel_error_loss", "rel_error_grad_norm"),
        *("timed_loss_error", "timed_max_loss_error", *TRAINED),
    ),
    "parity": ("max_nll_difference", "mean_nll_difference", "max_grad_norm_difference", *TRAINED),
    "collective": ("curve",),
}
AT_TIMED_LENGTH = (*PROOF[-1:], *PROOF_OF_GRADIENTS, "timed_loss_error", "timed_max_loss_error")
OF_VALUES = (*PROOF, *PROOF_OF_GRADIENTS, *REQUIRED["forward_backward"], *REQUIRED["train_step"])
PER_RANK = (
    *("rank_step_ms", "window_ms", "compute_only_rank_ms", "host_step_ms", "host_launch_us", "energy_j"),
    "internode_counted_bytes",
    *("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes", "device_used_bytes", "allocator_retries"),
    "leftover_bytes",
    *("device_state", "part_ms", "kernel_ms", "limit_ms", "phase_end_bytes", "peak_parts_bytes"),
)
PER_STEP = ("compute_only_step_ms", "comm_only_step_ms", *TRAINED)
ARMS = ("compute_only_step_ms", "compute_only_rank_ms", "comm_only_step_ms")  # all of them or none
POSITIVE = ("rank_step_ms", "window_ms", *ARMS)
DRIVERS = {  # columns of the driver, beside those that say what was asked for
    "schema_version",
    "node_environments",
    "proof",
    *(name for name in DERIVED if name != "flags"),  # ranks may have doubts too
    *(field.name for field in fields(Identity)),
    *(field.name for field in fields(Outcome) if field.name != "environment"),
}


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
    if columns["hfu"] is not None and columns["hfu"] > 1:
        peak = (hardware.peak_flops(device_name or "", config.dtype) or 0) / 1e12
        reason = f"{columns['hfu'] * peak:.0f} TFLOP/s a device is above its peak of {peak:.0f}: the step did not do "
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
        elif name in DRIVERS:
            own = _short(columns[name]) if name in columns else "its own"
            yield f"{name}={_short(value)}; expected no {name} from a rank, since the driver has {own}"


def _problems(config: TrialConfig, padded_len: int | None, record: Record) -> Iterator[str]:
    """What is wrong with what the ranks say: each names the column, its value and what was expected."""
    if not isinstance(record, Mapping):
        yield f"{_short(record)}; expected columns"
        return
    workload = config.workload
    unproven = AT_TIMED_LENGTH if workload.fit else ()
    if config.world == "one_rank":  # its values are wrong by design; `proof` says where they are proven
        unproven = OF_VALUES
    for name in (*REQUIRED["any"], *REQUIRED[workload.name], *REQUIRED.get(workload.pass_kind, ())):
        if record.get(name) is None and name not in unproven:
            yield f"{name}=null; expected a value, as every {workload.name} trial has"
    own = workload.name != "parity" and config.engine.name not in HUGGING_FACE  # others perturb no attention of theirs
    if workload.packing != "none" and own and config.world == "ranks":
        for name in PERTURBED:
            if record.get(name) is None:
                yield f"{name}=null; expected a value, as every trial of packed documents has"
    told = {name: value for name, value in record.items() if value is not None}
    measured = {name: value for name, value in told.items() if name in SCHEMA.names and name not in DRIVERS}
    for name, value in measured.items():
        if not _has_type(value, SCHEMA.field(name).type) or (isinstance(value, list) and None in value):
            yield f"{name}={_short(value)}; expected {SCHEMA.field(name).type}"
        elif not all(map(math.isfinite, _numbers(value))):
            yield f"{name}={_short(value)}; expected finite numbers"
    for name in POSITIVE:
        if not all(ms > 0 for ms in _numbers(told.get(name, ()), null=0)):
            yield f"{name}={_short(told[name])}; expected times above 0"
    steps = workload.timed_steps + (workload.warmup_steps if workload.name == "parity" else 0)
    lengths = dict.fromkeys(PER_RANK, config.num_processes) | dict.fromkeys(PER_STEP, steps)
    for name, length in lengths.items():
        if name in told and len(told[name]) != length:
            of = "ranks" if name in PER_RANK else "steps"
            yield f"{name} has {len(told[name])} entries; expected {length}, one for each of the {of}"
    for rank, step_ms in enumerate(told["rank_step_ms"]):
        if len(step_ms) != workload.timed_steps:
            yield f"rank_step_ms of rank {rank} has {len(step_ms)} steps; expected timed_steps={workload.timed_steps}"
    if 0 < sum(name in told for name in ARMS) < len(ARMS):
        yield f"{', '.join(name for name in ARMS if name not in told)}=null; expected all arms or none"
    for rank, (step_ms, window_ms) in enumerate(zip(told["rank_step_ms"], told["window_ms"], strict=True)):
        if abs(sum(step_ms) - window_ms) > MAX_CLOCK_GAP * window_ms + CLOCK_SLACK_MS:
            yield f"rank_step_ms of rank {rank} adds up to {sum(step_ms):.3f}; expected its window_ms={window_ms:.3f}"
    yield from _problems_of_bytes(config, padded_len, told)
    yield from _problems_of_work(config, padded_len, told)
    if workload.name == "collective":
        yield from _problems_of_curve(config, told)


def _problems_of_bytes(config: TrialConfig, padded_len: int | None, told: Record) -> Iterator[str]:
    inside = [entry for entry in told["comm"] if entry.get("phase") != "other"]
    counted, of_entries = (math.fsum(e.get(f"{kind}_bytes") or 0 for e in inside) for kind in ("counted", "predicted"))
    total, predicted = told["comm_counted_bytes"], predicted_bytes(config, padded_len)
    if not _equal(total, counted):
        yield f"comm_counted_bytes={total}; expected {counted}, the sum of comm"
    if predicted is not None and not _equal(of_entries, predicted):
        yield f"predicted_bytes of comm add up to {of_entries}; expected {predicted}, the closed form"
    if predicted is not None and not _equal(total, predicted) and not methods.traffic_is_mean(config.method.name):
        yield f"comm_counted_bytes={total}; expected {predicted}, the closed form"
    far, expected = told.get("internode_counted_bytes"), internode_predicted_bytes(config, padded_len)
    if (far is None) != (config.num_nodes == 1):
        yield f"internode_counted_bytes={_short(far)}; expected null of one node only, and num_nodes={config.num_nodes}"
    elif expected is not None and not all(map(_equal, far or (), expected)):
        yield f"internode_counted_bytes={_short(far)}; expected {_short(expected)}, the closed form"


def _problems_of_work(config: TrialConfig, padded_len: int | None, told: Record) -> Iterator[str]:
    for name, value in methods.expected_work(config, padded_len or config.seq_len, 0).columns.items():
        if told.get(name) != value:
            yield f"{name}={_short(told.get(name))}; expected {_short(value)}, the closed form"


def _problems_of_curve(config: TrialConfig, told: Record) -> Iterator[str]:
    got, sizes = told["curve"], [size.sent_bytes for size in message_sizes.message_sizes(config)]
    if [size.get("message_bytes") for size in got] != sizes:
        yield f"curve={_short(got)}; expected messages of {sizes} bytes"
    elif not all((size.get("ms") or 0) > 0 for size in got):
        yield f"curve={_short(got)}; expected times above 0"
    elif not _equal(got[-1]["ms"], slowest := median(map(max, zip(*told["rank_step_ms"], strict=True)))):
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
