"""aten's binding of cuDNN attention. Takes GQA unexpanded and strided views."""

from functools import cache
from typing import TYPE_CHECKING

from sp_bench.config.trial import AttentionShape
from sp_bench.kernels import half_precision_reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CUDA_KERNELS = (r"cudnn.*sdpa.*fprop", r"cudnn.*sdpa.*bprop")


@cache
def _random_state(device: "torch.device") -> "Tensor":
    """Dropout's, which is not used: there is no dropout."""
    import torch

    return torch.zeros((), dtype=torch.int64, device=device)


def unsupported_reason(shape: AttentionShape, device: str) -> str | None:
    return half_precision_reason("cudnn", shape, device, max_head_dim=128)


def forward(q: "Tensor", k: "Tensor", v: "Tensor", *, causal: bool, scale: float) -> "tuple[Tensor, Tensor]":
    import torch

    # [B,S,H,D] -> [B,H,S,D]: views, the kernel reads strides
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse.squeeze(-1)  # [B,H,S,1] -> [B,H,S]


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
    import torch

    heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    unused = _random_state(q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first,
        lse.unsqueeze(-1),
        unused,
        unused,
        None,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        causal,
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
