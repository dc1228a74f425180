"""FlashAttention-2, from the flash-attn package."""

from typing import TYPE_CHECKING

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window
from sp_bench.hardware import missing_packages
from sp_bench.kernels import flash_mask, half_precision_reason, with_batch, without_batch

if TYPE_CHECKING:
    from torch import Tensor

PACKS = True
WINDOWS = True
CUDA_KERNELS = (r"(?<!pytorch_)flash::flash_fwd_(splitkv_)?kernel", r"(?<!pytorch_)flash::flash_bwd_dq_dk_dv")
CUDA_HELPERS = r"(?<!pytorch_)flash::flash_"  # as of sdpa_flash


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    if reason := half_precision_reason("flash_attn", shape, device, max_head_dim=256):
        return reason
    if missing_packages("flash-attn"):
        return "kernel flash_attn needs the flash-attn package: pip install 'sp-bench[flash-attn]'"
    return None


_OPTIONS = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "window_size_left": -1, "window_size_right": -1}


def forward(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    *,
    causal: bool,
    scale: float,
    documents: tuple[int, ...] = (),
    window: Window | None = None,
) -> "tuple[Tensor, Tensor]":
    from flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        _flash_attn_forward,
        _flash_attn_varlen_forward,
    )

    call = _flash_attn_varlen_forward if documents else _flash_attn_forward
    options = {**_OPTIONS, "softmax_scale": scale, "causal": causal, **flash_mask(documents, window, q.device)}
    out, lse, *_ = call(*without_batch(documents, q, k, v), return_softmax=False, **options)
    out, lse = with_batch(documents, out, lse)
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
    documents: tuple[int, ...] = (),
    window: Window | None = None,
) -> "tuple[Tensor, Tensor, Tensor]":
    import torch
    from flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        _flash_attn_backward,
        _flash_attn_varlen_backward,
    )

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    call = _flash_attn_varlen_backward if documents else _flash_attn_backward
    options = {**_OPTIONS, "softmax_scale": scale, "causal": causal, **flash_mask(documents, window, q.device)}
    # the kernel reads lse as contiguous, whatever its strides say; a ring passes slices
    tensors = without_batch(documents, dout, q, k, v, out, lse.contiguous(), dq, dk, dv)
    call(*tensors, deterministic=False, **options)
    return dq, dk, dv
