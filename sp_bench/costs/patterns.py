"""Of which of our methods' kind a library's is, and what it does otherwise: the only place that says so. No torch.

A pattern is one of our methods with its default options. What a library sends beyond its closed form is declared here,
in the terms of docs/METHODS.md; tests hold the adapters' own `traffic` to it, and reports show it.

B batch, S global tokens, P = R * U ranks (ring x ulysses), Hq query heads, D head size, e bytes an element, n elements
of the K and V that one ring rank holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from sp_bench.config.trial import ELEMENT_BYTES, AttentionShape
from sp_bench.costs.attention import (
    Traffic,
    add_traffic,
    all_gather_traffic,
    kv_shard_elements,
    ring_traffic,
    travelling_dkv_dtype,
    ulysses_traffic,
)

Kind = Literal["ulysses", "ring", "all_gather", "usp"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Bytes = Mapping[str, Fraction]  # forward | backward -> bytes one rank sends off-rank in one attention call

POSITION_BYTES = 8  # int64, as transformers makes position_ids


@dataclass(frozen=True)
class Degrees:
    """How the P ranks of one sequence are split: U exchange heads, R exchange KV."""

    ulysses: int
    ring: int

    @property
    def sp_size(self) -> int:
        return self.ulysses * self.ring


@dataclass(frozen=True)
class Library:
    """What one variant of a library's method does where ours of its kind has a choice. The defaults are ours."""

    kind: Kind
    dkv_dtype: Literal["input", "float32"] = "input"  # that dK/dV travel in from ring rank to ring rank
    own_dkv_travels: bool = False  # a rank's own dK/dV go all the way round: R hops, not R-1
    replicates_kv: bool = False  # KV heads, where fewer than the ranks that exchange heads; otherwise: unsupported
    exchanges_output_again: bool = False  # the output travels again in the backward of the head exchange
    gathers_positions: bool = False  # position_ids, in each call


_FP32_ALL_THE_WAY = Library("ring", dkv_dtype="float32", own_dkv_travels=True)

LIBRARIES: Mapping[tuple[str, str | None], Library] = {  # (method, variant)
    ("ring_flash_attn", None): _FP32_ALL_THE_WAY,
    ("ring_flash_attn_llama3", None): Library("all_gather"),
    ("deepspeed_ulysses", None): Library("ulysses"),
    ("deepspeed_ulysses_hf", None): Library("ulysses", replicates_kv=True, gathers_positions=True),
    ("yunchang", "usp"): replace(_FP32_ALL_THE_WAY, kind="usp"),
    ("yunchang", "ulysses"): Library("ulysses"),
    ("torch_context_parallel", "allgather"): replace(_FP32_ALL_THE_WAY, kind="all_gather"),
    ("torch_context_parallel", "alltoall"): _FP32_ALL_THE_WAY,
    ("transformer_engine", "p2p"): Library("ring"),
    ("transformer_engine", "all_gather"): Library("all_gather"),
    ("transformer_engine", "a2a"): Library("ulysses", exchanges_output_again=True),
    ("transformer_engine", "a2a+p2p"): Library("usp", exchanges_output_again=True),
}


def kind(method: str, variant: str | None, degrees: Degrees) -> Kind | None:
    """Our method that does the same: a library's usp of one ring rank is Ulysses, of one ulysses rank a ring. None: not
    a method that splits a sequence, or none known here."""
    if (method, variant) not in LIBRARIES:
        return next((own for own in KINDS if own == method), None)
    declared = LIBRARIES[method, variant].kind
    if declared != "usp":
        return declared
    return "ulysses" if degrees.ring == 1 else "ring" if degrees.ulysses == 1 else "usp"


def dkv_dtype(method: str, variant: str | None, ring_degree: int) -> str | None:
    """What a library's dK/dV travel in, as `MethodConfig.dkv_dtype` has it; None: not a library's method. Where heads
    alone are exchanged that is the input's dtype."""
    library = LIBRARIES.get((method, variant))
    if library is None:
        return None
    return library.dkv_dtype if ring_degree > 1 else "input"


def closed_form(pattern: Kind, shape: AttentionShape, degrees: Degrees) -> Bytes:
    """What our method sends with its default options; also where it could not split the heads evenly: the mean."""
    ulysses = ulysses_traffic(shape, degrees.ulysses, degrees.sp_size)
    if pattern == "all_gather":
        return _by_phase(all_gather_traffic(shape, degrees.ring, "input"))
    return _by_phase(add_traffic(ulysses, ring_traffic(shape, degrees.ring, degrees.ulysses, "input")))


def _by_phase(traffic: Traffic) -> Bytes:
    phases = {"forward": Fraction(0), "backward": Fraction(0)}
    for (phase, _), size in traffic.items():
        phases[phase] += size
    return phases


def differences(library: Library, shape: AttentionShape, degrees: Degrees) -> Mapping[str, Bytes]:
    """Why a library sends other bytes than the closed form of its pattern, in words -> how many more."""
    n, element = kv_shard_elements(shape, degrees.ring, degrees.ulysses), shape.element_bytes
    travelling = ELEMENT_BYTES[travelling_dkv_dtype(shape, library.dkv_dtype)]
    in_a_ring = degrees.ring > 1  # what one rank sends to itself does not leave it
    found = {
        f"dK/dV travel in {library.dkv_dtype}": {"backward": (degrees.ring - 1) * n * (travelling - element)},
        "a rank's own dK/dV travel too, one hop more": {
            "backward": n * travelling if library.own_dkv_travels and in_a_ring else Fraction(0)
        },
        "the output is exchanged again in the backward": {
            "backward": _output_exchange_bytes(shape, degrees) if library.exchanges_output_again else Fraction(0)
        },
        "position_ids are gathered in each call": {
            "forward": _positions_bytes(shape, degrees.sp_size) if library.gathers_positions else Fraction(0)
        },
    }
    return {words: more for words, more in found.items() if any(more.values())}


def _output_exchange_bytes(shape: AttentionShape, degrees: Degrees) -> Fraction:
    """(U-1)/U * B * S/P * Hq * D * e."""
    local = Fraction(shape.batch_size * shape.seq_len * shape.num_heads * shape.head_dim, degrees.sp_size)
    return local * shape.element_bytes * Fraction(degrees.ulysses - 1, degrees.ulysses)


def _positions_bytes(shape: AttentionShape, sp_size: int) -> Fraction:
    """(P-1) * B * S/P * 8: each rank's positions to all others."""
    return Fraction(shape.batch_size * shape.seq_len * (sp_size - 1), sp_size) * POSITION_BYTES
