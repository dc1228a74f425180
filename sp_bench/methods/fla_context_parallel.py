"""Adapter: the context parallelism of flash-linear-attention (package fla-core) for the gated delta rule.

It takes and gives [1, S/P, H, D] in our contiguous and zigzag layouts, so nothing is converted. It wants the sequences
of a batch one after the other over the ranks, so B = 1. The library's kernels make of each run of tokens the state that
they make of none, and the transition, and gather these of all runs in fp32; each rank puts together those before its
own. Its backward gathers gradients of states and transitions likewise. In zigzag order a rank has two runs, and sends
twice as much. The library calls its own kernels, so kernel=fla is the only choice.

Closing leaves nothing behind but the imported modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

from sp_bench import hardware
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import Traffic, add_traffic, delta_map_bytes
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("fla-core")
PRIMITIVE = "all_gather"
GATED_DELTA = True


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout not in ("contiguous", "zigzag"):
        raise ConfigError(
            f"method.layout={method.layout}: fla_context_parallel has no such layout; use contiguous or zigzag"
        )
    return SequenceLayout(method.layout, ring_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if missing := hardware.missing_packages("fla-core"):
        return f"method {method.name} needs {missing[0]}: pip install 'sp-bench[flash-linear-attention]'"
    if kernel_name != "fla":
        return f"fla_context_parallel brings its own kernels, not kernel={kernel_name}; use kernel=fla"
    if not shape.gated_delta:
        return "fla_context_parallel is tried with the gated delta rule alone; use model.attention=gated_delta"
    if shape.batch_size > 1:
        return (
            f"batch_size={shape.batch_size}: fla_context_parallel wants a batch packed one sequence after the other "
            "over the ranks, not each sequence cut over all of them; use batch_size=1, or method=state_passing"
        )
    return None


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    runs = 2 if method.layout == "zigzag" else 1
    gather = Fraction((sp_size - 1) * runs * delta_map_bytes(shape))
    return add_traffic({("forward", "all_gather"): gather, ("backward", "all_gather"): gather})


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    import torch
    from fla.ops.cp import build_cp_context  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    from sp_bench.measure import ledger

    group, whole = mesh.get_group("ring"), torch.tensor([0, shape.seq_len], dtype=torch.int32)
    context = build_cp_context(whole.to(mesh.device_type), group, cu_seqlens_cpu=whole, layout=method.layout)

    def attend(q: "Tensor", k: "Tensor", v: "Tensor", g: "Tensor", beta: "Tensor") -> "Tensor":
        with ledger.attention():
            out, _ = chunk_gated_delta_rule(q, k, v, g, beta, scale=shape.head_dim**-0.5, cp_context=context)
        ledger.mark_backward_as_attention(out)
        return out

    yield SequenceParallelAttention(layout(method, group.size()), attend)
