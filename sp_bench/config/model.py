"""Options of the model: the decoder's shape, and its kinds of attention."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from sp_bench.config.declared import MAX_COUNT, Declared
from sp_bench.config.parsing import ConfigError, require_at_least, require_at_most, require_positive
from sp_bench.config.prose import Prose
from sp_bench.config.workload import ATTENTION, PROVABLE_TOKENS, TRAINING

WITH_EXPERTS = ("deepseek_v2_lite", "deepseek_v3")  # of which there is the attention alone
_DELTA_SIZES = ("delta_heads", "delta_kv_heads", "delta_head_dim")


@dataclass(frozen=True)
class ModelConfig:
    """A Llama/Qwen3-style decoder. The attention workload uses its three head fields only."""

    name: Annotated[
        str,
        Declared(
            "published shape the heads and layers come from",
            column="model",
            of=ATTENTION,
            words={
                "qwen3_0_6b": "Qwen3-0.6B",
                "qwen3_1_7b": "Qwen3-1.7B",
                "qwen3_4b": "Qwen3-4B",
                "qwen3_8b": "Qwen3-8B",
                "llama3_8b": "Llama-3-8B",
                "llama3_1_8b": "Llama-3.1-8B",
                "qwen2_5_7b": "Qwen2.5-7B",
                "mistral_7b": "Mistral-7B-v0.1",
                "gemma3_27b": "Gemma-3-27B",
                "gpt_oss_20b_dense": "gpt-oss-20b with a dense MLP",
                "deepseek_v2_lite": "DeepSeek-V2-Lite",
                "deepseek_v2_lite_dense": "DeepSeek-V2-Lite with a dense MLP",
                "deepseek_v3": "DeepSeek-V3",
                "qwen3_next_linear": "Qwen3-Next's linear layers",
                "qwen3_next_dense": "Qwen3-Next with a dense MLP",
                "tiny": "a tiny model",
            },
        ),
    ]
    num_layers: Annotated[int, Declared("decoder layers; null for attention", of=TRAINING)]
    hidden_size: Annotated[int, Declared("width of the residual stream", column=None)]
    intermediate_size: Annotated[int, Declared("width of the MLP", column=None)]
    num_heads: Annotated[int, Declared("query heads", unit="heads", of=ATTENTION)]
    num_kv_heads: Annotated[int, Declared("key/value heads", unit="heads", of=ATTENTION)]
    head_dim: Annotated[int, Declared("size of one head; with v_head_dim of queries and keys", of=ATTENTION)]
    vocab_size: Annotated[int, Declared("tokens that the model knows", column=None)]
    rope_theta: Annotated[float, Declared("base of the rotary embedding", column=None)]
    norm_eps: Annotated[float, Declared("epsilon of RMSNorm", column=None)]
    qk_norm: Annotated[bool, Declared("RMSNorm on each head of q and k (Qwen3)", column=None)]
    qkv_bias: Annotated[bool, Declared("bias on the q, k and v projections (Qwen2.5)", column=None)]
    tie_embeddings: Annotated[bool, Declared("the head is the embedding", column=None)]
    rope_scaling: Annotated[
        Literal["llama3", "yarn"] | None,
        Declared(
            "training: how the rotary embedding is stretched beyond its length: llama3, as Llama 3.1 | yarn; null: not",
            of=TRAINING,
            words={"llama3": "Llama 3's RoPE", "yarn": "YaRN"},
        ),
    ] = None
    rope_factor: Annotated[
        float | None, Declared("rope_scaling: how many times longer than the original", of=TRAINING, words="x{}")
    ] = None
    rope_original_seq_len: Annotated[
        int | None, Declared("rope_scaling: length that the embedding was trained with", unit="tokens", of=TRAINING)
    ] = None
    v_head_dim: Annotated[
        int | None,
        Declared(
            "size of a value head, and of the output's; null: head_dim",
            of=ATTENTION,
            words="values of {}",
        ),
    ] = None
    kv_lora_rank: Annotated[
        int | None,
        Declared(
            "elements of a token's latent that the step projects up to keys and values, before these travel "
            "or after (method.sends); null: it begins with keys and values",
            of=ATTENTION,
            words="latents of {}",
        ),
    ] = None
    qk_rope_head_dim: Annotated[
        int | None,
        Declared(
            "kv_lora_rank: elements beside a token's latent that end the key of every head; they carry its place",
            of=ATTENTION,
            words="and {}",
        ),
    ] = None
    attention: Annotated[
        Literal["gated_delta"] | None,
        Declared(
            "attention: gated_delta, states that each token decays and updates, of num_heads heads of values, and "
            "num_kv_heads of queries and keys; null: softmax over keys",
            column="attention_kind",
            of=("attention",),
            words={"gated_delta": "gated delta rule"},
        ),
    ] = None
    layers: Annotated[
        str | None,
        Declared(
            "training: kinds of attention of the layers, from the first on and over again: full, window and delta (the "
            "gated delta rule), with + between them; null: full",
            column="layer_kinds",
            of=TRAINING,
            none_means="full",
            words="layers {}",
            head="layers' kinds",
        ),
    ] = None
    window: Annotated[
        int | None,
        Declared(
            "training: in layers of kind window a token sees this many tokens up to itself",
            unit="tokens",
            column="layer_window",
            of=TRAINING,
            words="window {:,}",
            identifier="window {}",
            head="layers' window",
        ),
    ] = None
    sinks: Annotated[
        bool,
        Declared(
            "training: each query head of each layer learns a score beside those of its keys, without a value",
            column="layer_sinks",
            of=TRAINING,
            old_rows=False,
            omitted=True,
            words={True: "sinks", False: ""},
            head="layers' sinks",
        ),
    ] = False
    delta_heads: Annotated[int | None, Declared("layers of kind delta: heads of values and states", column=None)] = None
    delta_kv_heads: Annotated[int | None, Declared("layers of kind delta: heads of queries and keys", column=None)] = (
        None
    )
    delta_head_dim: Annotated[int | None, Declared("layers of kind delta: size of one head", column=None)] = None

    def __post_init__(self) -> None:
        self._check_layers()
        require_positive(
            self,
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "v_head_dim",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "vocab_size",
            "rope_original_seq_len",
            *_DELTA_SIZES,
        )
        self._require_whole_scaling()
        require_at_most(self, MAX_COUNT, "num_heads", "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            valid = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"use one of {valid}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.v_head_dim == self.head_dim:
            raise ConfigError(
                f"model.v_head_dim={self.v_head_dim} is model.head_dim, which values have anyway; use null"
            )
        self._check_latent()

    def _check_latent(self) -> None:
        rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
        said: Prose = f"model.kv_lora_rank={rank}, model.qk_rope_head_dim={rope}"
        if (rank is None) != (rope is None):
            raise ConfigError(f"{said}: a latent has both parts; use both, or neither")
        if rope is None:
            return
        if rope >= self.head_dim:
            raise ConfigError(f"{said}: it is a part of a key; use less than model.head_dim={self.head_dim}")
        if self.num_kv_heads != self.num_heads:
            raise ConfigError(
                f"{said}: each query head has a key of its own; use model.num_kv_heads={self.num_heads}, not "
                f"{self.num_kv_heads}"
            )

    def _check_layers(self) -> None:
        words = (self.layers or "full").split("+")
        if unknown := [word for word in words if word not in ("full", "window", "delta")]:
            raise ConfigError(
                f"model.layers={self.layers}: {unknown[0]!r} is no kind of attention; use full, window and delta with "
                "+ between them, as window+full"
            )
        sizes = {name: getattr(self, name) for name in _DELTA_SIZES}
        said: Prose = ", ".join(f"model.{name}={size}" for name, size in sizes.items())
        if any(("delta" in words) != (size is not None) for size in sizes.values()):
            raise ConfigError(
                f"model.layers={self.layers}, {said}: layers of kind delta need all of these sizes, and others have "
                "none; use all, or none"
            )
        if (self.delta_heads or 0) % (self.delta_kv_heads or 1):
            raise ConfigError(f"{said}: each head of keys has equally many of values; use a divisor of delta_heads")
        if ("window" in words) != (self.window is not None):
            raise ConfigError(
                f"model.layers={self.layers}, model.window={self.window}: layers of kind window need a model.window, "
                "and others have none; use both, or neither"
            )
        if self.window is not None:
            require_at_least(self, PROVABLE_TOKENS, "window")

    @property
    def rope_dim(self) -> int:
        """Elements of a head of queries that the rotary embedding turns."""
        return self.qk_rope_head_dim or self.head_dim

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer: full | window | delta."""
        words = (self.layers or "full").split("+")
        return tuple(words[index % len(words)] for index in range(self.num_layers))

    def shorter(self, num_layers: int) -> "ModelConfig":
        """The model with so many layers, or as many as it has, but with each of its kinds, which come one after the
        other."""
        order = tuple(dict.fromkeys(self.kinds))
        number = min(max(num_layers, len(order)), self.num_layers)
        window = self.window if "window" in order else None
        sizes = {} if "delta" in order else dict.fromkeys(_DELTA_SIZES)
        return replace(self, num_layers=number, layers=self.layers and "+".join(order), window=window, **sizes)

    def _require_whole_scaling(self) -> None:
        of_scaling = ("rope_scaling", "rope_factor", "rope_original_seq_len")
        given = [name for name in of_scaling if getattr(self, name) is not None]
        if given and len(given) < len(of_scaling):
            missing = ", ".join(f"model.{name}" for name in of_scaling if name not in given)
            raise ConfigError(f"model.{given[0]}={getattr(self, given[0])} needs {missing} too, as in llama3_1_8b")
        if self.rope_factor is not None and self.rope_factor < 1:
            raise ConfigError(f"model.rope_factor={self.rope_factor} must be 1 or more: it stretches the embedding")
