"""Other libraries' attention through its adapters, on real ranks: output, gradients, bytes, and what stays in the
process.

A test is skipped if its library is not installed. ring_flash_attn calls flash-attn, which has no CPU kernel. On gloo a
stand-in computes instead, so that these tests show which function gets which tokens, and say nothing about the kernel.
"""

import itertools
from fractions import Fraction
from typing import Any

import flash_attn_stand_in
import pytest
import torch.distributed as dist
from oracle import Case, mesh_of, on_meshes, relative_errors
from ranks import here, run, worlds
from test_gate import trial
from test_ledger import check, counted
from trials import row

from sp_bench import methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.hardware import package_versions
from sp_bench.methods import closed_forms

DEEPSPEED = MethodConfig("deepspeed_ulysses")
LAYOUTS = ("contiguous", "zigzag", "striped")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(package not in package_versions(), reason=f"{package} is not installed")


def check_deepspeed(rank: int, sp_size: int) -> None:
    mesh = mesh_of(methods.get(DEEPSPEED.name).layout(DEEPSPEED, sp_size))
    for (hq, hkv), causal, batch in itertools.product(((12, 12), (12, 4)), (True, False), (1, 2)):
        case = Case(DEEPSPEED, AttentionShape(batch, 12 * sp_size, hq, hkv, 8, causal, "float64"))
        errors = relative_errors(case, mesh)
        assert max(errors.values()) < 1e-13, f"{case} on rank {rank}: {errors}"
        check(case, mesh)


@needs("deepspeed")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(1, 2, 4), nccl=(1, 2, 4)))
def test_deepspeed_agrees_with_the_oracle_and_sends_what_the_closed_form_says(backend: str, sp_size: int) -> None:
    run(sp_size, check_deepspeed, sp_size, backend=backend)


def check_uneven_heads(rank: int, sp_size: int) -> None:
    mesh = mesh_of(methods.get(DEEPSPEED.name).layout(DEEPSPEED, sp_size))
    for hq, hkv in ((5, 5), (10, 5)):
        case = Case(DEEPSPEED, AttentionShape(2, 8 * sp_size, hq, hkv, 8, True, "float64"))
        errors = relative_errors(case, mesh)
        assert max(errors.values()) < 1e-13, f"{case} on rank {rank}: {errors}"
        sent: list[Any] = [None] * sp_size
        dist.all_gather_object(sent, counted(case, mesh))
        predicted = closed_forms.traffic(DEEPSPEED.name)(DEEPSPEED, case.shape, sp_size)
        assert {key: sum((s[key] for s in sent), Fraction(0)) / sp_size for key in predicted} == predicted
        # one KV head more: the output of its group goes to P-1 ranks; its own Q, K and V would have gone to another
        more = hq // hkv * (sp_size - 2) - 2
        assert (len({s["forward", "all_to_all"] for s in sent}) > 1) == (more != 0)


@needs("deepspeed")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(3, 4), nccl=(3, 4)))
def test_with_uneven_heads_deepspeed_sends_the_closed_form_on_average(backend: str, sp_size: int) -> None:
    run(sp_size, check_uneven_heads, sp_size, backend=backend)


def check_deepspeed_leaves_no_trace(rank: int) -> None:
    columns = row(trial(DEEPSPEED, 2))
    assert columns["rel_error_dq"] < 1e-6
    assert columns["comm_counted_bytes"] == columns["comm_predicted_bytes"] > 0
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.comm import comm  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    assert comm.cdb is None
    assert groups.mpu is None
    assert "__compatible_ops__" not in vars(deepspeed.ops)
    assert row(trial(MethodConfig("ulysses"), 2))["rel_error_dq"] < 1e-6


@needs("deepspeed")
def test_a_deepspeed_trial_passes_the_gate_and_so_does_the_next_one_in_its_processes() -> None:
    run(2, check_deepspeed_leaves_no_trace)


def ring_cases(sp_size: int) -> list[Case]:
    # float16, since flash-attn is for half precision: in float32 the library's casts alias its buffers
    return [
        Case(
            MethodConfig("ring_flash_attn", kind),
            AttentionShape(batch, 12 * sp_size, 4, hkv, 8, causal, "float16"),
            "flash_attn",
        )
        for kind, hkv, causal, batch in itertools.product(LAYOUTS, (4, 2), (True, False), (1, 2))
        if causal or kind == "contiguous"
    ]


def check_ring_flash_attn(rank: int, sp_size: int) -> None:
    if here().type == "cpu":
        flash_attn_stand_in.install()
    for case, mesh in on_meshes(ring_cases(sp_size)):
        errors = relative_errors(case, mesh)
        if case.method.layout == "contiguous":
            # dq is rounded to bfloat16 and back; rounding to float16 would have an error eight times smaller
            assert 1e-3 < errors.pop("dq") < 4e-3, f"{case} on rank {rank}"
        assert max(errors.values()) < 1e-3, f"{case} on rank {rank}: {errors}"
        check(case, mesh)


@needs("ring-flash-attn")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(2, 3, 4), nccl=(2, 3, 4, 8)))
def test_ring_flash_attn_takes_our_layouts_and_sends_dkv_home_in_fp32(backend: str, sp_size: int) -> None:
    if backend == "nccl" and "flash-attn" not in package_versions():
        pytest.skip("flash-attn is not installed, which ring-flash-attn calls on GPUs")
    run(sp_size, check_ring_flash_attn, sp_size, backend=backend)


def check_transformers_is_left_as_it_was(rank: int) -> None:
    flash_attn_stand_in.install()
    method = MethodConfig("ring_flash_attn", "zigzag")
    shape = AttentionShape(1, 16, 2, 2, 8, True, "float16")
    relative_errors(Case(method, shape, "flash_attn"), mesh_of(methods.get(method.name).layout(method, 2)))
    from transformers import modeling_flash_attention_utils as utils  # pyright: ignore[reportMissingImports]

    assert not hasattr(utils, "is_flash_attn_greater_or_equal_2_10")


@needs("ring-flash-attn")
def test_the_name_added_to_transformers_for_an_import_is_gone_afterwards() -> None:
    run(2, check_transformers_is_left_as_it_was)
