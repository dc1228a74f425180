"""yunchang's attention on real ranks: output, gradients, bytes, which tokens each rank takes, and what stays in the
process.

It calls flash-attn, which has no CPU kernel. On gloo a stand-in computes instead. In a ring of one rank, the rank sends
dK/dV to itself, which gloo cannot do. On gloo a copy stands in for that message.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import flash_attn_stand_in
import pytest
import torch
import torch.distributed as dist
from oracle import Case, global_tensors, mesh_of, on_meshes, relative_errors
from ranks import here, run, worlds
from test_ledger import check
from test_libraries import LAYOUTS, needs

from sp_bench import methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.hardware import package_versions


def needs_flash_attn(backend: str) -> None:
    if backend == "nccl" and "flash-attn" not in package_versions():
        pytest.skip("flash-attn is not installed, which yunchang calls on GPUs")


def options(sp_size: int) -> list[MethodConfig]:
    """Each degree, placement and layout."""
    usp = [
        MethodConfig("yunchang", kind, "usp", degree, placement)
        for degree in range(1, sp_size + 1)
        if sp_size % degree == 0
        for kind in LAYOUTS
        for placement in ("ulysses_inner", "ring_inner")
        if placement == "ulysses_inner" or 1 < degree < sp_size
    ]
    return [MethodConfig("yunchang", "contiguous", "ulysses"), *usp]


def cases(sp_size: int) -> list[Case]:
    # float16, as flash-attn is for half precision: in float32 the library's casts alias its buffers
    chosen = []
    for method, hkv, causal, batch in itertools.product(options(sp_size), (12, 4, 1), (True, False), (1, 2)):
        shape = AttentionShape(batch, 12 * sp_size, 12, hkv, 8, causal, "float16")
        if methods.get("yunchang").unsupported_reason(method, "flash_attn", shape, sp_size) is None:
            chosen.append(Case(method, shape, "flash_attn"))
    return chosen


def copying_to_itself(exchange: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """`batch_isend_irecv` for alternating sends and receives, with a copy for what a rank sends to itself."""

    def exchange_or_copy(operations: Sequence[Any]) -> Any:
        if operations[0].peer != dist.get_rank():
            return exchange(operations)
        for send, receive in zip(operations[::2], operations[1::2], strict=True):
            receive.tensor.copy_(send.tensor)
        return []

    return exchange_or_copy


def stand_in_for_what_the_cpu_lacks() -> None:
    flash_attn_stand_in.install()
    patch.object(dist, "batch_isend_irecv", copying_to_itself(dist.batch_isend_irecv)).start()


def check_yunchang(rank: int, sp_size: int) -> None:
    if here().type == "cpu":
        stand_in_for_what_the_cpu_lacks()
    for case, mesh in on_meshes(cases(sp_size)):
        errors = relative_errors(case, mesh)
        if (case.method.variant, case.method.layout) == ("usp", "contiguous"):
            # dq is rounded to bfloat16 and back; rounding to float16 would have an error eight times smaller
            assert 1e-3 < errors.pop("dq") < 4e-3, f"{case} on rank {rank}"
        assert max(errors.values()) < 1e-3, f"{case} on rank {rank}: {errors}"
        check(case, mesh)


@needs("yunchang")
@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(2, 3, 4), nccl=(2, 3, 4)))
def test_yunchang_takes_our_layouts_and_sends_dkv_home_in_fp32(backend: str, sp_size: int) -> None:
    needs_flash_attn(backend)
    run(sp_size, check_yunchang, sp_size, backend=backend)


def check_groups_and_tokens(rank: int) -> None:
    """yunchang's own groups are ours. Its own way to cut a sequence gives our layouts; where adjacent ranks are ring
    neighbours, only its zigzag does."""
    stand_in_for_what_the_cpu_lacks()
    from yunchang import EXTRACT_FUNC_DICT, set_seq_parallel_pg  # pyright: ignore[reportMissingImports]
    from yunchang.globals import PROCESS_GROUP  # pyright: ignore[reportMissingImports]

    from sp_bench.methods.yunchang import _RING_IMPL_TYPES

    degree, length = 2, 48
    for placement, kind in itertools.product(("ulysses_inner", "ring_inner"), LAYOUTS):
        method = MethodConfig("yunchang", kind, "usp", degree, placement)
        layout = methods.get("yunchang").layout(method, 4)
        set_seq_parallel_pg(degree, layout.ring_degree, rank, 4, use_ulysses_low=placement == "ulysses_inner")
        mesh = mesh_of(layout)
        for axis, group in (("ulysses", PROCESS_GROUP.ULYSSES_PG), ("ring", PROCESS_GROUP.RING_PG)):
            assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(mesh.get_group(axis))
        tokens = torch.arange(length).view(1, length, 1)
        extract = EXTRACT_FUNC_DICT[_RING_IMPL_TYPES[kind]]
        taken = extract(tokens, rank, 4, rd=layout.ring_degree, ud=degree).flatten().tolist()
        ours = taken == layout.global_positions(rank, length)
        assert ours == (placement == "ulysses_inner" or kind == "zigzag" or rank in (0, 3)), (placement, kind, rank)


@needs("yunchang")
def test_its_groups_are_ours_and_so_are_its_shards_where_adjacent_ranks_exchange_heads() -> None:
    run(4, check_groups_and_tokens)


def check_torch_attention(rank: int) -> None:
    """Why the adapter takes no other kernel: without flash-attn yunchang has a forward, but no backward."""
    stand_in_for_what_the_cpu_lacks()
    from yunchang import LongContextAttention, set_seq_parallel_pg  # pyright: ignore[reportMissingImports]
    from yunchang.kernels import AttnType  # pyright: ignore[reportMissingImports]

    shape = AttentionShape(1, 16, 2, 2, 8, False, "float32")
    q, k, v, _ = (x.chunk(2, dim=1)[rank].float().requires_grad_() for x in global_tensors(shape))
    set_seq_parallel_pg(2, 1, rank, 2)
    out = LongContextAttention(attn_type=AttnType.TORCH_MATH)(q, k, v)
    with pytest.raises(RuntimeError, match="Not implemented backward for PyTorch attention types"):
        out.sum().backward()
    flash = LongContextAttention(attn_type=AttnType.TORCH_FLASH)
    with pytest.raises(NotImplementedError, match="with arguments from the 'CPU' backend"):
        flash(q, k, v)

    # a ring merges by log-sum-exp, which yunchang's torch attention gives as zeros: every shard has the same weight
    set_seq_parallel_pg(1, 2, rank, 2)
    merged = LongContextAttention(attn_type=AttnType.TORCH_MATH)(q, k, v)
    assert float((merged - out).norm() / out.norm()) > 1e-2


@needs("yunchang")
def test_its_torch_attention_has_no_backward_and_no_log_sum_exp() -> None:
    run(2, check_torch_attention)


def check_no_trace(rank: int) -> None:
    stand_in_for_what_the_cpu_lacks()
    from yunchang.globals import PROCESS_GROUP  # pyright: ignore[reportMissingImports]

    shape = AttentionShape(1, 16, 2, 2, 8, True, "float16")
    for method in (MethodConfig("yunchang", "zigzag", "usp", 1), MethodConfig("yunchang", "contiguous", "ulysses")):
        before = {"ULYSSES_PG": None, "RING_PG": None}
        assert vars(PROCESS_GROUP) == before
        relative_errors(Case(method, shape, "flash_attn"), mesh_of(methods.get(method.name).layout(method, 2)))
        assert vars(PROCESS_GROUP) == before


@needs("yunchang")
def test_closing_takes_our_groups_out_of_its_globals() -> None:
    run(2, check_no_trace)
