"""A kernel that sees the boundaries of packed documents, for methods that call it on all tokens of some heads."""

from dataclasses import dataclass

from torch import Tensor

from sp_bench.config.trial import AttentionShape
from sp_bench.kernels import Attention


@dataclass(frozen=True)
class Packed:
    """`kernel` on whole sequences of packed documents, each of which sees itself only."""

    kernel: Attention
    documents: tuple[int, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(q, k, v, causal=causal, scale=scale, documents=self.documents)  # pyright: ignore[reportCallIssue]

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=scale, documents=self.documents)  # pyright: ignore[reportCallIssue]


def of_shape(kernel: Attention, shape: AttentionShape) -> Attention:
    """The kernel for whole sequences of `shape`: itself, unless documents are packed."""
    return Packed(kernel, shape.documents) if shape.documents else kernel
