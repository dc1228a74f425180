"""Adapter: the KV all-gather of zhuzilin's ring-flash-attn, `llama3_flash_attn_varlen_func` (arXiv 2407.21783).

It takes and gives packed tokens [S/P, H, D] in the contiguous layout, which are views of our [1, S/P, H, D]. It wants
the sequences of a batch one after the other over the ranks; we cut each sequence over all ranks. Both are the same for
one sequence only, so B = 1. The library's helper turns the lengths of the whole sequence, or of the documents packed
into it, into those of this rank, once.

Forward: the library gathers `head_stride` KV heads at a time, K and V apart, in the input's dtype, while it computes
the heads before. Each rank reads the prefix of the keys that it needs. Backward: KV is gathered again, and dK/dV are
reduce-scattered in the input's dtype, zero past the prefix, while nothing else runs. The library calls flash-attn
itself, so kernel=flash_attn is the only choice.

Closing leaves nothing behind but the imported modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import Traffic, all_gather_traffic
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed, missing_library_reason

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("ring-flash-attn")
PRIMITIVE = "all_gather"
PACKS = True


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout != "contiguous":
        raise ConfigError(
            f"method.layout={method.layout}: ring_flash_attn_llama3 reads one prefix of the gathered keys; "
            "use contiguous"
        )
    return SequenceLayout(ring_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if reason := missing_library_reason(method.name, "ring-flash-attn", "transformers"):
        return reason
    if kernel_name != "flash_attn":
        return f"ring_flash_attn_llama3 brings its own kernel, not kernel={kernel_name}; use kernel=flash_attn"
    if shape.batch_size > 1:
        return (
            f"batch_size={shape.batch_size}: ring_flash_attn_llama3 wants a batch packed one sequence after the other "
            "over the ranks, not each sequence cut over all of them; use batch_size=1, or method=all_gather"
        )
    if shape.num_kv_heads % _stride(method, shape):
        valid = ", ".join(str(n) for n in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % n == 0)
        return (
            f"method.head_stride={method.head_stride} does not divide num_kv_heads={shape.num_kv_heads}; "
            f"use one of {{{valid}}}"
        )
    return None


def _stride(method: MethodConfig, shape: AttentionShape) -> int:
    """The library's heads_k_stride: KV heads gathered at a time."""
    return method.head_stride or shape.num_kv_heads


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    """As the KV all-gather: `head_stride` makes more messages of the same bytes."""
    return all_gather_traffic(shape, sp_size, "input")


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    import torch

    from sp_bench.kernels import cumulative
    from sp_bench.measure import ledger
    from sp_bench.methods._ring_flash_attn import load

    library, group = load(), mesh.get_group("ring")
    cu_seqlens = cumulative(shape.documents or (shape.seq_len,), torch.device(mesh.device_type))
    *lengths, own_prefix = library.llama3_flash_attn_prepare_cu_seqlens(
        cu_seqlens, shape.causal, group.rank(), group.size()
    )
    options = {
        "heads_k_stride": _stride(method, shape),
        "local_k_slice": own_prefix,
        "softmax_scale": shape.head_dim**-0.5,
        "causal": shape.causal,
        "group": group,
    }

    def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        packed = (x.squeeze(0) for x in (q, k, v))  # [1,S/P,H,D] -> [S/P,H,D]: packed tokens
        with ledger.attention():
            out = library.llama3_flash_attn_varlen_func(*packed, *lengths, **options)
        ledger.mark_backward_as_attention(out)
        return out.unsqueeze(0)  # [S/P,H,D] -> [1,S/P,H,D]

    yield SequenceParallelAttention(layout(method, group.size()), attend)
