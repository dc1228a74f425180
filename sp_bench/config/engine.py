"""The engine, which trains the decoder: what each of ours is, and its options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from sp_bench.config.declared import Declared
from sp_bench.config.parsing import require_positive
from sp_bench.config.prose import Prose
from sp_bench.config.workload import TRAINING


@dataclass(frozen=True)
class EngineFacts:
    """What an engine is. Nothing is known here of one from outside, so it has the defaults."""

    # Whose model it trains. Ours calls our methods and kernels; one of transformers has an attention and a data loader
    # of its own.
    decoder: Literal["sp_bench", "transformers", "megatron"] | None = None
    # How ranks share parameters: torch's FSDP2, DeepSpeed's ZeRO-3, or Megatron's distributed optimizer.
    sharding: Literal["fsdp2", "zero_3", "megatron"] | None = None
    packages: tuple[str, ...] = ()  # the libraries that it needs
    extra: Prose | None = None  # of sp-bench, which installs them
    is_trainer: bool = False  # its loop is transformers' Trainer, or TRL's, which extends it

    @property
    def hf_on_zero_3(self) -> bool:
        """Whether it trains a model of transformers on ZeRO-3, with DeepSpeed's UlyssesSPAttentionHF."""
        return self.decoder == "transformers" and self.sharding == "zero_3"


_TRAINER = ("deepspeed", "transformers", "accelerate")
FACTS: Mapping[str, EngineFacts] = {  # of our engines, by name
    "fsdp2": EngineFacts("sp_bench", "fsdp2"),
    "deepspeed": EngineFacts("sp_bench", "zero_3", ("deepspeed",), "deepspeed"),
    "hf_deepspeed": EngineFacts("transformers", "zero_3", ("deepspeed", "transformers"), "hugging-face"),
    "hf_trainer": EngineFacts("transformers", "zero_3", _TRAINER, "hugging-face", is_trainer=True),
    "trl_sft": EngineFacts("transformers", "zero_3", (*_TRAINER, "trl"), "trl", is_trainer=True),
    "hf_fsdp2": EngineFacts("transformers", "fsdp2", ("transformers", "accelerate"), "hugging-face"),
    "megatron": EngineFacts("megatron", "megatron", ("megatron-core", "transformer-engine"), "megatron"),
}


@dataclass(frozen=True)
class EngineConfig:
    """What trains the decoder of train_step and parity. None: the engine has no such option."""

    name: Annotated[
        str,
        Declared(
            f"what trains: {' | '.join(FACTS)}; null in old rows: fsdp2",
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

    @property
    def facts(self) -> EngineFacts:
        return FACTS.get(self.name, EngineFacts())
