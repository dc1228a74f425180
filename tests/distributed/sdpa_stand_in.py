"""A stand-in for aten's CUDA flash attention on CPU, computed by our math kernel, and an SDPA that uses it.

torch's context parallelism needs both, because it has no rule for the op that SDPA chooses on CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from sp_bench.kernels import math

_sdpa = functional.scaled_dot_product_attention
_REGISTERED: list[torch.library.Library] = []  # a registration lasts as long as its library object


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert scale is not None
    # [B,H,S,D] -> [B,S,H,D] and back, in the strides that aten gives
    out, lse = math.forward(*(x.transpose(1, 2) for x in (q, k, v)), causal=is_causal, scale=scale)
    unused = torch.empty((), dtype=torch.uint64)
    return out.transpose(1, 2), lse, None, None, q.shape[2], k.shape[2], unused, unused, torch.empty(0)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    assert dropout_p == 0.0
    assert scale is not None
    assert lse.is_contiguous(), "aten's kernel reads it so, whatever its strides say"
    grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
    return tuple(x.transpose(1, 2) for x in math.backward(grad_out, q, k, v, out, lse, causal=is_causal, scale=scale))


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """For sharded tensors, what SDPA does on a GPU with its flash backend. For others, such as the oracle's, SDPA."""
    if not isinstance(q, DTensor):
        return _sdpa(q, k, v, **options)
    assert options.pop("attn_mask", None) is None
    assert options.pop("dropout_p", 0.0) == 0.0
    grouped = options.pop("enable_gqa", False)
    assert options.keys() == {"is_causal", "scale"}
    assert grouped or q.shape[1] == k.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, 0.0, options["is_causal"], scale=options["scale"])[0]


def install() -> None:
    """Install the stand-in for the rest of this process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _backward, "CPU")
    _REGISTERED.append(library)
    functional.scaled_dot_product_attention = scaled_dot_product_attention
