"""workload.timed_steps=auto on real ranks: all of them take as many steps, whoever's loop it is."""

import importlib
import itertools
from dataclasses import replace

import pytest
from ranks import run
from test_engines import WITH_TRL, as_a_rank, needs
from trials import TRAIN, row, trial

from sp_bench.config import workload
from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig

ATTENTION = WorkloadConfig("attention", "forward_backward", True, 2, "auto", 48, attribution=True)
TRAINS = replace(TRAIN, warmup_steps=2, timed_steps="auto")


def check(rank: int, *configs: TrialConfig) -> None:
    """On ranks whose clocks differ tenfold, so that each alone would take another number."""
    as_a_rank(rank, 2)
    workload.TIMED_S = 0.1
    timing = importlib.import_module("sp_bench.measure.timing")
    honest, factor = timing.time.perf_counter, 10.0**rank
    for config in configs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timing.time, "perf_counter", lambda: factor * honest())
            columns = row(config)
        numbers = {len(steps) for steps in columns["rank_step_ms"]}
        assert numbers == {columns["timed_steps"]}
        assert workload.FEWEST_TIMED_STEPS <= columns["timed_steps"] <= config.workload.most_timed_steps
        lengths = {name: len(columns[name]) for name in ("loss", "comm_only_step_ms") if columns.get(name)}
        assert set(lengths.values()) == numbers, lengths


def test_ranks_agree_on_the_steps_of_attention_and_training() -> None:
    methods = MethodConfig("ulysses"), MethodConfig("ring", "zigzag", dkv_dtype="input")
    run(2, check, *(trial(m, 2, workload=w) for m, w in itertools.product(methods, (ATTENTION, TRAINS))))


@needs("deepspeed", "transformers", "accelerate")
@pytest.mark.parametrize("name", ["deepspeed", "hf_deepspeed", "hf_trainer", WITH_TRL])
def test_loops_of_other_libraries_end_with_the_last_step(name: str) -> None:
    method = MethodConfig("ulysses") if name == "deepspeed" else MethodConfig("deepspeed_ulysses_hf")
    engine = EngineConfig(name) if name == "deepspeed" else EngineConfig(name, variable_seq_len=False)
    kernel = KernelConfig("math" if name == "deepspeed" else "cpu_flash")
    run(2, check, trial(method, 2, workload=TRAINS, engine=engine, kernel=kernel))
