"""Packed documents against attention of each document alone: kernels, and methods on real ranks."""

import sys

import flash_attn_4_varlen_stand_in
import flash_attn_varlen_stand_in
import pytest
import torch
from oracle import mesh_of
from ranks import here, run

from sp_bench import kernels, methods
from sp_bench.attention.packed import of_shape
from sp_bench.config.trial import AttentionShape, MethodConfig
from sp_bench.oracle import reduced_length


@pytest.mark.parametrize("name", ["math", "flash_attn", "flash_attn_4"])
def test_a_kernel_on_a_pack_is_as_on_each_document_alone(name, monkeypatch):
    if name == "flash_attn":
        stand_in = flash_attn_varlen_stand_in
        for dense in ("_flash_attn_forward", "_flash_attn_backward"):  # which are not called
            monkeypatch.setattr(stand_in, dense, None, raising=False)
        monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", stand_in)
    elif name == "flash_attn_4":
        monkeypatch.setattr(kernels.get(name), "_library", lambda: flash_attn_4_varlen_stand_in)
    shape = AttentionShape(1, 96, 4, 2, 8, True, "float32", (32, 16, 48))
    inputs = reduced_length.random_inputs(shape, torch.device("cpu"), 0)
    got = reduced_length._run_kernel(of_shape(kernels.get(name), shape), inputs, shape)
    for tensor, want in zip(got, reduced_length._run_reference(inputs, shape), strict=True):
        torch.testing.assert_close(tensor, want)


def method_configs() -> list[MethodConfig]:
    return [
        *(MethodConfig("ulysses", head_chunks=chunks) for chunks in (1, 2)),
        *(MethodConfig("ring", layout, dkv_dtype="input") for layout in ("contiguous", "zigzag")),
        *(MethodConfig("all_gather", layout, head_stride=2, dkv_dtype="input") for layout in ("contiguous", "zigzag")),
    ]


def check_packs(rank: int, sp_size: int) -> None:
    """The gate itself: output and gradients against each document alone, and one document perturbed."""
    packs = [(16, 32, 48, 24, 24), (72, 72), (16,) * 9]  # across ranks, cut by a rank's end, and many
    kernel = kernels.get("math")
    for documents in packs:
        shape = AttentionShape(1, 144, 8, 4, 8, True, "float64", documents)
        for method in method_configs():
            mesh = mesh_of(methods.get(method.name).layout(method, sp_size))
            with methods.get(method.name).open(method, kernel, shape, mesh) as attention:
                columns = reduced_length.check_attention(attention, kernel, "math", shape, mesh, here(), seed=0)
            assert columns["rel_error_dq"] < 1e-13
            assert set(columns["outside_difference"].values()) == {0.0}, (method, documents)
            assert min(columns["inside_difference"].values()) > 0.1


@pytest.mark.parametrize("sp_size", [2, 4])
def test_methods_on_packs_agree_with_each_document_alone_and_leak_nothing(sp_size: int) -> None:
    run(sp_size, check_packs, sp_size)
