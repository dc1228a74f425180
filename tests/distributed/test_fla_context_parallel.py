"""flash-linear-attention's context parallelism on real gloo ranks: its own code and kernels, which Triton interprets.

Three things of it that a CPU lacks stand in: the tuning of kernels, a gather into a tensor of another shape, which NCCL
takes, and the check that there is a GPU.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from oracle import Case, on_meshes
from ranks import here, run
from test_windows_libraries import needs
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import kernels, methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.measure import ledger
from sp_bench.methods import closed_forms
from sp_bench.oracle import delta as oracle
from sp_bench.workloads.step import attention_step

SHAPE = AttentionShape(*(1, 0, 4, 2, 16, True, "float32"), gated_delta=True)
CASES = [Case(MethodConfig("fla_context_parallel", layout), SHAPE, "fla") for layout in ("contiguous", "zigzag")]


class Int(int):
    def to(self, dtype: object) -> "Int":
        return self


@contextmanager
def interpreted() -> Iterator[None]:
    os.environ["TRITON_INTERPRET"] = "1"  # read as a kernel is declared: what a rank's parent has imported goes
    for name in [each for each in sys.modules if each.startswith("triton") and not each.startswith("triton._C")]:
        del sys.modules[name]
    import fla.ops.common.chunk_delta_h as states  # pyright: ignore[reportMissingImports]
    import fla.ops.cp.chunk_bwd as backward  # pyright: ignore[reportMissingImports]
    import fla.ops.cp.chunk_delta_h as passing  # pyright: ignore[reportMissingImports]
    import fla.ops.cp.chunk_fwd as forward  # pyright: ignore[reportMissingImports]
    import fla.ops.cp.chunk_merge as merging  # pyright: ignore[reportMissingImports]
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    def untuned(self: Any, *args: Any, **options: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        return self.fn.run(*args, **options, **self.configs[0].kwargs)

    def gathered(own: Any, group: Any) -> tuple[Any, None]:
        whole = own.new_empty(group.size(), *own.shape)
        dist.all_gather_into_tensor(whole.flatten(0, 1), own, group=group)
        return whole, None

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(Autotuner, "run", untuned))
        patched.enter_context(mock.patch.object(passing, "all_gather_into_tensor", gathered))
        for module in (passing, forward, backward, merging):
            if hasattr(module, "_check_cp_device"):
                patched.enter_context(mock.patch.object(module, "_check_cp_device"))
        with mock.patch.object(states, "range", lambda *ends: map(Int, range(*ends)), create=True):
            yield


def check_all(rank: int, sp_size: int) -> None:
    with interpreted():
        for case, mesh in on_meshes(replace(case, shape=replace(SHAPE, seq_len=96 * sp_size)) for case in CASES):
            check(case, mesh, rank, sp_size)


def check(case: Case, mesh: DeviceMesh, rank: int, sp_size: int) -> None:
    inputs = oracle.random_inputs(case.shape, here(), 0)
    want = oracle.results(oracle.recurrence, [x.double() for x in inputs])
    with methods.opened(case.method, kernels.get("fla"), case.shape, mesh) as attention, ledger.Ledger() as book:
        held = attention.layout.global_positions(rank, case.shape.seq_len)
        got = attention_step([x[:, held] for x in inputs], attention)
    for name, found, right in zip(oracle.RESULTS, got, want, strict=True):
        assert float((found - right[:, held]).norm() / right.norm()) < 1e-6, f"{case} on rank {rank}: {name}"
    sent = {key: size for key, (_, size) in book.counts.items() if size}
    assert sent == closed_forms.traffic(case.method.name)(case.method, case.shape, sp_size), str(case)


@needs("fla-core", "triton")
@pytest.mark.parametrize("sp_size", [2, 3])
def test_it_is_right_in_both_layouts_and_sends_the_closed_form(sp_size: int) -> None:
    run(sp_size, check_all, sp_size)
