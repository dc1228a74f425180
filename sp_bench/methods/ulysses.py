"""Ulysses: an all-to-all turns my tokens of all heads into all tokens of my heads, and back.

Source: DeepSpeed-Ulysses, arXiv 2309.14509. KV heads are replicated when there are fewer of them than ranks. In
`head_chunks` parts, each part's exchange overlaps another's kernel; the loop is sp_bench/head_chunks.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.config import AttentionShape, MethodConfig
from sp_bench.costs import Traffic, head_split_reason, replicated_kv_heads, ulysses_traffic
from sp_bench.kernels import Kernel
from sp_bench.layouts import SequenceLayout
from sp_bench.methods import SequenceParallelAttention
from sp_bench.parsing import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = "sp_bench"
PRIMITIVE = "all_to_all"


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout != "contiguous":
        raise ConfigError(f"method.layout={method.layout}: ulysses gathers the whole sequence and has contiguous only")
    return SequenceLayout(ulysses_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> str | None:
    if reason := head_split_reason(shape, sp_size, "sp_size", method.name):
        return reason
    chunks, heads = method.head_chunks or 1, shape.num_heads // sp_size
    kv_heads = replicated_kv_heads(shape.num_kv_heads, sp_size) // sp_size
    valid = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if chunks in valid:
        return None
    return (
        f"method.head_chunks={chunks} does not cut the {heads} query and {kv_heads} key/value heads of a rank; "
        f"use one of {valid}"
    )


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    return ulysses_traffic(shape, sp_size, sp_size)


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.copy_engines import transport
    from sp_bench.head_chunks import HeadChunks, chunked_attention
    from sp_bench.local import local_attention

    group, scale = mesh.get_group("ulysses"), shape.head_dim**-0.5
    chunks = HeadChunks(kernel, transport(method.exchange, group), shape.causal, scale, method.head_chunks or 1)

    def attend(q, k, v):
        if group.size() == 1:
            return local_attention(kernel, q, k, v, causal=shape.causal, scale=scale)
        return chunked_attention(chunks, q, k, v)

    yield SequenceParallelAttention(layout(method, group.size()), attend)
