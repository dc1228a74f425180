"""FlashAttention-4 (CuTe DSL), from the flash-attn-4 package; compiles each variant at its first call."""

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from sp_bench.config.trial import AttentionShape
from sp_bench.hardware import package_versions
from sp_bench.kernels import half_precision_reason
from sp_bench.kernels.compiled_code import own_folder

if TYPE_CHECKING:
    from torch import Tensor

KEEP, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"  # read at the import
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
    out, lse, *_ = _library()._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
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
    # lse is read as contiguous; a ring hands over slices
    dq, dk, dv, *_ = _library()._flash_attn_bwd(
        q, k, v, out, dout, lse.contiguous(), softmax_scale=scale, causal=causal
    )
    return dq, dk, dv


@cache
def _library() -> Any:
    """Told, before it is imported, to keep what it compiles: each launch would take up to 25 s to do it again. Who has
    told it already, in the environment, is listened to."""
    if not {KEEP, FOLDER} & set(os.environ):
        try:
            _keep_compiled()
        except OSError as error:
            print(f"what flash_attn_4 compiles is not kept for the next launch: {error}", flush=True)
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface


def _keep_compiled() -> None:
    import torch

    architecture = "".join(map(str, torch.cuda.get_device_capability()))  # not all of its keys have it
    os.environ[FOLDER] = str(own_folder(f"flash_attn_4-sm{architecture}"))
    os.environ[KEEP] = "1"
