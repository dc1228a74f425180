"""aten's flash attention for CPUs. It takes GQA without expanding the KV heads, forward and backward.

B batch, S tokens, H heads, D head size.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window
from sp_bench.kernels import even_values_reason, same_document, seen

if TYPE_CHECKING:
    from torch import Tensor

PACKS = True
WINDOWS = True
CUDA_KERNELS = None
OPS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (1, 0),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1),
}


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    if device != "cpu":
        return "kernel cpu_flash runs on CPU only; use kernel=cudnn or sdpa_flash"
    if shape.dtype == "float16":
        return "kernel cpu_flash takes float64, float32 or bfloat16, not dtype=float16; use kernel=math"
    return even_values_reason("cpu_flash", shape)


def _bias(q: "Tensor", k: "Tensor", documents: Sequence[int], window: Window | None) -> "Tensor | None":
    """Documents and a window as the kernel takes them beside a causal mask, as a bias of the scores [Sq,Sk]: it
    computes what they hide, too."""
    import torch

    masks = ([same_document(documents, q.device)] if documents else []) + ([seen(window, q, k)] if window else [])
    if not masks:
        return None
    hidden = ~torch.stack(masks).all(0)
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, float("-inf"))


def forward(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    *,
    causal: bool,
    scale: float,
    documents: Sequence[int] = (),
    window: Window | None = None,
) -> "tuple[Tensor, Tensor]":
    import torch

    # [B,S,H,D] -> [B,H,S,D]: views, since the kernel reads strides
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, 0.0, causal, attn_mask=_bias(q, k, documents, window), scale=scale
    )
    return out.transpose(1, 2), lse


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
    documents: Sequence[int] = (),
    window: Window | None = None,
) -> "tuple[Tensor, Tensor, Tensor]":
    import torch

    heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))  # [B,S,H,D] -> [B,H,S,D]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first, lse, 0.0, causal, attn_mask=_bias(q, k, documents, window), scale=scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
