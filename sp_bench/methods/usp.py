"""USP: Ulysses inside groups of `ulysses_degree` ranks, and a ring over the groups' shards.

Layouts: contiguous, zigzag and striped. `placement` says whether adjacent ranks exchange heads or are ring neighbours.
With `head_chunks`, the ring of one part of the heads overlaps the head exchange of another. Source: Unified Sequence
Parallelism, arXiv 2405.07719.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.attention.layouts import SequenceLayout, num_blocks
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import (
    border_exchange_reason,
    head_chunks_reason,
    head_split_reason,
    merging_dtype,
    travelling_dkv_dtype,
)
from sp_bench.costs.work import KernelCalls, usp_calls
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = "sp_bench"
PRIMITIVE = "all_to_all+send_recv"
PACKS = True
WINDOWS = True


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    degree = method.ulysses_degree
    if degree is None:
        raise ConfigError(f"method.ulysses_degree must be given for usp; use a divisor of sp_size={sp_size}")
    return SequenceLayout(method.layout, max(sp_size // degree, 1), degree, method.placement != "ring_inner")


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    degree = layout(method, sp_size).ulysses_degree
    if sp_size % degree:
        valid = ", ".join(str(n) for n in range(1, sp_size + 1) if sp_size % n == 0)
        return f"method.ulysses_degree={degree} does not divide sp_size={sp_size}; use one of {valid}"
    reason = head_split_reason(shape, degree, "method.ulysses_degree", method.name)
    reason = reason or border_exchange_reason(method, shape)
    # parts may not share a KV head: each part would send it around the ring
    return reason or head_chunks_reason(shape, degree, method.head_chunks, may_share_kv=False)


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    cut = layout(method, sp_size)
    ring_rank, _ = cut.coordinates(rank)
    blocks = num_blocks(cut.kind, ring_rank, cut.ring_degree, shape)
    return usp_calls(shape, cut.kind, cut.ulysses_degree, cut.ring_degree, ring_rank, method.head_chunks, blocks)


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    import torch

    from sp_bench.attention import borders
    from sp_bench.attention.copy_engines import transport
    from sp_bench.attention.head_chunks import HeadChunks, chunked

    ulysses, around = (transport(method.exchange, mesh.get_group(axis)) for axis in ("ulysses", "ring"))
    ring = borders.ring(
        kernel,
        around,
        method.layout,
        shape,
        dkv_dtype=getattr(torch, travelling_dkv_dtype(shape, method.dkv_dtype)),
        merge_dtype=getattr(torch, merging_dtype(shape, method.merge_dtype)),
    )
    chunks = HeadChunks(ring, ulysses, shape.causal, shape.head_dim**-0.5, method.head_chunks or 1)
    cut = layout(method, ulysses.group.size() * around.group.size())
    yield SequenceParallelAttention(cut, chunked(chunks))
