"""What runs the work of a decoder layer around its attention, and the loss of a tile of logits: torch, call by call;
torch.compile; or, of a layer, Liger's kernels.

Products of matrices are torch's in all of them. They differ in the work between them: norms, rotations, SwiGLU and
residual sums.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_bench.measure import ledger
from sp_bench.training import cross_entropy

Rotation = tuple[Tensor, Tensor]  # cos and sin, [s,1,D/2]


def norm(x: Tensor, module: nn.RMSNorm) -> Tensor:
    """x [...,n], normalised over its last axis and scaled."""
    return module(x)


def rotate(x: Tensor, rope: Rotation) -> Tensor:
    """x [B,s,H,D] with each pair of elements (i, i + D/2) rotated. Computed in the dtype of `rope`, returned in x's."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_both(q: Tensor, k: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
    """q [B,s,Hq,D] and k [B,s,Hkv,D], rotated."""
    return rotate(q, rope), rotate(k, rope)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def as_it_is(part: Callable[..., Any]) -> Callable[..., Any]:
    return part


@dataclass(frozen=True)
class ModelCode:
    """What a layer calls. `part` makes of a part of the layer, a function of tensors, what is called in its place."""

    norm: Callable[[Tensor, nn.RMSNorm], Tensor] = norm
    rotate_both: Callable[[Tensor, Tensor, Rotation], tuple[Tensor, Tensor]] = rotate_both
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    part: Callable[[Callable[..., Any]], Callable[..., Any]] = as_it_is
    loss: cross_entropy.WithGradient | None = None  # of a tile of logits; None: by autograd
    rounds_factors: bool = False  # products are in FP8, whose factors are rounded to it first


EAGER = ModelCode()


@dataclass
class Stopwatch:
    """Seconds that torch.compile has taken in this process, and how often it compiled."""

    seconds: float = 0.0
    times: int = 0
    _started: list[float] = field(default_factory=list)

    def start(self, _: Any) -> None:
        self._started.append(time.perf_counter())

    def stop(self, _: Any) -> None:
        self.seconds += time.perf_counter() - self._started.pop()
        self.times += 1


compiling = Stopwatch()


def named(name: str | None, device: torch.device) -> ModelCode:
    """The code of `workload.model_code`."""
    if name == "compiled":
        return _compiled(device)
    return _liger() if name == "liger" else EAGER


def _compiled(device: torch.device) -> ModelCode:
    """Shapes are static: each is compiled for itself. The layers of one shape share what is compiled."""
    from torch._dynamo.callback import callback_handler
    from torch._inductor import config

    if compiling.start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(compiling.start)
        callback_handler.register_end_callback(compiling.stop)
        ledger.leave_uncompiled()
    # Shapes of one function in a process: torch.compile takes 8, and fails at the ninth. A warm process has many
    # lengths, each with tiles of its own in the loss of its proof.
    torch._dynamo.config.recompile_limit = 64
    if device.type == "cpu":
        config.compile_threads = (
            1  # otherwise each rank starts processes that compile, beside ranks that fill the cores
        )
    part = partial(torch.compile, dynamic=False, fullgraph=True)
    return ModelCode(part=part, loss=part(cross_entropy.with_gradient))


def _liger() -> ModelCode:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

    def liger_norm(x: Tensor, module: nn.RMSNorm) -> Tensor:
        # "gemma" computes all in fp32, as torch does; in place it would overwrite a gradient that others may read
        return LigerRMSNormFunction.apply(x, module.weight, module.eps, 0.0, "gemma", False)

    def liger_rotation(q: Tensor, k: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        # [s,1,D/2] -> [1,s,D], as transformers has it: each half the same
        cos, sin = (torch.cat((x, x), dim=-1).transpose(0, 1) for x in rope)
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return ModelCode(norm=liger_norm, rotate_both=liger_rotation, swiglu=LigerSiLUMulFunction.apply)
