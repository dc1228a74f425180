"""Makes the forward and the backward of an attention one differentiable function."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from sp_bench.attention.sinks import merge_sinks, sink_gradients
from sp_bench.kernels import Attention


def _itself(tensor: Any) -> Any:
    return tensor


class Kept:
    """The output of one attention call and its LSEs, for a second call in the backward.

    A checkpointed layer calls its attention twice. The second call finds these here, takes them and runs no kernel.
    """

    def __init__(self, pack: Callable[[Tensor], Any] = _itself, unpack: Callable[[Any], Tensor] = _itself) -> None:
        """pack: what is held in the place of a tensor; unpack: the tensor of it."""
        self._pack, self._unpack = pack, unpack
        self._held: list[Any] = []

    def put(self, *tensors: Tensor) -> None:
        """Keep them. They are detached, or what is kept would keep the graph that it belongs to."""
        self._held = [self._pack(t.detach()) for t in tensors]

    def take(self) -> tuple[Tensor, ...]:
        """What was put, once; nothing in the first call."""
        held, self._held = self._held, []
        return tuple(map(self._unpack, held))


class Attend(Protocol):
    """A differentiable attention."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, sinks: Tensor | None = None, /
    ) -> Tensor:
        """q [B,Sq,Hq,D], k and v [B,Sk,Hkv,D], sinks [Hq] -> output [B,Sq,Hq,D]. With `kept` a second
        call runs no kernel: only what the backward needs is made again from q, k and v."""
        ...


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore
        ctx,
        attention: Attention,
        causal: bool,
        scale: float,
        kept: Kept | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        held = kept.take() if kept else ()
        out, lse = held or merge_sinks(*attention.forward(q, k, v, causal=causal, scale=scale), sinks)
        if kept and not held:
            kept.put(out, lse)
        ctx.attention, ctx.causal, ctx.scale = attention, causal, scale
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grads = ctx.attention.backward(dout, q, k, v, out, lse, causal=ctx.causal, scale=ctx.scale)
        dsinks = None if sinks is None else sink_gradients(dout, out, lse, sinks)
        return (None, None, None, None, *grads, dsinks)


def differentiable(attention: Attention, *, causal: bool, scale: float) -> Attend:
    """A differentiable function: q [B,Sq,Hq,D], k and v [B,Sk,Hkv,D], sinks [Hq] -> output [B,Sq,Hq,D].

    `attention` is a kernel, or a ring or a gather over several ranks. Saved for the backward: q, k, v, output and lse.
    """
    return lambda q, k, v, kept=None, sinks=None: _Differentiable.apply(attention, causal, scale, kept, q, k, v, sinks)  # pyright: ignore
