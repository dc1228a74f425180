"""Byte formulas against a message-by-message simulation, and the identities that the comparison rests on."""

from fractions import Fraction

from hypothesis import assume, given
from hypothesis import strategies as st

from sp_bench.config.shape import AttentionShape
from sp_bench.costs import attention as attention_costs


@st.composite
def shapes(draw: st.DrawFn, sp_size: int | None = None) -> AttentionShape:
    kv_heads = draw(st.integers(1, 8))
    return AttentionShape(
        batch_size=draw(st.integers(1, 3)),
        seq_len=(sp_size or 1) * draw(st.integers(1, 64)),
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 64)),
        causal=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


@st.composite
def split_shapes(draw: st.DrawFn) -> tuple[int, AttentionShape]:
    """(sp_size, shape) that Ulysses can split: sp_size divides Hkv, or Hkv divides sp_size and KV is replicated."""
    sp_size = draw(st.integers(2, 16))
    divisors = [n for n in range(1, sp_size) if sp_size % n == 0]
    kv_heads = draw(st.integers(1, 3).map(lambda n: n * sp_size) | st.sampled_from(divisors))
    group = draw(st.integers(1, 3)) * max(sp_size // kv_heads, 1)
    shape = AttentionShape(
        draw(st.integers(1, 3)), sp_size * draw(st.integers(1, 64)), kv_heads * group, kv_heads, 16, True, "bfloat16"
    )
    return sp_size, shape


def total(traffic: attention_costs.Traffic, phase: str) -> Fraction:
    return sum((size for (name, _), size in traffic.items() if name == phase), Fraction(0))


@given(shapes())
def test_causal_pairs_are_exact(shape: AttentionShape) -> None:
    pairs = sum(q + 1 if shape.causal else shape.seq_len for q in range(shape.seq_len))
    assert attention_costs.score_pairs(shape) == shape.batch_size * pairs


@given(split_shapes())
def test_ulysses_bytes_are_what_the_messages_hold(drawn: tuple[int, AttentionShape]) -> None:
    sp_size, shape = drawn
    assert attention_costs.head_split_reason(shape, sp_size, "sp_size", "ulysses") is None
    local = shape.seq_len // sp_size
    heads_sent = 0  # to each other rank: its slice of the heads, of my tokens; for the output, its tokens of my heads
    for heads in (shape.num_heads, max(shape.num_kv_heads, sp_size), max(shape.num_kv_heads, sp_size), shape.num_heads):
        heads_sent += (sp_size - 1) * (heads // sp_size)
    expected = shape.batch_size * local * heads_sent * shape.head_dim * shape.element_bytes
    traffic = attention_costs.ulysses_traffic(shape, sp_size, sp_size)
    assert total(traffic, "forward") == total(traffic, "backward") == expected


@given(st.integers(1, 16).flatmap(lambda p: st.tuples(st.just(p), shapes(p))), st.sampled_from(["input", "float32"]))
def test_ring_and_gather_send_the_same_forward_bytes(drawn: tuple[int, AttentionShape], dkv_dtype: str) -> None:
    sp_size, shape = drawn
    ring = attention_costs.ring_traffic(shape, sp_size, 1, dkv_dtype)
    gather = attention_costs.all_gather_traffic(shape, sp_size, dkv_dtype)
    assert total(ring, "forward") == total(gather, "forward")
    assert total(ring, "backward") == total(gather, "backward")


@given(split_shapes().filter(lambda drawn: drawn[0] <= drawn[1].num_kv_heads))
def test_ulysses_over_ring_forward_is_group_plus_one_over_ranks(drawn: tuple[int, AttentionShape]) -> None:
    sp_size, shape = drawn
    group = shape.num_heads // shape.num_kv_heads
    ulysses = total(attention_costs.ulysses_traffic(shape, sp_size, sp_size), "forward")
    assert ulysses / total(attention_costs.ring_traffic(shape, sp_size, 1, "input"), "forward") == Fraction(
        group + 1, sp_size
    )


@given(split_shapes())
def test_ring_sends_no_more_forward_bytes_than_ulysses_while_sp_size_is_within_the_group_size(
    drawn: tuple[int, AttentionShape],
) -> None:
    sp_size, shape = drawn
    assume(sp_size <= shape.num_heads // shape.num_kv_heads)
    ring = total(attention_costs.ring_traffic(shape, sp_size, 1, "input"), "forward")
    assert ring <= total(attention_costs.ulysses_traffic(shape, sp_size, sp_size), "forward")


def test_the_headline_shape_moves_the_published_mebibytes() -> None:
    shape = AttentionShape(1, 131_072, 32, 8, 128, True, "bfloat16")
    mib = {
        "ulysses": sum(attention_costs.ulysses_traffic(shape, 8, 8).values()) / 2**20,
        "ring": sum(attention_costs.ring_traffic(shape, 8, 1, "input").values()) / 2**20,
    }
    assert mib == {"ulysses": 560, "ring": 1344}


@given(shapes(), st.integers(1, 64))
def test_a_refused_degree_names_only_degrees_that_work(shape: AttentionShape, degree: int) -> None:
    reason = attention_costs.head_split_reason(shape, degree, "sp_size", "ulysses")
    if reason is None:
        assert shape.num_heads % degree == 0
        return
    named = [int(n) for n in reason.split("{")[1].split("}")[0].split(", ")]
    assert 1 in named
    assert degree not in named
    assert all(attention_costs.head_split_reason(shape, n, "sp_size", "ulysses") is None for n in named)
