"""Adapter: DeepSpeed's UlyssesSPAttentionHF, the Ulysses of ALST (arXiv 2506.13996) for Hugging Face models.

Made directly, without transformers' registry, around our local kernel in the form of its attention functions. It takes
[B, H, S/P, D] views of ours and gives [B, S/P, H*D], our contiguous layout. Q, K, V and the output each travel in an
all-to-all of their own; KV heads are replicated until each rank has one. Every call gathers position_ids [B, S/P] too,
8 bytes a token, as transformers' attention functions want those of the whole sequence; ours has no use for them. Q, K
and V are each copied before the exchange and after it, even for B = 1; the output after it, and before it if it has to.

Closing restores what sp_bench/methods/_deepspeed.py does, and DeepSpeed's registry of groups by name. What stays
is the imports, einops' and torch's compiler among them, with TORCHINDUCTOR_CACHE_DIR in the environment, which torch
sets for a library's custom operator. transformers is asked for its version only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import AttentionShape, MethodConfig
from sp_bench.costs.attention import Traffic, add_traffic, head_split_reason, ulysses_traffic
from sp_bench.costs.patterns import POSITION_BYTES
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed, missing_library_reason

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("deepspeed")
PRIMITIVE = "all_to_all"


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout != "contiguous":
        raise ConfigError(
            f"method.layout={method.layout}: deepspeed_ulysses_hf gathers the whole sequence and has contiguous only"
        )
    return SequenceLayout(ulysses_degree=sp_size)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> str | None:
    if reason := missing_library_reason(method.name, "deepspeed", "transformers"):
        return reason
    return head_split_reason(shape, sp_size, "sp_size", method.name)


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    """That of Ulysses, and in the forward each rank's position_ids to all others."""
    positions = Fraction(shape.batch_size * shape.seq_len, sp_size) * POSITION_BYTES * (sp_size - 1)
    return add_traffic(ulysses_traffic(shape, sp_size, sp_size), {("forward", "all_gather"): positions})


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
    # [S/P] -> [B,S/P]
    position_ids = own.repeat(shape.batch_size, 1)

    with told_of(group), _registered_groups():
        ulysses, layer = _make(kernel, shape, group), torch.nn.Module()

        def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            # [B,S/P,H,D] -> [B,H,S/P,D]: views, as those of a Hugging Face model
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            with ledger.attention():
                # one mapping a call: it puts the gathered positions into it
                out, _ = ulysses(layer, *heads_first, None, position_ids=position_ids)
            _mark_exchange(out)
            # [B,S/P,H*D] -> [B,S/P,H,D]
            return out.unflatten(-1, (-1, shape.head_dim))

        yield SequenceParallelAttention(cut, attend)


def _make(kernel: Kernel, shape: AttentionShape, group: Any) -> Any:
    """The library's module for sequences of one length, around `kernel` on all tokens of this rank's heads."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )

    from sp_bench.attention.autograd import differentiable

    local = differentiable(kernel, causal=shape.causal, scale=shape.head_dim**-0.5)

    def attend_locally(
        layer: Any, q: "Tensor", k: "Tensor", v: "Tensor", mask: None, *, position_ids: "Tensor"
    ) -> "tuple[Tensor, None]":
        """q [B,H/P,S,D], k and v likewise -> [B,S,H/P,D], as transformers' attention functions; and no weights."""
        for exchanged in (q, k, v):
            _mark_exchange(exchanged)
        return local(*(x.transpose(1, 2) for x in (q, k, v))), None

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
    """Tell the ledger which node issues the backward's collective: the exchange, behind the permutes of its result."""
    from sp_bench.measure import ledger

    node = result.grad_fn
    while node is not None and "dim_zero_all_to_all" not in node.name():
        node = node.next_functions[0][0]
    if result.grad_fn is not None:
        assert node is not None, "UlyssesSPAttentionHF exchanged nothing that is differentiable"
        ledger.mark_node_as_attention(node)


@contextmanager
def _registered_groups() -> Iterator[None]:
    """DeepSpeed's registry of groups, by name, afterwards as it was."""
    from deepspeed.sequence import layer  # pyright: ignore[reportMissingImports]

    registry = layer._all_to_all_groups
    before = dict(registry)
    try:
        yield
    finally:
        registry.clear()
        registry.update(before)
