"""Options of engines from outside: a trial whose library ignores one must not end as `ok`.

A test is skipped if its libraries are not installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run
from test_engines import HF, as_a_rank, needs
from trials import TRAIN, job, trial

from sp_bench.config.trial import EngineConfig, KernelConfig, MethodConfig, TrialConfig
from sp_bench.engines import trl_sft
from sp_bench.workloads import train_step

RECOMPUTED = replace(TRAIN, activation_checkpointing="full")


def shared(engine: str, **fields: Any) -> TrialConfig:
    """Two ranks of a sequence."""
    return trial(MethodConfig(HF), 2, **{"engine": EngineConfig(engine), "kernel": KernelConfig("cpu_flash")} | fields)


@contextmanager
def offload_from_a_cpu(**options: Any) -> Iterator[None]:
    """TRL's activation offloading, which takes the CPU for an accelerator: it copies from host memory to host memory,
    none of it page-locked."""
    from trl.models.activation_offloading import (  # pyright: ignore[reportMissingImports]
        get_act_offloading_ctx_manager,
    )

    open_context = partial(get_act_offloading_ctx_manager, use_pin_memory=False, use_streams=False, **options)
    with (
        mock.patch("torch.accelerator.current_accelerator", lambda *_, **__: torch.device("cpu")),
        mock.patch("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", open_context),
    ):
        yield


def check_offload_of_trl(rank: int, smallest: int) -> None:
    as_a_rank(rank, 1)
    real = trl_sft.stack

    def offloading(config: TrialConfig) -> Any:
        stack = real(config)
        return replace(stack, own_arguments=stack.own_arguments | {"activation_offloading": True})

    config = trial(MethodConfig("single"), 1, engine=EngineConfig("trl_sft"), workload=RECOMPUTED)
    with (
        mock.patch.object(trl_sft, "stack", offloading),
        offload_from_a_cpu(min_offload_size=smallest),
        pytest.raises(AttributeError, match="'ds_status'"),
    ):
        train_step.run(job(config))


@needs("deepspeed", "transformers", "accelerate", "trl")
@pytest.mark.parametrize("smallest", [1024, 2**30])  # bytes that are moved; what stays comes back as a plain tensor too
def test_trls_loss_does_not_find_the_head_under_its_own_offloading(smallest: int) -> None:
    """So `workload.checkpoint_offload` is refused. If this fails, TRL can do it: count what it moves, and allow it."""
    run(1, check_offload_of_trl, smallest)
