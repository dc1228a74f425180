"""The gated delta rule by states: each rank computes its own tokens, and what travels is the state between shards.

Layouts: contiguous; beside softmax layers in zigzag order zigzag_by_kind, which is converted and back. Variants:
gather, of all ranks' states and transitions; chain, of the state from rank to rank. The maths is in
sp_bench/attention/delta.py.
"""

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
PRIMITIVE = {"gather": "all_gather", "chain": "send_recv"}
GATED_DELTA = True


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout not in ("contiguous", "zigzag_by_kind"):
        raise ConfigError(f"method.layout={method.layout}: state_passing computes tokens in order; use contiguous")
    return SequenceLayout(method.layout, ring_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if shape.gated_delta:
        return None
    return "method state_passing passes states, which softmax has not; use a model with model.attention=gated_delta"


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    return ONE_CALL


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.attention import delta
    from sp_bench.attention.exchange import Collectives

    # in a decoder of several kinds of layers the mesh is that of the other ones' method
    group = mesh.get_group("ring" if mesh["ring"].size() > 1 else "ulysses")
    attend = delta.by_states(delta.rule(kernel, shape.head_dim**-0.5), Collectives(group), method.variant or "gather")
    if method.layout == "zigzag_by_kind":
        attend = delta.converted(attend, group)
    yield SequenceParallelAttention(layout(method, group.size()), attend)
