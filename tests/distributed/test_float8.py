"""Training steps whose layers multiply in FP8, on gloo ranks: each proves itself, and sends what is predicted."""

import functools
from dataclasses import replace

import pytest
import torch
from ranks import run
from test_train_step import check_counted_bytes
from trials import PARITY, TRAIN, job, trial

from sp_bench.config.method import MethodConfig
from sp_bench.hardware import package_versions
from sp_bench.workloads import parity

pytestmark = pytest.mark.skipif("torchao" not in package_versions(), reason="torchao is not installed")
KINDS = ("float8_rowwise", "float8_tensorwise")
METHODS = {1: MethodConfig("single"), 2: MethodConfig("ring", "zigzag", dkv_dtype="input")}
FP8 = replace(TRAIN, timed_steps=1, correctness_seq_len=64)


def check(rank: int, world_size: int, kind: str, checkpointing: str, backend: str | None = None) -> None:
    if backend is not None:
        torch.compile = functools.partial(torch.compile, backend=backend)
    code = {} if backend is None else {"model_code": "compiled", "warmup_steps": 1}
    workload = replace(FP8, linear_dtype=kind, activation_checkpointing=checkpointing, micro_batches=2, **code)
    config = trial(METHODS[world_size], world_size, seq_len=128, dtype="bfloat16", workload=workload)
    found = check_counted_bytes(config).columns
    for name in ("float8_grad_error", "float8_product_error"):
        assert found[name]["error"] < found[name]["budget"], found


CHECKPOINTING = ["none", *(pytest.param(c, marks=pytest.mark.faults) for c in ("full", "selective_output"))]


@pytest.mark.parametrize("checkpointing", [*CHECKPOINTING, "selective_mlp"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_fp8_is_as_far_off_as_rounding_makes_it(kind: str, checkpointing: str) -> None:
    run(2, check, 2, kind, checkpointing)


@pytest.mark.parametrize("checkpointing", ["none", "selective_mlp"])
@pytest.mark.parametrize(("world_size", "kind"), [(1, KINDS[0]), (2, KINDS[1])])
def test_a_traced_step_in_fp8_is_the_same(world_size: int, kind: str, checkpointing: str) -> None:
    """torch.compile cuts each part into graphs, and the ranks run them as they are."""
    run(world_size, check, world_size, kind, checkpointing, "aot_eager_decomp_partition")


def check_parity(rank: int, world_size: int, kind: str) -> None:
    config = trial(METHODS[2], 2, seq_len=64, dtype="bfloat16", workload=replace(PARITY, linear_dtype=kind))
    found = parity.run(job(config)).columns
    assert 0 < found["max_nll_difference"] <= parity.FLOAT8_FACTOR * found["control_nll_difference"]


@pytest.mark.parametrize("kind", KINDS)
def test_training_in_fp8_over_two_ranks_stays_as_near_to_bf16_as_on_one(kind: str) -> None:
    run(2, check_parity, 2, kind)
