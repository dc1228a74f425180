"""What a trial is: frozen dataclasses whose fields are the options, each declared once: here, or in its group's file.

`parsing.parse` reads them from the mapping that Hydra composed, or from JSON. `options.OPTIONS` lists the declarations;
the row's schema, identities, names and reports are made from that list.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from sp_bench.config.declared import MAX_COUNT, Declared
from sp_bench.config.documents import MAX_DOCUMENTS, MULTIPLE, documents, from_text, padded, rounded, spans
from sp_bench.config.engine import EngineConfig
from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import NO_DELAY, FabricConfig, HardwareConfig, LinkConfig
from sp_bench.config.method import OF_ANY_SIZE, MethodConfig
from sp_bench.config.model import WITH_EXPERTS, ModelConfig
from sp_bench.config.parsing import ConfigError, require_at_least, require_at_most, require_positive
from sp_bench.config.prose import Prose
from sp_bench.config.shape import EXACT, AttentionShape, DType
from sp_bench.config.workload import ATTENTION, AUTO, PROVABLE_TOKENS, Stage, WorkloadConfig

MAX_TOKENS = 2**30  # of one sequence: far more than any machine holds


def has_times(fit: bool, ranks_per_gpu: int) -> bool:
    """Whether times of a trial mean something: not where attention is left out, or where ranks share a GPU."""
    return not fit and ranks_per_gpu == 1


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
            "world=one_rank: which rank is there; null: the one with the most work; of equals 0, or under a window the "
            "middle one; of a ring with workload.fit the last one, which holds most"
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
        self._check_delta_layers()
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
        if self.workload.name == "parity" and self.dtype not in EXACT and self.workload.linear_dtype == "model":
            raise ConfigError(
                f"dtype={self.dtype}: {self.workload.name} compares to 1e-5; use float32 or float64, or "
                "workload.linear_dtype=float8_rowwise, which is compared with bfloat16"
            )
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
            "method.exchange": (self.method.exchange or "collectives", "collectives"),
            "model.kv_lora_rank": (model.kv_lora_rank, None),
        }
        for option, (value, proven) in unusual.items():
            if value != proven:
                raise ConfigError(f"{option}={value}: {said} is proven with {option}={proven} alone; use that")

    def _check_delta_layers(self) -> None:
        if not self.trains or "delta" not in self.model.kinds:
            for option, value in (("method.states", self.method.states), ("kernel.delta", self.kernel.delta)):
                if value is not None:
                    raise ConfigError(
                        f"{option}={value} is of layers of kind delta, and workload={self.workload.name} with "
                        f"model={self.model.name} has none; leave it out"
                    )
            return
        workload, method = self.workload, self.method
        proven = {
            "workload": (workload.name, ("train_step",)),
            "workload.packing": (workload.packing, ("none",)),
            "workload.fit": (workload.fit, (False,)),
            "workload.linear_dtype": (workload.linear_dtype, ("model",)),
            "workload.checkpoint_offload": (workload.checkpoint_offload, (False,)),
            "workload.activation_checkpointing": (
                workload.activation_checkpointing,
                ("none", "selective", "selective_mlp"),
            ),
            "method": (method.name, ("ulysses", "ring", "single")),
            "method.states": (
                method.states,
                ("gather", "chain") if method.name == "ring" else (None, "gather", "chain"),
            ),
            "method.layout": (method.layout, ("contiguous", "zigzag_by_kind")),
            "method.head_chunks": (method.head_chunks or 1, (1,)),
            "method.exchange": (method.exchange or "collectives", ("collectives",)),
        }
        self._require_proven("layers of kind delta", proven)

    def _require_proven(self, layers: Prose, proven: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
        """proven: option -> its value, and the values with which such layers are proven."""
        for option, (value, values) in proven.items():
            if value not in values:
                raise ConfigError(
                    f"{option}={value}: {layers} (model={self.model.name}) are proven with "
                    f"{' and '.join(map(str, values))} alone; use {option}={values[0]}"
                )

    def _check_latent(self) -> None:
        model, workload = self.model, self.workload
        if self.trains and model.kv_lora_rank is None and model.v_head_dim is not None:
            raise ConfigError(
                f"model.v_head_dim={model.v_head_dim}: no decoder here has that without latents; use workload=attention"
            )
        if self.trains and model.kv_lora_rank is not None:
            self._check_latent_layers()
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

    def _check_latent_layers(self) -> None:
        model, workload = self.model, self.workload
        if model.name in WITH_EXPERTS:
            raise ConfigError(
                f"model={model.name} has experts, which no decoder here has; use model=deepseek_v2_lite_dense, or "
                "workload=attention"
            )
        proven = {
            "workload": (workload.name, ("train_step", "parity")),
            "workload.fit": (workload.fit, (False,)),
            "workload.checkpoint_offload": (workload.checkpoint_offload or False, (False,)),
            "workload.model_code": (workload.model_code or "eager", ("eager", "compiled")),
            "engine": (self.engine.name, ("fsdp2",)),
            "workload.linear_dtype": (workload.linear_dtype or "model", ("model",)),
            "workload.activation_checkpointing": (
                workload.activation_checkpointing or "none",
                ("none", "selective", "selective_mlp", "full"),
            ),
            "model.layers": (model.layers or "full", ("full",)),
            "model.sinks": (model.sinks, (False,)),
            "model.qk_norm": (model.qk_norm, (False,)),
            "model.qkv_bias": (model.qkv_bias, (False,)),
            "model.rope_scaling": (model.rope_scaling or "none", ("none",)),
        }
        self._require_proven("layers with latents", proven)
        if model.rope_dim % 2:
            raise ConfigError(f"model.qk_rope_head_dim={model.rope_dim} must be even: RoPE rotates pairs")

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
        if (self.dtype in EXACT or self.workload.policy is not None) and self.workload.optimizer != "sgd":
            raise ConfigError(
                f"workload.optimizer={self.workload.optimizer}: stream in {self.dtype} compares each step with one "
                "process and needs sgd, whose loss shows a wrong scale; use sgd, or stages with dtype=bfloat16"
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
        if self.workload.attribution and (self.dp_replicate_size > 1 or self.workload.linear_dtype != "model"):
            raise ConfigError(
                f"workload.attribution=true: dp_replicate_size={self.dp_replicate_size}, linear_dtype="
                f"{self.workload.linear_dtype}; a stream without messages has one replica and no FP8: use 1 and model"
            )
        if self.workload.stages is not None:
            _ = self.of_stages  # each of which refuses options that do not fit it
        if self.workload.policy is not None:
            self._check_policy()
        of_megatron = self.engine.name == "megatron" and self.workload.policy == "dynamic"
        if not (self.engine.name == "fsdp2" or of_megatron) or self.model.window is not None:
            raise ConfigError(
                f"workload=stream with engine={self.engine.name}, model={self.model.name}: lengths change on "
                "engine=fsdp2, or with policy=dynamic on engine=megatron, with a model without windows"
            )

    def _check_policy(self) -> None:
        said: Prose = f"workload.policy={self.workload.policy}"
        if self.workload.masked_label_share or self.dp_replicate_size > 1:
            raise ConfigError(
                f"{said}: masked_label_share={self.workload.masked_label_share}, dp_replicate_size="
                f"{self.dp_replicate_size}; each batch is compared with one process, as a whole: use 0 and 1"
            )
        theirs = (self.engine.name, self.method.name, self.method.variant) == ("megatron", "transformer_engine", "p2p")
        if self.method.name not in OF_ANY_SIZE and not theirs:
            raise ConfigError(
                f"{said}: method={self.method.name} has one size; use {', '.join(OF_ANY_SIZE)}, or "
                "transformer_engine with variant=p2p on engine=megatron"
            )
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
            options["activation_checkpointing"] = (
                stage.activation_checkpointing or self.workload.activation_checkpointing
            )
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
        """How often one forward calls attention of each kind, full | window | delta: once a layer. Attention alone is
        of one kind, and called once."""
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
    def usual_rank(self) -> int:
        """Of ranks with equal work the one that one real rank is: 0, which has a whole shard of parameters that do not
        divide evenly; under a window the middle one, which both receives and sends."""
        return self.sp_size // 2 if "window" in self.kinds else 0

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
        """Whether its times mean something."""
        return has_times(self.workload.fit, self.hardware.ranks_per_gpu)

    @property
    def num_sequences(self) -> int:
        """The number of sequences of one step: all micro-batches of all data-parallel ranks."""
        return self.workload.num_micro_batches * self.batch_size * self.dp_replicate_size * self.dp_shard_size

    def attention_shape(self, seq_len: int, kind: str | None = None) -> AttentionShape:
        """The attention call of layers of a kind at `seq_len` global tokens (the full, padded or reduced length); None:
        full, if there are such layers. Where each document is cut over all ranks, it is padded to equal chunks, so that
        there may be more tokens."""
        kind = kind or next(each for each in ("full", "window", "delta") if each in self.kinds)
        m, lengths = self.model, self.documents(seq_len)
        if kind == "delta":
            assert m.delta_heads is not None
            assert m.delta_kv_heads is not None
            assert m.delta_head_dim is not None
            sizes = m.delta_heads, m.delta_kv_heads, m.delta_head_dim
            return AttentionShape(self.batch_size, seq_len, *sizes, True, self.dtype, gated_delta=True)
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

    def method_of(self, kind: str) -> MethodConfig:
        """How attention of a kind is split over the ranks."""
        if kind != "delta" or self.method.states is None:
            return self.method
        return MethodConfig("state_passing", self.method.layout, variant=self.method.states)

    def kernel_of(self, kind: str) -> str:
        """The kernel of attention of a kind."""
        return self.kernel.delta or "chunked" if kind == "delta" else self.kernel.name

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON-ready values; `parse(TrialConfig, ...)` reads them back."""
        return asdict(self)
