"""Closed forms for one attention layer: FLOPs, and the bytes that one rank sends off-rank.

B batch, S global tokens, P = R * U ranks (ring x ulysses), s = S / P, Hq query and Hkv key/value heads, D size of a
query or key head, Dv of a value head, e bytes an element.

Only payload counts: not what a rank keeps for itself, and no protocol overhead. Byte counts are exact fractions, so
that they can be compared for equality with the counted bytes of the ledger.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

from sp_bench.config.documents import causal_pairs
from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.shape import ELEMENT_BYTES, AttentionShape

Traffic = Mapping[tuple[str, str], Fraction]  # (phase, op) -> bytes one rank sends off-rank
ClosedForm = Callable[[MethodConfig, AttentionShape, int], Traffic]
FLASH_BACKWARD = Fraction(5, 2)  # FLOPs of a flash backward per forward where D = Dv: see `flash_backward`
DELTA_BACKWARD = 2  # FLOPs of a backward of the gated delta rule per forward: each product has two gradients
POSITION_BYTES = 8  # of one token: transformers makes position_ids in int64


def score_pairs(shape: AttentionShape) -> int:
    """Visible (query, key) pairs of one head: exactly B * S(S+1)/2 when causal, otherwise B * S^2. Under a window of w:
    B * (w(w+1)/2 + (S-w) w). Of packed documents, the sum of each one's."""
    s = shape.seq_len
    return shape.batch_size * (causal_pairs(shape.documents or (s,), shape.window) if shape.causal else s * s)


def attention_forward_flops(shape: AttentionShape) -> int:
    """FLOPs of one attention forward over all ranks: of each pair and head 2 * D for scores, 2 * Dv for the output."""
    if shape.gated_delta:
        return delta_flops(shape.batch_size * shape.seq_len, shape.num_heads, shape.head_dim, shape.value_dim)
    return 2 * score_pairs(shape) * shape.num_heads * (shape.head_dim + shape.value_dim)


def delta_flops(tokens: int, heads: int, head_dim: int, value_dim: int) -> int:
    """FLOPs of one forward of the gated delta rule, by its recurrence: of each token and value head what the state has
    of the key, the update, and the output, 2 * D * Dv each. A kernel in chunks computes more."""
    return 6 * tokens * heads * head_dim * value_dim


def backward_per_forward(shape: AttentionShape) -> Fraction:
    """FLOPs of attention's backward per forward."""
    return Fraction(DELTA_BACKWARD) if shape.gated_delta else flash_backward(shape.head_dim, shape.value_dim)


def flash_backward(head_dim: int, value_dim: int) -> Fraction:
    """FLOPs of a flash backward per forward. It has 5 matmuls: QK^T again, dQ and dK of D, dV and dO V^T of Dv."""
    return Fraction(3 * head_dim + 2 * value_dim, head_dim + value_dim)


def replicated_kv_heads(num_kv_heads: int, ulysses_degree: int) -> int:
    """Hkv*: the KV heads that travel in the head exchange, replicated until every ulysses rank holds one."""
    return max(num_kv_heads, ulysses_degree)


def head_exchange_bytes(shape: AttentionShape, ulysses_degree: int, sp_size: int) -> Fraction:
    """Bytes one rank sends in the forward of a head exchange: Q, K, V and the output. The backward sends as much: dO,
    dQ, dK and dV.

    (U-1)/U * B * s * e * (D + Dv) * (Hq + Hkv*). Source: arXiv 2309.14509, section 3.2. Here with GQA, with KV
    replication (Hkv* = max(Hkv, U)), and without the rank's own slice.
    """
    heads = shape.num_heads + replicated_kv_heads(shape.num_kv_heads, ulysses_degree)
    dims = shape.head_dim + shape.value_dim
    local_elements = Fraction(shape.batch_size * shape.seq_len * dims * heads, sp_size)
    return local_elements * shape.element_bytes * Fraction(ulysses_degree - 1, ulysses_degree)


def kv_shard_elements(shape: AttentionShape, ring_degree: int, ulysses_degree: int = 1) -> Fraction:
    """n: elements of K and V together that one ring rank holds, B * S/R * Hkv*/U * (D + Dv)."""
    heads = Fraction(replicated_kv_heads(shape.num_kv_heads, ulysses_degree), ulysses_degree)
    return shape.batch_size * Fraction(shape.seq_len, ring_degree) * heads * (shape.head_dim + shape.value_dim)


def travelling(method: MethodConfig, shape: AttentionShape) -> AttentionShape:
    """The shape whose keys and values are what travels: of latents one head of C + R elements, and no values."""
    if method.sends != "latent":
        return shape
    return replace(shape, num_kv_heads=1, head_dim=shape.sizes(1)[1][-1], v_head_dim=0)


def computed(method: MethodConfig, shape: AttentionShape) -> AttentionShape:
    """The shape that a method's kernels compute. Those that pass states have D values more: the transition's."""
    if method.name != "state_passing":
        return shape
    return replace(shape, v_head_dim=shape.value_dim + shape.head_dim)


def latent_reason(method: MethodConfig) -> Prose | None:
    """Why a ring or a gather cannot send latents that way, or None."""
    if method.sends != "latent" or (method.layout in ("contiguous", "zigzag") and method.head_stride is None):
        return None
    return (
        f"method.layout={method.layout}, method.head_stride={method.head_stride}: latents are proven with contiguous "
        "or zigzag, and have no heads to gather one by one; use these, and method.head_stride=null"
    )


def travelling_dkv_dtype(shape: AttentionShape, dkv_dtype: str | None) -> str:
    """The dtype in which dK/dV travel: the trial's, unless `dkv_dtype` names another. fp64 trials stay fp64."""
    return shape.dtype if dkv_dtype in (None, "input") or shape.dtype == "float64" else dkv_dtype


def merging_dtype(shape: AttentionShape, merge_dtype: str | None) -> str:
    """The dtype of outputs and dQ between merges: fp32, or the trial's for "input". fp64 trials stay fp64."""
    return shape.dtype if merge_dtype == "input" or shape.dtype == "float64" else "float32"


def head_split_reason(shape: AttentionShape, degree: int, field: str, method: str) -> Prose | None:
    """Why `degree` ranks cannot exchange heads, naming the degrees that work, or None.

    The degree must divide Hq. It must also divide Hkv, or be a multiple of it; KV heads are then replicated.
    """
    hq, hkv = shape.num_heads, shape.num_kv_heads
    valid = [n for n in range(1, hq + 1) if hq % n == 0 and (hkv % n == 0 or n % hkv == 0)]
    if degree in valid:
        return None
    which = f"num_heads={hq}" if hq % degree else f"num_kv_heads={hkv}"
    sizes = ", ".join(map(str, valid))
    return f"{which} cannot be split over {field}={degree} for {method}; use {field} in {{{sizes}}}, or method=ring"


def head_chunks_reason(
    shape: AttentionShape, degree: int, chunks: int | None, *, may_share_kv: bool, field: str = "method.head_chunks"
) -> Prose | None:
    """Why the heads of one of `degree` ranks cannot be cut into `chunks` parts, naming the numbers that work, or None.
    `field` is the option that says how many.

    The number of parts must divide the rank's query heads. It must also divide its key/value heads, or be a multiple of
    them if parts may share a KV head.
    """
    heads, kv_heads = shape.num_heads // degree, replicated_kv_heads(shape.num_kv_heads, degree) // degree
    valid = [
        n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or (may_share_kv and n % kv_heads == 0))
    ]
    if (chunks or 1) in valid:
        return None
    sizes = ", ".join(map(str, valid))
    return (
        f"{field}={chunks} does not cut a rank's {heads} query and {kv_heads} key/value heads; use one of {{{sizes}}}"
    )


def add_traffic(*parts: Traffic) -> Traffic:
    """The sum by phase and op, without those of 0 bytes."""
    total: dict[tuple[str, str], Fraction] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, Fraction(0)) + value
    return {key: value for key, value in total.items() if value}


def scale_traffic(traffic: Traffic, factor: int | Fraction) -> Traffic:
    """`factor` times the bytes of each phase and op."""
    return {key: value * factor for key, value in traffic.items()}


def ulysses_traffic(shape: AttentionShape, ulysses_degree: int, sp_size: int) -> Traffic:
    """Bytes of the head exchange (DeepSpeed-Ulysses, arXiv 2309.14509); see `head_exchange_bytes`."""
    one_way = head_exchange_bytes(shape, ulysses_degree, sp_size)
    return add_traffic({("forward", "all_to_all"): one_way, ("backward", "all_to_all"): one_way})


def upipe_traffic(shape: AttentionShape, sp_size: int) -> Traffic:
    """Bytes of UPipe (arXiv 2602.21196): the head exchange of Ulysses, and in the backward Q, K, V and the output once
    more, because they are kept by tokens. The number of stages changes nothing: no KV head is sent twice in a pass."""
    one_way = head_exchange_bytes(shape, sp_size, sp_size)
    return add_traffic({("forward", "all_to_all"): one_way, ("backward", "all_to_all"): 2 * one_way})


def ring_traffic(
    shape: AttentionShape,
    ring_degree: int,
    ulysses_degree: int,
    dkv_dtype: str | None,
    *,
    num_hops: int | None = None,
    dkv_hops: int | None = None,
) -> Traffic:
    """Bytes of the point-to-point ring (Ring Attention, arXiv 2310.01889).

    KV travels `num_hops` hops in the forward, and again in the backward; None: R-1, to all ranks. dK/dV travel
    `dkv_hops` hops in the backward. None: as many, because a rank's own contribution stays where it is.
    """
    n = kv_shard_elements(shape, ring_degree, ulysses_degree)
    hops = ring_degree - 1 if num_hops is None else num_hops
    kv = hops * n * shape.element_bytes
    dkv = (hops if dkv_hops is None else dkv_hops) * n * ELEMENT_BYTES[travelling_dkv_dtype(shape, dkv_dtype)]
    return add_traffic({("forward", "send"): kv, ("backward", "send"): kv + dkv})


def border_tokens(layout: str, q_rank: int, kv_rank: int, ring_degree: int, shape: AttentionShape) -> int:
    """Keys of ring rank `kv_rank` that a window shows to queries of another, `q_rank`: contiguous or zigzag.

    Of runs of c tokens, d runs apart, the later one sees the last w-1-(d-1)c tokens of the earlier one, at most all and
    at least none; and none before the document of its own first token. In zigzag order a rank has two runs, of which
    the nearer one sees what the other does, and more.
    """
    window = shape.window
    assert window is not None
    if layout == "contiguous":
        mine, theirs, run = [q_rank], [kv_rank], shape.seq_len // ring_degree
    else:
        mirror, run = 2 * ring_degree - 1, shape.seq_len // (2 * ring_degree)
        mine, theirs = [q_rank, mirror - q_rank], [kv_rank, mirror - kv_rank]
    starts = [0, *accumulate(shape.documents)]

    def seen(q: int, kv: int) -> int:
        """Tokens of run `kv` that the first query of run `q` has in its window and in its document."""
        document = starts[bisect_right(starts, q * run) - 1]
        return min(max((kv + 1) * run - max(q * run - window + 1, document), 0), run)

    nearest = ((min((q for q in mine if q > kv), default=None), kv) for kv in theirs)
    return sum(seen(q, kv) for q, kv in nearest if q is not None)


def window_ring_traffic(
    shape: AttentionShape, layout: str, ring_rank: int, ring_degree: int, ulysses_degree: int, dkv_dtype: str | None
) -> Traffic:
    """Bytes that one ring rank sends under a window. Its keys go to the ranks that see them, in the forward and again
    in the backward, where dK/dV of the keys that it sees go back to their ranks.

    Striped, each window has tokens of all shards. So whole shards travel, min(R, w) - 1 hops.
    """
    assert shape.window is not None
    if layout == "striped":
        hops = min(ring_degree, shape.window) - 1
        return ring_traffic(shape, ring_degree, ulysses_degree, dkv_dtype, num_hops=hops)
    others = {*range(ring_degree)} - {ring_rank}
    shown = sum(border_tokens(layout, other, ring_rank, ring_degree, shape) for other in others)
    seen = sum(border_tokens(layout, ring_rank, other, ring_degree, shape) for other in others)
    token = kv_shard_elements(shape, ring_degree, ulysses_degree) * Fraction(ring_degree, shape.seq_len)
    kv = shown * token * shape.element_bytes
    dkv = seen * token * ELEMENT_BYTES[travelling_dkv_dtype(shape, dkv_dtype)]
    return add_traffic({("forward", "send"): kv, ("backward", "send"): kv + dkv})


def conversion_traffic(shape: AttentionShape, ring_rank: int, ring_degree: int) -> Traffic:
    """Bytes that one ring rank sends to turn zigzag tokens into contiguous ones and back: what attention reads goes and
    the output returns, and in the backward their gradients.

    Of 2R chunks a rank holds two, and keeps those that it holds in both layouts.
    """
    zigzag, contiguous = {ring_rank, 2 * ring_degree - 1 - ring_rank}, {2 * ring_rank, 2 * ring_rank + 1}
    tokens = Fraction(shape.batch_size * shape.seq_len * len(zigzag - contiguous), 2 * ring_degree)
    softmax = (shape.num_heads + shape.num_kv_heads) * (shape.head_dim + shape.value_dim) * shape.element_bytes
    one_way = tokens * (_delta_token_bytes(shape) if shape.gated_delta else softmax)
    return add_traffic({("forward", "send"): one_way, ("backward", "send"): one_way})


def _ring_rank(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> Traffic:
    converts = method.layout == "zigzag_by_kind"
    layout = "contiguous" if converts else method.layout
    borders = window_ring_traffic(shape, layout, rank, sp_size, 1, method.dkv_dtype)
    return add_traffic(borders, conversion_traffic(shape, rank, sp_size)) if converts else borders


def border_exchange_reason(method: MethodConfig, shape: AttentionShape) -> Prose | None:
    """Why a ring cannot send borders that way, or None."""
    if shape.window is None or method.exchange != "copy_engines":
        return None
    return "method.exchange=copy_engines sends equal parts, and under a window parts differ; use collectives"


def all_gather_traffic(
    shape: AttentionShape, sp_size: int, dkv_dtype: str | None, layout: str = "contiguous"
) -> Traffic:
    """Bytes of the KV all-gather (Llama 3, arXiv 2407.21783, section 3.3.2).

    KV is gathered in the forward, and again in the backward, where dK/dV are reduce-scattered. Under a window it is KV
    of the last w-1 tokens of each run: others may see these. Packed documents change nothing.
    """
    n, others = kv_shard_elements(shape, sp_size), sp_size - 1
    if shape.window is not None:
        runs = sp_size * (2 if layout == "zigzag" else 1)
        n *= min(Fraction((shape.window - 1) * runs, shape.seq_len), Fraction(1))
    gather = others * n * shape.element_bytes
    return add_traffic(
        {
            ("forward", "all_gather"): gather,
            ("backward", "all_gather"): gather,
            ("backward", "reduce_scatter"): others * n * ELEMENT_BYTES[travelling_dkv_dtype(shape, dkv_dtype)],
        }
    )


def delta_heads_traffic(shape: AttentionShape, sp_size: int) -> Traffic:
    """Bytes of the head exchange of the gated delta rule; in the backward the gradients of what the forward sends."""
    tokens = Fraction(shape.batch_size * shape.seq_len, sp_size)
    one_way = tokens * _delta_token_bytes(shape) * Fraction(sp_size - 1, sp_size)
    return add_traffic({("forward", "all_to_all"): one_way, ("backward", "all_to_all"): one_way})


def _delta_token_bytes(shape: AttentionShape) -> int:
    """Of one token q, k, v, beta, the logarithm of the decay in fp32 (fp64), and the output."""
    elements = 2 * shape.num_kv_heads * shape.head_dim + shape.num_heads * (2 * shape.value_dim + 1)
    return elements * shape.element_bytes + shape.num_heads * _wide_bytes(shape)


def state_traffic(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> Traffic:
    """Bytes of states in fp32 (fp64), whatever the length is. By gather: of each rank the state that its tokens make of
    none, and the transition; in the backward their gradients by reduce-scatter. As a chain: the state, to the next
    rank; in the backward its gradient, to the one before. Tokens in zigzag order are converted, which grows with the
    length."""
    converting = conversion_traffic(shape, rank, sp_size) if method.layout == "zigzag_by_kind" else {}
    if method.variant == "chain":
        state = Fraction(shape.batch_size * shape.num_heads * shape.head_dim * shape.value_dim * _wide_bytes(shape))
        forward, backward = state * (rank < sp_size - 1), state * (rank > 0)
        return add_traffic({("forward", "send"): forward, ("backward", "send"): backward}, converting)
    both = Fraction((sp_size - 1) * delta_map_bytes(shape))
    return add_traffic({("forward", "all_gather"): both, ("backward", "reduce_scatter"): both}, converting)


def delta_map_bytes(shape: AttentionShape) -> int:
    """Of the state that some tokens make of none, [B,H,D,Dv], and of its transition, [B,H,D,D], in fp32 (fp64)."""
    sizes = shape.batch_size * shape.num_heads * shape.head_dim * (shape.value_dim + shape.head_dim)
    return sizes * _wide_bytes(shape)


def _wide_bytes(shape: AttentionShape) -> int:
    return 8 if shape.dtype == "float64" else 4


def usp_traffic(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    """Bytes of USP (arXiv 2405.07719): a head exchange among U ranks, and a ring of P/U such groups."""
    degree = method.ulysses_degree
    assert degree is not None, "its layout refuses that"
    ring = ring_traffic(shape, max(sp_size // degree, 1), degree, method.dkv_dtype)
    return add_traffic(ulysses_traffic(shape, degree, sp_size), ring)


def _usp_rank(method: MethodConfig, shape: AttentionShape, sp_size: int, rank: int) -> Traffic:
    degree = method.ulysses_degree
    assert degree is not None, "its layout refuses that"
    ring_degree = max(sp_size // degree, 1)
    ring_rank = rank % ring_degree if method.placement == "ring_inner" else rank // degree
    ring = window_ring_traffic(shape, method.layout, ring_rank, ring_degree, degree, method.dkv_dtype)
    return add_traffic(ulysses_traffic(shape, degree, sp_size), ring)


# Under a window the ranks of a ring send different numbers of bytes, in a chain of states the first and the last, and
# where they convert: (method, shape, sp_size, rank) -> those of `rank`.
OF_RANKS: Mapping[str, Callable[[MethodConfig, AttentionShape, int, int], Traffic]] = {
    "ring": _ring_rank,
    "usp": _usp_rank,
    "state_passing": state_traffic,
}


def _busiest(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
    """That of the rank that sends most."""
    of_ranks = [OF_RANKS[method.name](method, shape, sp_size, rank) for rank in range(sp_size)]
    return max(of_ranks, key=lambda traffic: sum(traffic.values()))


def _busiest_under_window(otherwise: ClosedForm) -> ClosedForm:
    """The closed form `otherwise`; under a window that of the rank that sends most."""

    def form(method: MethodConfig, shape: AttentionShape, sp_size: int) -> Traffic:
        return (otherwise if shape.window is None else _busiest)(method, shape, sp_size)

    return form


# The closed form of each method of ours. It stands here and not in the method's file, whose bytes it checks.
OF_METHODS: Mapping[str, ClosedForm] = {
    "single": lambda method, shape, sp_size: {},
    "ulysses": lambda method, shape, sp_size: (
        delta_heads_traffic(shape, sp_size) if shape.gated_delta else ulysses_traffic(shape, sp_size, sp_size)
    ),
    "upipe": lambda method, shape, sp_size: upipe_traffic(shape, sp_size),
    "ring": _busiest_under_window(
        lambda method, shape, sp_size: ring_traffic(travelling(method, shape), sp_size, 1, method.dkv_dtype)
    ),
    "double_ring": lambda method, shape, sp_size: ring_traffic(shape, sp_size, 1, method.dkv_dtype),
    "all_gather": lambda method, shape, sp_size: all_gather_traffic(
        travelling(method, shape), sp_size, method.dkv_dtype, method.layout
    ),
    "usp": _busiest_under_window(usp_traffic),
    "state_passing": _busiest,
}
