"""FlashAttention-2, from the flash-attn package."""

from typing import TYPE_CHECKING

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window
from sp_bench.hardware import missing_packages
from sp_bench.kernels import cuts, half_precision_reason, sides

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


_PLAIN = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
_NO_WINDOW = Window(-1, -1)


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

    options = {
        "softmax_scale": scale,
        "causal": causal,
        "return_softmax": False,
        **sides(window or _NO_WINDOW),
        **_PLAIN,
    }
    if documents:
        out, lse, *_ = _flash_attn_varlen_forward(q[0], k[0], v[0], *cuts(documents, q.device).values(), **options)
        return out[None], lse[None]  # [S,Hq,D], [Hq,S] -> [1,S,Hq,D], [1,Hq,S]
    out, lse, *_ = _flash_attn_forward(q, k, v, **options)
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

    # the kernel reads lse as contiguous, whatever its strides say; a ring passes slices
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "deterministic": False,
        **sides(window or _NO_WINDOW),
        **_PLAIN,
    }
    if documents:
        tensors = (dout[0], q[0], k[0], v[0], out[0], lse[0].contiguous(), dq[0], dk[0], dv[0])
        _flash_attn_varlen_backward(*tensors, *cuts(documents, q.device).values(), **options)
        return dq, dk, dv
    _flash_attn_backward(dout, q, k, v, out, lse.contiguous(), dq, dk, dv, **options)
    return dq, dk, dv
