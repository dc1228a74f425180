"""The gated delta rule by flash-linear-attention's Triton kernels, which the package fla-core has."""

from typing import TYPE_CHECKING

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.hardware import missing_packages

if TYPE_CHECKING:
    from torch import Tensor

CUDA_KERNELS = (r"^chunk_fwd_kernel_o$", r"^chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64$")
MAX_HEAD_DIM = 256  # of keys


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    if device != "cuda":
        return "kernel fla runs on CUDA only; use kernel=chunked"
    if shape.dtype not in ("bfloat16", "float16"):
        return f"kernel fla is proven in bfloat16 and float16, not dtype={shape.dtype}; use these, or kernel=chunked"
    if shape.head_dim > MAX_HEAD_DIM:
        return f"kernel fla takes a head_dim up to {MAX_HEAD_DIM}, not {shape.head_dim}; use kernel=chunked"
    if missing := missing_packages("fla-core"):
        return f"kernel fla needs {missing[0]}: pip install 'sp-bench[flash-linear-attention]'"
    return None


def attend(
    q: "Tensor", k: "Tensor", v: "Tensor", g: "Tensor", beta: "Tensor", state: "Tensor | None", *, scale: float
) -> "tuple[Tensor, Tensor]":
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    return chunk_gated_delta_rule(q, k, v, g, beta, scale=scale, initial_state=state, output_final_state=True)
