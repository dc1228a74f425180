"""What one step computes, by closed form: calls of the kernel, FLOPs, and elements that the optimizer updates.

A step that is counted must have computed exactly this. The calls of a method follow from the blocks in which it cuts
the scores. P ranks of a sequence, R ring ranks, U ulysses ranks, Hkv key/value heads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.costs.attention import attention_forward_flops, backward_per_forward, replicated_kv_heads

# What torch runs of an MLP and of a norm that no other code has replaced. Products and messages are the same.
SWIGLU_OP, NORM_OP, LOSS_OP = "aten::silu", "aten::rsqrt", "aten::_log_softmax"


class KernelCalls(NamedTuple):
    """How often one rank calls the attention kernel."""

    forward: int
    backward: int


@dataclass(frozen=True)
class ExpectedWork:
    """What one step must compute. None: there is no closed form, and the row has a null for what was counted."""

    matmul_flops: Mapping[str, int] | None = None  # of all ranks, outside the attention kernel, by dtype
    attention_flops: int | None = None  # of all ranks
    kernel_calls: KernelCalls | None = None  # of this rank
    updated_elements: int | None = None  # parameters that the optimizers of all ranks update, copies counted
    replaced_ops: tuple[str, ...] = ()  # of torch, in whose place the trial's model code has its own
    updated_by: str | None = None  # the class of the optimizer, and where it updates: AdamW on cuda
    half_sums: int | None = None  # of two gradients of a matrix in half precision, at most

    def of_one(self, num_ranks: int, of_attention: Fraction) -> "ExpectedWork":
        """One rank's part of what all compute: of attention as given, of all else an equal share. Updated elements are
        those of the rank already."""
        matmul_flops, attention_flops = self.matmul_flops, self.attention_flops
        return replace(
            self,
            matmul_flops=matmul_flops and {dtype: flops // num_ranks for dtype, flops in matmul_flops.items()},
            attention_flops=attention_flops and int(attention_flops * of_attention),
        )

    @property
    def columns(self) -> Mapping[str, float | int | None]:
        """What the row must say was counted."""
        matmul_flops, attention_flops = self.matmul_flops, self.attention_flops
        return {
            "counted_matmul_flops": None if matmul_flops is None else float(sum(matmul_flops.values())),
            "counted_attention_flops": None if attention_flops is None else float(attention_flops),
            "counted_parameters": self.updated_elements,
        }


ONE_CALL = KernelCalls(1, 1)  # whole sequences of some heads


def ring_calls(
    shape: AttentionShape,
    layout: str,
    ring_degree: int,
    ring_rank: int,
    kv_heads: int,
    masked_blocks: tuple[int, int] | None = None,
) -> KernelCalls:
    """Calls of one ring rank: one for each KV shard of which its queries see something.

    Causal and contiguous, it sees the shards up to its own; in the other layouts a part of each. In the backward of a
    ring the own block is computed in two halves of the KV heads, unless borders travel.

    masked_blocks: of packed documents or under a window, the blocks that this rank computes: against its own KV shard,
    and in all.
    """
    one_token = layout == "striped" and shape.seq_len == ring_degree  # it sees nothing of a later rank's only token
    blocks = ring_rank + 1 if shape.causal and (layout == "contiguous" or one_token) else ring_degree
    own, blocks = masked_blocks or (1, blocks)
    has_borders = shape.window is not None and layout != "striped"
    halves = ring_degree > 1 and kv_heads > 1 and not has_borders
    return KernelCalls(blocks, blocks + own * halves)


def usp_calls(
    shape: AttentionShape,
    layout: str,
    ulysses_degree: int,
    ring_degree: int,
    ring_rank: int,
    head_chunks: int | None,
    masked_blocks: tuple[int, int] | None = None,
) -> KernelCalls:
    """Calls of one rank of both: a ring for each chunk of its heads. With one ring rank that is Ulysses. One ulysses
    rank exchanges no heads, so it has no chunks."""
    chunks = (head_chunks or 1) if ulysses_degree > 1 else 1
    kv_heads = replicated_kv_heads(shape.num_kv_heads, ulysses_degree) // ulysses_degree // chunks
    ring = ring_calls(shape, layout, ring_degree, ring_rank, kv_heads, masked_blocks)
    return KernelCalls(chunks * ring.forward, chunks * ring.backward)


def all_gather_calls(shape: AttentionShape, layout: str, rank: int, head_stride: int | None) -> KernelCalls:
    """Calls of one rank of the KV all-gather, for each group of `head_stride` KV heads: one for each run of its tokens,
    or if causal two, the run against itself and against the keys before it. Rank 0 has a run without keys before it."""
    runs = 2 if layout == "zigzag" else 1
    of_a_group = 2 * runs - (rank == 0) if shape.causal else runs
    groups = -(-shape.num_kv_heads // (head_stride or shape.num_kv_heads))
    return KernelCalls(groups * of_a_group, groups * of_a_group)


def projected_tokens(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> int:
    """Tokens whose latents a rank projects up in one forward: its own, where keys and values travel; else those of
    each call of the kernel. Causal, a rank of a ring sees earlier ranks' shards, in zigzag order half of each and all
    of later ones; each run of a gather sees all keys before it."""
    own, zigzag = shape.seq_len // sp_size, method.layout == "zigzag"
    if method.sends != "latent":
        return own
    if not shape.causal:
        return shape.seq_len * (2 if zigzag and method.name == "all_gather" else 1)
    if not zigzag:
        return own * (rank + 1)
    others = sp_size - 1 - Fraction(rank, 2) if method.name == "ring" else sp_size - Fraction(1, 2)
    return int(own * (1 + others))


def projection_flops(
    method: MethodConfig, shape: AttentionShape, sp_size: int, ranks: Iterable[int], *, backward: bool
) -> int:
    """FLOPs of the up-projections on these ranks; 0 without latents. The backward has two products, for the latents and
    for the up-projections, and projects up again where latents travel: nobody keeps keys and values."""
    if shape.kv_lora_rank is None:
        return 0
    rank, heads, width = shape.sizes(1)[2]
    times = 1 + (2 + (method.sends == "latent")) * backward
    tokens = sum(projected_tokens(method, shape, sp_size, each) for each in ranks)
    return times * 2 * shape.batch_size * tokens * rank * heads * width


def attention_work(
    shape: AttentionShape, calls: KernelCalls | None, projection: int, *, backward: bool, products: bool
) -> ExpectedWork:
    """What attention alone must compute, forward or with its backward. Beside the kernel only up-projections multiply
    matrices.

    calls: of this rank, in one forward and backward; None: it is not known how the method calls the kernel.
    projection: FLOPs of the up-projections of all ranks.
    products: whether all other matrix products are in the kernel.
    """
    matmul_flops = ({shape.dtype: projection} if projection else {}) if products else None
    if calls is None:
        return ExpectedWork(matmul_flops)
    flops = attention_forward_flops(shape)
    if not backward:
        return ExpectedWork(matmul_flops, flops, calls._replace(backward=0))
    of_backward = flops * backward_per_forward(shape)
    return ExpectedWork(matmul_flops, flops + int(of_backward), calls)
