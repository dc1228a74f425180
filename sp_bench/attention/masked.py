"""A kernel bound to a mask beside the causal one: packed documents, a window, or both. For methods that call it on all
tokens of some heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sp_bench.config.shape import AttentionShape
from sp_bench.config.windows import whole
from sp_bench.kernels import Attention


@dataclass(frozen=True)
class Masked:
    """`kernel`, which also takes `mask`."""

    kernel: Attention
    mask: Mapping[str, Any]  # `documents`, `window` or both; see kernels.Kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(q, k, v, causal=self._causal(causal), scale=scale, **self.mask)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernel.backward(dout, q, k, v, out, lse, causal=self._causal(causal), scale=scale, **self.mask)

    def _causal(self, causal: bool) -> bool:
        """A window says the whole mask."""
        return causal and "window" not in self.mask


def of_shape(kernel: Attention, shape: AttentionShape) -> Attention:
    """The kernel for whole sequences of `shape`: itself, unless documents are packed or a window hides keys."""
    masks = {"documents": shape.documents, "window": shape.window and whole(shape.window)}
    hiding = {name: mask for name, mask in masks.items() if mask}
    return Masked(kernel, hiding) if hiding else kernel
