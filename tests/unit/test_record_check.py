"""What a driver believes of a record: the honest one of each workload, and none that was tampered with."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pyarrow as pa
import pytest

from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import PASS_KINDS
from sp_bench.driver.derived import derived
from sp_bench.driver.record_check import checked
from sp_bench.planning import plan
from sp_bench.rows import store
from sp_bench.rows.row import Identity, Outcome, asked_for
from sp_bench.rows.schema import COLUMNS

from .records import record_of

WORKLOADS = tuple(PASS_KINDS)
Tamper = Callable[[dict[str, Any]], object]


def outcome_of(config: TrialConfig, tamper: Tamper = lambda record: None) -> Outcome:
    record = record_of(config)
    tamper(record)
    return checked(Outcome("ok", "done", measured=json.loads(json.dumps(record))), config)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("sp_size", [2, 4])
def test_an_honest_record_becomes_a_row_with_what_follows_from_it(make_config, tmp_path, workload, sp_size):
    config = make_config(workload=workload, sp_size=sp_size, seq_len=256)
    outcome = outcome_of(config)
    assert outcome.status == "ok", outcome.reason
    columns = outcome.columns() | asked_for(config, plan.resolve(config))
    assert columns["median_step_ms"] == 1.5
    assert columns["step_ms"] == [1.5] * config.workload.timed_steps
    if workload == "stream":
        assert columns["stage_times"] == [
            {"first_step_ms": 1.5, "median_step_ms": 1.5, "tokens_per_s": pytest.approx(seq_len / 1.5e-3)}
            for seq_len in (128, 256)
        ]
        assert columns["tokens_per_s"] is columns["window_tokens_per_s"] is columns["model_flops"] is None
    elif workload != "collective":
        tokens = config.num_sequences * 256
        assert columns["tokens_per_s"] == columns["window_tokens_per_s"] == pytest.approx(tokens / 1.5e-3)
        assert columns["hardware_flops"] > columns["model_flops"] > 0
    store.write(columns | {"trial_id": "0" * 12, "env_id": "0" * 8, "attempt": 0}, tmp_path)


@pytest.mark.parametrize("method", ["ring", "all_gather", "usp", "single", "yunchang", "deepspeed_ulysses"])
@pytest.mark.parametrize("workload", ["attention", "train_step"])
def test_the_closed_form_of_every_method_is_known_to_the_driver(make_config, method, workload):
    options = {"usp": {"method__ulysses_degree": 2}, "yunchang": {"method__ulysses_degree": 2}}.get(method, {})
    config = make_config(method=method, workload=workload, sp_size=1 if method == "single" else 4, **options)
    sent = outcome_of(config).columns()["comm_predicted_bytes"]
    assert (sent == 0) == (method == "single")


def set_to(**columns: Any) -> Tamper:
    return lambda record: record.update(columns)


def scaled(name: str, factor: float) -> Tamper:
    return lambda record: record.update({name: [[factor * ms for ms in steps] for steps in record[name]]})


def shorter(name: str) -> Tamper:
    return lambda record: record.update({name: [steps[:-1] for steps in record[name]]})


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (set_to(stage_ends=[{"seq_len": 16, "num_steps": 1}]), r"stage_ends=\[\{'seq_len': 16.*; expected \[\], its"),
        (set_to(seq_len=1024), "seq_len=1024; expected no seq_len from a rank, since 2048 was asked for"),
        (set_to(config="{}"), r"config=\{\}; expected no config from a rank"),
        (set_to(padded_seq_len=1), "padded_seq_len=1; .* 2048 was asked for"),
        (set_to(timed_steps=1), "timed_steps=1; expected no timed_steps from a rank"),
        (set_to(median_step_ms=math.nan), "median_step_ms=nan; .* since the driver has 1.5"),
        (set_to(median_step_ms=None), "median_step_ms=null; .* since the driver has 1.5"),
        (set_to(tokens_per_s=-1), "tokens_per_s=-1; .* since the driver has 1365333.3"),
        (set_to(model_flops=1.0), "model_flops=1.0; .* since the driver has 3222798336"),
        (set_to(mfu=0.9), "mfu=0.9; .* since the driver has null"),
        (set_to(comm_predicted_bytes=0.0), "comm_predicted_bytes=0.0; .* since the driver has "),
        (set_to(status="ok"), "status=ok; expected no status from a rank, since the driver has its own"),
        (set_to(cell_id="f00"), "cell_id=f00; expected no cell_id from a rank"),
        (set_to(schema_version=1), "schema_version=1; expected no schema_version from a rank"),
        (set_to(**{"speed\x1b": 1}), r"speed\\x1b=1; expected no such column"),
        (shorter("rank_step_ms"), "rank_step_ms of rank 0 has 4 steps; expected timed_steps=5"),
        (lambda r: r["rank_step_ms"].pop(), "rank_step_ms has 1 entries; expected 2, one for each of the ranks"),
        (scaled("rank_step_ms", 0.5), "rank_step_ms of rank 0 adds up to 3.750; expected its window_ms=7.500"),
        (scaled("rank_step_ms", 2), "rank_step_ms of rank 0 adds up to 15.000; expected its window_ms=7.500"),
        (scaled("rank_step_ms", -1), r"rank_step_ms=\[\[-1.5.*; expected times above 0"),
        (scaled("rank_step_ms", math.inf), r"rank_step_ms=\[\[inf.*; expected finite numbers"),
        (set_to(rank_step_ms=[[1.5] * 5, None]), "rank_step_ms=.*; expected list"),
        (set_to(rank_step_ms=[[1.5] * 5, [None] * 5]), "rank_step_ms=.*; expected times above 0"),
        (set_to(rank_step_ms="fast"), "rank_step_ms=fast; expected list"),
        (set_to(window_ms=None), "window_ms=null; expected a value, as every attention trial has"),
        (set_to(peak_host_bytes=[None, 5]), "peak_host_bytes=.*; expected list"),
        (set_to(host_launch_us=[1.0]), "host_launch_us has 1 entries; expected 2"),
        (set_to(sampled_rel_error=math.nan), "sampled_rel_error=nan; expected finite numbers"),
        (set_to(sampled_grad_error=None), "sampled_grad_error=null; expected a value"),
        (set_to(comm_counted_bytes=0.0), "comm_counted_bytes=0.0; expected 1310720.0, the sum of comm"),
        (set_to(comm=[], comm_counted_bytes=0.0), "predicted_bytes of comm add up to 0.0; expected 1310720.0"),
        (set_to(counted_attention_flops=1.0), "counted_attention_flops=1.0; expected 3759931392.0, the closed form"),
        (set_to(counted_matmul_flops=None), "counted_matmul_flops=null; expected 0.0, the closed form"),
        (set_to(counted_parameters=5), "counted_parameters=5; expected null, the closed form"),
        (set_to(compute_only_step_ms=[1.0] * 5), "compute_only_rank_ms, comm_only_step_ms=null; expected all arms"),
        (set_to(environment=[1]), r"environment=\[1\]; expected struct"),
    ],
)
def test_a_broken_record_is_an_error_that_names_column_value_and_what_was_expected(make_config, tamper, reason):
    config = make_config(workload__timed_steps=5)
    outcome = outcome_of(config, tamper)
    assert (outcome.status, outcome.measured) == ("error", {})
    assert re.search(f"^the record is broken: {reason}", str(outcome.reason)), outcome.reason


def test_a_row_has_the_number_of_steps_on_which_the_ranks_agreed(make_config):
    auto, agreed = make_config(workload__timed_steps="auto"), make_config(workload__timed_steps=7)
    outcome = checked(Outcome("ok", "done", measured=record_of(agreed)), auto)
    assert (outcome.status, outcome.measured["timed_steps"]) == ("ok", 7)
    assert "timed_steps" not in asked_for(auto, plan.resolve(auto))  # of a trial that failed nobody knows it
    assert asked_for(agreed, plan.resolve(agreed))["timed_steps"] == 7


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda r: r["rank_step_ms"][1].pop(), "rank_step_ms of rank 1 has 6 steps; expected timed_steps=7"),
        (set_to(rank_step_ms=[[10.5]] * 2), "rank_step_ms has 1 steps; expected 2 to 5000"),
        (set_to(timed_steps=7), "timed_steps=7; expected no timed_steps from a rank, since the driver has 7"),
    ],
)
def test_ranks_that_agreed_on_no_number_of_steps_are_an_error(make_config, tamper, reason):
    record = json.loads(json.dumps(record_of(make_config(workload__timed_steps=7))))
    tamper(record)
    outcome = checked(Outcome("ok", "done", measured=record), make_config(workload__timed_steps="auto"))
    assert outcome.status == "error"
    assert reason in str(outcome.reason)


@pytest.mark.parametrize("record", ["not JSON", [1, 2], 5])
def test_what_is_no_record_at_all_is_an_error(make_config, record):
    outcome = checked(Outcome("ok", "done", measured=record), make_config())
    assert outcome.status == "error"
    assert "expected columns" in str(outcome.reason)


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda r: r["curve"].pop(), "curve=.*; expected messages of"),
        (lambda r: r["curve"][0].update(ms=0), "curve=.*; expected times above 0"),
        (lambda r: r["curve"][-1].update(ms=0.7), "curve ends with 0.7 ms; expected 1.5, the median"),
        (set_to(latency_us=1.0), "latency_us=1.0; expected no latency_us from a rank"),
    ],
)
def test_a_broken_curve_is_an_error(make_config, tamper, reason):
    outcome = outcome_of(make_config(workload="collective"), tamper)
    assert outcome.status == "error"
    assert re.search(reason, str(outcome.reason)), outcome.reason


def test_a_loss_is_of_each_step_that_the_workload_records(make_config):
    train_step, parity = (make_config(workload=name, workload__warmup_steps=3) for name in ("train_step", "parity"))
    for config in (train_step, parity):
        assert outcome_of(config).status == "ok"
        reason = str(outcome_of(config, lambda record: record["loss"].pop()).reason)
        assert "one for each of the steps" in reason


def test_steps_may_leave_the_host_some_time_to_launch_the_first_of_them(make_config):
    config = make_config()
    steps = config.workload.timed_steps
    assert outcome_of(config, set_to(window_ms=[1.5 * steps + 1] * 2)).status == "ok"
    assert outcome_of(config, set_to(window_ms=[1.5 * steps * 1.2 + 1] * 2)).status == "error"


def test_a_rate_above_the_peak_is_incorrect(make_config):
    """66.9 TFLOP/s in fp32 on each of two H200s."""
    config = make_config(seq_len=131072, kernel="math")
    environment = {"device_names": ["NVIDIA H200"] * 2}
    outcome = outcome_of(config, set_to(environment=environment))
    assert (outcome.status, outcome.measured) == ("incorrect", {})
    assert "TFLOP/s a device is above its peak of 67: the step did not do the work" in str(outcome.reason)
    slow = 1e3 * outcome_of(config).measured["hardware_flops"] / 2 / 60e12
    steps = config.workload.timed_steps
    times = {"rank_step_ms": [[slow] * steps] * 2, "window_ms": [slow * steps] * 2}
    columns = outcome_of(config, set_to(environment=environment, **times)).columns()
    assert columns["hfu"] == pytest.approx(60 / 66.9)


def test_what_a_rank_flags_stays_beside_what_the_driver_flags(make_config):
    config = make_config()
    assert outcome_of(config, set_to(flags=["fault_injected"])).measured["flags"] == ["short_window", "fault_injected"]


def test_a_failure_has_no_record_to_check(make_config):
    failed = Outcome("oom", "warmup", "no memory", "torch")
    assert checked(failed, make_config()) == failed


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_column_comes_from_where_it_is_declared_to_come_from(make_config, workload):
    config = make_config(workload=workload, seq_len=256)
    resolved = plan.resolve(config)
    record = record_of(config)
    named = {kind: {f.name for f in fields(kind)} for kind in (Identity, Outcome)}
    of_driver = named[Identity] | (named[Outcome] - {"measured", "environment"})
    assert of_driver <= of("driver")
    assert of("driver") - of_driver == {"schema_version", "digest", "node_environments", "proof"}
    assert {*asked_for(config, resolved)} == of("asked")
    assert {*derived(config, resolved.padded_seq_len, record, None)} == of("derived")
    assert {*record} - {"flags"} <= of("measured")


def of(source: str) -> set[str]:
    return {column.name for column in COLUMNS if column.source == source}


def test_columns_are_required_by_what_a_trial_can_be():
    cases = {case for column in COLUMNS for case in column.required}
    assert cases <= {
        "any",
        "perturbed",
        "arms",
        *PASS_KINDS,
        *(kind for kinds in PASS_KINDS.values() for kind in kinds),
    }
    assert cases >= {"any", "perturbed", "arms", *PASS_KINDS}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_record_without_a_required_column_is_refused_by_its_name(make_config, workload):
    config = make_config(workload=workload, seq_len=256)
    required = [c.name for c in COLUMNS if {"any", workload, config.workload.pass_kind} & {*c.required}]
    assert {"rank_step_ms", "environment"} <= {*required}
    for name in required:
        reason = f"the record is broken: {name}=null; expected a value, as every {workload} trial has"
        assert outcome_of(config, lambda record, name=name: record.pop(name)).reason == reason


def test_a_column_with_an_entry_a_rank_or_a_step_is_a_list_and_its_meaning_says_so():
    assert [c.name for c in COLUMNS if ("per rank" in c.doc) != (c.per == "rank")] == []
    assert all(pa.types.is_list(column.type) for column in COLUMNS if column.per or column.positive)


def test_a_trial_that_asks_whether_a_step_fits_has_no_times_and_needs_no_proof_at_the_timed_length(make_config):
    fit = {"workload__single_step": True, "workload__timed_steps": 1, "workload__fit": True}
    config = make_config(workload="train_step", **fit)
    unproven = ("sampled_rel_error", "sampled_grad_error", "identity_error", "timed_loss_error", "timed_max_loss_error")
    outcome = outcome_of(config, lambda record: [record.pop(name) for name in unproven])
    assert outcome.status == "ok", outcome.reason
    known = {name for name, value in outcome.measured.items() if value is not None}
    assert known & {column.name for column in COLUMNS if column.is_time} == set()
    assert {"loss", "peak_host_bytes", "hardware_flops"} <= known
