"""FlashAttention-4 (CuTe DSL), from the flash-attn-4 package; compiles each variant at its first call."""

from typing import TYPE_CHECKING

from sp_bench.config import AttentionShape
from sp_bench.hardware import package_versions
from sp_bench.kernels import half_precision_reason

if TYPE_CHECKING:
    from torch import Tensor

CUDA_KERNELS = (r"FlashAttentionForwardSm\d", r"FlashAttentionBackwardSm\d")


def unsupported_reason(shape: AttentionShape, device: str) -> str | None:
    if reason := half_precision_reason("flash_attn_4", shape, device, max_head_dim=128):
        return reason
    if "flash-attn-4" not in package_versions():
        return "kernel flash_attn_4 needs the flash-attn-4 package: pip install --pre flash-attn-4"
    if shape.head_dim not in (64, 128):
        return f"kernel flash_attn_4 is proven with head_dim 64 and 128, not {shape.head_dim}; use kernel=cudnn"
    return None


def forward(q: "Tensor", k: "Tensor", v: "Tensor", *, causal: bool, scale: float) -> "tuple[Tensor, Tensor]":
    from flash_attn.cute.interface import _flash_attn_fwd  # pyright: ignore[reportMissingImports]

    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
    return out, lse


def backward(
    dout: "Tensor",
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    out: "Tensor",
    lse: "Tensor",
    *,
    causal: bool,
    scale: float,
) -> "tuple[Tensor, Tensor, Tensor]":
    from flash_attn.cute.interface import _flash_attn_bwd  # pyright: ignore[reportMissingImports]

    # lse is read as contiguous; a ring hands over slices
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, dout, lse.contiguous(), softmax_scale=scale, causal=causal)
    return dq, dk, dv
