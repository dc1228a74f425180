"""Double ring: KV travels around inner rings of `inner_ring_degree` neighbours, and around an outer ring of these.

Layouts: contiguous, zigzag and striped. With one inner ring, or with inner rings of one rank, it is `ring`. Source:
LoongTrain, arXiv 2406.18485. The loop is sp_bench/attention/double_ring.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import merging_dtype, travelling_dkv_dtype
from sp_bench.costs.work import KernelCalls, ring_calls
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = "sp_bench"
PRIMITIVE = "send_recv"
NO_PACKS: Prose = "its loop over two rings does not know the blocks of documents"


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    return SequenceLayout(method.layout, ring_degree=sp_size)


def inner_ring_degree(method: MethodConfig, sp_size: int) -> int:
    """The ranks of an inner ring: as given, or of sp_size's divisors the smallest that is no smaller than the number of
    inner rings that it leaves."""
    balanced = next(n for n in range(1, sp_size + 1) if sp_size % n == 0 and n * n >= sp_size)
    return method.inner_ring_degree or balanced


def ring_degrees(method: MethodConfig, sp_size: int) -> tuple[int, int]:
    """The ranks of an inner ring, and of the outer one. Where either is 1, all ranks are in one ring."""
    inner = inner_ring_degree(method, sp_size)
    return inner, max(sp_size // inner, 1)


def send_rings(method: MethodConfig, sp_size: int, rank: int) -> list[tuple[list[int], Fraction]]:
    """The members of the inner and of the outer ring of `rank`, and which part of its bytes it sends around each.

    Of the R-1 hops of a shard, all but one for each further window are inside a window. Its dK/dV make the same hops.
    """
    inner, outer = ring_degrees(method, sp_size)
    window, place = divmod(rank, inner)
    between = Fraction(outer - 1, max(sp_size - 1, 1))
    neighbours = range(window * inner, (window + 1) * inner)
    return [([*neighbours], 1 - between), ([*range(place, sp_size, inner)], between)]


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    degree = inner_ring_degree(method, sp_size)
    if sp_size % degree:
        valid = ", ".join(str(n) for n in range(1, sp_size + 1) if sp_size % n == 0)
        return f"method.inner_ring_degree={degree} does not divide sp_size={sp_size}; use one of {valid}"
    return None


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    return ring_calls(shape, method.layout, sp_size, rank, shape.num_kv_heads)


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    import torch

    from sp_bench.attention.autograd import differentiable
    from sp_bench.attention.copy_engines import transport
    from sp_bench.attention.double_ring import DoubleRing
    from sp_bench.attention.exchange import rings_within

    group = mesh.get_group("ring")
    rings = rings_within(group, inner_ring_degree(method, group.size()), mesh.device_type)
    inner, outer = (transport(method.exchange, rings.get_group(axis)) for axis in ("inner", "outer"))
    ring = DoubleRing(
        kernel,
        inner,
        outer,
        method.layout,
        dkv_dtype=getattr(torch, travelling_dkv_dtype(shape, method.dkv_dtype)),
        merge_dtype=getattr(torch, merging_dtype(shape, method.merge_dtype)),
    )
    attend = differentiable(ring, causal=shape.causal, scale=shape.head_dim**-0.5)
    yield SequenceParallelAttention(layout(method, group.size()), attend)
