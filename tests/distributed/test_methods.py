"""Every own method against the oracle on real gloo ranks: output and all three gradients."""

import itertools

import pytest
import torch.distributed as dist
from gloo import run
from oracle import Case, mesh_of, relative_errors

from sp_bench import methods
from sp_bench.config import AttentionShape, MethodConfig

HEADS = {"MHA": (12, 12), "GQA": (12, 4), "MQA": (12, 1)}


def method_configs(sp_size: int) -> list[MethodConfig]:
    """Every method, layout, degree and placement that `sp_size` ranks allow."""
    ring_layouts = ("contiguous", "zigzag", "striped")
    configs = [MethodConfig("ulysses")]
    configs += [MethodConfig("ring", layout, dkv_dtype="input") for layout in ring_layouts]
    configs += [MethodConfig("all_gather", layout, dkv_dtype="input") for layout in ("contiguous", "zigzag")]
    configs += [
        MethodConfig("usp", layout, degree, placement, "input")
        for degree in range(1, sp_size + 1)
        if sp_size % degree == 0
        for layout in ring_layouts
        for placement in ("ulysses_inner", "ring_inner")
        if placement == "ulysses_inner" or 1 < degree < sp_size
    ]
    return configs


def cases(sp_size: int) -> list[Case]:
    """The cross product, with a length that every layout can cut and that no power of two divides."""
    chosen = []
    for method, (hq, hkv), causal, batch in itertools.product(
        method_configs(sp_size), HEADS.values(), (True, False), (1, 2)
    ):
        shape = AttentionShape(batch, 12 * sp_size, hq, hkv, 8, causal, "float64")
        if methods.get(method.name).unsupported_reason(method, shape, sp_size) is None:
            chosen.append(Case(method, shape))
    return chosen


def check_all(rank: int, sp_size: int) -> None:
    meshes = {}
    for case in cases(sp_size):
        layout = methods.get(case.method.name).layout(case.method, sp_size)
        key = (layout.ring_degree, layout.ulysses_degree, layout.ulysses_inner)
        if key not in meshes:
            meshes[key] = mesh_of(layout)
        errors = relative_errors(case, meshes[key])
        assert max(errors.values()) < 1e-13, f"{case} on rank {rank}: {errors}"


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4])
def test_methods_agree_with_the_oracle_in_output_and_gradients(sp_size: int) -> None:
    assert len(cases(sp_size)) >= 60
    run(sp_size, check_all, sp_size)


def check_options(rank: int) -> None:
    """Options that change how bytes travel, not what is computed."""
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
    exact = AttentionShape(1, 32, causal=True, dtype="float64", **heads)
    for stride in (1, 2, 3, 4):
        case = Case(MethodConfig("all_gather", "zigzag", dkv_dtype="input", head_stride=stride), exact)
        mesh = mesh_of(methods.get("all_gather").layout(case.method, dist.get_world_size()))
        assert max(relative_errors(case, mesh).values()) < 1e-13, str(case)
    low = AttentionShape(1, 64, causal=True, dtype="bfloat16", **heads)
    for name, kernel in itertools.product(("ring", "all_gather"), ("math", "cpu_flash")):
        errors = {
            dtype: relative_errors(Case(MethodConfig(name, "zigzag", dkv_dtype=dtype), low, kernel), mesh)
            for dtype in ("input", "float32")
        }
        assert max(errors["float32"].values()) < 8e-3, f"{name} {kernel}: {errors}"
        # fewer roundings on the way cannot make the sum of many partial gradients worse by more than noise
        assert errors["float32"]["dk"] < 1.1 * errors["input"]["dk"], f"{name} {kernel}: {errors}"


def test_options_of_travel_change_the_rounding_and_nothing_else() -> None:
    run(4, check_options)
