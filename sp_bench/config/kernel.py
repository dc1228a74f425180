"""Options of the local attention kernel."""

from dataclasses import dataclass
from typing import Annotated, Literal

from sp_bench.config.declared import Declared
from sp_bench.config.workload import ATTENTION, TRAINING


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
    delta: Annotated[
        Literal["chunked", "fla"] | None,
        Declared(
            "training: kernel of layers of kind delta; null: chunked",
            column="delta_kernel",
            of=TRAINING,
            none_means="chunked",
            words={"fla": "with flash-linear-attention", "chunked": "with plain chunks"},
        ),
    ] = None
