"""cuDNN's attention, as aten binds it. It takes strided views, and GQA without expanding the KV heads.

B batch, S tokens, H heads, D head size.
"""

from functools import cache
from typing import TYPE_CHECKING

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.kernels import DEEPSEEK, half_precision_reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CUDA_KERNELS = (r"cudnn.*sdpa.*fprop", r"cudnn.*sdpa.*bprop")
CUDA_HELPERS = r"^(void )?cudnn"
OPS = {
    "aten::_scaled_dot_product_cudnn_attention": (1, 0),
    "aten::_scaled_dot_product_cudnn_attention_backward": (0, 1),
}


@cache
def _random_state(device: "torch.device") -> "Tensor":
    """A placeholder for dropout's random state: the backward asks for one, and there is no dropout."""
    import torch

    return torch.zeros((), dtype=torch.int64, device=device)


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    return half_precision_reason("cudnn", shape, device, max_head_dim=128, uneven=DEEPSEEK)


def forward(q: "Tensor", k: "Tensor", v: "Tensor", *, causal: bool, scale: float) -> "tuple[Tensor, Tensor]":
    import torch

    # [B,S,H,D] -> [B,H,S,D]: views, since the kernel reads strides
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    # None: bias; True: give lse; 0.0: dropout; False: give no dropout mask
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse.squeeze(-1)  # [B,H,S,1] -> [B,H,S]


def backward(
    dout: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", out: "Tensor", lse: "Tensor", *, causal: bool, scale: float
) -> "tuple[Tensor, Tensor, Tensor]":
    import torch

    heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))  # [B,S,H,D] -> [B,H,S,D]
    unused = _random_state(q.device)
    # None: bias and the two cumulative lengths of packed sequences; 0.0: dropout
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first,
        lse.unsqueeze(-1),  # [B,H,S] -> [B,H,S,1]
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
