"""Options of the workload: what one step is, on which text, and how often it runs."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

from sp_bench.config.declared import MAX_COUNT, Declared
from sp_bench.config.documents import Packing, from_text
from sp_bench.config.parsing import ConfigError, require_at_least, require_at_most, require_positive, shown
from sp_bench.config.prose import Prose

ATTENTION = ("attention", "train_step", "parity", "stream")  # workloads that compute attention
TRAINING = ("train_step", "parity", "stream")  # workloads that take optimizer steps
COMPARED = ("parity", "stream")  # workloads that are compared with training on one process, step by step
PASS_KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("forward", "forward_backward"),
    "train_step": ("step",),
    "parity": ("step",),
    "stream": ("step",),
    "collective": ("exchange",),
}
PROVABLE_TOKENS = 2  # over a single key dQ and dK are 0 whatever is computed
MIN_MESSAGE_BYTES = 64 * 1024  # where the curve of the collective workload begins; each size is 4 times the one before
AUTO = "auto"  # timed_steps: the ranks agree on their number after the warm-up
# What `auto` times: so long, in seconds, but at least so many steps, and never longer than the limit. Over 1 s energy
# is measured. If timed steps are twice as fast as the last warm-up step, the window is still over 0.5 s.
TIMED_S, LEAST_TIMED_STEPS, MOST_TIMED_S = 1.25, 5, 10.0
FEWEST_TIMED_STEPS = 2  # of steps that reach the limit: one alone cannot show that its results repeat
MOST_TIMED_STEPS = {"attention": 5000, "train_step": 100}  # workloads that take `auto`; a row has all their times
Checkpointing = Literal["none", "full", "selective", "selective_output", "selective_mlp"]
# Tokens of a sequence x steps, and options of its own: 8192x20:micro_batches=4:sp_size=1
OWN = rf":(micro_batches|sp_size)=[1-9]\d{{0,4}}|:activation_checkpointing=({'|'.join(get_args(Checkpointing))})"
STAGE = rf"[1-9]\d{{0,9}}x[1-9]\d{{0,3}}({OWN})*"


class Stage(NamedTuple):
    """A stage of a training whose sequences change their length."""

    seq_len: int
    steps: int
    micro_batches: int | None = None  # this and the next two; None: those of the last stage
    sp_size: int | None = None
    activation_checkpointing: Checkpointing | None = None


def parse_stages(text: str | None) -> list[Stage]:
    """Stages as `workload.stages` has them, whose form has been checked."""
    found = []
    for each in (text or "").split(","):
        if each:
            of_stage, *options = each.split(":")
            own: dict[str, Any] = dict(option.split("=") for option in options)
            own = {name: int(value) if value.isdigit() else value for name, value in own.items()}
            seq_len, steps = map(int, of_stage.split("x"))
            found.append(Stage(seq_len, steps, **own))
    return found


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
        Checkpointing | None,
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
            "attention: the step is timed without messages, and without kernels, as well | stream: without messages",
            column=None,
            protocol=True,
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
            "has seq_len tokens and the other steps. Options of a stage: 8192x20:micro_batches=4:sp_size=1, and "
            "activation_checkpointing",
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
            "train_step, parity: what multiplies the layers' matrices: model, in the trial's dtype | float8_rowwise, "
            "in FP8 with a scale for each row | float8_tensorwise, with one for each tensor | float8_blockwise, with "
            "one for each 128 elements, of weights 128 x 128; embedding, head and attention stay in the dtype; null in "
            "old rows: model",
            of=("train_step", "parity"),
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
