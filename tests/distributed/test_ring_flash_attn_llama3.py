"""ring-flash-attn's KV all-gather on real ranks: output, gradients and bytes, with every head stride.

It calls flash-attn, which has no CPU kernel. On gloo a stand-in computes instead.
"""

import itertools

import flash_attn_stand_in
import pytest
from oracle import Case, mesh_of, relative_errors
from ranks import here, run, worlds
from test_ledger import check, counted
from test_libraries import needs

from sp_bench import methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.hardware import package_versions

NAME = "ring_flash_attn_llama3"


def cases(sp_size: int) -> list[Case]:
    """MHA, GQA and MQA, with each stride that divides the KV heads."""
    return [
        Case(
            MethodConfig(NAME, head_stride=stride),
            AttentionShape(1, 12 * sp_size, 4, hkv, 8, causal, "float16"),
            "flash_attn",
        )
        for hkv, causal, stride in itertools.product((4, 2, 1), (True, False), (None, 1, 2))
        if stride is None or hkv % stride == 0
    ]


def check_cases(rank: int, sp_size: int) -> None:
    if here().type == "cpu":
        flash_attn_stand_in.install()
    mesh = mesh_of(methods.get(NAME).layout(MethodConfig(NAME), sp_size))
    for case in cases(sp_size):
        errors = relative_errors(case, mesh)
        # dK/dV are summed over the ranks in float16
        assert max(errors.values()) < 1e-3, f"{case} on rank {rank}: {errors}"
        check(case, mesh)
        ours = Case(MethodConfig("all_gather", dkv_dtype="input"), case.shape, "math")
        assert counted(case, mesh) == counted(ours, mesh), str(case)


@needs("ring-flash-attn")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(1, 2, 3, 4), nccl=(1, 2, 4, 8)))
def test_it_agrees_with_the_oracle_and_sends_the_bytes_of_our_all_gather(backend: str, sp_size: int) -> None:
    if backend == "nccl" and "flash-attn" not in package_versions():
        pytest.skip("flash-attn is not installed, which ring-flash-attn calls on GPUs")
    run(sp_size, check_cases, sp_size, backend=backend)
