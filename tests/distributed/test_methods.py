"""Each of our methods against the oracle, on real ranks (gloo and NCCL): output and all three gradients."""

import itertools
from dataclasses import replace

import pytest
import torch.distributed as dist
from oracle import Case, mesh_of, on_meshes, relative_errors
from ranks import here, run, worlds
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import kernels, methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import reduced_length

TOKENS_A_RANK = 12  # every layout can cut it, and it is no multiple of a power of two above 4
# On GPUs bf16 kernels work in blocks of 64 and 128 tokens: here whole blocks and a rest.
HALF_PRECISION_TOKENS = {"cpu": TOKENS_A_RANK, "cuda": 160}


def heads(sp_size: int) -> dict[str, tuple[int, int]]:
    """(query heads, KV heads) that most methods can split; GQA has fewer KV heads than 8 ranks."""
    num_heads = 16 if sp_size == 8 else 12
    return {"MHA": (num_heads, num_heads), "GQA": (num_heads, 4), "MQA": (num_heads, 1)}


def method_configs(sp_size: int) -> list[MethodConfig]:
    """Every method, layout, degree and placement that `sp_size` ranks allow."""
    ring_layouts = ("contiguous", "zigzag", "striped")
    configs = [MethodConfig("ulysses", head_chunks=chunks) for chunks in (1, 2, 4)]
    configs += [MethodConfig("upipe", head_stages=stages) for stages in (None, 2)]
    configs += [MethodConfig("ring", layout, dkv_dtype="input") for layout in ring_layouts]
    configs += [
        MethodConfig("double_ring", layout, inner_ring_degree=inner, dkv_dtype="input")
        for layout, inner in (*((layout, 2) for layout in ring_layouts), ("zigzag", 1), ("striped", 4))
        if sp_size % inner == 0
    ]
    configs += [MethodConfig("all_gather", layout, dkv_dtype="input") for layout in ("contiguous", "zigzag")]
    configs += [
        MethodConfig("usp", layout, None, degree, placement, "input")
        for degree in range(1, sp_size + 1)
        if sp_size % degree == 0
        for layout in ring_layouts
        for placement in ("ulysses_inner", "ring_inner")
        if placement == "ulysses_inner" or 1 < degree < sp_size
    ]
    configs += [
        MethodConfig("usp", "zigzag", None, degree, "ulysses_inner", "input", head_chunks=2)
        for degree in range(2, sp_size)
        if sp_size % degree == 0
    ]
    return configs


def cases(sp_size: int) -> list[Case]:
    """All methods, heads and masks in fp64, with the kernel that runs everywhere. One sequence and two, by turns: each
    method has both with either mask."""
    chosen = []
    for method, (number, (hq, hkv)), causal in itertools.product(
        method_configs(sp_size), enumerate(heads(sp_size).values()), (True, False)
    ):
        batch = 1 + (number + causal) % 2
        shape = AttentionShape(batch, TOKENS_A_RANK * sp_size, hq, hkv, 8, causal, "float64")
        if methods.get(method.name).unsupported_reason(method, "math", shape, sp_size) is None:
            chosen.append(Case(method, shape))
    return chosen


def half_precision_cases(sp_size: int, device: str) -> list[Case]:
    """Every method with every kernel of the device, in bf16."""
    shape = AttentionShape(
        *(1, HALF_PRECISION_TOKENS[device] * sp_size, *heads(sp_size)["GQA"], 128),
        causal=True,
        dtype="bfloat16",
    )
    return [
        Case(method, shape, kernel)
        for kernel, method in itertools.product(kernels.NAMES, method_configs(sp_size))
        if kernels.get(kernel).unsupported_reason(shape, device) is None
        and methods.get(method.name).unsupported_reason(method, kernel, shape, sp_size) is None
    ]


def by_copy_engines(sp_size: int) -> list[Case]:
    """One exact case in five, which gives each method other heads and masks."""
    chosen = cases(sp_size)[::5] if sp_size > 1 else []
    return [replace(case, method=replace(case.method, exchange="copy_engines")) for case in chosen]


def check_within_budget(case: Case, mesh: DeviceMesh) -> None:
    """The project's own gate: kernel and method must each be within twice the error of `math` in this dtype."""
    kernel = kernels.get(case.kernel)
    with methods.get(case.method.name).open(case.method, kernel, case.shape, mesh) as attention:
        try:
            reduced_length.check_attention(attention, kernel, case.kernel, case.shape, mesh, here(), seed=0)
        except Incorrect as error:
            raise AssertionError(str(case)) from error


def check_all(rank: int, sp_size: int) -> None:
    """One case in five, because eight ranks share the cores of a laptop; each method gets other heads and masks."""
    crowded = sp_size == 8 and here().type == "cpu"
    exact = cases(sp_size)[:: 5 if crowded else 1]
    if here().type == "cuda":
        exact += by_copy_engines(sp_size)
    for case, mesh in on_meshes(exact):
        errors = relative_errors(case, mesh)
        assert all(error < 1e-13 for error in errors.values()), f"{case} on rank {rank}: {errors}"
    for case, mesh in on_meshes([] if crowded else half_precision_cases(sp_size, here().type)):
        check_within_budget(case, mesh)


@pytest.mark.parametrize(("backend", "sp_size"), worlds(gloo=(1, 2, 3, 4, 8), nccl=(1, 2, 3, 4, 8)))
def test_methods_agree_with_the_oracle_in_output_and_gradients(backend: str, sp_size: int) -> None:
    assert len(cases(sp_size)) >= 60
    run(sp_size, check_all, sp_size, backend=backend)


def test_methods_agree_with_the_oracle_on_more_ranks_than_kv_heads() -> None:
    replicated = [c for c in cases(8) if c.method.name == "ulysses" and c.shape.num_kv_heads == 4]
    assert replicated


def check_options(rank: int) -> None:
    """Options that change in which dtype bytes travel, and not what is computed."""
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
    exact = AttentionShape(1, 32, causal=True, dtype="float64", **heads)
    for stride in (1, 2, 3, 4):
        case = Case(MethodConfig("all_gather", "zigzag", dkv_dtype="input", head_stride=stride), exact)
        mesh = mesh_of(methods.get("all_gather").layout(case.method, dist.get_world_size()))
        assert all(error < 1e-13 for error in relative_errors(case, mesh).values()), str(case)
    uneven = Case(MethodConfig("ring", "zigzag", dkv_dtype="input"), replace(exact, num_heads=6, num_kv_heads=3))
    assert all(error < 1e-13 for error in relative_errors(uneven, mesh).values()), "halves of an odd number of KV heads"
    low = AttentionShape(1, 64, causal=True, dtype="bfloat16", **heads)
    usable = [k for k in ("math", "cpu_flash") if kernels.get(k).unsupported_reason(low, here().type) is None]
    for name, kernel in itertools.product(("ring", "all_gather"), usable):
        errors = {
            dtype: relative_errors(Case(MethodConfig(name, "zigzag", dkv_dtype=dtype), low, kernel), mesh)
            for dtype in ("input", "float32")
        }
        assert all(error < 8e-3 for error in errors["float32"].values()), f"{name} {kernel}: {errors}"
        # with fewer roundings, the sum of many partial gradients is not worse by more than noise
        assert errors["float32"]["dk"] < 1.1 * errors["input"]["dk"], f"{name} {kernel}: {errors}"

    whole = replace(low, causal=False)  # all blocks are whole, and each rank merges some before the last one arrives
    for kernel in usable:
        rounded, wide = (
            relative_errors(
                Case(MethodConfig("ring", "zigzag", dkv_dtype="float32", merge_dtype=dtype), whole, kernel), mesh
            )
            for dtype in ("input", "float32")
        )
        assert all(error < 1.6e-2 for error in rounded.values()), f"{kernel}: {rounded}"
        assert rounded["output"] > wide["output"], f"{kernel}: sums in bf16 round in between"


@pytest.mark.parametrize(("backend", "world_size"), worlds(gloo=[4], nccl=[4]))
def test_options_of_how_tensors_travel_change_the_rounding_and_nothing_else(backend: str, world_size: int) -> None:
    run(world_size, check_options, backend=backend)
