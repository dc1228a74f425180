"""KV all-gather: every rank gathers all keys and values, and computes its own queries against them.

Layouts: contiguous and zigzag. Source: the context parallelism of Llama 3, arXiv 2407.21783, section 3.3.2. The loop is
sp_bench/attention/gather.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.attention.layouts import SequenceLayout, borders, seen_across
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import latent_reason, travelling, travelling_dkv_dtype
from sp_bench.costs.work import KernelCalls, all_gather_calls
from sp_bench.kernels import Attention, Kernel
from sp_bench.methods import SequenceParallelAttention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = "sp_bench"
PRIMITIVE = "all_gather"
PACKS = True
WINDOWS = True
LATENTS = True


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout == "striped":
        raise ConfigError("method.layout=striped: all_gather needs runs of tokens; use contiguous or zigzag")
    return SequenceLayout(method.layout, ring_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if method.head_stride is not None and method.head_stride > shape.num_kv_heads:
        return (
            f"method.head_stride={method.head_stride} is more than num_kv_heads={shape.num_kv_heads}; "
            f"use {shape.num_kv_heads} or fewer"
        )
    if method.head_stride is not None and shape.window is not None:
        return (
            f"method.head_stride={method.head_stride}: under a window all heads' borders are gathered at once; use null"
        )
    return latent_reason(method)


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    if shape.window is not None:
        computed = borders(method.layout, rank, sp_size, shape.seq_len, shape.window, shape.documents).num_blocks.all
        return KernelCalls(computed, computed)
    if shape.documents:
        runs = layout(method, sp_size).runs(rank, shape.seq_len)
        before = sum(seen_across(run, range(run.start), shape.documents) is not None for run in runs)
        groups = -(-shape.num_kv_heads // (method.head_stride or shape.num_kv_heads))
        return KernelCalls(groups * (len(runs) + before), groups * (len(runs) + before))
    return all_gather_calls(travelling(method, shape), method.layout, rank, method.head_stride)


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    import torch

    from sp_bench.attention.autograd import differentiable
    from sp_bench.attention.borders import Bordered, Gathered
    from sp_bench.attention.copy_engines import transport
    from sp_bench.attention.gather import Gather
    from sp_bench.attention.latent import over_latents

    group = mesh.get_group("ring")
    dkv_dtype = getattr(torch, travelling_dkv_dtype(shape, method.dkv_dtype))
    cut = layout(method, group.size())
    stride = method.head_stride or travelling(method, shape).num_kv_heads
    over, options = transport(method.exchange, group), {"causal": shape.causal, "scale": shape.head_dim**-0.5}

    def gather(kernel: Attention) -> Attention:
        if shape.window is not None:
            return Bordered(kernel, Gathered(over), method.layout, shape.window, dkv_dtype, shape.documents)
        return Gather(kernel, over, cut, stride, dkv_dtype, shape.documents)

    sends_latents = method.sends == "latent"
    attend = over_latents(gather, kernel, **options) if sends_latents else differentiable(gather(kernel), **options)
    yield SequenceParallelAttention(cut, attend)
