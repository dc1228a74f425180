"""UPipe, or Untied Ulysses: Ulysses in stages of heads, one after the other, of which only one has buffers.

Layout: contiguous. It differs from `ulysses` with `head_chunks`: no exchange overlaps a kernel, and nothing that was
exchanged is kept for the backward, which exchanges it again. So it sends 1.5 times as much, and holds less. Source:
Untied Ulysses, arXiv 2602.21196. The loop is sp_bench/attention/head_stages.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import head_chunks_reason, head_split_reason
from sp_bench.costs.work import KernelCalls, usp_calls
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, layout_of_heads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = "sp_bench"
PRIMITIVE = "all_to_all"
layout = layout_of_heads
PACKS = True
WINDOWS = True


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    return head_split_reason(shape, sp_size, "sp_size", method.name) or head_chunks_reason(
        shape, sp_size, method.head_stages, may_share_kv=True, field="method.head_stages"
    )


def _num_stages(method: MethodConfig, shape: AttentionShape, sp_size: int) -> int:
    return method.head_stages or shape.num_heads // sp_size


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    return usp_calls(shape, "contiguous", sp_size, 1, 0, _num_stages(method, shape, sp_size))


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.attention.copy_engines import transport
    from sp_bench.attention.head_chunks import HeadChunks
    from sp_bench.attention.head_stages import staged
    from sp_bench.attention.masked import of_shape

    group = mesh.get_group("ulysses")
    num_stages = _num_stages(method, shape, group.size())
    stages = HeadChunks(
        of_shape(kernel, shape), transport(method.exchange, group), shape.causal, shape.head_dim**-0.5, num_stages
    )
    yield SequenceParallelAttention(layout(method, group.size()), staged(stages))
