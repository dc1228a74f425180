"""How long trials keep GPUs busy: by rows of the same kind, else by constants."""

from dataclasses import replace

import pytest

from sp_bench.driver import proven
from sp_bench.planning import device_time, plan

DEVICE = "NVIDIA H200"


def row(**changed):
    """A step of 1 s: 3 warm-up steps, 5 timed ones and 3 others, and 19 s beside them."""
    return {
        "status": "ok",
        "hardware": "h200",
        "engine": "fsdp2",
        "isolation": "group",
        "evidence": "measured",
        "proof": None,
        "campaign": "c",
        "started_at": 0,
        "method": "ring",
        "kernel": "cudnn",
        "model": "qwen3_4b",
        "world_size": 2,
        "duration_s": 30.0,
        "phase_s": [("correctness", 20.0), ("measure", 4.0)],
        "hfu": 0.5,
        "window_ms": [4900.0, 5000.0],
        "median_step_ms": 1000.0,
        "warmup_steps": 3,
        "single_step": False,
    } | changed


@pytest.fixture
def config(make_config):
    return make_config(
        workload="train_step",
        hardware="h200",
        fabric="nvlink",
        model="qwen3_4b",
        dtype="bfloat16",
        kernel="cudnn",
        isolation="group",
        seq_len=32768,
    )


def test_rows_of_the_same_kind_say_what_is_beside_the_steps_and_which_rate_these_reach(config):
    kept = {"proof": "c/_proofs/x.json"}
    known = device_time.measured(
        [
            *(row(duration_s=90.0), row(started_at=1), row(started_at=2, duration_s=32.0)),
            *(row(started_at=3, duration_s=20.0, hfu=0.6, **kept), row(status="oom", duration_s=900.0)),
            row(hardware="h100", duration_s=90.0),
        ]
    )
    assert known[device_time.kind(config, relies=False, first=True)] == (0.5, 79.0)
    assert known[device_time.kind(config, relies=False, first=False)] == (0.5, 20.0)
    assert known[device_time.kind(config, relies=True, first=False)] == (0.6, 9.0)
    proves, relies = (device_time.trial_time(config, DEVICE, relies=relies, known=known) for relies in (False, True))
    assert proves is not None
    assert relies is not None
    steps = config.workload.warmup_steps + config.workload.timed_steps + device_time.OTHER_STEPS
    for time, share, beside_s in ((proves, 0.5, 20.0), (relies, 0.6, 9.0)):
        one_step_s = device_time.step_s(config, DEVICE, share)
        assert time == pytest.approx((beside_s + steps * one_step_s, config.workload.timed_steps * one_step_s))


def test_a_row_without_times_says_what_is_beside_its_timed_steps_and_no_rate(config):
    shared = row(hfu=None, median_step_ms=None, window_ms=None)  # ranks that share a GPU
    known = device_time.measured([shared, row(duration_s=float("nan"))])
    assert known == {device_time.kind(config, relies=False, first=True): (device_time.LIKELY_SHARE, 26.0)}


def test_the_first_trial_with_each_code_takes_longer(config):
    ring = replace(config, method=replace(config.method, name="ring"))
    assert device_time.firsts([config, ring, config, ring, config]) == [True, True, False, False, False]
    first, later = (device_time.trial_time(config, DEVICE, first=first) for first in (True, False))
    assert first.whole > later.whole
    assert first.timed == later.timed


def test_without_rows_of_the_kind_it_is_a_guess_and_shorter_for_who_relies(config):
    known = device_time.measured([row(hardware="h100", duration_s=900.0), row(evidence="one_rank", proof="x")])
    guesses = [device_time.trial_time(config, DEVICE, relies=relies, known=known) for relies in (False, True)]
    assert guesses == [device_time.trial_time(config, DEVICE, relies=relies) for relies in (False, True)]
    assert guesses[0].whole > guesses[1].whole
    assert guesses[0].timed == guesses[1].timed


def test_replicates_between_the_first_and_the_sixth_are_likely_to_rely(config):
    trials = plan.plan([config], 7, 0, None)
    assert [proven.is_likely(trial, "auto") for trial in trials] == [False, True, True, True, True, False, True]
    assert not any(proven.is_likely(trial, "always") for trial in trials)


def test_each_trial_with_sinks_proves_itself(make_config):
    trials = plan.plan([make_config(method="ring", sp_size=2, workload__sinks=True)], 3, 0, None)
    assert not any(proven.is_likely(trial, "auto") for trial in trials)
