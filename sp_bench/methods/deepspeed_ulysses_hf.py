"""Adapter: DeepSpeed's UlyssesSPAttentionHF, the Ulysses of ALST (arXiv 2506.13996) for Hugging Face models.

We build the module directly, without transformers' registry, around our local kernel, which we give the form of a
transformers attention function. The module takes [B, H, S/P, D], which are views of our tensors, and gives
[B, S/P, H*D], both in our contiguous layout.

What it does otherwise than our Ulysses:
- Q, K, V and the output each travel in an all-to-all of their own.
- Every call also gathers position_ids [B, S/P], 8 bytes a token, because transformers' attention functions want those
  of the whole sequence. Ours does not use them.
- It copies Q, K and V before the exchange and after it, even for B = 1. It copies the output after the exchange, and
  before it if it is not contiguous.
As in ours, KV heads are replicated until each rank has one.

Closing restores what sp_bench/methods/_deepspeed.py restores, and DeepSpeed's registry of groups by name. What stays is
the imported modules, einops' and torch's compiler among them, and TORCHINDUCTOR_CACHE_DIR in the environment, which
torch sets for a library's custom operator. Of transformers only the version is read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import POSITION_BYTES, Traffic, add_traffic, head_split_reason, ulysses_traffic
from sp_bench.costs.work import ONE_CALL, KernelCalls
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed, layout_of_heads, missing_library_reason

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("deepspeed")
PRIMITIVE = "all_to_all"
layout = layout_of_heads
PACKS = True


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if reason := missing_library_reason(method.name, "deepspeed", "transformers"):
        return reason
    return head_split_reason(shape, sp_size, "sp_size", method.name)


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    """As Ulysses, and in the forward each rank sends its position_ids to all others: B * S/P * 8 * (P-1) bytes."""
    positions = Fraction(shape.batch_size * shape.seq_len, sp_size) * POSITION_BYTES * (sp_size - 1)
    return add_traffic(ulysses_traffic(shape, sp_size, sp_size), {("forward", "all_gather"): positions})


def kernel_calls(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> KernelCalls:
    return ONE_CALL


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    import torch

    from sp_bench.measure import ledger
    from sp_bench.methods._deepspeed import told_of

    group = mesh.get_group("ulysses")
    cut = layout(method, group.size())
    own = torch.tensor(cut.global_positions(group.rank(), shape.seq_len), device=mesh.device_type)
    position_ids = own.repeat(shape.batch_size, 1)  # [S/P] -> [B,S/P]

    with told_of(group), _registered_groups():
        ulysses, layer = _make(kernel, shape, group), torch.nn.Module()

        def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            # [B,S/P,H,D] -> [B,H,S/P,D]: views, as in a Hugging Face model
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            with ledger.attention():
                # keyword arguments: each call makes a new mapping, into which the module puts the gathered positions
                out, _ = ulysses(layer, *heads_first, None, position_ids=position_ids)
            _mark_exchange(out)
            return out.unflatten(-1, (-1, shape.head_dim))  # [B,S/P,H*D] -> [B,S/P,H,D]

        yield SequenceParallelAttention(cut, attend)


def _make(kernel: Kernel, shape: AttentionShape, group: Any) -> Any:
    """The library's module for sequences of `shape.seq_len` tokens. Between the exchanges it calls `kernel`."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )

    from sp_bench.attention.autograd import differentiable
    from sp_bench.attention.masked import of_shape

    local = differentiable(of_shape(kernel, shape), causal=shape.causal, scale=shape.head_dim**-0.5)

    def attend_locally(
        layer: Any, q: "Tensor", k: "Tensor", v: "Tensor", mask: None, *, position_ids: "Tensor"
    ) -> "tuple[Tensor, None]":
        """q, k and v [B,H/P,S,D] -> (output [B,S,H/P,D], None): the form of a transformers attention function, whose
        second result are the attention weights."""
        for exchanged in (q, k, v):
            _mark_exchange(exchanged)
        return local(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), None

    return UlyssesSPAttentionHF(
        attn=attend_locally,
        batch_size=shape.batch_size,
        attn_head_count=shape.num_heads,
        attn_head_size=shape.head_dim,
        kv_head_count=shape.num_kv_heads,
        num_hidden_layers=1,
        process_group=group,
        local_seq_length=shape.seq_len // group.size(),
        global_seq_length=shape.seq_len,
    )


def _mark_exchange(result: "Tensor") -> None:
    """Tell the ledger which autograd node issues the collective of the backward: the exchange that gave `result`, which
    permutes follow."""
    from sp_bench.measure import ledger

    node = result.grad_fn
    while node is not None and "dim_zero_all_to_all" not in node.name():
        node = node.next_functions[0][0]
    if result.grad_fn is not None:
        assert node is not None, "UlyssesSPAttentionHF exchanged nothing that is differentiable"
        ledger.mark_node_as_attention(node)


@contextmanager
def _registered_groups() -> Iterator[None]:
    """Restores DeepSpeed's registry of groups by name."""
    from deepspeed.sequence import layer  # pyright: ignore[reportMissingImports]

    registry = layer._all_to_all_groups
    before = dict(registry)
    try:
        yield
    finally:
        registry.clear()
        registry.update(before)
