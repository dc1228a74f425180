"""A kernel that computes nothing: what is left of a step is its messages, its memory and all its other work."""

from collections.abc import Callable

import torch
from torch import Tensor

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape

Make = Callable[..., Tensor]  # torch.empty or torch.zeros


class NoKernel:
    """Returns tensors of a kernel's shapes and dtypes, as `make` makes them (see `kernels.Kernel`). Whoever goes on
    with them needs zeros: what lies in empty ones may be no number."""

    CUDA_KERNELS: tuple[str, str] | None = None

    def __init__(self, make: Make = torch.empty) -> None:
        self._make = make

    @staticmethod
    def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **mask: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        batch, tokens, heads, _ = q.shape
        out = self._make(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        return out, self._make(batch, heads, tokens, dtype=wide, device=q.device)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        **mask: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.like(q), self.like(k), self.like(v)

    def like(self, x: Tensor) -> Tensor:
        """Of the shape and dtype of x."""
        return self._make(x.shape, dtype=x.dtype, device=x.device)
