"""The only schema of a trial: frozen dataclasses that say what is measured and how a campaign is run.

`parsing.parse` reads them from the mapping that Hydra composed, or from JSON.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sp_bench.config.parsing import ConfigError, require_at_least, require_at_most, require_positive

MAX_TOKENS = 2**30  # of one sequence: far more than any machine holds
PROVABLE_TOKENS = 2  # over a single key dQ and dK are 0 whatever is computed
MAX_COUNT = 65_536  # heads of a model, ranks on an axis, micro-batches; messages list what divides a number of heads
MIN_MESSAGE_BYTES = 64 * 1024  # where the curve of the collective workload begins; each size is 4 times the one before
DType = Literal["float64", "float32", "bfloat16", "float16"]
ELEMENT_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MethodConfig:
    """How attention is split over the `sp_size` ranks of one sequence. None: the method has no such option."""

    name: str
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous"
    variant: str | None = None  # of an adapter's library: which of its own patterns; the adapter names them
    ulysses_degree: int | None = None  # usp: ranks that exchange heads; ring_degree is sp_size / ulysses_degree
    placement: Literal["ulysses_inner", "ring_inner"] | None = None  # usp, yunchang: which group holds adjacent ranks
    dkv_dtype: Literal["input", "float32"] | None = None  # what dK/dV travel in; input: the trial's dtype
    merge_dtype: Literal["input", "float32"] | None = None  # ring, usp: of outputs and dQ between merges
    head_stride: int | None = None  # all_gather, llama3: KV heads gathered at a time; None: all
    head_chunks: int | None = None  # ulysses, usp: parts of the heads, exchanged in turn; None: 1
    # what moves the tensors: the group's collectives, or copy engines, which leave all SMs to the kernels
    exchange: Literal["collectives", "copy_engines"] | None = None
    own: Mapping[str, str | int | float | bool | None] | None = None  # of a method from outside: its own options

    def __post_init__(self) -> None:
        require_positive(self, "ulysses_degree", "head_stride", "head_chunks")


@dataclass(frozen=True)
class EngineConfig:
    """What trains the decoder of train_step and parity. None: the engine has no such option."""

    name: str = "fsdp2"
    # all but fsdp2: fp32 parameters and moments in host memory, and whose Adam steps them there; None: on the device
    optimizer_offload: Literal["deepspeed_cpu_adam", "torch_adamw"] | None = None
    # hf_deepspeed, hf_trainer, trl_sft: the attention is told that the length may change from batch to batch
    variable_seq_len: bool | None = None


@dataclass(frozen=True)
class KernelConfig:
    """The local attention kernel; the same one serves every method."""

    name: str


@dataclass(frozen=True)
class ModelConfig:
    """A Llama/Qwen3-style decoder. The attention workload uses its three head fields only."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool  # RMSNorm on each head of q and k (Qwen3)
    qkv_bias: bool  # bias on the q, k and v projections (Qwen2.5)
    tie_embeddings: bool  # the head is the embedding

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
        )
        require_at_most(self, MAX_COUNT, "num_heads", "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            valid = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"use one of {valid}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim} must be even: RoPE rotates pairs")


PASS_KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("forward", "forward_backward"),
    "train_step": ("step",),
    "parity": ("step",),
    "collective": ("exchange",),
}


@dataclass(frozen=True)
class WorkloadConfig:
    """What one step is and how often it runs."""

    name: Literal["attention", "train_step", "parity", "collective"]
    pass_kind: Literal["forward", "forward_backward", "step", "exchange"]
    causal: bool
    warmup_steps: int
    timed_steps: int
    correctness_seq_len: int  # the reduced length at which output and gradients are proven, before any timing
    optimizer: Literal["adamw", "sgd"] | None = None
    learning_rate: float | None = None
    max_grad_norm: float | None = None  # None: gradients are not clipped
    activation_checkpointing: Literal["none", "full"] | None = None
    attribution: bool = False  # attention: time the step without messages, and without kernels, as well
    launch: Literal["eager", "cuda_graph"] | None = None  # attention: call by call, or all at one; None: eager
    max_message_bytes: int | None = None  # collective: no message is larger; bytes one rank sends off-rank
    # train_step, parity: forward and backward passes of one optimizer step, their gradients summed; None: one
    micro_batches: int | None = None
    # train_step, parity: local tokens whose logits exist at a time, forward and backward; None: all of a micro-batch
    loss_tile_tokens: int | None = None

    def __post_init__(self) -> None:
        positive = ("timed_steps", "correctness_seq_len", "learning_rate", "max_grad_norm")
        require_positive(self, *positive, "micro_batches", "loss_tile_tokens")
        require_at_most(self, MAX_COUNT, "micro_batches")
        if self.warmup_steps < 0:
            raise ConfigError(f"workload.warmup_steps={self.warmup_steps} must not be negative")
        if self.pass_kind not in PASS_KINDS[self.name]:
            valid = " or ".join(PASS_KINDS[self.name])
            raise ConfigError(f"workload.pass_kind={self.pass_kind} does not fit workload {self.name}; use {valid}")
        if self.name == "collective" and (self.max_message_bytes or 0) < 4 * MIN_MESSAGE_BYTES:
            raise ConfigError(
                f"workload.max_message_bytes={self.max_message_bytes}: sizes are {MIN_MESSAGE_BYTES}, "
                f"{4 * MIN_MESSAGE_BYTES} and so on, and a line needs two; use {4 * MIN_MESSAGE_BYTES} or more"
            )
        if self.launch is not None and self.name != "attention":
            raise ConfigError(f"workload.launch={self.launch}: only workload=attention has a choice; leave it away")
        if self.launch == "cuda_graph" and self.warmup_steps == 0:
            raise ConfigError("workload.warmup_steps=0: the first of them records the CUDA graph; use 1 or more")
        for option in ("micro_batches", "loss_tile_tokens"):
            if (value := getattr(self, option)) is not None and self.pass_kind != "step":
                raise ConfigError(
                    f"workload.{option}={value}: workload {self.name} takes no optimizer step; leave it away, or use "
                    "workload=train_step"
                )
        if self.pass_kind == "step":
            if not self.causal:
                raise ConfigError(f"workload.causal=false: {self.name} trains a causal decoder; use causal=true")
            for option in ("optimizer", "learning_rate", "activation_checkpointing"):
                if getattr(self, option) is None:
                    raise ConfigError(f"workload.{option} must be given for workload {self.name}")
        if self.name == "parity" and self.optimizer != "sgd":
            raise ConfigError(f"workload.optimizer={self.optimizer}: parity needs sgd, whose loss shows a wrong scale")

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches or 1


@dataclass(frozen=True)
class FabricConfig:
    """The backend of the process group and the environment variables that shape its transport."""

    name: str
    backend: Literal["gloo", "nccl"]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HardwareConfig:
    """The kind of device. `device_memory_gib` emulates a smaller GPU; `threads_per_rank` is for CPU."""

    name: str
    device: Literal["cpu", "cuda"]
    device_memory_gib: float | None = None
    threads_per_rank: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "device_memory_gib", "threads_per_rank")


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
    batch_size: int  # sequences a data-parallel rank holds; of one micro-batch
    seq_len: int  # global tokens of one sequence
    sp_size: int
    dp_replicate_size: int
    dp_shard_size: int
    dtype: DType
    seed: int
    # trial: fresh processes; group: trials of one world size, fabric and hardware share warm ones, for quick surveys
    isolation: Literal["trial", "group"] = "trial"
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "seq_len", "sp_size", "dp_replicate_size", "dp_shard_size")
        require_at_most(self, MAX_COUNT, "batch_size", "sp_size", "dp_replicate_size", "dp_shard_size")
        require_at_most(self, MAX_TOKENS, "seq_len")
        if self.workload.name != "collective":
            require_at_least(self, PROVABLE_TOKENS, "seq_len")
            require_at_least(self.workload, PROVABLE_TOKENS, "correctness_seq_len")
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
        if self.workload.name == "parity" and self.dtype not in ("float64", "float32"):
            raise ConfigError(f"dtype={self.dtype}: parity compares to 1e-5; use float32 or float64")
        if self.fabric.backend == "nccl" and self.hardware.device == "cpu":
            raise ConfigError(f"fabric={self.fabric.name} needs CUDA devices; use fabric=gloo with hardware=cpu")

    @property
    def world_size(self) -> int:
        return self.sp_size * self.dp_replicate_size * self.dp_shard_size

    @property
    def num_sequences(self) -> int:
        """Of one step: all micro-batches of all data-parallel ranks."""
        return self.workload.num_micro_batches * self.batch_size * self.dp_replicate_size * self.dp_shard_size

    def attention_shape(self, seq_len: int) -> AttentionShape:
        """The attention call of this trial at `seq_len` global tokens (the full, padded or reduced length)."""
        m = self.model
        return AttentionShape(
            self.batch_size, seq_len, m.num_heads, m.num_kv_heads, m.head_dim, self.workload.causal, self.dtype
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON-ready values; `parse(TrialConfig, ...)` reads them back."""
        return asdict(self)
