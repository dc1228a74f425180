"""Identities of attention's results hold for right methods, and tell which gradient is wrong without a reference."""

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from oracle import Case, mesh_of, on_meshes
from ranks import run
from test_methods import method_configs
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import kernels, methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.kernels import math
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import identities
from sp_bench.oracle.identities import IDENTITIES, budget, check_identities
from sp_bench.workloads.step import attention_step, local_inputs

OUT, DQ, DK, DV = range(4)
scores = math._scores
Wrong = Callable[[Tensor], Tensor]


def shape(causal: bool, dtype: str, seq_len: int = 240) -> AttentionShape:
    return AttentionShape(2, seq_len, 8, 2, 16, causal, dtype)


def results(case: Case, mesh: DeviceMesh) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's inputs and results."""
    inputs = local_inputs(case.shape, case.shape.seq_len // 2, torch.device("cpu"), seed=mesh.get_rank())
    with methods.get(case.method.name).open(case.method, kernels.get(case.kernel), case.shape, mesh) as attention:
        return inputs, attention_step(inputs, attention)


def check_right_methods() -> None:
    cases = [
        Case(method, shape(causal, dtype), "cpu_flash")
        for method, causal, dtype in product(method_configs(2), (True, False), ("float64", "bfloat16"))
    ]
    supported = [c for c in cases if not methods.get(c.method.name).unsupported_reason(c.method, c.kernel, c.shape, 2)]
    for case, mesh in on_meshes(supported):
        found = check_identities(*results(case, mesh), mesh, str(case))
        assert set(found) == set(IDENTITIES)
        for name, quotient in found.items():
            assert quotient < 0.5 * budget(name, getattr(torch, case.shape.dtype)), f"{case}: {found}"


def check_chunks(mesh: DeviceMesh) -> None:
    values = results(Case(MethodConfig("ulysses"), shape(True, "float64")), mesh)
    whole = check_identities(*values, mesh, "whole")
    with patch.object(identities, "CHUNK", 8 * 16 * 2 * 7):  # 7 tokens, and a rest
        in_chunks = check_identities(*values, mesh, "in chunks")
    for name in IDENTITIES:
        assert abs(whole[name] - in_chunks[name]) < budget(name, torch.float64)


def on_last_rank(wrong: Wrong) -> Wrong:
    return lambda x: wrong(x) if dist.get_rank() == dist.get_world_size() - 1 else x


def without_a_head(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, :-1], 0 * x[:, :, -1:]], dim=2)


def without_a_window(x: Tensor) -> Tensor:
    return torch.cat([x[:, :60], 0 * x[:, 60:70], x[:, 70:]], dim=1)


FAULTS: list[tuple[str, int, Wrong, str]] = [
    ("dv of a KV head is lost", DV, without_a_head, r"sum dv = sum dout does not hold in KV head 1: "),
    ("dk has a constant too much", DK, lambda x: x + 0.5, "sum dk = 0 does not hold in KV head [01]"),
    ("dq of a window is lost", DQ, without_a_window, "sum <q,dq> = sum <k,dk> does not hold in KV head"),
    ("a window of rows is lost", OUT, without_a_window, "sum <v,dv> = sum <out,dout> does not hold in KV head"),
    ("dv is not a number", DV, lambda x: x * float("nan"), "sum dv = sum dout .* differ by nan"),
]


def check_faults(mesh: DeviceMesh) -> None:
    for dtype in ("float32", "bfloat16"):
        inputs, right = results(Case(MethodConfig("ulysses"), shape(False, dtype)), mesh)
        for what, place, wrong, message in FAULTS:
            print(f"fault: {what}, {dtype}")
            got = [on_last_rank(wrong)(x) if i == place else x for i, x in enumerate(right)]
            with pytest.raises(Incorrect, match=f"all rows: {message}"):
                check_identities(inputs, got, mesh, "all rows")


def check_blind_spots(mesh: DeviceMesh) -> None:
    """What docs/METRICS.md says that identities cannot see: without its mask it is another attention."""
    case = Case(MethodConfig("ulysses"), shape(True, "float64"), "math")
    inputs, right = results(case, mesh)
    with patch.object(math, "_scores", lambda q, k, causal, *options: scores(q, k, False, *options)):
        _, wrong = results(case, mesh)
    assert not torch.allclose(wrong[OUT], right[OUT])
    check_identities(inputs, wrong, mesh, "a lost mask")


def check(rank: int) -> None:
    check_right_methods()
    mesh = mesh_of(methods.get("ulysses").layout(MethodConfig("ulysses"), 2))
    check_chunks(mesh)
    check_faults(mesh)
    check_blind_spots(mesh)


def test_identities_hold_for_right_methods_and_tell_what_is_wrong() -> None:
    run(2, check)
