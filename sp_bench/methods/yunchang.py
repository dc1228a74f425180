"""Adapter: yunchang, the reference implementation of USP (arXiv 2405.07719), around flash-attn.

Variant `usp` is its LongContextAttention: groups of `ulysses_degree` ranks exchange heads, and R = sp_size /
ulysses_degree ranks form a ring over the groups' shards; either degree may be 1. Variant `ulysses` is its
UlyssesAttention: all ranks exchange heads, without a ring. Both take and give [B, S/P, H, D] in our layouts, so nothing
is converted.

Q, K, V and the output each travel in an all-to-all of their own; KV heads are not replicated. In the ring K and V
travel R-1 hops in the input's dtype. dK and dV travel R hops in fp32, because a rank's own contribution goes all the
way round too; in a ring of one rank, the rank sends it to itself. The contiguous ring rounds dQ to bfloat16, whatever
dtype the trial has, also with one rank.

yunchang gets our process groups, in the order of its own set_seq_parallel_pg(use_ulysses_low=True) for
placement=ulysses_inner, and False for ring_inner. Closing restores its groups. The import leaves its modules and, where
flashinfer is installed, TORCH_CUDA_ARCH_LIST in the environment.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import Traffic, add_traffic, ring_traffic, ulysses_traffic
from sp_bench.kernels import Kernel
from sp_bench.methods import SequenceParallelAttention, installed, missing_library_reason

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

IMPLEMENTATION = installed("yunchang")
PRIMITIVE = {"usp": "all_to_all+send_recv", "ulysses": "all_to_all"}
NO_PACKS: Prose = "neither LongContextAttention nor UlyssesAttention takes cu_seqlens"

# layout -> the library's ring_impl_type
_RING_IMPL_TYPES = {"contiguous": "basic", "zigzag": "zigzag", "striped": "strip"}


def layout(method: MethodConfig, sp_size: int) -> SequenceLayout:
    degree = method.ulysses_degree or sp_size
    if method.variant == "ulysses":
        if degree != sp_size:
            raise ConfigError(
                f"method.ulysses_degree={degree}: variant ulysses of yunchang exchanges heads over all "
                f"sp_size={sp_size} ranks; use method.ulysses_degree=null, or method.variant=usp"
            )
        if method.layout != "contiguous":
            raise ConfigError(
                f"method.layout={method.layout}: variant ulysses of yunchang gathers the whole sequence; use contiguous"
            )
    return SequenceLayout(method.layout, max(sp_size // degree, 1), degree, method.placement != "ring_inner")


def unsupported_reason(method: MethodConfig, kernel_name: str, shape: AttentionShape, sp_size: int) -> Prose | None:
    if reason := missing_library_reason(method.name, "yunchang"):
        return reason
    if kernel_name != "flash_attn":
        return (
            f"yunchang has a backward for flash-attn only, not for kernel={kernel_name}: its torch attention has none, "
            "and it does not know FlashAttention-4; use kernel=flash_attn"
        )
    if not shape.causal and method.layout != "contiguous":
        return (
            f"workload.causal=false: the {method.layout} ring of yunchang is causal only; use "
            "method.layout=contiguous, or method=usp"
        )
    return _degree_reason(layout(method, sp_size).ulysses_degree, shape, sp_size)


def _degree_reason(degree: int, shape: AttentionShape, sp_size: int) -> Prose | None:
    hq, hkv = shape.num_heads, shape.num_kv_heads
    valid = [n for n in range(1, sp_size + 1) if not (sp_size % n or hq % n or hkv % n)]
    if degree in valid:
        return None
    degrees = ", ".join(map(str, valid))
    return (
        f"method.ulysses_degree={degree} must divide sp_size={sp_size}, num_heads={hq} and num_kv_heads={hkv}: "
        f"yunchang replicates no KV heads; use method.variant=usp with method.ulysses_degree in {{{degrees}}}, "
        "or method=usp"
    )


def traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    cut = layout(method, sp_size)
    ring = cut.ring_degree
    hops = ring if ring > 1 else 0  # a single rank sends to itself, which is not traffic
    return add_traffic(
        ulysses_traffic(shape, cut.ulysses_degree, sp_size),
        ring_traffic(shape, ring, cut.ulysses_degree, "float32", dkv_hops=hops),
    )


@contextmanager
def open(
    method: MethodConfig, kernel: Kernel, shape: AttentionShape, mesh: "DeviceMesh"
) -> Iterator[SequenceParallelAttention]:
    from sp_bench.measure import ledger

    ulysses, ring = mesh.get_group("ulysses"), mesh.get_group("ring")
    with _process_groups(ULYSSES_PG=ulysses, RING_PG=ring):
        from yunchang.hybrid import LongContextAttention  # pyright: ignore[reportMissingImports]
        from yunchang.kernels import AttnType  # pyright: ignore[reportMissingImports]
        from yunchang.ulysses import UlyssesAttention  # pyright: ignore[reportMissingImports]

        if method.variant == "ulysses":
            module = UlyssesAttention(ulysses, attn_type=AttnType.FA)
            module.attn_fn = _marked(module.attn_fn)
        else:
            module = LongContextAttention(ring_impl_type=_RING_IMPL_TYPES[method.layout], attn_type=AttnType.FA)
            module.ring_attn_fn = _marked(module.ring_attn_fn)

        def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            with ledger.attention():
                out = module(q, k, v, softmax_scale=shape.head_dim**-0.5, causal=shape.causal)
            ledger.mark_backward_as_attention(out)
            return out

        yield SequenceParallelAttention(layout(method, ulysses.size() * ring.size()), attend)


def _marked(attend_locally: "Callable[..., Tensor]") -> "Callable[..., Tensor]":
    """`attend_locally`, which runs between the two head exchanges, with its inputs and output marked for the ledger:
    the backward of each is an exchange or a ring."""
    from sp_bench.measure import ledger

    def attend(q: "Tensor", k: "Tensor", v: "Tensor", **options: Any) -> "Tensor":
        ledger.mark_backward_as_attention(q, k, v)  # results of the head exchange
        out = attend_locally(q, k, v, **options)
        ledger.mark_backward_as_attention(out)
        return out

    return attend


@contextmanager
def _process_groups(**groups: Any) -> Iterator[None]:
    """Inside, yunchang's process-wide groups are these, which its modules take when they are made. Restores them."""
    from yunchang.globals import PROCESS_GROUP  # pyright: ignore[reportMissingImports]

    names = vars(PROCESS_GROUP)
    before = {name: names[name] for name in groups}
    names.update(groups)
    try:
        yield
    finally:
        names.update(before)
