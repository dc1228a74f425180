"""Each kernel against autograd through torch's own attention, forward and backward, and its LSE against its meaning."""

import re
from pathlib import Path

import pytest
import torch

from sp_bench import hardware, kernels
from sp_bench.attention.merge import Part, merge
from sp_bench.config.parsing import ConfigError
from sp_bench.config.shape import AttentionShape
from sp_bench.kernels import flash_attn_3
from sp_bench.measure.ledger import CountedKernel, Ledger

TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 1.5e-2}


def inputs(shape: AttentionShape, device: str) -> list[torch.Tensor]:
    """q, k, v, dout as strided views of one buffer: what an exchange hands over."""
    generator = torch.Generator().manual_seed(0)
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads]
    buffer = torch.randn(shape.batch_size, shape.seq_len, sum(heads), shape.head_dim, generator=generator)
    return list(buffer.to(device, getattr(torch, shape.dtype)).split(heads, dim=2))


def reference(tensors: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    q, k, v, dout = (x.double().detach() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check(name: str, shape: AttentionShape, device: str) -> None:
    kernel, scale = kernels.get(name), shape.head_dim**-0.5
    assert kernel.unsupported_reason(shape, device) is None
    q, k, v, dout = tensors = inputs(shape, device)
    out, lse = kernel.forward(q, k, v, causal=shape.causal, scale=scale)
    assert lse.shape == (shape.batch_size, shape.num_heads, shape.seq_len)
    assert lse.dtype == (torch.float64 if shape.dtype == "float64" else torch.float32)
    got = [out, *kernel.backward(dout, q, k, v, out, lse, causal=shape.causal, scale=scale)]
    for what, mine, true in zip(("output", "dq", "dk", "dv"), got, reference(tensors, shape.causal), strict=True):
        assert mine.dtype == q.dtype
        error = float((mine.double() - true).norm() / true.norm())
        assert error < TOLERANCE[shape.dtype], f"{name} {what}: {error:.1e}"


def shapes(dtypes: tuple[str, ...], head_dims: tuple[int, ...]) -> list[AttentionShape]:
    heads = [(6, 6), (6, 2), (6, 1)]
    return [
        AttentionShape(2, seq_len, *h, dim, causal, dtype)
        for seq_len in (130, 3)
        for h in heads
        for dim in head_dims
        for causal in (True, False)
        for dtype in dtypes
    ]


@pytest.mark.parametrize("name", ["math", "cpu_flash"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_cpu_kernels_agree_with_autograd(name: str, dtype: str) -> None:
    for shape in shapes((dtype,), (16, 64)):
        check(name, shape, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:flash_attn.cute",
    "ignore:cutlass:DeprecationWarning",
    "ignore:warpgroup:DeprecationWarning",
    "ignore::UserWarning:cutlass.base_dsl.dsl",
)
@pytest.mark.parametrize("name", ["math", "sdpa_flash", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4"])
def test_cuda_kernels_agree_with_autograd(name: str) -> None:
    for shape in shapes(("bfloat16",), (64, 128)):
        if reason := kernels.get(name).unsupported_reason(shape, "cuda"):
            pytest.skip(reason)
        check(name, shape, "cuda")


@pytest.mark.parametrize("name", ["math", "cpu_flash"])
def test_key_halves_merged_by_lse_are_the_whole(name: str) -> None:
    shape, kernel = AttentionShape(2, 64, 6, 2, 16, False, "float64"), kernels.get(name)
    q, k, v, dout = inputs(shape, "cpu")
    whole, whole_lse = kernel.forward(q, k, v, causal=False, scale=0.25)
    out, lse = torch.empty_like(whole), torch.empty_like(whole_lse)
    halves = (slice(0, 20), slice(20, 64))
    merge([Part(*kernel.forward(q, k[:, keys], v[:, keys], causal=False, scale=0.25)) for keys in halves], out, lse)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    # the backward of a part, given the whole's out and lse, is that part's share
    parts = [
        kernel.backward(dout, q, k[:, keys], v[:, keys], whole, whole_lse, causal=False, scale=0.25) for keys in halves
    ]
    dq, dk, dv = kernel.backward(dout, q, k, v, whole, whole_lse, causal=False, scale=0.25)
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]], dim=1), dk)
    torch.testing.assert_close(torch.cat([parts[0][2], parts[1][2]], dim=1), dv)


def test_kernels_say_what_they_cannot_do() -> None:
    shape = AttentionShape(1, 8, 4, 4, 64, True, "float32")
    assert "runs on CUDA only" in str(kernels.get("cudnn").unsupported_reason(shape, "cpu"))
    assert "runs on CPU only" in str(kernels.get("cpu_flash").unsupported_reason(shape, "cuda"))
    assert "not dtype=float32" in str(kernels.get("sdpa_flash").unsupported_reason(shape, "cuda"))


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([("NVIDIA H200", (9, 0))] * 2, None),
        ([("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0))], r"9\.0\) only, not on NVIDIA A100 \(8\.0\); use kernel="),
        ([("NVIDIA B200", (10, 0))], r"not on NVIDIA B200 \(10\.0\); use kernel=flash_attn or cudnn"),
        (None, None),  # planned where no GPU is
    ],
)
def test_flash_attention_3_is_refused_where_a_gpu_is_not_hopper(
    monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, tuple[int, int]]] | None, reason: str | None
) -> None:
    found = gpus and hardware.Gpus("1", tuple(hardware.Gpu(name, "GPU", 0, number) for name, number in gpus))
    monkeypatch.setattr(hardware, "gpus", lambda: found)
    monkeypatch.setattr(flash_attn_3, "_shared_library", lambda: Path("_C.so"))
    monkeypatch.setattr(flash_attn_3, "_device_reason", flash_attn_3._device_reason.__wrapped__)
    said = flash_attn_3.unsupported_reason(AttentionShape(1, 64, 4, 4, 64, True, "bfloat16"), "cuda")
    assert (said is None) == (reason is None)
    assert re.search(reason or "", said or "")


def test_an_unknown_kernel_gets_the_nearest_name_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"did you mean cudnn\? kernels: math, cpu_flash"):
        kernels.get("cuddn")


HELPERS = {  # further ones that it launches, with names that look like attention
    "sdpa_flash": [
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "void pytorch_flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>",
    ],
    "cudnn": [
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>",
        "cudnn_sdpa_sm90_convert_dq",
    ],
    "flash_attn": ["void flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8>>"],
    "flash_attn_3": [
        "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<cute::C<80>, cute::C<128> >, 128> >",
        "void cutlass::device_kernel<flash::FlashAttnBwdPostprocessConvertdQ<cute::tuple<cute::C<80> >, 128> >",
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, cute::C<128> >, 5> >",
        "void flash::prepare_varlen_num_blocks_kernel<32, true>(int, int, int, int const*)",
    ],
    "flash_attn_4": [
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess_object_at__tensor",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_object_at__tensor",
    ],
}
LAUNCHED = {  # names as the profiler gives them on Hopper: forward, backward
    "sdpa_flash": (
        ["void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4>>"],
        ["void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_traits>"],
    ),
    "cudnn": (
        ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"],
        ["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x128x128_4x1x1_kernel0_0"],
    ),
    "flash_attn": (
        ["void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>"],
        ["void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>"],
    ),
    "flash_attn_3": (
        [
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
            "flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> > > > > >"
        ],
        [
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<"
            "flash::CollectiveMainloopBwdSm90<2, 2, 2> > > >"
        ],
    ),
    "flash_attn_4": (
        ["kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor"],
        ["kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor"],
    ),
}


def test_a_cuda_kernel_belongs_to_one_of_our_kernels_and_to_one_pass() -> None:
    assert LAUNCHED.keys() == {name for name in kernels.NAMES if kernels.get(name).CUDA_KERNELS}
    for name, (forward, backward) in LAUNCHED.items():
        helpers = HELPERS.get(name, [])
        names = [*forward, *backward, *helpers, "void at::native::vectorized_elementwise_kernel<4>"]
        counts = {each: number for number, each in enumerate(names, start=3)}
        launched = kernels.launched(counts, name)
        assert launched == {name: tuple({n: counts[n] for n in part} for part in (forward, backward))}
        assert kernels.unknown(counts, name) == {}


@pytest.mark.parametrize("name", kernels.NAMES)
def test_what_looks_like_attention_and_is_no_kernels_own_is_unknown(name: str) -> None:
    others = {"fmha_cutlassF_bf16_aligned_64x128_rf_sm80": 1, "my::SparseAttnKernel<64>": 2}
    for other, kinds in LAUNCHED.items():
        if other != name:
            others |= dict.fromkeys((*kinds[0], *kinds[1]), 4)
    assert kernels.unknown(others, name) == others


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["math", "cpu_flash"])
def test_a_cpu_kernel_runs_the_operations_that_it_declares(name: str, dtype: str) -> None:
    """Whatever the shape is, down to one query, one key and one head."""
    kernel = kernels.get(name)
    declared = getattr(kernel, "OPS")  # noqa: B009
    for queries, keys, hq, hkv, causal in (
        (1, 1, 1, 1, True),
        (1, 5, 2, 1, False),
        (6, 6, 4, 4, True),
        (3, 1, 4, 2, False),
    ):
        q, k, v = (
            torch.randn(1, n, h, 8, dtype=getattr(torch, dtype)) for n, h in ((queries, hq), (keys, hkv), (keys, hkv))
        )
        counted, book = CountedKernel(kernel), Ledger()
        with book:
            out, lse = counted.forward(q, k, v, causal=causal, scale=0.3)
            for _ in range(2):
                counted.backward(out, q, k, v, out, lse, causal=causal, scale=0.3)
        found = {op: book.work.kernel_ops[op] for op in declared}
        assert found == {op: forward + 2 * backward for op, (forward, backward) in declared.items()}
        assert not book.work.other_ops
        assert not book.work.matmul_flops
