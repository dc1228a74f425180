"""aten's FlashAttention-2, the kernel of the flash backend of scaled_dot_product_attention.

B batch, S tokens, H heads, D head size.
"""

from typing import TYPE_CHECKING

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window
from sp_bench.kernels import half_precision_reason, sides

if TYPE_CHECKING:
    from torch import Tensor

WINDOWS = True
CUDA_KERNELS = (r"pytorch_flash::flash_fwd_(splitkv_)?kernel", r"pytorch_flash::flash_bwd_dq_dk_dv")
CUDA_HELPERS = r"pytorch_flash::"  # rowsum(dO * O), conversion of dQ; combination of a forward that is split over keys
OPS = {
    "aten::_scaled_dot_product_flash_attention": (1, 0),
    "aten::_scaled_dot_product_flash_attention_backward": (0, 1),
}


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    return half_precision_reason("sdpa_flash", shape, device, max_head_dim=256)


def forward(
    q: "Tensor", k: "Tensor", v: "Tensor", *, causal: bool, scale: float, window: Window | None = None
) -> "tuple[Tensor, Tensor]":
    import torch

    if window is not None:
        # None: the cumulative lengths of packed sequences; 0.0: dropout; False: give no dropout mask
        lengths = (None, None, q.shape[1], k.shape[1])
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, causal, False, scale=scale, **sides(window)
        )
        return out, lse

    # [B,S,H,D] -> [B,H,S,D]: views, since the kernel reads strides
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal, scale=scale)
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
    window: Window | None = None,
) -> "tuple[Tensor, Tensor, Tensor]":
    import torch

    if window is not None:
        state = torch.zeros((2,), dtype=torch.uint64, device=q.device)  # dropout's random state: there is no dropout
        return torch.ops.aten._flash_attention_backward(
            *(dout, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, state, state),
            scale=scale,
            **sides(window),
        )
    heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))  # [B,S,H,D] -> [B,H,S,D]
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)  # dropout's random state: there is no dropout
    # None: the cumulative lengths of packed sequences; 0.0: dropout. The kernel reads lse as contiguous, whatever its
    # strides say; a ring passes slices.
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *heads_first, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused, scale=scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
