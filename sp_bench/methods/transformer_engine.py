"""Adapter: NVIDIA's TransformerEngine, DotProductAttention with context parallelism.

All of this is from the sources of 2.20.2. The byte counts of p2p and all_gather hold on 2 GPUs, packed or
not, those of a2a packed.

Variants are the library's cp_comm_type; P ranks:
- `p2p`: K and V travel as one message around a ring, P-1 hops, and again in the backward. dK/dV travel P-1 hops in the
  input's dtype.
- `all_gather`: K and V are gathered, and again in the backward. dK/dV are reduce-scattered in the input's dtype.
- `a2a`: Ulysses. Q, K, V and the output each travel in an all-to-all of their own.
- `a2a+p2p`: both. Groups of `ulysses_degree` adjacent ranks exchange heads.
None of them replicates KV heads.

Each variant wants the zigzag layout over all P ranks (the library's DualChunkSwap), whether causal or not. Variants
that exchange heads reorder the chunks by copies of their own. Tensors are [B, S/P, H, D] in and [B, S/P, H*D] out,
which is a view of ours. The kernel is flash-attn 2, FlashAttention-4, or TransformerEngine's own cuDNN attention
(kernel=cudnn). FlashAttention-4 must be older than 4.0.0b30: docs/METHODS.md says why.

Packed documents lie in the layout document_zigzag and go in as [S/P, H, D] (the library's thd), a view for B = 1. The
lengths beside them are those of the whole pack: the library divides them by the ranks itself. Each variant sends the
same tensors as without packing, so bytes are equal. Documents come divisible by 2 x P, padded if need be.

Closing restores NVTE_*_ATTN* in the environment and makes the library choose its backend again. The imported modules
stay.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sp_bench import kernels
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import Traffic, add_traffic, all_gather_traffic, ring_traffic, ulysses_traffic
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed, missing_library_reason

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("transformer-engine")
PRIMITIVE = {
    "p2p": "send_recv",
    "all_gather": "all_gather",
    "a2a": "all_to_all",
    "a2a+p2p": "all_to_all+send_recv",
}
CUTS_DOCUMENTS = True  # and packs documents so only
OWN_PACKED_KERNELS = ("cudnn",)  # its own binding of cuDNN takes packs; aten's, which is our kernel, does not

FIRST_BETA_OF_ANOTHER_WINDOW = 30  # of FlashAttention-4 4.0.0: docs/METHODS.md

# our kernel -> the library's switches that allow it, NVTE_<...>; it chooses among what is allowed and installed
_SWITCHES = {
    "flash_attn": ("FLASH_ATTN", "FLASH_ATTN_V2"),
    "flash_attn_4": ("FLASH_ATTN", "FLASH_ATTN_V4"),
    "cudnn": ("FUSED_ATTN",),
}
_ALL_SWITCHES = ("FLASH_ATTN", "FLASH_ATTN_V2", "FLASH_ATTN_V3", "FLASH_ATTN_V4", "FUSED_ATTN", "UNFUSED_ATTN")
_MAJOR = {"flash_attn": "2", "flash_attn_4": "4"}  # version of what the library calls flash attention


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    if method.layout not in ("zigzag", "document_zigzag"):
        raise ConfigError(
            f"method.layout={method.layout}: transformer_engine has one layout; use zigzag, or document_zigzag for "
            "packed documents"
        )
    if method.placement == "ring_inner":
        raise ConfigError(
            "method.placement=ring_inner: transformer_engine exchanges heads between adjacent ranks; use ulysses_inner"
        )
    if method.variant != "a2a+p2p" and method.ulysses_degree is not None:
        raise ConfigError(
            f"method.ulysses_degree={method.ulysses_degree}: variant {method.variant} of transformer_engine has no "
            "degrees; use method.ulysses_degree=null, or method.variant=a2a+p2p"
        )
    if method.variant == "a2a+p2p" and method.ulysses_degree is None:
        raise ConfigError("method.ulysses_degree must be given for variant a2a+p2p of transformer_engine")
    degree = sp_size if method.variant == "a2a" else method.ulysses_degree or 1
    return SequenceLayout(method.layout, max(sp_size // degree, 1), degree, over_all_ranks=True, by_document=True)


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if shape.documents and method.variant == "all_gather" and kernel_name == "flash_attn":
        # First: the library need not be here to lack it. The kernel gets all queries of the rank, and each of two calls
        # is meant to compute one chunk of each document. Given cu_seqlens alone, flash-attn 2 takes the tokens from the
        # first on, without gaps: not those of the chunk.
        return (
            "transformer_engine with method.variant=all_gather computes packed documents by a kernel that takes an "
            "offset and a length of each, and flash-attn 2 takes no offsets; use kernel=flash_attn_4 or cudnn, or "
            "method.variant=p2p or a2a"
        )
    if reason := missing_library_reason(method.name, "transformer-engine"):
        return reason
    if kernel_name not in _SWITCHES:
        return (
            f"transformer_engine runs flash-attn 2, FlashAttention-4 or its own cuDNN attention, not "
            f"kernel={kernel_name}; use kernel=flash_attn, flash_attn_4 or cudnn"
        )
    if kernel_name == "flash_attn_4" and method.variant == "a2a+p2p":
        return (
            "transformer_engine has no FlashAttention-4 for method.variant=a2a+p2p; "
            "use kernel=flash_attn or cudnn, or method.variant=p2p, all_gather or a2a"
        )
    if sp_size == 1:
        return "transformer_engine on sp_size=1 is its kernel alone; use sp_size of 2 or more, or method=single"
    return _degree_reason(method, shape, sp_size)


def _degree_reason(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Prose | None:
    degree, hq, hkv = layout(method, sp_size).ulysses_degree, shape.num_heads, shape.num_kv_heads
    valid = [n for n in range(1, sp_size + 1) if not (sp_size % n or hq % n or hkv % n)]
    inner = ", ".join(str(n) for n in valid if 1 < n < sp_size)
    hierarchical = method.variant == "a2a+p2p"
    if degree in valid and not (hierarchical and degree in (1, sp_size)):
        return None
    field = "method.ulysses_degree" if hierarchical else "sp_size"
    between: Prose = f" and lie between 1 and sp_size={sp_size}" if hierarchical else ""
    way_out: Prose = f"method.variant=a2a+p2p with method.ulysses_degree in {{{inner}}}, or " if inner else ""
    return (
        f"{field}={degree} must divide num_heads={hq} and num_kv_heads={hkv}{between}: transformer_engine replicates "
        f"no KV heads; use {way_out}method.variant=p2p or all_gather"
    )


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    """The closed form of each pattern, with dK/dV in the input's dtype."""
    cut = layout(method, sp_size)
    if method.variant == "all_gather":
        return all_gather_traffic(shape, sp_size, "input")
    return add_traffic(
        ulysses_traffic(shape, cut.ulysses_degree, sp_size),
        ring_traffic(shape, cut.ring_degree, cut.ulysses_degree, "input"),
    )


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    import torch

    from sp_bench.kernels import cumulative
    from sp_bench.measure import ledger

    ulysses, ring = mesh.get_group("ulysses"), mesh.get_group("ring")
    groups = {"a2a": ulysses, "a2a+p2p": [ulysses, ring]}.get(str(method.variant), ring)
    cut = layout(method, ulysses.size() * ring.size())
    mask, lengths = "causal" if shape.causal else "no_mask", {}
    if shape.documents:
        mask, cut = "padding_causal", replace(cut, documents=shape.documents)
        for of in ("q", "kv"):  # of the whole pack, and not of this rank
            lengths[f"cu_seqlens_{of}"] = cumulative(shape.documents, torch.device(mesh.device_type))
            lengths[f"max_seqlen_{of}"] = max(shape.documents)
        lengths["pad_between_seqs"] = False  # True: the library would not choose flash-attn 2
    with _only_backend(next(name for name in _SWITCHES if kernels.get(name) is kernel)) as require_asked_for:
        from transformer_engine.pytorch import DotProductAttention  # pyright: ignore[reportMissingImports]

        module = DotProductAttention(
            shape.num_heads,
            shape.head_dim,
            num_gqa_groups=shape.num_kv_heads,
            attention_dropout=0.0,
            qkv_format="thd" if shape.documents else "bshd",
            attn_mask_type=mask,
            softmax_scale=shape.head_dim**-0.5,
        )
        first = mesh.get_rank() - mesh.get_rank() % cut.sp_size  # the ranks of one sequence are adjacent and in order
        ranks = list(range(first, first + cut.sp_size))
        module.set_context_parallel_group(groups, ranks, torch.cuda.Stream(), method.variant)

        def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            # packed tokens: [1,S/P,H,D] -> [S/P,H,D], and back
            tensors = (x.squeeze(0) for x in (q, k, v)) if shape.documents else (q, k, v)
            with ledger.attention():
                out = module(*tensors, **lengths)
            require_asked_for()
            _mark_backward(out, q, k, v)
            return out.view(q.shape)  # [B,S/P,H*D] -> [B,S/P,H,D]

        yield SequenceParallelAttention(cut, attend)


def doubt(kernel_name: str, packages: Mapping[str, str]) -> Prose | None:
    """What a plan warns of: rows that will be `incorrect`. packages: versions of what is installed."""
    version = packages.get("flash-attn-4")
    beta = re.fullmatch(r"4\.0\.0b(\d+)", version or "")
    if kernel_name != "flash_attn_4" or version is None or (beta and int(beta[1]) < FIRST_BETA_OF_ANOTHER_WINDOW):
        return None
    return (
        f"transformer_engine with flash-attn-4 {version} computes another attention: rows end as incorrect. Install "
        f"flash-attn-4 4.0.0b{FIRST_BETA_OF_ANOTHER_WINDOW - 1}, or use kernel=cudnn or flash_attn"
    )


@contextmanager
def _only_backend(kernel_name: str) -> Iterator[Any]:
    """Inside, TransformerEngine may use only the backend of `kernel_name`. Yields a function that raises unless the
    last call ran that backend."""
    from transformer_engine.pytorch.attention.dot_product_attention import (  # pyright: ignore[reportMissingImports]
        _attention_backends as chosen,
    )

    allowed = {f"NVTE_{name}": str(int(name in _SWITCHES[kernel_name])) for name in _ALL_SWITCHES}
    before = {name: os.environ[name] for name in allowed if name in os.environ}
    os.environ.update(allowed)
    chosen["backend_selection_requires_update"] = True  # otherwise it would keep its choice while shapes stay the same
    try:
        yield lambda: _require(kernel_name, chosen)
    finally:
        for name in allowed:
            del os.environ[name]
        os.environ.update(before)
        chosen["backend_selection_requires_update"] = True


def _require(kernel_name: str, chosen: Mapping[str, Any]) -> None:
    """
    Raises:
        RuntimeError: the library ran another backend, or another version of flash attention.
    """
    version = str(chosen["flash_attention_backend"])
    ran_flash = chosen["use_flash_attention"] and version.partition(".")[0] == _MAJOR.get(kernel_name)
    if not (ran_flash if kernel_name in _MAJOR else chosen["use_fused_attention"]):
        raise RuntimeError(f"kernel={kernel_name} was asked for, and transformer_engine chose {dict(chosen)}")


def _mark_backward(out: "Tensor", *inputs: "Tensor") -> None:
    """Mark all autograd nodes between the inputs and the output as attention in the ledger. Which of them issue the
    collectives is internal to the library."""
    from torch.autograd.graph import get_gradient_edge

    from sp_bench.measure import ledger

    seen = {get_gradient_edge(x).node for x in inputs if x.requires_grad}
    pending = [out.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ledger.mark_node_as_attention(node)
            pending += [function for function, _ in node.next_functions]
