"""A stand-in for flash_attn 2.8.3 on CPU: the functions that other libraries call, computed by our math kernel.

Where transformers is not installed, also a stand-in for what ring_flash_attn imports of it, as in transformers 5.
"""

import importlib.util
import sys
from types import ModuleType

import torch
from flash_attn_varlen_stand_in import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from torch import Tensor

from sp_bench.attention.autograd import differentiable
from sp_bench.kernels import math


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _require_plain(q, dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    out, lse = math.forward(q, k, v, causal=causal, scale=softmax_scale)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    _require_plain(q, dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    grads = math.backward(dout, q, k, v, out, softmax_lse, causal=causal, scale=softmax_scale)
    for to, grad in zip((dq, dk, dv), grads, strict=True):
        to.copy_(grad)
    return torch.empty_like(softmax_lse)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> Tensor:
    _require_plain(q, dropout_p, *window_size, softcap, alibi_slopes)
    assert not return_attn_probs
    return differentiable(math, causal=causal, scale=softmax_scale)(q, k, v)  # pyright: ignore


def _require_plain(q: Tensor, dropout_p: float, left: int, right: int, softcap: float, alibi: Tensor | None) -> None:
    assert (dropout_p, left, right, softcap, alibi) == (0.0, -1, -1, 0.0, None)
    assert q.dim() == 4


def install() -> None:
    """Put the stand-ins into this process's sys.modules."""
    interface = ModuleType("flash_attn.flash_attn_interface")
    batches, packed = (
        (_flash_attn_forward, _flash_attn_backward),
        (_flash_attn_varlen_forward, _flash_attn_varlen_backward),
    )
    for function in (*batches, *packed):
        setattr(interface, function.__name__, function)
    package = ModuleType("flash_attn")
    vars(package).update(__version__="2.8.3", flash_attn_func=flash_attn_func, flash_attn_interface=interface)
    sys.modules |= {package.__name__: package, interface.__name__: interface}
    if importlib.util.find_spec("transformers") is None:
        transformers, utils = ModuleType("transformers"), ModuleType("transformers.modeling_flash_attention_utils")
        vars(transformers)["modeling_flash_attention_utils"] = utils
        sys.modules |= {transformers.__name__: transformers, utils.__name__: utils}
