"""Packed documents against attention of each document alone: kernels, and methods on real ranks."""

import itertools
import sys
from unittest import mock

import flash_attn_3_varlen_stand_in
import flash_attn_4_varlen_stand_in
import flash_attn_stand_in
import flash_attn_varlen_stand_in
import pytest
import torch
import trials
from oracle import mesh_of
from ranks import here, run
from test_libraries import needs

from sp_bench import kernels, methods
from sp_bench.attention.masked import of_shape
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.config.workload import WorkloadConfig
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import reduced_length


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", ["math", "cpu_flash", "flash_attn", "flash_attn_3", "flash_attn_4"])
def test_a_kernel_on_a_pack_is_as_on_each_document_alone(name, window, monkeypatch):
    if name == "flash_attn":
        stand_in = flash_attn_varlen_stand_in
        for dense in ("_flash_attn_forward", "_flash_attn_backward"):  # which are not called
            monkeypatch.setattr(stand_in, dense, None, raising=False)
        monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", stand_in)
    elif name == "flash_attn_3":
        monkeypatch.setattr(kernels.get(name), "_operations", lambda: flash_attn_3_varlen_stand_in)
    elif name == "flash_attn_4":
        monkeypatch.setattr(kernels.get(name), "_library", lambda: flash_attn_4_varlen_stand_in)
    shape = AttentionShape(1, 96, 4, 2, 8, True, "float32", (32, 16, 48), window)
    inputs = reduced_length.random_inputs(shape, torch.device("cpu"), 0)
    got = reduced_length._run_kernel(of_shape(kernels.get(name), shape), inputs, shape)
    for tensor, want in zip(got, reduced_length._run_reference(inputs, shape), strict=True):
        torch.testing.assert_close(tensor, want)


def method_configs(sp_size: int) -> list[MethodConfig]:
    usp = [
        MethodConfig("usp", kind, ulysses_degree=sp_size // 2, dkv_dtype="input") for kind in ("contiguous", "zigzag")
    ]
    return [
        *(MethodConfig("ulysses", head_chunks=chunks) for chunks in (1, 2)),
        MethodConfig("upipe", head_stages=2),
        *(usp if sp_size > 2 else []),
        *(MethodConfig("ring", layout, dkv_dtype="input") for layout in ("contiguous", "zigzag", "document_zigzag")),
        *(MethodConfig("all_gather", layout, head_stride=2, dkv_dtype="input") for layout in ("contiguous", "zigzag")),
    ]


PACKS = [(16, 32, 48, 24, 24), (72, 72), (16,) * 9]  # across ranks, cut by a rank's end, and many


def check_packs(rank: int, sp_size: int) -> None:
    """The gate itself: output and gradients against each document alone, and one document perturbed."""
    kernel = kernels.get("math")
    for number, documents in enumerate(PACKS):
        shape = AttentionShape(1, 144, 8, 4, 8, True, "float64", documents)
        for place, method in enumerate(method_configs(sp_size)):
            if sp_size > 2 and method.name != "usp" and place % len(PACKS) != number:
                continue  # two ranks have each method with each pack; more have them by turns
            mesh = mesh_of(methods.get(method.name).layout(method, sp_size))
            with methods.get(method.name).open(method, kernel, shape, mesh) as attention:
                columns = reduced_length.check_attention(attention, kernel, "math", shape, mesh, here(), seed=0)
            assert columns["rel_error_dq"] < 1e-13
            assert set(columns["outside_difference"].values()) == {0.0}, (method, documents)
            assert min(columns["inside_difference"].values()) > 0.1


def check_unsteady(
    differing: set[int], part: float = 1e-9, dtype: str = "float64", seldom: float = 1e-9, smaller: int = 4
) -> dict:
    """The perturbed run, the first, differs in the largest element of another document's dq by `part` of it. So do
    equal runs of the numbers `differing`, in an element that is `smaller` times smaller, by `seldom` of it."""
    shape, runs, real = (
        AttentionShape(1, 64, 4, 2, 8, True, dtype, (32, 32)),
        itertools.count(),
        reduced_length._run_method,
    )
    inputs = reduced_length.random_inputs(shape, here(), 0)
    mesh = mesh_of(methods.get("ulysses").layout(MethodConfig("ulysses"), 1))

    def unsteady(attention, inputs):
        out, dq, dk, dv = real(attention, inputs)
        of_other = got[1][:, 32:].abs()
        size = float(of_other.max())
        run = next(runs)
        other = (of_other - size / smaller).abs().argmin()
        changed, share = (of_other.argmax(), part) if run == 0 else (other, seldom)
        if run == 0 or run in differing:
            dq[:, 32:].view(-1)[changed] *= 1 + share
        return [out, dq, dk, dv]

    with methods.get("ulysses").open(MethodConfig("ulysses"), kernels.get("math"), shape, mesh) as attention:
        got = real(attention, inputs)
        with mock.patch.object(reduced_length, "_run_method", unsteady):
            return reduced_length.check_perturbation(attention, inputs, range(64), shape.documents, got, mesh)


def check_equal_runs(rank: int) -> None:
    columns = check_unsteady({9})  # in absolute terms four times as much changes as in equal runs
    assert columns["outside_difference"]["dq"] > 2 * columns["repeat_difference"]["dq"] > 0
    with pytest.raises(Incorrect, match=r"dq of other documents changes by 1.00e-09 of an element, and 16 equal runs"):
        check_unsteady(set())
    with pytest.raises(Incorrect, match=r"changes by 3.00e-09 of an element, and 16 equal runs differ by 1.00e-09"):
        check_unsteady({9}, part=3e-9)


def check_roundings(rank: int) -> None:
    """A kernel whose gradients round otherwise in a few runs, in bfloat16: of small elements in equal runs, and of a
    large one in the perturbed run, which is no leak."""
    rounding = 2**-7
    check_unsteady({9}, rounding, "bfloat16", rounding, smaller=1000)
    with pytest.raises(Incorrect, match=r"dq of other documents changes by"):
        check_unsteady({9}, 4 * rounding, "bfloat16", rounding, smaller=1000)
    with pytest.raises(Incorrect, match=r"dq of other documents changes by"):  # all equal runs are equal
        check_unsteady(set(), rounding, "bfloat16")


def test_one_rounding_is_no_leak_where_equal_runs_round_otherwise() -> None:
    run(1, check_roundings)


def test_a_kernel_that_seldom_differs_is_given_more_equal_runs() -> None:
    run(1, check_equal_runs)


@pytest.mark.parametrize("sp_size", [2, 4])
def test_methods_on_packs_agree_with_each_document_alone_and_leak_nothing(sp_size: int) -> None:
    run(sp_size, check_packs, sp_size)


def check_library(rank: int, method: MethodConfig, kernel_name: str, dtype: str) -> None:
    if here().type == "cpu":
        flash_attn_stand_in.install()
    kernel, module = kernels.get(kernel_name), methods.get(method.name)
    for documents in PACKS:
        shape = AttentionShape(1, 144, 8, 4, 8, True, dtype, documents)
        mesh = mesh_of(module.layout(method, 2))
        with module.open(method, kernel, shape, mesh) as attention:
            columns = reduced_length.check_attention(attention, kernel, kernel_name, shape, mesh, here(), seed=0)
        assert set(columns["outside_difference"].values()) == {0.0}, (method, documents)
        assert min(columns["inside_difference"].values()) > 0.1


@needs("ring-flash-attn")
@pytest.mark.parametrize(
    "method",
    [
        *(MethodConfig("ring_flash_attn_llama3", head_stride=stride) for stride in (None, 1)),
        MethodConfig("ring_flash_attn", "document_zigzag"),
    ],
    ids=lambda method: f"{method.name}-{method.head_stride}",
)
def test_ring_flash_attn_passes_both_proofs(method: MethodConfig) -> None:
    run(2, check_library, method, "flash_attn", "float16")


@needs("deepspeed")
@pytest.mark.parametrize("name", ["deepspeed_ulysses", "deepspeed_ulysses_hf"])
def test_deepspeed_around_our_packed_kernel_passes_both_proofs(name: str) -> None:
    run(2, check_library, MethodConfig(name), "math", "float64")


def check_rows(rank: int, sp_size: int) -> None:
    """Whole trials: counted calls and FLOPs equal the closed forms, or `row` raises."""
    workload = WorkloadConfig(
        *("attention", "forward_backward", True, 1, 2, 48), packing="fixed", document_len=32, attribution=True
    )
    kinds = ("contiguous", "zigzag")
    usp = MethodConfig("usp", "zigzag", ulysses_degree=1)
    for method in (
        MethodConfig("ulysses"),
        MethodConfig("upipe"),
        usp,
        *(MethodConfig(m, kind) for m in ("ring", "all_gather") for kind in kinds),
        MethodConfig("ring", "document_zigzag"),
    ):
        row = trials.row(trials.trial(method, sp_size, workload=workload, seq_len=144))
        assert (row["num_documents"], row["longest_document"], row["median_document"]) == (5, 32, 32.0)
        pairs = 4 * 32 * 33 // 2 + 16 * 17 // 2
        assert row["model_flops"] == 3 * 4 * pairs * 8 * 16
        assert row["counted_attention_flops"] == 3.5 * 4 * pairs * 8 * 16
        # contiguous, rank 0 has two documents and 8 tokens of the third: 1,092 pairs of 2,248
        cut = method.name in ("ring", "all_gather") and method.layout == "contiguous"
        assert row["flops_imbalance"] == (1156 / 1124 if cut else 1)
        assert row["sampled_grad_error"]["dk"] < 1e-5


def check_padded_row(rank: int) -> None:
    """Three ranks cut each document into six equal parts: 32 tokens become 36, 16 become 18."""
    workload = WorkloadConfig(*("attention", "forward_backward", True, 1, 2, 48), packing="fixed", document_len=32)
    row = trials.row(trials.trial(MethodConfig("ring", "document_zigzag"), 3, workload=workload, seq_len=144))
    assert (row["num_documents"], row["longest_document"]) == (5, 32)
    assert row["model_flops"] == 3 * 4 * (4 * 32 * 33 // 2 + 16 * 17 // 2) * 8 * 16
    assert row["counted_attention_flops"] == 3.5 * 4 * (4 * 36 * 37 // 2 + 18 * 19 // 2) * 8 * 16
    assert row["tokens_per_s"] == pytest.approx(144e3 / row["median_step_ms"])
    assert row["flops_imbalance"] == 1


def test_a_row_of_padded_documents_counts_real_tokens() -> None:
    run(3, check_padded_row)


def test_rows_of_packs_count_visible_pairs_only() -> None:
    run(2, check_rows, 2)
