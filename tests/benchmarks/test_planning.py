"""How long it takes to plan; no trial is launched."""

from dataclasses import replace

from sp_bench.driver import plan
from sp_bench.driver.sweep import with_options


def test_plan_10_000_trial_configs(benchmark, make_config):
    base = make_config(method="ring", kernel="math")
    configs = [replace(base, seq_len=8 * n, seed=seed) for n in range(1, 1001) for seed in range(10)]
    trials = benchmark.pedantic(plan.plan, (configs, 1, 0, None), rounds=3)
    assert len(trials) == 10_000


def test_identify_one_cell(benchmark, make_config):
    assert len(benchmark(plan.cell_id, make_config())) == 12


def test_set_options_of_one_point(benchmark, make_config):
    composed = make_config(method="ring").to_mapping()
    options = {"seq_len": 4096, "sp_size": 4, "method.layout": "striped"}
    assert benchmark(with_options, composed, options)["sp_size"] == 4
