"""How long it takes to plan; no trial is launched."""

import subprocess
import sys
from dataclasses import replace

import pytest

from sp_bench.planning import plan
from sp_bench.planning.sweep import with_options


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


@pytest.mark.load
def test_plan_5000_trials_of_a_cluster_with_packs_and_gpu_hours(benchmark, tmp_path):
    methods = "method=ulysses,ring,all_gather,upipe,double_ring"
    sizes = ("sp_size=8,16", "num_nodes=1,2", "seq_len=range(4096,204801,4096)", "replicates=5")
    gpus = ("hardware=h200", "fabric=nvlink", "kernel=cudnn", "dtype=bfloat16", "deadlines.measure=60")
    words = ("plan", methods, *sizes, *gpus, "model=llama3_8b", "--cluster", "slurm")
    command = [sys.executable, "-m", "sp_bench", *words]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    done = benchmark.pedantic(subprocess.run, (command,), options, rounds=3)
    assert done.stdout.splitlines()[-1].startswith("5000 trials: ")
