"""Which trials share a job, and for how long it is asked."""

from collections import Counter

import pytest

from sp_bench.cluster import packs
from sp_bench.config.parsing import ConfigError
from sp_bench.planning import plan
from sp_bench.planning.settings import DeadlinesConfig

DEADLINES = DeadlinesConfig(init=60, correctness=60, warmup=60, measure=120)
TRIAL_S = 3 * 60 + 60 + 60 + 2 * 120  # 540


@pytest.fixture
def on_gpus(make_config):
    return lambda **changes: make_config(hardware="h200", fabric="nvlink", kernel="cudnn", dtype="bfloat16", **changes)


def packed(configs, *, replicates=1, num_gpus=8, limit_minutes=1440, slowest_s=None):
    trials = plan.plan(configs, replicates, 0, num_gpus)
    return trials, packs.packs(trials, DEADLINES, slowest_s or {}, limit_minutes)


def test_all_methods_of_a_replicate_that_need_equally_many_gpus_share_a_job(on_gpus):
    configs = [
        on_gpus(method=m, sp_size=p, seq_len=s) for m in ("ulysses", "ring") for p in (2, 4) for s in (512, 1024)
    ]
    trials, found = packed(configs, replicates=3)
    assert [(pack.replicate, pack.gpus_per_node, len(pack.trials)) for pack in found] == [
        (replicate, num_gpus, 4) for replicate in range(3) for num_gpus in (2, 4)
    ]
    assert Counter(t.trial_id for pack in found for t in pack.trials) == Counter(t.trial_id for t in trials)
    assert {pack.minutes for pack in found} == {(300 + 4 * TRIAL_S + 59) // 60}
    assert packs.gpu_hours(found) == pytest.approx(3 * (2 + 4) * found[0].minutes / 60)


def test_trials_on_the_cpu_ask_for_no_gpu(make_config, on_gpus):
    _, found = packed([make_config(sp_size=4), make_config(sp_size=2), on_gpus(sp_size=2)])
    assert [(pack.gpus_per_node, len(pack.trials)) for pack in found] == [(0, 2), (2, 1)]


def test_what_cannot_run_gets_its_row_beside_the_most_gpus_and_takes_no_time(on_gpus):
    configs = [on_gpus(sp_size=2), on_gpus(sp_size=4), on_gpus(sp_size=3), on_gpus(sp_size=16, method="ring")]
    _, found = packed(configs)
    assert [(pack.gpus_per_node, len(pack.trials), pack.estimate_s) for pack in found] == [
        (2, 1, 300 + TRIAL_S),
        (4, 3, 300 + TRIAL_S),
    ]
    _, alone = packed([on_gpus(sp_size=16, method="ring")])
    assert alone == []


def test_a_block_too_long_for_one_job_is_parted_between_settings_and_never_between_methods(on_gpus):
    configs = [on_gpus(method=m, seq_len=s) for m in ("ulysses", "ring", "all_gather") for s in (512, 1024, 2048)]
    _, found = packed(configs, limit_minutes=60)  # six trials of nine minutes, and five minutes to start
    assert [len(pack.trials) for pack in found] == [6, 3]
    methods = [Counter(t.config.seq_len for t in pack.trials) for pack in found]
    assert all(count == 3 for each in methods for count in each.values())
    _, uncut = packed(configs, limit_minutes=20)  # one trial fits, three do not
    assert [(len(pack.trials), pack.minutes) for pack in uncut] == [(3, 20)] * 3
    assert all(pack.estimate_s == 300 + 3 * TRIAL_S for pack in uncut)


def test_a_trial_that_fits_no_job_is_refused_with_both_numbers(on_gpus):
    with pytest.raises(ConfigError) as refused:
        packed([on_gpus()], limit_minutes=13)
    assert "may take 9 min 00 s, and its job 5 min 00 s" in str(refused.value)
    assert "time_limit_minutes=13" in str(refused.value)
    packed([on_gpus()], limit_minutes=14)


def test_a_cell_that_was_measured_is_taken_to_need_twice_its_slowest_trial(on_gpus):
    trials, _ = packed([on_gpus()])
    _, (found,) = packed([on_gpus()], slowest_s={trials[0].cell_id: 30.0})
    assert found.estimate_s == 300 + 60
    _, (slow,) = packed([on_gpus()], slowest_s={trials[0].cell_id: 3000.0})  # its deadlines end it before
    assert slow.estimate_s == 300 + TRIAL_S


def test_gpu_hours_are_an_estimate_and_a_bound(on_gpus):
    trials, found = packed([on_gpus(method=m, sp_size=2, seq_len=131072) for m in ("ulysses", "ring")])
    likely = packs.likely_gpu_hours(found, {})
    assert likely is not None
    assert 0 < likely < packs.gpu_hours(found)
    measured = {trial.cell_id: 36.0 for trial in trials}
    gpus = sum(trial.config.gpus_per_node for trial in trials if not trial.unsupported_reason)
    assert packs.likely_gpu_hours(found, measured) == pytest.approx(gpus * 36 / 3600)
    assert packs.hours_text(found, measured).startswith("less than 0.1 GPU-hours, at most ")


def test_nothing_left_is_no_job():
    assert packs.packs([], DEADLINES, {}, 60) == []
