"""What a trial is: frozen dataclasses whose fields are the options, each declared here and nowhere else.

`parsing.parse` reads them from the mapping that Hydra composed, or from JSON. `options.OPTIONS` lists the declarations;
the row's schema, identities, names and reports are made from that list.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from sp_bench.config.documents import MAX_DOCUMENTS, MULTIPLE, Packing, documents, from_text, padded, rounded, spans
from sp_bench.config.parsing import ConfigError, require_at_least, require_at_most, require_positive, shown
from sp_bench.config.prose import Prose

# Tokens of a sequence x steps, and options of its own: 8192x20:micro_batches=4:sp_size=1
STAGE = r"[1-9]\d{0,9}x[1-9]\d{0,3}(:(micro_batches|sp_size)=[1-9]\d{0,4})*"
MAX_TOKENS = 2**30  # of one sequence: far more than any machine holds
PROVABLE_TOKENS = 2  # over a single key dQ and dK are 0 whatever is computed
MAX_COUNT = 65_536  # heads of a model, ranks on an axis, micro-batches; messages list what divides a number of heads
MIN_MESSAGE_BYTES = 64 * 1024  # where the curve of the collective workload begins; each size is 4 times the one before
DType = Literal["float64", "float32", "bfloat16", "float16"]
ATTENTION = ("attention", "train_step", "parity", "stream")  # workloads that compute attention
TRAINING = ("train_step", "parity", "stream")  # workloads that take optimizer steps
COMPARED = ("parity", "stream")  # workloads that are compared with training on one process, step by step
OF_ANY_SIZE = ("ulysses", "ring", "all_gather")  # methods whose options fit any number of ranks
EXACT = ("float64", "float32")  # dtypes in which steps agree to 1e-5 or better
AUTO = "auto"  # timed_steps: the ranks agree on their number after the warm-up
# What `auto` times: so long, in seconds, but at least so many steps, and never longer than the limit. Over 1 s energy
# is measured. If timed steps are twice as fast as the last warm-up step, the window is still over 0.5 s.
TIMED_S, LEAST_TIMED_STEPS, MOST_TIMED_S = 1.25, 5, 10.0
FEWEST_TIMED_STEPS = 2  # of steps that reach the limit: one alone cannot show that its results repeat
MOST_TIMED_STEPS = {"attention": 5000, "train_step": 100}  # workloads that take `auto`; a row has all their times
ELEMENT_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Stage(NamedTuple):
    """A stage of a training whose sequences change their length."""

    seq_len: int
    steps: int
    micro_batches: int | None = None  # this and the next; None: those of the last stage
    sp_size: int | None = None


def parse_stages(text: str | None) -> list[Stage]:
    """Stages as `workload.stages` has them, whose form has been checked."""
    found = []
    for each in (text or "").split(","):
        if each:
            of_stage, *options = each.split(":")
            named = dict(option.split("=") for option in options)
            found.append(Stage(*map(int, of_stage.split("x")), **{name: int(value) for name, value in named.items()}))
    return found


@dataclass(frozen=True)
class Declared:
    """An option beside the type and default of its field. The fields from `words` on are text for people; no identity
    hashes them. Words of values are one text, in which {} stands for the value, or a text for each value, with those
    of all others under the key ""."""

    doc: Prose
    unit: Prose = ""
    column: str | None = ""  # of the row; empty: named as the field; None: the row has it in `config` only
    of: tuple[str, ...] = ()  # workloads that it means something to: null in rows of others; empty: all
    old_rows: Any = None  # null in older rows and None mean this value; new rows write it
    omitted: bool = False  # leave `old_rows` out of the identity's hash, so that older rows keep theirs
    none_means: Any = None  # what the method does where the option is None; by default `old_rows`
    protocol: bool = False  # how a cell is measured, not what it is
    words: Prose | Mapping[Any, str] = ""  # of its values, for readers; empty: name=value
    identifier: Prose | Mapping[Any, str] = ""  # of its values, in the identifier of a setting; empty: name=value
    named: Prose | bool = False  # True: each name shows a value other than `none_means`; False: if names would be equal
    head: Prose = ""  # of a table's column for it
    under_head: Prose | Mapping[Any, str] = ""  # of its values there; empty: the value


@dataclass(frozen=True)
class MethodConfig:
    """How attention is split over the `sp_size` ranks of one sequence. None: the method has no such option."""

    name: Annotated[
        str,
        Declared(
            "sequence-parallel method",
            column="method",
            words={
                "single": "one rank",
                "ulysses": "Ulysses",
                "upipe": "UPipe",
                "ring": "ring",
                "double_ring": "double ring",
                "all_gather": "all-gather",
                "usp": "USP",
                "state_passing": "state passing",
                "deepspeed_ulysses": "DeepSpeed's Ulysses",
                "deepspeed_ulysses_hf": "DeepSpeed's UlyssesSPAttentionHF",
                "ring_flash_attn": "ring-flash-attn",
                "ring_flash_attn_llama3": "ring-flash-attn, llama3",
                "yunchang": "yunchang",
                "torch_context_parallel": "torch context parallel",
                "transformer_engine": "TransformerEngine",
            },
        ),
    ]
    layout: Annotated[
        Literal["contiguous", "zigzag", "striped", "document_zigzag", "zigzag_by_kind"],
        Declared(
            "which tokens a rank holds: contiguous | zigzag | striped | document_zigzag | zigzag_by_kind, whose layers "
            "with a window convert to contiguous and back",
            of=ATTENTION,
        ),
    ] = "contiguous"
    variant: Annotated[
        str | None,
        Declared(
            "of an adapter's library: which of its own patterns; the adapter names them. state_passing: gather | chain",
            of=ATTENTION,
            words={
                "allgather": "all-gather",
                "alltoall": "all-to-all",
                "a2a": "all-to-all",
                "p2p": "ring",
                "usp": "USP",
                "ulysses": "Ulysses",
                "all_gather": "all-gather",
                "a2a+p2p": "USP",
                "gather": "by gather",
                "chain": "from rank to rank",
            },
        ),
    ] = None
    ulysses_degree: Annotated[
        int | None, Declared("ranks that exchange heads; usp chooses it, and ring_degree is the rest", unit="ranks")
    ] = None
    placement: Annotated[
        Literal["ulysses_inner", "ring_inner"] | None,
        Declared(
            "usp, yunchang: which group holds adjacent ranks, ulysses_inner | ring_inner",
            of=ATTENTION,
            words={"ring_inner": "ring inside", "ulysses_inner": ""},
            named=True,
        ),
    ] = None
    dkv_dtype: Annotated[
        Literal["input", "float32"] | None,
        Declared(
            "dK/dV travel in: input (the trial's dtype) | float32; null: the library decides, or the row is old",
            of=ATTENTION,
            words={"input": "", "float32": "dK/dV in fp32"},
        ),
    ] = None
    merge_dtype: Annotated[
        Literal["input", "float32"] | None,
        Declared(
            "ring, double_ring, usp: dtype of outputs and dQ between merges, input | float32",
            of=ATTENTION,
            words={"input": "merges in the input", "float32": ""},
        ),
    ] = None
    head_stride: Annotated[
        int | None,
        Declared(
            "all_gather, llama3: KV heads gathered at a time",
            unit="heads",
            of=ATTENTION,
            none_means="all",
            words={1: "1 KV head at a time", "": "{} KV heads at a time"},
            named=True,
        ),
    ] = None
    head_chunks: Annotated[
        int | None,
        Declared(
            "ulysses, usp: parts of the heads, each exchanged while another is computed",
            of=ATTENTION,
            none_means=1,
            words="{} chunks",
            named=True,
        ),
    ] = None
    head_stages: Annotated[
        int | None,
        Declared(
            "upipe: parts of the heads, exchanged and computed one after the other; null: one query head of each rank "
            "in each part",
            of=ATTENTION,
            none_means="one query head a rank",
            words="{} stages",
            named=True,
        ),
    ] = None
    inner_ring_degree: Annotated[
        int | None,
        Declared(
            "double_ring: ranks of an inner ring, which are neighbours; null: the divisor of sp_size at its square "
            "root or next above",
            unit="ranks",
            of=ATTENTION,
            none_means="balanced",
            named=True,
        ),
    ] = None
    sends: Annotated[
        Literal["latent"] | None,
        Declared(
            "ring, all_gather, of a model with kv_lora_rank: latent, of which each rank projects keys and values up; "
            "null: keys and values",
            of=("attention",),
            none_means="keys and values",
            words={"latent": "of latents"},
            named=True,
        ),
    ] = None
    exchange: Annotated[
        Literal["collectives", "copy_engines"] | None,
        Declared(
            "what moves the tensors: collectives of the group | copy_engines, which leave all SMs to the kernels; null "
            "in old rows: what their primitive says, else collectives",
            old_rows="collectives",
            words={"copy_engines": "copy engines", "collectives": ""},
            named=True,
        ),
    ] = None
    own: Annotated[
        Mapping[str, str | int | float | bool | None] | None,
        Declared("of a method from outside: the options that it declares itself", column=None, of=ATTENTION),
    ] = None

    def __post_init__(self) -> None:
        require_positive(self, "ulysses_degree", "inner_ring_degree", "head_stride", "head_chunks", "head_stages")


@dataclass(frozen=True)
class EngineConfig:
    """What trains the decoder of train_step and parity. None: the engine has no such option."""

    name: Annotated[
        str,
        Declared(
            "what trains: fsdp2 | deepspeed | hf_deepspeed | hf_trainer | trl_sft | hf_fsdp2 | megatron; null in old "
            "rows: fsdp2",
            column="engine",
            of=TRAINING,
            old_rows="fsdp2",
            words="{}",
            identifier="engine {}",
        ),
    ] = "fsdp2"
    optimizer_offload: Annotated[
        Literal["deepspeed_cpu_adam", "torch_adamw"] | None,
        Declared(
            "Adam that steps in host memory, where fp32 parameters and moments then are; fsdp2 has torch_adamw alone; "
            "null: on the device",
            of=TRAINING,
            words={"deepspeed_cpu_adam": "optimizer offloaded", "torch_adamw": "optimizer offloaded"},
            identifier="optimizer offloaded ({})",
            head="optimizer",
        ),
    ] = None
    variable_seq_len: Annotated[
        bool | None,
        Declared(
            "hf_deepspeed, hf_trainer, trl_sft: the attention expects lengths that change from batch to batch",
            column=None,
        ),
    ] = None

    forward_prefetch: Annotated[
        int | None,
        Declared(
            "fsdp2: layers that are gathered while one is computed, in the forward; null: FSDP2's own way",
            unit="layers",
            of=TRAINING,
            named=True,
        ),
    ] = None
    backward_prefetch: Annotated[
        int | None,
        Declared(
            "fsdp2: the same in the backward; null: FSDP2's own way, which is one",
            unit="layers",
            of=TRAINING,
            named=True,
        ),
    ] = None
    reshard_after_forward: Annotated[
        bool | None,
        Declared(
            "fsdp2: whether a layer's parameters are freed after its forward and gathered again in the backward; null: "
            "true",
            of=TRAINING,
            none_means=True,
            named=True,
        ),
    ] = None
    reduce_gradients: Annotated[
        Literal["each_micro_batch", "last_micro_batch"] | None,
        Declared(
            "fsdp2: when gradients are reduced; after the last micro-batch alone takes the memory of whole gradients; "
            "null: each_micro_batch",
            of=TRAINING,
            none_means="each_micro_batch",
            named=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        require_positive(self, "forward_prefetch", "backward_prefetch")


@dataclass(frozen=True)
class KernelConfig:
    """The local attention kernel; the same one serves every method."""

    name: Annotated[
        str,
        Declared(
            "local attention kernel",
            column="kernel",
            of=ATTENTION,
            words={
                "flash_attn_4": "FlashAttention-4",
                "flash_attn_3": "FlashAttention-3",
                "flash_attn": "FlashAttention-2",
                "cudnn": "cuDNN",
                "sdpa_flash": "aten's flash",
                "cpu_flash": "aten's CPU flash",
                "math": "plain math",
                "fla": "flash-linear-attention",
                "chunked": "plain chunks",
            },
        ),
    ]


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
                "deepseek_v3": "DeepSeek-V3",
                "qwen3_next_linear": "Qwen3-Next's linear layers",
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
            "attention: size of a value head, and of the output's; null: head_dim",
            of=("attention",),
            words="values of {}",
        ),
    ] = None
    kv_lora_rank: Annotated[
        int | None,
        Declared(
            "attention: elements of a token's latent that the step projects up to keys and values, before these travel "
            "or after (method.sends); null: it begins with keys and values",
            of=("attention",),
            words="latents of {}",
        ),
    ] = None
    qk_rope_head_dim: Annotated[
        int | None,
        Declared(
            "kv_lora_rank: elements beside a token's latent that end the key of every head; they carry its place",
            of=("attention",),
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
            "training: kinds of attention of the layers, from the first on and over again: full and window, with + "
            "between them; null: full",
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
        if unknown := [word for word in words if word not in ("full", "window")]:
            raise ConfigError(
                f"model.layers={self.layers}: {unknown[0]!r} is no kind of attention; use full and window with + "
                "between them, as window+full"
            )
        if ("window" in words) != (self.window is not None):
            raise ConfigError(
                f"model.layers={self.layers}, model.window={self.window}: layers of kind window need a model.window, "
                "and others have none; use both, or neither"
            )
        if self.window is not None:
            require_at_least(self, PROVABLE_TOKENS, "window")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer: full | window."""
        words = (self.layers or "full").split("+")
        return tuple(words[index % len(words)] for index in range(self.num_layers))

    def shorter(self, num_layers: int) -> "ModelConfig":
        """The model with so many layers, or as many as it has, but with each of its kinds, which come one after the
        other."""
        order = tuple(dict.fromkeys(self.kinds))
        number = min(max(num_layers, len(order)), self.num_layers)
        window = self.window if "window" in order else None
        return replace(self, num_layers=number, layers=self.layers and "+".join(order), window=window)

    def _require_whole_scaling(self) -> None:
        of_scaling = ("rope_scaling", "rope_factor", "rope_original_seq_len")
        given = [name for name in of_scaling if getattr(self, name) is not None]
        if given and len(given) < len(of_scaling):
            missing = ", ".join(f"model.{name}" for name in of_scaling if name not in given)
            raise ConfigError(f"model.{given[0]}={getattr(self, given[0])} needs {missing} too, as in llama3_1_8b")
        if self.rope_factor is not None and self.rope_factor < 1:
            raise ConfigError(f"model.rope_factor={self.rope_factor} must be 1 or more: it stretches the embedding")


PASS_KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("forward", "forward_backward"),
    "train_step": ("step",),
    "parity": ("step",),
    "stream": ("step",),
    "collective": ("exchange",),
}


_IN_FP8 = {"model": ""} | {f"float8_{each}wise": f"FP8 by {each}" for each in ("row", "tensor", "block")}
_PACKING_OF: Mapping[str, Prose] = {
    "document_len": "fixed or lognormal",
    "document_sigma": "lognormal",
    "document_lens": "file",
}


@dataclass(frozen=True)
class WorkloadConfig:
    """What one step is and how often it runs."""

    name: Annotated[
        Literal["attention", "train_step", "parity", "stream", "collective"],
        Declared(
            "attention | train_step | parity | stream | collective",
            column="workload",
            words={
                "attention": "Attention",
                "train_step": "Training step",
                "parity": "Training parity",
                "stream": "Stages of training",
                "collective": "Messages alone",
            },
        ),
    ]
    pass_kind: Annotated[
        Literal["forward", "forward_backward", "step", "exchange"],
        Declared(
            "forward | forward_backward | step | exchange",
            words={"forward_backward": "forward and backward", "step": "", "exchange": ""},
        ),
    ]
    causal: Annotated[bool, Declared("causal mask", of=ATTENTION)]
    warmup_steps: Annotated[int, Declared("untimed steps before the timed ones", unit="steps", protocol=True)]
    timed_steps: Annotated[
        int | Literal["auto"],
        Declared(
            "timed steps, the same on every rank; auto: the ranks agree on their number after the warm-up, and the row "
            "has it",
            unit="steps",
            protocol=True,
        ),
    ]
    correctness_seq_len: Annotated[
        int,
        Declared(
            "the reduced length at which output and gradients are proven, before any timing",
            unit="tokens",
            column=None,
            protocol=True,
        ),
    ]
    optimizer: Annotated[Literal["adamw", "sgd"] | None, Declared("training: adamw | sgd", column=None)] = None
    learning_rate: Annotated[float | None, Declared("training: of the optimizer", column=None)] = None
    max_grad_norm: Annotated[
        float | None, Declared("training: gradients are clipped to it; null: not at all", column=None)
    ] = None
    activation_checkpointing: Annotated[
        Literal["none", "full", "selective", "selective_output", "selective_mlp"] | None,
        Declared(
            "training: what the backward computes again: none | full, each layer | selective, all but attention "
            "(engine megatron: MLPs alone) | "
            "selective_output, its q, k and v too | selective_mlp, less than selective: gate and up are kept",
            column=None,
            words={"full": "all recomputed", "none": "nothing recomputed"},
            identifier={"none": "", "": "{} activation checkpointing"},
            head="recomputed",
            under_head={"full": "all", "none": "nothing"},
        ),
    ] = None
    checkpoint_offload: Annotated[
        bool,
        Declared(
            "training: what activation_checkpointing keeps is in host memory from a layer's forward to its backward",
            of=TRAINING,
            old_rows=False,
            omitted=True,
            words={True: "checkpoints offloaded", False: ""},
            named=True,
            head="checkpoints",
            under_head={True: "on the host", False: ""},
        ),
    ] = False
    model_code: Annotated[
        Literal["eager", "compiled", "liger"] | None,
        Declared(
            "training: what runs a layer around its attention: eager, torch call by call | compiled, torch.compile | "
            "liger, Liger's kernels; null in old rows: eager",
            of=TRAINING,
            old_rows="eager",
            omitted=True,
            words="{}",
            named=True,
            head="code",
        ),
    ] = None
    attribution: Annotated[
        bool,
        Declared(
            "attention: the step is timed without messages, and without kernels, as well", column=None, protocol=True
        ),
    ] = False
    launch: Annotated[
        Literal["eager", "cuda_graph"] | None,
        Declared(
            "attention: eager, call by call | cuda_graph, the whole step at one call; null in old rows: eager",
            old_rows="eager",
            omitted=True,
            words={"cuda_graph": "CUDA graph", "": "launch={}"},
            identifier="replayed as a CUDA graph",
        ),
    ] = None
    single_step: Annotated[
        bool,
        Declared(
            "train_step: one step is timed and counted at once, for steps of minutes; with warmup_steps=0 it follows "
            "a step of one layer",
            of=("train_step",),
            old_rows=False,
            omitted=True,
            protocol=True,
            words={True: "one step", False: ""},
        ),
    ] = False
    fit: Annotated[
        bool,
        Declared(
            "single_step: does it fit? Attention is computed only in layers where memory may peak, all else as ever; "
            "memory and messages are in the row, and no time",
            of=("train_step",),
            old_rows=False,
            omitted=True,
            protocol=True,
        ),
    ] = False
    trace: Annotated[
        bool,
        Declared(
            "the untimed step is traced, and on CUDA the memory that it holds: compressed JSON in _work/traces",
            column=None,
            old_rows=False,
            omitted=True,
            protocol=True,
        ),
    ] = False
    max_message_bytes: Annotated[
        int | None,
        Declared("collective: no message is larger; bytes one rank sends off-rank", unit="bytes", column=None),
    ] = None
    micro_batches: Annotated[
        int | None,
        Declared(
            "training: forward and backward passes of one optimizer step, their gradients summed; null in old rows: 1",
            of=TRAINING,
            old_rows=1,
            omitted=True,
            words="{} micro-batches",
            identifier="{} micro-batches a step",
        ),
    ] = None
    loss_tile_tokens: Annotated[
        int | None,
        Declared(
            "training: local tokens whose logits exist at a time, forward and backward; null: all of a micro-batch",
            unit="tokens",
            column=None,
            named=True,
            head="loss tile",
        ),
    ] = None

    mlp_tile_tokens: Annotated[
        int | None,
        Declared(
            "training: local tokens of a sequence that an MLP computes at a time, forward and backward; null: all",
            unit="tokens",
            column=None,
            named=True,
            head="MLP tile",
        ),
    ] = None

    packing: Annotated[
        Packing,
        Declared(
            "none, one document a sequence | fixed, documents of one length | lognormal, of drawn lengths | "
            "file, of a list; drawn from `seed`, rounded to 16 tokens",
            of=ATTENTION,
            old_rows="none",
            omitted=True,
            words={"none": "not packed"},
        ),
    ] = "none"
    document_len: Annotated[
        int | None,
        Declared("packing: tokens of a document (fixed), or their median (lognormal)", unit="tokens", of=ATTENTION),
    ] = None
    document_sigma: Annotated[
        float | None,
        Declared("lognormal packing: standard deviation of the logarithm of a document's length", of=ATTENTION),
    ] = None
    document_lens: Annotated[
        str | None,
        Declared(
            "file packing: lengths of the documents with commas between them, or @FILE, which has them",
            unit="tokens",
            of=ATTENTION,
        ),
    ] = None
    window: Annotated[
        int | None,
        Declared(
            "attention: a token sees this many tokens up to itself, i - window + 1 to i; null: all up to itself",
            unit="tokens",
            of=("attention",),
            none_means="none",
            words="window {:,}",
            identifier="window {}",
            named=True,
            head="window",
        ),
    ] = None
    sinks: Annotated[
        bool,
        Declared(
            "attention: each query head has a learnable score beside those of its keys, without a value",
            of=("attention",),
            old_rows=False,
            omitted=True,
            words={True: "sinks", False: ""},
            named=True,
            head="sinks",
        ),
    ] = False
    stages: Annotated[
        str | None,
        Declared(
            "stream: stages of one training before the last, tokens of a sequence x steps: 8192x20,32768x20; the last "
            "has seq_len tokens and the other steps. Options of a stage: 8192x20:micro_batches=4:sp_size=1",
            of=("stream",),
            words="stages {}",
            named=True,
            head="stages",
        ),
    ] = None
    policy: Annotated[
        Literal["static", "per_document", "dynamic"] | None,
        Declared(
            "stream of drawn documents (packing) in place of stages: static, packs of seq_len tokens over sp_size "
            "ranks | per_document, each on one rank, or over all where one cannot hold it | dynamic, each over 1, 2, "
            "4 ... all ranks, so that the slowest ends first; a rank holds seq_len / sp_size tokens at a time",
            of=("stream",),
            words={"static": "static groups", "per_document": "groups by document", "dynamic": "dynamic groups"},
            named=True,
            head="policy",
        ),
    ] = None
    filling: Annotated[
        Literal["first_fit", "balanced"] | None,
        Declared(
            "policy=static: packs are filled in the order drawn and dealt in turn (first_fit), or so that groups have "
            "equal work (balanced)",
            of=("stream",),
            words={"first_fit": "first fit", "balanced": "balanced", None: ""},
            named=True,
            head="filling",
        ),
    ] = None
    masked_label_share: Annotated[
        float,
        Declared(
            "training: share of the labels that the loss ignores: the first ones of a sequence, or of each packed "
            "document, as of prompts",
            of=TRAINING,
            old_rows=0.0,
            omitted=True,
            words={0.5: "half of the labels masked", "": "{:.0%} of the labels masked"},
        ),
    ] = 0.0
    linear_dtype: Annotated[
        Literal["model", "float8_rowwise", "float8_tensorwise", "float8_blockwise"],
        Declared(
            "train_step: what multiplies the layers' matrices: model, in the trial's dtype | float8_rowwise, in FP8 "
            "with a scale for each row | float8_tensorwise, with one for each tensor | float8_blockwise, with one for "
            "each 128 elements, of weights 128 x 128; embedding, head and attention stay in the dtype; null in old "
            "rows: model",
            of=("train_step",),
            old_rows="model",
            omitted=True,
            words=_IN_FP8,
            named=True,
            head="products",
            under_head=_IN_FP8,
        ),
    ] = "model"

    def __post_init__(self) -> None:
        positive = ("correctness_seq_len", "learning_rate", "max_grad_norm", "micro_batches")
        require_positive(self, *positive, "loss_tile_tokens", "mlp_tile_tokens")
        self._check_timed_steps()
        require_at_most(self, MAX_COUNT, "micro_batches")
        require_positive(self, "document_len", "document_sigma")
        self._check_packing()
        self._check_stages()
        self._check_window()
        self._check_masked_labels()
        if self.warmup_steps < 0:
            raise ConfigError(f"workload.warmup_steps={self.warmup_steps} must not be negative")
        if self.trace and self.single_step:
            raise ConfigError("workload.trace=true traces an untimed step, and workload.single_step=true has none")
        if self.pass_kind not in PASS_KINDS[self.name]:
            valid = " or ".join(PASS_KINDS[self.name])
            raise ConfigError(f"workload.pass_kind={self.pass_kind} does not fit workload {self.name}; use {valid}")
        if self.name == "collective" and (self.max_message_bytes or 0) < 4 * MIN_MESSAGE_BYTES:
            raise ConfigError(
                f"workload.max_message_bytes={self.max_message_bytes}: sizes are {MIN_MESSAGE_BYTES}, "
                f"{4 * MIN_MESSAGE_BYTES} and so on, and a line needs two; use {4 * MIN_MESSAGE_BYTES} or more"
            )
        if self.launch is not None and self.name != "attention":
            raise ConfigError(f"workload.launch={self.launch}: only workload=attention has a choice; leave it out")
        if self.launch == "cuda_graph" and self.warmup_steps == 0:
            raise ConfigError("workload.warmup_steps=0: the first of them records the CUDA graph; use 1 or more")
        if self.fit and not self.single_step:
            raise ConfigError("workload.fit=true asks of one step whether it fits; use workload.single_step=true too")
        if self.model_code == "compiled" and self.warmup_steps == 0 and not self.single_step and self.stages is None:
            raise ConfigError("workload.warmup_steps=0: the first of them compiles the model's code; use 1 or more")
        if self.mlp_tile_tokens is not None and self.activation_checkpointing in ("none", "selective_mlp"):
            raise ConfigError(
                f"workload.mlp_tile_tokens={self.mlp_tile_tokens}: activation_checkpointing="
                f"{self.activation_checkpointing} keeps what the MLP computes of all tokens; use full, selective or "
                "selective_output"
            )
        if self.checkpoint_offload and self.activation_checkpointing == "none":
            raise ConfigError(
                "workload.checkpoint_offload=true: activation_checkpointing=none keeps no checkpoints; use full, "
                "selective, selective_output or selective_mlp"
            )
        of_steps = ("micro_batches", "loss_tile_tokens", "mlp_tile_tokens", "model_code", "checkpoint_offload")
        for option in (*of_steps, "linear_dtype"):
            if (value := getattr(self, option)) not in (None, False, "model") and self.pass_kind != "step":
                raise ConfigError(
                    f"workload.{option}={value}: workload {self.name} takes no optimizer step; leave it out, or use "
                    "workload=train_step"
                )
        if self.pass_kind == "step":
            if not self.causal:
                raise ConfigError(f"workload.causal=false: {self.name} trains a causal decoder; use causal=true")
            for option in ("optimizer", "learning_rate", "activation_checkpointing"):
                if getattr(self, option) is None:
                    raise ConfigError(f"workload.{option} must be given for workload {self.name}")
        if self.name == "parity" and self.optimizer != "sgd":
            raise ConfigError(
                f"workload.optimizer={self.optimizer}: {self.name} needs sgd, whose loss shows a wrong scale"
            )

    def _check_timed_steps(self) -> None:
        if self.single_step and (self.name, self.timed_steps) != ("train_step", 1):
            raise ConfigError(
                f"workload.single_step=true: workload {self.name} with timed_steps={self.timed_steps}; it is for "
                "workload=train_step with timed_steps=1"
            )
        if self.timed_steps != AUTO:
            require_positive(self, "timed_steps")
        elif self.name not in MOST_TIMED_STEPS:
            raise ConfigError(
                f"workload.timed_steps=auto: workload {self.name} has a fixed number of steps; use a number, or "
                f"workload={' or '.join(MOST_TIMED_STEPS)}"
            )
        elif self.warmup_steps < 2:
            raise ConfigError(
                "workload.timed_steps=auto: the last warm-up step tells how long a step is, and the first compiles and "
                f"connects too; use workload.warmup_steps=2 or more, not {self.warmup_steps}"
            )

    def num_timed_steps(self, step_ms: float) -> int:
        """How many steps of so many ms are timed."""
        if self.timed_steps != AUTO:
            return self.timed_steps
        enough = max(math.ceil(1e3 * TIMED_S / step_ms), LEAST_TIMED_STEPS)
        longest = max(int(1e3 * MOST_TIMED_S / step_ms), FEWEST_TIMED_STEPS)
        return min(enough, longest, self.most_timed_steps)

    @property
    def most_timed_steps(self) -> int:
        return MOST_TIMED_STEPS[self.name] if self.timed_steps == AUTO else self.timed_steps

    @property
    def earlier_stages(self) -> list[Stage]:
        """All but the last; none of other workloads."""
        return parse_stages(self.stages)

    def _check_stages(self) -> None:
        if (self.stages is not None) + (self.policy is not None) != (self.name == "stream"):
            raise ConfigError(
                f"workload.stages={self.stages}, workload.policy={self.policy}: workload={self.name}; give stages such "
                "as 8192x20,32768x20 or a policy to workload=stream, and to no other"
            )
        if (self.filling is not None) != (self.policy == "static"):
            raise ConfigError(
                f"workload.filling={self.filling}: workload.policy={self.policy}; give first_fit or balanced to "
                "policy=static, and null to others"
            )
        if self.policy is not None and (self.packing == "none" or self.micro_batches or self.warmup_steps):
            raise ConfigError(
                f"workload.policy={self.policy}: packing={self.packing}, micro_batches={self.micro_batches}, "
                f"warmup_steps={self.warmup_steps}; use packing=fixed, lognormal or file, whose documents are drawn, "
                "micro_batches=null and warmup_steps=0"
            )
        if self.stages is None:
            return
        if not re.fullmatch(STAGE + f"(,{STAGE})*", self.stages):
            raise ConfigError(
                f"workload.stages={shown(self.stages)}: write tokens of a sequence x steps of each stage, such as "
                "8192x20,32768x20"
            )
        steps = sum(stage.steps for stage in self.earlier_stages)
        if self.timed_steps == AUTO or self.timed_steps <= steps or self.warmup_steps:
            raise ConfigError(
                f"workload.timed_steps={self.timed_steps}, workload.warmup_steps={self.warmup_steps}: all steps are "
                f"timed, {steps} of workload.stages={self.stages} and the last; use {steps + 1} or more, and 0"
            )
        if self.packing != "none":
            raise ConfigError(f"workload.packing={self.packing}: stages train on whole sequences; use none")

    def _check_packing(self) -> None:
        needed = {
            "none": (),
            "fixed": ("document_len",),
            "lognormal": ("document_len", "document_sigma"),
            "file": ("document_lens",),
        }[self.packing]
        if self.document_lens is not None:
            from_text(self.document_lens)
        for option in ("document_len", "document_sigma", "document_lens"):
            if (getattr(self, option) is None) == (option in needed):
                verb: Prose = "needs" if option in needed else "has no"
                raise ConfigError(
                    f"workload.packing={self.packing} {verb} workload.{option}, which is {getattr(self, option)}; "
                    + ("give it" if option in needed else f"use null, or workload.packing={_PACKING_OF[option]}")
                )
        if self.packing == "none":
            return
        if self.name not in ATTENTION:
            raise ConfigError(f"workload.packing={self.packing}: workload {self.name} computes no attention; use none")
        if not self.causal:
            raise ConfigError(f"workload.packing={self.packing} is proven with a causal mask; use workload.causal=true")
        if self.launch == "cuda_graph":
            raise ConfigError(
                f"workload.packing={self.packing} is not recorded as a CUDA graph; use workload.launch=eager"
            )

    def _check_window(self) -> None:
        if self.sinks and (self.name != "attention" or not self.causal):
            raise ConfigError(
                f"workload.sinks=true with workload {self.name}, causal={self.causal}: these sinks are of "
                "workload=attention with workload.causal=true; training has model.sinks"
            )
        if self.window is None:
            return
        said: Prose = f"workload.window={self.window}"
        require_at_least(self, PROVABLE_TOKENS, "window")
        if self.name != "attention":
            raise ConfigError(f"{said}: workload {self.name} has windows by layer; use model.window and model.layers")
        if not self.causal:
            raise ConfigError(f"{said} ends at the token itself; use workload.causal=true, or leave it out")

    def _check_masked_labels(self) -> None:
        said: Prose = f"workload.masked_label_share={self.masked_label_share}"
        if not 0 <= self.masked_label_share < 1:
            raise ConfigError(f"{said} must be 0 or more, and less than 1: a loss needs labels")
        if self.masked_label_share and self.pass_kind != "step":
            raise ConfigError(f"{said}: workload {self.name} has no labels; use 0, or workload=train_step")
        if self.masked_label_share and self.single_step:
            raise ConfigError(
                f"{said}: workload.single_step=true is compared with a short text alone, whose labels may all be "
                "masked; use 0, or several steps"
            )

    @property
    def num_micro_batches(self) -> int:
        """Per optimizer step."""
        return self.micro_batches or 1


@dataclass(frozen=True)
class FabricConfig:
    """The backend of the process group and the environment variables that shape its transport."""

    name: Annotated[
        str,
        Declared(
            "transport of the process group",
            column="fabric",
            words={
                "nvlink": "NVLink",
                "channels_2": "2 NCCL channels",
                "channels_1": "1 NCCL channel",
                "shm": "host memory",
                "socket": "TCP sockets",
                "network": "NVLink and the network",
                "gloo": "gloo",
            },
        ),
    ]
    backend: Annotated[Literal["gloo", "nccl"], Declared("of the process group: gloo | nccl", column=None)]
    env: Annotated[Mapping[str, str], Declared("environment variables that shape the transport", column=None)] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class HardwareConfig:
    """The kind of device."""

    name: Annotated[str, Declared("kind of device asked for", column="hardware")]
    device: Annotated[Literal["cpu", "cuda"], Declared("cpu | cuda", column=None)]
    device_memory_gib: Annotated[
        float | None,
        Declared(
            "emulated size of a smaller device; null: the whole device",
            unit="GiB",
            words="capped at {:g} GiB",
            identifier="capped at {:g} GiB a device",
        ),
    ] = None
    threads_per_rank: Annotated[
        int | None, Declared("processor threads of a rank; null: 1 of several ranks, all cores of one", column=None)
    ] = None
    allocator: Annotated[
        Literal["expandable_segments"] | None,
        Declared(
            "cuda: expandable_segments of torch's allocator, against fragmentation; null: as the shell says",
            head="allocator",
        ),
    ] = None
    ranks_per_gpu: Annotated[
        int,
        Declared(
            "cuda: above 1, ranks share a GPU, for proofs, bytes and memory; such a row has no time; null in old "
            "rows, which had 1",
            unit="ranks",
            old_rows=1,
            omitted=True,
            words="{} ranks share a GPU",
            identifier="{} ranks share a GPU",
        ),
    ] = 1

    def __post_init__(self) -> None:
        require_positive(self, "device_memory_gib", "threads_per_rank", "ranks_per_gpu")
        if self.ranks_per_gpu > 1 and self.device == "cpu":
            raise ConfigError(f"hardware.ranks_per_gpu={self.ranks_per_gpu} is of CUDA devices; leave it out")
        if self.allocator is not None and self.device == "cpu":
            raise ConfigError(f"hardware.allocator={self.allocator} is of torch's allocator on CUDA; leave it out")


NO_DELAY = "none"


@dataclass(frozen=True)
class LinkConfig:
    """How long messages take in a world of one rank: curves of time over size, by collective and size of its group. The
    text of a curve is `bytes:us bytes:us ...`, bytes that one rank sends off-rank. costs/links.py reads it."""

    name: Annotated[
        str,
        Declared(
            "world=one_rank: what says how long messages take, a file of conf/link; none: they are copies alone",
            column="link",
            old_rows=NO_DELAY,
        ),
    ] = NO_DELAY
    inside: Annotated[Mapping[str, str], Declared("of a host: `collective ranks` -> curve", column=None)] = field(
        default_factory=dict
    )
    between: Annotated[
        Mapping[str, str],
        Declared("`collective hosts` -> curve of what one network card carries; empty: of one host only", column=None),
    ] = field(default_factory=dict)


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


@dataclass(frozen=True)
class TrialConfig:
    """Everything that says what is measured; equal configs are the same cell of a campaign."""

    method: MethodConfig
    kernel: KernelConfig
    model: ModelConfig
    workload: WorkloadConfig
    fabric: FabricConfig
    hardware: HardwareConfig
    batch_size: Annotated[
        int, Declared("sequences of a data-parallel rank and micro-batch", unit="sequences", of=ATTENTION)
    ]
    seq_len: Annotated[int, Declared("global tokens of one sequence", unit="tokens", of=ATTENTION)]
    sp_size: Annotated[int, Declared("ranks that share one sequence", unit="ranks")]
    dp_replicate_size: Annotated[int, Declared("replicas of the sharded parameters", unit="ranks")]
    dp_shard_size: Annotated[
        int, Declared("data-parallel ranks that shard parameters (with the sp ranks)", unit="ranks")
    ]
    dtype: Annotated[
        DType,
        Declared(
            "dtype of activations and attention",
            words={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"},
        ),
    ]
    seed: Annotated[int, Declared("of weights, inputs and text", column=None, protocol=True)]
    isolation: Annotated[
        Literal["trial", "group"],
        Declared(
            "trial: fresh processes | group: trials of one world size, fabric and hardware share warm ones, for quick "
            "surveys",
            words={"group": "warm processes", "trial": "fresh processes"},
            identifier={"group": "warm process group", "trial": ""},
        ),
    ] = "trial"
    engine: Annotated[
        EngineConfig,
        Declared("trains the decoder of train_step, parity and stream", old_rows=EngineConfig(), omitted=True),
    ] = field(default_factory=EngineConfig)
    num_nodes: Annotated[
        int,
        Declared(
            "hosts over which the ranks lie, equally many on each, neighbours together; null in old rows: 1",
            unit="nodes",
            old_rows=1,
            omitted=True,
            identifier="over {} nodes",
        ),
    ] = 1
    world: Annotated[
        Literal["ranks", "one_rank"],
        Declared(
            "ranks: all are there | one_rank: one real rank, whose messages are copies of its own and take what `link` "
            "says; null in old rows: ranks",
            column=None,
            old_rows="ranks",
            omitted=True,
        ),
    ] = "ranks"
    real_rank: Annotated[
        int | None,
        Declared(
            "world=one_rank: which rank is there; null: the one with the most work, 0 of even layouts, under a window "
            "the middle one"
        ),
    ] = None
    link: Annotated[
        LinkConfig, Declared("how long messages take in a world of one rank", old_rows=LinkConfig(), omitted=True)
    ] = field(default_factory=LinkConfig)

    def __post_init__(self) -> None:
        sizes = ("batch_size", "sp_size", "dp_replicate_size", "dp_shard_size", "num_nodes")
        require_positive(self, "seq_len", *sizes)
        require_at_most(self, MAX_COUNT, *sizes)
        require_at_most(self, MAX_TOKENS, "seq_len")
        if self.workload.name != "collective":
            require_at_least(self, PROVABLE_TOKENS, "seq_len")
            require_at_least(self.workload, PROVABLE_TOKENS, "correctness_seq_len")
        if self.workload.packing != "none":
            self._check_pack()
        self._check_latent()
        if self.model.attention == "gated_delta" and self.workload.name != "collective":
            self._check_gated_delta()
        checkpointing = self.workload.activation_checkpointing
        if self.method.layout == "zigzag_by_kind" and checkpointing == "selective_output":
            raise ConfigError(
                f"method.layout=zigzag_by_kind: workload.activation_checkpointing={checkpointing} would convert q, k "
                "and v again for the backward, which the closed form lacks; use selective or full"
            )
        if (window := self.workload.window) is not None and window >= (longest := self._longest(self.seq_len)):
            of: Prose = f"documents of {longest} tokens or less" if longest < self.seq_len else f"seq_len={longest}"
            raise ConfigError(
                f"workload.window={window} hides nothing of {of}; use {longest - 1} or less, or leave it out"
            )
        if self.workload.pass_kind != "step" and self.dp_replicate_size * self.dp_shard_size > 1:
            raise ConfigError(
                f"dp_replicate_size={self.dp_replicate_size}, dp_shard_size={self.dp_shard_size}: the "
                f"{self.workload.name} workload has no data parallelism; use 1 and 1, or workload=train_step"
            )
        if self.workload.pass_kind != "step" and self.engine != EngineConfig():
            raise ConfigError(
                f"engine={self.engine.name}: the {self.workload.name} workload trains nothing; use engine=fsdp2, the "
                "default, or workload=train_step"
            )
        if self.engine.optimizer_offload is not None and self.workload.optimizer != "adamw":
            raise ConfigError(
                f"engine.optimizer_offload={self.engine.optimizer_offload} is an Adam, not {self.workload.optimizer}; "
                "use workload.optimizer=adamw, or engine.optimizer_offload=null"
            )
        if self.workload.pass_kind == "step" and self.model.vocab_size < 256:
            raise ConfigError(f"model.vocab_size={self.model.vocab_size} is below 256: the training text is bytes")
        if self.workload.name == "parity" and self.dtype not in EXACT:
            raise ConfigError(f"dtype={self.dtype}: {self.workload.name} compares to 1e-5; use float32 or float64")
        if self.workload.name == "stream":
            self._check_stream(self.stages)
        if self.fabric.backend == "nccl" and self.hardware.device == "cpu":
            raise ConfigError(f"fabric={self.fabric.name} needs CUDA devices; use fabric=gloo with hardware=cpu")
        self._check_world()

    def _check_gated_delta(self) -> None:
        said: Prose = f"model.attention=gated_delta (model={self.model.name})"
        if self.trains:
            raise ConfigError(f"{said}: no decoder here has such layers; use workload=attention")
        workload, model = self.workload, self.model
        unusual = {
            "workload.causal": (workload.causal, True),
            "workload.packing": (workload.packing, "none"),
            "workload.window": (workload.window, None),
            "workload.sinks": (workload.sinks, False),
            "workload.launch": (workload.launch or "eager", "eager"),
            "method.layout": (self.method.layout, "contiguous"),
            "method.exchange": (self.method.exchange or "collectives", "collectives"),
            "model.kv_lora_rank": (model.kv_lora_rank, None),
        }
        for option, (value, proven) in unusual.items():
            if value != proven:
                raise ConfigError(f"{option}={value}: {said} is proven with {option}={proven} alone; use that")

    def _check_latent(self) -> None:
        model, workload = self.model, self.workload
        of_attention = [(f"model.{name}", getattr(model, name)) for name in ("v_head_dim", "kv_lora_rank")]
        for option, value in of_attention:
            if value is not None and self.trains:
                raise ConfigError(f"{option}={value}: no decoder here has that; use workload=attention")
        if self.method.sends == "latent" and model.kv_lora_rank is None:
            raise ConfigError(
                f"method.sends=latent: model={model.name} has no latent; use method.sends=null, or a model with "
                "kv_lora_rank, such as deepseek_v2_lite"
            )
        for option, value in (("packing", workload.packing), ("window", workload.window), ("sinks", workload.sinks)):
            if model.kv_lora_rank is not None and value not in ("none", None, False):
                raise ConfigError(
                    f"workload.{option}={value}: model={model.name} has latents, which are proven without; leave it out"
                )

    def _check_world(self) -> None:
        if self.world == "ranks":
            for option, value in (("link", self.link.name), ("real_rank", self.real_rank)):
                if value not in (None, NO_DELAY):
                    raise ConfigError(
                        f"{option}={value} is of a world of one rank; use world=one_rank, or leave it out"
                    )
        elif self.real_rank is not None and not 0 <= self.real_rank < self.world_size:
            raise ConfigError(f"real_rank={self.real_rank}: the world has ranks 0 to {self.world_size - 1}")

    def _check_stream(self, stages: list[tuple[int, int]]) -> None:
        lengths = [seq_len for seq_len, _ in stages]
        for stage in self.workload.earlier_stages:
            if self.sp_size % (stage.sp_size or 1) or (stage.sp_size and self.method.name not in OF_ANY_SIZE):
                raise ConfigError(
                    f"workload.stages={self.workload.stages}: sp_size={stage.sp_size} of a stage, and sp_size="
                    f"{self.sp_size} of the last, method={self.method.name}; a stage's must divide that of the last, "
                    f"and the method be one of {', '.join(OF_ANY_SIZE)}"
                )
            if (stage.micro_batches or 1) > MAX_COUNT:
                raise ConfigError(f"workload.stages={self.workload.stages}: use {MAX_COUNT} micro_batches or fewer")
        if self.dtype in EXACT and self.workload.optimizer != "sgd":
            raise ConfigError(
                f"workload.optimizer={self.workload.optimizer}: stream in {self.dtype} compares each step with one "
                "process and needs sgd, whose loss shows a wrong scale; use sgd, or dtype=bfloat16"
            )
        if self.dtype not in EXACT and self.workload.masked_label_share:
            raise ConfigError(
                f"workload.masked_label_share={self.workload.masked_label_share}: stages in {self.dtype} are compared "
                "where they meet, on tokens whose labels may all be masked; use 0, or dtype=float32"
            )
        if min(lengths) < PROVABLE_TOKENS or max(lengths) > MAX_TOKENS:
            raise ConfigError(
                f"workload.stages={self.workload.stages}: use {PROVABLE_TOKENS} to {MAX_TOKENS} tokens in each stage"
            )
        if self.workload.policy is not None:
            self._check_policy()
        if self.engine.name != "fsdp2" or self.model.window is not None:
            raise ConfigError(
                f"workload=stream with engine={self.engine.name}, model={self.model.name}: lengths change on "
                "engine=fsdp2 alone, with a model without windows"
            )

    def _check_policy(self) -> None:
        said: Prose = f"workload.policy={self.workload.policy}"
        if self.dtype not in EXACT or self.workload.masked_label_share or self.dp_replicate_size > 1:
            raise ConfigError(
                f"{said}: dtype={self.dtype}, masked_label_share={self.workload.masked_label_share}, "
                f"dp_replicate_size={self.dp_replicate_size}; each batch is compared with one process: use float32 or "
                "float64, 0 and 1"
            )
        if self.method.name not in OF_ANY_SIZE:
            raise ConfigError(f"{said}: method={self.method.name} has one size; use {', '.join(OF_ANY_SIZE)}")
        if self.world_size & (self.world_size - 1):
            raise ConfigError(f"{said}: groups are of 1, 2, 4 ... of {self.world_size} ranks; use 1, 2, 4, 8 ... ranks")

    def _check_pack(self) -> None:
        said: Prose = f"workload.packing={self.workload.packing}"
        if self.batch_size != 1:
            raise ConfigError(f"batch_size={self.batch_size}: {said} packs one sequence; use batch_size=1")
        if self.seq_len % MULTIPLE or self.seq_len < 2 * MULTIPLE:
            raise ConfigError(f"seq_len={self.seq_len}: {said} takes a multiple of {MULTIPLE} from {2 * MULTIPLE} on")
        if 2 * (self.workload.document_len or 0) > self.seq_len:
            raise ConfigError(
                f"workload.document_len={self.workload.document_len} is more than half of seq_len={self.seq_len}: a "
                f"pack has two documents or more; use {self.seq_len // 2} or less, or workload.packing=none"
            )
        if self.workload.packing == "file":
            listed = from_text(self.workload.document_lens or "")
            if (total := sum(map(rounded, listed))) < self.seq_len:
                raise ConfigError(
                    f"workload.document_lens: {len(listed)} documents, rounded to {MULTIPLE} tokens, have {total}, "
                    f"less than seq_len={self.seq_len}; give more, or use seq_len={total}"
                )
            if (longest := rounded(max(listed))) > self.seq_len - MULTIPLE:
                raise ConfigError(
                    f"workload.document_lens: a document of {max(listed)} tokens leaves less than {MULTIPLE} of "
                    f"seq_len={self.seq_len} to others; use shorter ones, or seq_len={longest + MULTIPLE} or more"
                )
        require_at_least(self.workload, 2 * MULTIPLE, "correctness_seq_len")
        if (number := len(self.documents(self.seq_len))) > MAX_DOCUMENTS:
            raise ConfigError(
                f"{said} makes {number} documents of seq_len={self.seq_len}, more than {MAX_DOCUMENTS}; use a larger "
                "workload.document_len"
            )

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Tokens of a sequence and number of steps of each stage; none of workloads without stages. Where documents are
        drawn, each batch is one."""
        if self.workload.policy is not None and self.workload.timed_steps != AUTO:
            return [(self.seq_len, 1)] * self.workload.timed_steps
        if self.workload.stages is None or self.workload.timed_steps == AUTO:
            return []
        earlier = [(stage.seq_len, stage.steps) for stage in self.workload.earlier_stages]
        return [*earlier, (self.seq_len, self.workload.timed_steps - sum(steps for _, steps in earlier))]

    @property
    def of_stages(self) -> list["TrialConfig"]:
        """The train_step that each step of a stage is, for each stage."""
        found, earlier = [], self.workload.earlier_stages
        for index, (seq_len, _) in enumerate(self.stages):
            stage = earlier[index] if index < len(earlier) else Stage(seq_len, 1)
            micro_batches, sp_size = stage.micro_batches or self.workload.micro_batches, stage.sp_size or self.sp_size
            unused = {"stages": None, "policy": None, "filling": None}
            options = {"name": "train_step", "warmup_steps": 1, "micro_batches": micro_batches}
            sizes = {"seq_len": seq_len, "sp_size": sp_size, "dp_shard_size": self.num_shards // sp_size}
            found.append(replace(self, **sizes, workload=replace(self.workload, **options, **unused)))
        return found

    def of_documents(self, lengths: Sequence[int], sp_size: int) -> "TrialConfig":
        """The train_step over sequences of these documents, each over `sp_size` ranks."""
        packing = {"packing": "file", "document_lens": ",".join(map(str, lengths))}
        if len(lengths) == 1:
            packing = {"packing": "none", "document_lens": None}
        unused = {"policy": None, "filling": None, "document_len": None, "document_sigma": None}
        workload = replace(self.workload, name="train_step", warmup_steps=1, **unused, **packing)
        sizes = {"sp_size": sp_size, "dp_shard_size": self.world_size // sp_size, "seq_len": sum(lengths)}
        return replace(self, **sizes, workload=workload)

    def documents(self, seq_len: int) -> tuple[int, ...]:
        """Tokens of each document of a sequence of `seq_len` tokens; empty without packing. At a reduced length they
        are shorter by as much, so that a short proof has as many boundaries."""
        w, share = self.workload, seq_len / self.seq_len
        listed = tuple(length * share for length in from_text(w.document_lens)) if w.document_lens else ()
        return documents(w.packing, seq_len, (w.document_len or 0) * share, w.document_sigma or 0.0, self.seed, listed)

    def window(self, seq_len: int) -> int | None:
        """The window over a sequence of `seq_len` tokens, of layers that have one; None: it hides nothing. At a reduced
        length it is shorter by as much, so that it ends in the same shard, and ends inside the longest document."""
        window = self.model.window if self.trains else self.workload.window
        if window is None or window >= self._longest(self.seq_len):
            return None
        if seq_len >= self.seq_len:
            return window
        return min(max(round(window * seq_len / self.seq_len), PROVABLE_TOKENS), self._longest(seq_len) - 1)

    def _longest(self, seq_len: int) -> int:
        """Tokens of the longest document of a sequence of `seq_len` tokens."""
        return max(self.documents(seq_len) or (seq_len,))

    @property
    def trains(self) -> bool:
        """Whether it takes optimizer steps."""
        return self.workload.pass_kind == "step"

    @property
    def kinds(self) -> Mapping[str, int]:
        """How often one forward calls attention of each kind, full | window: once a layer. Attention alone is of one
        kind, and called once."""
        if self.trains:
            return Counter(self.model.kinds)
        return {"full" if self.workload.window is None else "window": 1}

    def labelled(self, seq_len: int) -> list[range]:
        """Training: the tokens of a sequence of `seq_len` tokens that have a label, by document. A label is the token
        that follows, so the last one of a packed document has none. Nor have the first ones, if labels are masked."""
        wholes = list(spans(self.documents(seq_len))) or [range(seq_len + 1)]
        return [whole[int(self.workload.masked_label_share * (len(whole) - 1)) : -1] for whole in wholes]

    def num_labels(self, seq_len: int) -> int:
        """The number of labels of one sequence of `seq_len` tokens."""
        return sum(map(len, self.labelled(seq_len)))

    @property
    def world_size(self) -> int:
        return self.dp_replicate_size * self.num_shards

    @property
    def num_shards(self) -> int:
        """Ranks that share one replica of the parameters where an engine shards them, FSDP as ZeRO-3."""
        return self.sp_size * self.dp_shard_size

    @property
    def ranks_per_node(self) -> int:
        """And so GPUs of each node. A plan refuses ranks that the nodes do not divide."""
        return self.world_size // self.num_nodes

    @property
    def evidence(self) -> Literal["measured", "one_rank"]:
        """What kind of row its trials leave."""
        return "measured" if self.world == "ranks" else "one_rank"

    @property
    def real_place(self) -> int | None:
        """The rank that is there; None: all are. Where the work is even, rank 0 has the most: a whole shard of
        parameters that do not divide evenly. Under a window the first ranks see less, and the last one sends nothing
        on: the middle one does both. Of states the last one has the most to put together."""
        if self.world == "ranks":
            return None
        busiest = self.world_size // 2 if "window" in self.kinds else 0
        busiest = self.world_size - 1 if self.model.attention == "gated_delta" else busiest
        return busiest if self.real_rank is None else self.real_rank

    @property
    def num_processes(self) -> int:
        """Processes that run: one for each rank, or the one real rank."""
        return self.world_size if self.world == "ranks" else 1

    @property
    def num_hosts(self) -> int:
        """Hosts that the processes need. The world has `num_nodes`."""
        return self.num_nodes if self.world == "ranks" else 1

    @property
    def processes_per_host(self) -> int:
        return self.num_processes // self.num_hosts

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the processes of a host need; 0 on CPUs."""
        return -(-self.processes_per_host // self.hardware.ranks_per_gpu) if self.hardware.device == "cuda" else 0

    @property
    def is_timed(self) -> bool:
        """Whether its times mean something: not where attention is left out, or where ranks share a GPU."""
        return not self.workload.fit and self.hardware.ranks_per_gpu == 1

    @property
    def num_sequences(self) -> int:
        """The number of sequences of one step: all micro-batches of all data-parallel ranks."""
        return self.workload.num_micro_batches * self.batch_size * self.dp_replicate_size * self.dp_shard_size

    def attention_shape(self, seq_len: int, kind: str | None = None) -> AttentionShape:
        """The attention call of layers of a kind at `seq_len` global tokens (the full, padded or reduced length); None:
        full, if there are such layers. Where each document is cut over all ranks, it is padded to equal chunks, so that
        there may be more tokens."""
        kind = kind or ("full" if "full" in self.kinds else "window")
        m, lengths = self.model, self.documents(seq_len)
        if lengths and self.method.layout == "document_zigzag":
            lengths = padded(lengths, 2 * self.sp_size)
            seq_len = sum(lengths)
        return AttentionShape(
            *(self.batch_size, seq_len, m.num_heads, m.num_kv_heads, m.head_dim, self.workload.causal, self.dtype),
            documents=lengths,
            window=self.window(seq_len) if kind == "window" else None,
            sinks=m.sinks if self.trains else self.workload.sinks,
            v_head_dim=m.v_head_dim,
            kv_lora_rank=m.kv_lora_rank,
            qk_rope_head_dim=m.qk_rope_head_dim,
            gated_delta=m.attention == "gated_delta",
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON-ready values; `parse(TrialConfig, ...)` reads them back."""
        return asdict(self)
