"""Adapter: zhuzilin's ring-flash-attn, which merges flash-attn blocks around a point-to-point ring.

Its functions take and give [B, S/P, H, D] in our layouts, so nothing is converted. That for packed documents wants each
of them cut over all ranks (document_zigzag), and takes [S/P, H, D], which is a view for B = 1. K and V travel P-1 hops
in the input's dtype. dK and dV travel P hops in fp32, because a rank's own contribution goes all the way round too. The
library calls flash-attn itself, so kernel=flash_attn is the only choice. Its contiguous ring rounds dQ to bfloat16,
whatever dtype the trial has.

Closing leaves nothing behind but the imported modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import Traffic, ring_traffic
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed, missing_library_reason

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("ring-flash-attn")
PRIMITIVE = "send_recv"
CUTS_DOCUMENTS = True  # and packs documents so only

_FUNCTIONS = {  # layout -> the library's function
    "contiguous": "ring_flash_attn_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "striped": "stripe_flash_attn_func",
    "document_zigzag": "zigzag_ring_flash_attn_varlen_func",
}


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    return SequenceLayout(method.layout, ring_degree=sp_size, by_document=True)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
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
    import torch

    from sp_bench.kernels import cumulative
    from sp_bench.measure import ledger
    from sp_bench.methods._ring_flash_attn import load

    group = mesh.get_group("ring")
    ring = getattr(load(), _FUNCTIONS[method.layout])
    options = {"softmax_scale": shape.head_dim**-0.5, "causal": shape.causal, "group": group}
    cut = layout(method, group.size())
    if shape.documents:
        cut = replace(cut, documents=shape.documents)
        local = tuple(length // group.size() for length in shape.documents)
        options |= {"cu_seqlens": cumulative(local, torch.device(mesh.device_type)), "max_seqlen": max(local)}

    def attend(q, k, v):
        # packed tokens: [1,S/P,H,D] -> [S/P,H,D], and back
        tensors = (x.squeeze(0) for x in (q, k, v)) if shape.documents else (q, k, v)
        with ledger.attention():
            out = ring(*tensors, **options)
        ledger.mark_backward_as_attention(out)
        return out.unsqueeze(0) if shape.documents else out

    yield SequenceParallelAttention(cut, attend)
