"""Ulysses: an all-to-all turns my tokens of all heads into all tokens of my heads, and back.

Source: DeepSpeed-Ulysses, arXiv 2309.14509. KV heads are replicated when there are fewer of them than ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.config import AttentionShape, MethodConfig
from sp_bench.costs import Traffic, head_split_reason, ulysses_traffic
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


def unsupported_reason(method: MethodConfig, shape: AttentionShape, sp_size: int) -> str | None:
    return head_split_reason(shape, sp_size, "sp_size", method.name)


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    return ulysses_traffic(shape, sp_size, sp_size)


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.collectives import heads_to_tokens, tokens_to_heads
    from sp_bench.local import local_attention

    group, scale = mesh.get_group("ulysses"), shape.head_dim**-0.5

    def attend(q, k, v):
        q, k, v = tokens_to_heads(q, k, v, group)
        return heads_to_tokens(local_attention(kernel, q, k, v, causal=shape.causal, scale=scale), group)

    yield SequenceParallelAttention(layout(method, group.size()), attend)
