"""FlashAttention-4 (CuTe DSL), from the flash-attn-4 package.

The library compiles each variant at its first call, which takes up to 25 s. So it keeps the compiled
variants for the next launch, in a folder that only this user can write to.
"""

import os
import stat
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import Window
from sp_bench.hardware import missing_packages
from sp_bench.kernels import DEEPSEEK, flash_mask, half_precision_reason, with_batch, without_batch

if TYPE_CHECKING:
    from torch import Tensor

# the library's own environment variables, which it reads when it is imported
KEEP, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
PACKS = True
WINDOWS = True
CUDA_KERNELS = (r"FlashAttentionForwardSm\d", r"FlashAttentionBackwardSm\d")
CUDA_HELPERS = r"FlashAttention(ForwardCombine|BackwardPreprocess|BackwardPostprocess)"


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    if reason := half_precision_reason("flash_attn_4", shape, device, max_head_dim=128, uneven=DEEPSEEK):
        return reason
    if missing_packages("flash-attn-4"):
        return "kernel flash_attn_4 needs the flash-attn-4 package: pip install --pre flash-attn-4"
    if shape.head_dim not in (64, 128) and shape.value_dim == shape.head_dim:
        return f"kernel flash_attn_4 is proven with head_dim 64 and 128, not {shape.head_dim}; use kernel=cudnn"
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
    options = {"softmax_scale": scale, "causal": causal, "return_lse": True} | flash_mask(documents, window, q.device)
    out, lse, *_ = _library()._flash_attn_fwd(*without_batch(documents, q, k, v), **options)
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
    options = {"softmax_scale": scale, "causal": causal} | flash_mask(documents, window, q.device)
    # the kernel reads lse as contiguous, whatever its strides say; a ring passes slices
    tensors = without_batch(documents, q, k, v, out, dout, lse.contiguous())
    dq, dk, dv, *_ = _library()._flash_attn_bwd(*tensors, **options)
    dq, dk, dv = with_batch(documents, dq, dk, dv)
    return dq, dk, dv


@cache
def _library() -> Any:
    """The library, set while it is imported to keep what it compiles. A user's own variables take precedence.

    They are set for the import alone: rows and proofs name a process's variables, and in a group of trials these would
    depend on whether an earlier one had this kernel. If the folder cannot be used, the rank's log has a line.
    """
    ours: dict[str, str] = {}
    if not {KEEP, FOLDER} & set(os.environ):
        import torch

        architecture = "".join(map(str, torch.cuda.get_device_capability()))  # some of the library's cache keys lack it
        try:
            ours = {FOLDER: str(own_folder(f"flash_attn_4-sm{architecture}")), KEEP: "1"}
        except OSError as error:
            print(f"flash_attn_4 does not keep its compiled kernels for the next launch: {error}", flush=True)
    os.environ |= ours
    try:
        from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]
    finally:
        for name in ours:
            del os.environ[name]
    return interface


def own_folder(name: str) -> Path:
    """A folder that only this user can write to, on this machine and kept between launches.

    What lies in it is loaded as code. It is in the folder for temporary files; where that is sticky, as /tmp is, nobody
    else can replace it.

    Raises:
        OSError: it cannot be made, is not a folder, or others can write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"sp_bench-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} must be a folder that only you can write to, since code is loaded from it; remove it")
    return folder
