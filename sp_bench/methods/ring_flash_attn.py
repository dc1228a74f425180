"""Adapter: zhuzilin's ring-flash-attn, which merges flash-attn blocks around a point-to-point ring.

Its functions take and give [B, S/P, H, D] in our layouts, so nothing is converted. K and V travel P-1 hops in the
input's dtype. dK and dV travel P hops in fp32, because a rank's own contribution goes all the way round too. The
library calls flash-attn itself, so kernel=flash_attn is the only choice. Its contiguous ring rounds dQ to bfloat16,
whatever dtype the trial has.

Closing leaves nothing behind but the imported modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.trial import AttentionShape, MethodConfig
from sp_bench.costs.attention import Traffic, ring_traffic
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed, missing_library_reason

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("ring-flash-attn")
PRIMITIVE = "send_recv"
NO_PACKS = "the library's rings for packed tokens want each document cut over all ranks, a layout that is not here"

_FUNCTIONS = {  # layout -> the library's function
    "contiguous": "ring_flash_attn_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "striped": "stripe_flash_attn_func",
}


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    return SequenceLayout(method.layout, ring_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> str | None:
    if reason := missing_library_reason(method.name, "ring-flash-attn", "transformers"):
        return reason
    if kernel_name != "flash_attn":
        return f"ring_flash_attn brings its own kernel, not kernel={kernel_name}; use kernel=flash_attn"
    if not shape.causal and method.layout != "contiguous":
        return (
            f"workload.causal=false: the {method.layout} ring of ring_flash_attn is causal only; "
            "use method.layout=contiguous, or method=ring"
        )
    if sp_size == 1:
        return "ring_flash_attn sends dK/dV to itself on sp_size=1; use sp_size of 2 or more, or method=single"
    return None


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    return ring_traffic(shape, sp_size, 1, "float32", dkv_hops=sp_size)


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.measure import ledger
    from sp_bench.methods._ring_flash_attn import load

    group = mesh.get_group("ring")
    ring = getattr(load(), _FUNCTIONS[method.layout])
    options = {"softmax_scale": shape.head_dim**-0.5, "causal": shape.causal, "group": group}

    def attend(q, k, v):
        with ledger.attention():
            out = ring(q, k, v, **options)
        ledger.mark_backward_as_attention(out)
        return out

    yield SequenceParallelAttention(layout(method, group.size()), attend)
