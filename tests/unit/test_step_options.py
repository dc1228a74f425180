"""Options of a training step: what is asked for, and whose cell it is."""

from dataclasses import replace

import pytest

from sp_bench.config.options import canonical
from sp_bench.config.parsing import ConfigError
from sp_bench.measure.timing import num_steps
from sp_bench.planning import plan


def test_eager_code_is_the_cell_of_old_rows_and_compiled_code_is_not(make_config):
    said, unsaid, compiled = (
        make_config(workload="train_step", workload__model_code=code) for code in ("eager", None, "compiled")
    )
    assert canonical(said) == canonical(unsaid) != canonical(compiled)


def test_compiled_code_is_compiled_in_a_warm_up_step(make_config):
    for workload in ("train_step", "parity"):
        with pytest.raises(ConfigError, match="the first of them compiles the model's code; use 1 or more"):
            make_config(workload=workload, workload__model_code="compiled", workload__warmup_steps=0)
    with pytest.raises(ConfigError, match="workload attention takes no optimizer step"):
        make_config(workload__model_code="compiled")


SINGLE = {"workload": "train_step", "workload__single_step": True, "workload__warmup_steps": 0}
H200 = {"kernel": "cudnn", "fabric": "nvlink", "hardware": "h200", "dtype": "bfloat16", "model": "qwen3_0_6b"}


def test_a_single_step_is_one_timed_step(make_config):
    single = make_config(**SINGLE, workload__timed_steps=1)
    assert num_steps(single.workload) == 1
    assert num_steps(replace(single.workload, warmup_steps=1)) == 2
    assert canonical(single) != canonical(replace(single, workload=replace(single.workload, single_step=False)))
    with pytest.raises(ConfigError, match="timed_steps=5; it is for workload=train_step with timed_steps=1"):
        make_config(**SINGLE, workload__timed_steps=5)


@pytest.mark.parametrize(
    ("seq_len", "device", "measure_s", "refused"),
    [
        (1_048_576, "NVIDIA H200", 600, False),  # predicted: 376 s
        (1_048_576, "NVIDIA H200", 480, True),
        (1_048_576, "a device of unknown peak", 480, False),
        (1_048_576, None, 480, True),  # by the name of the hardware
        (1_048_576, None, 600, False),
        (16_384, "NVIDIA H200", 130, False),
    ],
)
def test_a_single_step_that_would_miss_its_deadline_is_refused(make_config, seq_len, device, measure_s, refused):
    config = make_config(**SINGLE, **H200, workload__timed_steps=1, seq_len=seq_len)
    (trial,) = plan.plan([config], 1, 0, 2, device_name=device, measure_s=measure_s)
    assert ("deadlines.measure=480; use 4" in str(trial.unsupported_reason)) == refused, trial.unsupported_reason
    assert refused or trial.unsupported_reason is None


@pytest.mark.parametrize("checkpointing", ["none", "selective_mlp"])
def test_tiles_of_an_mlp_whose_results_are_kept_are_refused(make_config, checkpointing):
    with pytest.raises(ConfigError, match="use full, selective or selective_output"):
        make_config(
            workload="train_step",
            workload__activation_checkpointing=checkpointing,
            workload__mlp_tile_tokens=64,
        )
