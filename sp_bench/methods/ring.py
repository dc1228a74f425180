"""Ring Attention: KV shards travel point to point around the ranks.

Layouts: contiguous, zigzag and striped; of packed documents also document_zigzag, and not striped; for layers of two
kinds also zigzag_by_kind. Source: arXiv 2310.01889. The loop is sp_bench/attention/ring.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sp_bench.attention.layouts import SequenceLayout, computed_on, num_blocks
from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import (
    border_exchange_reason,
    latent_reason,
    merging_dtype,
    travelling,
    travelling_dkv_dtype,
)
from sp_bench.costs.work import KernelCalls, ring_calls
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = "sp_bench"
PRIMITIVE = "send_recv"
PACKS = True
WINDOWS = True
LATENTS = True
CUTS_DOCUMENTS = True
CONVERTS = True


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    return SequenceLayout(method.layout, ring_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    return border_exchange_reason(method, shape) or latent_reason(method)


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    kind = computed_on(method.layout, shape.window)
    kv_heads = travelling(method, shape).num_kv_heads
    return ring_calls(shape, kind, sp_size, rank, kv_heads, num_blocks(kind, rank, sp_size, shape))


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    import torch

    from sp_bench.attention import borders
    from sp_bench.attention.autograd import differentiable
    from sp_bench.attention.copy_engines import transport
    from sp_bench.attention.latent import over_latents

    group, kind = mesh.get_group("ring"), computed_on(method.layout, shape.window)
    ring = partial(
        borders.ring,
        transport=transport(method.exchange, group),
        layout=kind,
        shape=shape,
        dkv_dtype=getattr(torch, travelling_dkv_dtype(shape, method.dkv_dtype)),
        merge_dtype=getattr(torch, merging_dtype(shape, method.merge_dtype)),
    )
    options = {"causal": shape.causal, "scale": shape.head_dim**-0.5}
    sends_latents = method.sends == "latent"
    attend = over_latents(ring, kernel, **options) if sends_latents else differentiable(ring(kernel), **options)
    if method.layout == "zigzag_by_kind" and kind == "contiguous":
        attend = borders.converted(attend, "zigzag", kind, group)
    cut = layout(method, group.size())
    if method.layout == "document_zigzag":
        cut = replace(cut, documents=shape.documents)
    yield SequenceParallelAttention(cut, attend)
