"""torch's context parallelism through its adapter, on real ranks: output, gradients, bytes, and what stays in the
process.

It has kernels for CUDA only. On gloo a stand-in computes instead of aten's flash attention. So gloo tests all the rest:
DTensor's dispatch, the rotation, the merging, and which tokens each rank holds.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import sdpa_stand_in
import torch
from oracle import Case, mesh_of, on_meshes, relative_errors
from ranks import here, run, worlds
from test_gate import trial
from test_ledger import check
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from trials import TRAIN, job, row
from trials import trial as training_trial

from sp_bench import kernels, methods
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.workloads import train_step

NAME = "torch_context_parallel"
VARIANTS = ("allgather", "alltoall")
LAYOUTS = ("contiguous", "zigzag")
ZIGZAG = MethodConfig(NAME, "zigzag", "alltoall")


def cases(sp_size: int, dtype: str, kernel: str) -> list[Case]:
    """On GPUs with sizes that GPU kernels take."""
    seq_len, head_dim = (64 * sp_size, 64) if here().type == "cuda" else (4 * sp_size, 8)
    return [
        Case(MethodConfig(NAME, kind, variant), AttentionShape(batch, seq_len, 4, hkv, head_dim, causal, dtype), kernel)
        for kind, variant, hkv, causal in itertools.product(LAYOUTS, VARIANTS, (4, 2, 1), (True, False))
        for batch in [1 + (hkv // 2 + causal) % 2]  # by turns: each kind of heads, and of mask, has both
        if causal or kind == "contiguous"
    ]


def check_oracle(rank: int, sp_size: int, kernel: str) -> None:
    dtype, tolerance = "bfloat16", 1e-2
    if here().type == "cpu":
        sdpa_stand_in.install()
        dtype, tolerance = "float32", 1e-6
    for case, mesh in on_meshes(cases(sp_size, dtype, kernel)):
        errors = relative_errors(case, mesh)
        assert max(errors.values()) < tolerance, f"{case} on rank {rank}: {errors}"
        # half precision, so that dK/dV in fp32 take twice the bytes
        check(replace(case, shape=replace(case.shape, dtype="bfloat16")), mesh)


@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(1, 2, 3, 4), nccl=(1, 2, 4, 8)))
def test_it_agrees_with_the_oracle_and_sends_dkv_home_in_fp32(backend: str, sp_size: int) -> None:
    run(sp_size, check_oracle, sp_size, "sdpa_flash", backend=backend)


@pytest.mark.parametrize(("backend", "sp_size"), worlds(nccl=(2, 4)))
def test_it_agrees_with_the_oracle_with_the_cudnn_backend_too(backend: str, sp_size: int) -> None:
    run(sp_size, check_oracle, sp_size, "cudnn", backend=backend)


def check_layout(rank: int, sp_size: int) -> None:
    """torch itself gives each rank the tokens that our layout says."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention as state

    seq_len = 12 * sp_size
    for kind in LAYOUTS:
        layout = methods.get(NAME).layout(MethodConfig(NAME, kind, VARIANTS[0]), sp_size)
        state._cp_options.enable_load_balance = kind == "zigzag"
        positions = torch.arange(seq_len)
        with context_parallel(mesh_of(layout)["ring"], buffers=[positions], buffer_seq_dims=[0]):
            assert positions.tolist() == layout.global_positions(rank, seq_len)


@pytest.mark.parametrize("sp_size", [2, 3])
def test_its_load_balancing_is_our_zigzag_layout(sp_size: int) -> None:
    run(sp_size, check_layout, sp_size)


def process_state() -> dict[str, Any]:
    """The state of the process that context_parallel and the adapter change."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as state
    from torch.distributed.tensor.experimental._context_parallel import _sharding_rules

    return {
        "sdpa": functional.scaled_dot_product_attention,
        "options": dict(vars(state._cp_options)),
        "mode": state._dispatch_mode,
        "replaced": dict(state._replaced_functions),
        "handlers": dict(DTensor._op_dispatcher._custom_op_handlers),
        "rules": dict(_sharding_rules._cp_strategy_contexts),
        "backends": (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()),
    }


def opened(mesh: DeviceMesh, shape: AttentionShape):
    return methods.get(NAME).open(ZIGZAG, kernels.get("sdpa_flash"), shape, mesh)


def check_state(rank: int) -> None:
    before = process_state()
    mesh = mesh_of(methods.get(NAME).layout(ZIGZAG, 2))
    shape = AttentionShape(1, 8, 2, 2, 8, True, "float32")
    with opened(mesh, shape):
        within = process_state()
        assert all(within[name] != before[name] for name in before if name != "mode")
    assert process_state() == before
    with pytest.raises(ValueError, match="out of luck"), opened(mesh, shape):
        raise ValueError("out of luck")
    assert process_state() == before


def test_what_it_changes_in_the_process_is_restored_also_after_an_error() -> None:
    run(2, check_state)


def check_gate(rank: int) -> None:
    sdpa_stand_in.install()
    for variant in VARIANTS:
        asked = trial(replace(ZIGZAG, variant=variant), 2)
        columns = row(replace(asked, kernel=KernelConfig("sdpa_flash")))
        assert columns["rel_error_dq"] < 1e-6
        assert columns["comm_counted_bytes"] == columns["comm_predicted_bytes"] > 0
        assert row(trial(MethodConfig("ulysses"), 2))["rel_error_dq"] < 1e-6


def test_its_trials_pass_the_gate_and_so_does_the_next_trial_in_their_processes() -> None:
    run(2, check_gate)


def check_training(rank: int) -> None:
    sdpa_stand_in.install()
    parallel = (("dp_shard_size", "full"), ("dp_replicate_size", "selective"))
    for variant, (data_parallel, checkpointing) in zip(VARIANTS, parallel, strict=True):
        recomputed, method = replace(TRAIN, activation_checkpointing=checkpointing), replace(ZIGZAG, variant=variant)
        config = training_trial(method, 2, seq_len=45, workload=recomputed, **{data_parallel: 2})
        measurement = train_step.run(job(replace(config, kernel=KernelConfig("sdpa_flash"))))
        counted = {key: size for key, (_, size) in measurement.counts.items() if size and key[0] != "other"}
        assert counted == measurement.predicted, config


def test_a_decoder_trains_on_it_beside_data_parallel_ranks_and_with_recomputation() -> None:
    run(4, check_training)


def check_cpu(rank: int) -> None:
    mesh = mesh_of(methods.get(NAME).layout(ZIGZAG, 2))
    q, k, v = (torch.ones(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    missing = "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy"
    with (
        opened(mesh, AttentionShape(1, 8, 2, 2, 8, True, "float32")) as attention,
        pytest.raises(NotImplementedError, match=missing),
    ):
        attention(q, k, v)


def test_without_a_stand_in_it_has_no_rule_for_the_op_that_sdpa_chooses_on_cpu() -> None:
    run(2, check_cpu)
