"""Options of the engine: what trains the decoder."""

from dataclasses import dataclass
from typing import Annotated, Literal

from sp_bench.config.declared import Declared
from sp_bench.config.parsing import require_positive
from sp_bench.config.workload import TRAINING


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
