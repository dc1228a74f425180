"""Ulysses: an all-to-all turns "my tokens of all heads" into "all tokens of my heads", and another one turns it back.

Layout: contiguous. KV heads are replicated when there are fewer of them than ranks. With `head_chunks`, the heads are
exchanged in that many parts, and the exchange of one part overlaps the kernel of another. Source: DeepSpeed-Ulysses,
arXiv 2309.14509. The loop is sp_bench/attention/head_chunks.py.
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
GATED_DELTA = True


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if shape.gated_delta:
        return _delta_reason(method, shape, sp_size)
    reason = head_split_reason(shape, sp_size, "sp_size", method.name)
    return reason or head_chunks_reason(shape, sp_size, method.head_chunks, may_share_kv=True)


def _delta_reason(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Prose | None:
    """Why the heads of the gated delta rule cannot be exchanged, or None. Heads of queries and keys are not copied."""
    if method.head_chunks not in (None, 1):
        return f"method.head_chunks={method.head_chunks}: heads of gated_delta travel in one exchange; use 1"
    if shape.num_kv_heads % sp_size == 0:
        return None
    valid = ", ".join(str(n) for n in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % n == 0)
    return (
        f"num_kv_heads={shape.num_kv_heads}, of queries and keys, cannot be split over sp_size={sp_size} for ulysses; "
        f"use sp_size in {{{valid}}}, or method=state_passing"
    )


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    return usp_calls(shape, "contiguous", sp_size, 1, 0, method.head_chunks)


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.attention import delta
    from sp_bench.attention.copy_engines import transport
    from sp_bench.attention.exchange import Collectives
    from sp_bench.attention.head_chunks import HeadChunks, chunked
    from sp_bench.attention.masked import of_shape

    group = mesh.get_group("ulysses")
    if shape.gated_delta:
        attend = delta.by_heads(delta.rule(kernel, shape.head_dim**-0.5), Collectives(group))
        yield SequenceParallelAttention(layout(method, group.size()), attend)
        return
    chunks = HeadChunks(
        of_shape(kernel, shape),
        transport(method.exchange, group),
        shape.causal,
        shape.head_dim**-0.5,
        method.head_chunks or 1,
    )
    yield SequenceParallelAttention(layout(method, group.size()), chunked(chunks))
