"""Declares for each library of softmax attention which communication pattern it has, and what it sends in addition.
Only this file says so.

A pattern is one of our methods with its default options. Tests compare the `traffic` of each adapter with what is
declared here, and reports show the differences. docs/METHODS.md uses the same terms.

B batch, S global tokens, P = R * U ranks (ring x ulysses), Hq query heads, D head size, e bytes an element, n elements
of the K and V that one ring rank holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from sp_bench.config.shape import ELEMENT_BYTES, AttentionShape
from sp_bench.costs.attention import (
    POSITION_BYTES,
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
Bytes = Mapping[str, Fraction]  # "forward" | "backward" -> bytes one rank sends off-rank in one attention call


@dataclass(frozen=True)
class Degrees:
    """How the P = U * R ranks of one sequence are split: groups of U exchange heads, groups of R exchange KV."""

    ulysses: int
    ring: int

    @property
    def sp_size(self) -> int:
        return self.ulysses * self.ring


@dataclass(frozen=True)
class Library:
    """How one variant of a library's method differs from our method of its kind. The defaults are what ours does, but
    for `replicates_kv`."""

    kind: Kind
    dkv_dtype: Literal["input", "float32"] = "input"  # in which dK/dV travel between ring ranks
    own_dkv_travels: bool = False  # True: a rank's own dK/dV go all the way round, R hops instead of R-1
    replicates_kv: bool = False  # False: fewer KV heads than ranks that exchange heads are unsupported
    gathers_positions: bool = False  # True: each call gathers position_ids


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
    ("transformer_engine", "a2a"): Library("ulysses"),
    ("transformer_engine", "a2a+p2p"): Library("usp"),
}


def kind(method: str, variant: str | None, degrees: Degrees) -> Kind | None:
    """The method of ours with the same pattern. With one ring rank a library's usp is Ulysses; with one ulysses rank it
    is a ring. None: the method does not split sequences, or is not known here."""
    if (method, variant) not in LIBRARIES:
        return next((own for own in KINDS if own == method), None)
    declared = LIBRARIES[method, variant].kind
    if declared != "usp":
        return declared
    return "ulysses" if degrees.ring == 1 else "ring" if degrees.ulysses == 1 else "usp"


def dkv_dtype(method: str, variant: str | None, ring_degree: int) -> str | None:
    """The dtype in which a library's dK/dV travel, in the words of `MethodConfig.dkv_dtype`. Without a ring it is the
    input's. None: not a library's method."""
    library = LIBRARIES.get((method, variant))
    if library is None:
        return None
    return library.dkv_dtype if ring_degree > 1 else "input"


def closed_form(pattern: Kind, shape: AttentionShape, degrees: Degrees) -> Bytes:
    """Bytes of our method of this pattern, with its default options. Where heads cannot be split evenly, the mean over
    the ranks."""
    ulysses = ulysses_traffic(shape, degrees.ulysses, degrees.sp_size)
    if pattern == "all_gather":
        return _by_phase(all_gather_traffic(shape, degrees.ring, "input"))
    return _by_phase(add_traffic(ulysses, ring_traffic(shape, degrees.ring, degrees.ulysses, "input")))


def _by_phase(traffic: Traffic) -> Bytes:
    """The bytes of each phase, summed over ops."""
    phases = {"forward": Fraction(0), "backward": Fraction(0)}
    for (phase, _), size in traffic.items():
        phases[phase] += size
    return phases


def differences(library: Library, shape: AttentionShape, degrees: Degrees) -> Mapping[str, Bytes]:
    """How many bytes more than the closed form of its pattern a library sends, by reason. Reasons are in words, for
    readers."""
    n, element = kv_shard_elements(shape, degrees.ring, degrees.ulysses), shape.element_bytes
    travelling = ELEMENT_BYTES[travelling_dkv_dtype(shape, library.dkv_dtype)]
    in_a_ring = degrees.ring > 1  # a single ring rank sends to itself, which is not traffic
    found = {
        f"dK/dV travel in {library.dkv_dtype}": {"backward": (degrees.ring - 1) * n * (travelling - element)},
        "a rank's own dK/dV travel too, one hop more": {
            "backward": n * travelling if library.own_dkv_travels and in_a_ring else Fraction(0)
        },
        "position_ids are gathered in each call": {
            "forward": _positions_bytes(shape, degrees.sp_size) if library.gathers_positions else Fraction(0)
        },
    }
    return {words: more for words, more in found.items() if any(more.values())}


def _positions_bytes(shape: AttentionShape, sp_size: int) -> Fraction:
    """Bytes of each rank's position_ids to all others: (P-1) * B * S/P * 8."""
    return Fraction(shape.batch_size * shape.seq_len * (sp_size - 1), sp_size) * POSITION_BYTES
