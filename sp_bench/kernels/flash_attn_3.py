"""FlashAttention-3, from the flash-attn-3 package or from xformers, whose wheels up to 0.0.34 bring it.

Both have the same operations of torch, in one shared library that is loaded without the rest of the package.
"""

import importlib.metadata
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_bench import hardware
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window
from sp_bench.kernels import flash_mask, half_precision_reason, with_batch, without_batch

if TYPE_CHECKING:
    from torch import Tensor

PACKAGES = ("flash-attn-3", "xformers")
HOPPER = (9, 0)  # the compute capability that FlashAttention-3 is written for
PACKS = True
WINDOWS = True
CUDA_KERNELS = (r"FlashAttnFwdSm\d", r"FlashAttnBwdSm\d")
CUDA_HELPERS = r"FlashAttnFwdCombine|FlashAttnBwdP(re|ost)process|flash::prepare_varlen"


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    if reason := half_precision_reason("flash_attn_3", shape, device, max_head_dim=256):
        return reason
    if _shared_library() is None and not hardware.is_assumed_installed():
        return (
            "kernel flash_attn_3 needs FlashAttention-3: the flash-attn-3 package of torch's wheel index, or xformers "
            "0.0.31 to 0.0.34, which brings it"
        )
    return _device_reason()


@cache
def _device_reason() -> Prose | None:
    """Cached, because a plan asks of each trial, and the driver answers slowly. Without a driver nothing is known: a
    plan may be made where it does not run."""
    found = hardware.gpus()
    for gpu in found.devices if found else ():
        if gpu.capability != HOPPER:
            capability = ".".join(map(str, gpu.capability or ("unknown",)))
            return (
                f"kernel flash_attn_3 runs on Hopper GPUs (compute capability 9.0) only, not on {gpu.name} "
                f"({capability}); use kernel=flash_attn or cudnn"
            )
    return None


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
    # keys in one part: no kernel combines
    options = {"softmax_scale": scale, "is_causal": causal, "num_splits": 1} | flash_mask(documents, window, q.device)
    out, lse, *_ = _operations().fwd(*without_batch(documents, q, k, v), **options)
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

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    options = {"softmax_scale": scale, "is_causal": causal} | flash_mask(documents, window, q.device)
    # a ring passes slices of lse
    _operations().bwd(*without_batch(documents, dout, q, k, v, out, lse.contiguous(), dq, dk, dv), **options)
    return dq, dk, dv


@cache
def _shared_library() -> Path | None:
    for package in PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.match("flash_attn_3/_C*.so"):
                return Path(str(file.locate()))
    return None


@cache
def _operations() -> Any:
    import torch

    torch.ops.load_library(str(_shared_library()))
    return torch.ops.flash_attn_3
