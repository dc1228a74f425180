"""Adapter: DeepSpeed's DistributedAttention, the Ulysses of arXiv 2309.14509, around our local kernel.

It takes and gives [B, S/P, H, D] in our contiguous layout, so nothing is converted: scatter_idx=2 are heads,
gather_idx=1 are tokens, batch_dim_idx=0. Q, K, V and the output each travel in an all-to-all of their own. Each of the
P ranks needs a KV head of its own: P <= Hkv. If P does not divide Hkv, some ranks get one KV head, with its query
heads, more than others.

Closing restores DeepSpeed's communication backend, its groups and its list of usable ops. The import leaves DeepSpeed's
modules and its logger, and PYTORCH_NVML_BASED_CUDA_CHECK=1 in the environment.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import Traffic, ulysses_traffic
from sp_bench.costs.work import ONE_CALL, KernelCalls
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed, layout_of_heads, missing_library_reason

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("deepspeed")
PRIMITIVE = "all_to_all"
layout = layout_of_heads
PACKS = True
TRAFFIC_IS_MEAN: Prose = (
    "where sp_size does not divide the KV heads, ranks with a KV head more send other bytes than the rest"
)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if reason := missing_library_reason(method.name, "deepspeed"):
        return reason
    if shape.num_kv_heads < sp_size:
        return (
            f"num_kv_heads={shape.num_kv_heads} is fewer than sp_size={sp_size}: deepspeed_ulysses replicates no KV "
            f"heads; use sp_size up to {shape.num_kv_heads}, or method=ulysses or ring"
        )
    return None


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    """As Ulysses. With uneven heads this is the mean over the ranks, because ranks with more heads send more."""
    return ulysses_traffic(shape, sp_size, sp_size)


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    return ONE_CALL


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.attention.autograd import differentiable
    from sp_bench.attention.masked import of_shape
    from sp_bench.measure import ledger
    from sp_bench.methods._deepspeed import told_of

    group = mesh.get_group("ulysses")
    local = differentiable(of_shape(kernel, shape), causal=shape.causal, scale=shape.head_dim**-0.5)

    def attend_locally(q, k, v):
        ledger.mark_backward_as_attention(q, k, v)  # results of the exchange, whose backward is an exchange too
        return local(q, k, v)

    with told_of(group):
        from deepspeed.sequence.layer import DistributedAttention  # pyright: ignore[reportMissingImports]

        distributed = DistributedAttention(attend_locally, group, scatter_idx=2, gather_idx=1)

        def attend(q, k, v):
            with ledger.attention():
                out = distributed(q, k, v, batch_dim_idx=0)
            ledger.mark_backward_as_attention(out)
            return out

        yield SequenceParallelAttention(layout(method, group.size()), attend)
