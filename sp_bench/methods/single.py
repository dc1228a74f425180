"""No sequence parallelism: one rank holds the whole sequence. The baseline of the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.work import ONE_CALL, KernelCalls
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = "sp_bench"
PRIMITIVE = "none"
PACKS = True
WINDOWS = True
GATED_DELTA = True


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout != "contiguous":
        raise ConfigError(f"method.layout={method.layout}: single holds the whole sequence; use contiguous")
    return SequenceLayout()


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if sp_size == 1:
        return None
    return f"method single runs on one rank, not sp_size={sp_size}; use sp_size=1, or another method"


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    return ONE_CALL


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.attention import delta
    from sp_bench.attention.autograd import differentiable
    from sp_bench.attention.masked import of_shape

    scale = shape.head_dim**-0.5
    if shape.gated_delta:
        of_rule = delta.rule(kernel, scale)
        yield SequenceParallelAttention(layout(method, 1), lambda *inputs: of_rule(*inputs, None)[0])
        return
    attend = differentiable(of_shape(kernel, shape), causal=shape.causal, scale=scale)
    yield SequenceParallelAttention(layout(method, 1), attend)
