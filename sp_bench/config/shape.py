"""The shape of one attention call, and the dtypes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DType = Literal["float64", "float32", "bfloat16", "float16"]
EXACT = ("float64", "float32")  # dtypes in which steps agree to 1e-5 or better
ELEMENT_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class AttentionShape:
    """One attention call over the whole sequence: global sizes, before any sharding."""

    batch_size: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    dtype: str
    documents: tuple[int, ...] = ()  # tokens of each, in order; a token sees its own document only. Empty: one document
    window: int | None = None  # token i sees tokens i - window + 1 to i; None: all up to itself, or all if not causal
    sinks: bool = False  # each query head has a score beside those of its keys, without a value
    v_head_dim: int | None = None  # size of a value head; None: head_dim
    kv_lora_rank: int | None = None  # of a latent: what is projected up; None: the step begins with keys and values
    qk_rope_head_dim: int | None = None  # of a latent: what is a part of each key
    gated_delta: bool = False  # a state in the place of softmax over keys

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The number of heads and the size of one, of q, k, v and the output's gradient."""
        q, kv = self.num_heads, self.num_kv_heads
        return (q, self.head_dim), (kv, self.head_dim), (kv, self.value_dim), (q, self.value_dim)

    def sizes(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """The sizes of a step's inputs over so many tokens: q, k, v and the output's gradient, [B,n,H,.] each; with
        latents q, latent [B,n,1,C+R], up-projections [C,H,D-R+E] and gradient. Letters as in attention/latent.py.
        gated_delta: q, k [B,n,Hkv,D], v [B,n,H,E], the logarithm of the decay and beta [B,n,H], and gradient."""
        q, k, v, dout = ((self.batch_size, num_tokens, *heads) for heads in self.heads)
        if self.gated_delta:
            return k, k, dout, dout[:-1], dout[:-1], dout
        if self.kv_lora_rank is None or self.qk_rope_head_dim is None:
            return q, k, v, dout
        latent = (self.batch_size, num_tokens, 1, self.kv_lora_rank + self.qk_rope_head_dim)
        up = (self.kv_lora_rank, self.num_heads, self.head_dim - self.qk_rope_head_dim + self.value_dim)
        return q, latent, up, dout

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]
