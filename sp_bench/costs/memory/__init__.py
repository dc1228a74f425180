"""The memory of a trial: what it must hold, and an estimate of the peak of a training step. No rank imports it.

held           a lower bound, on devices and hosts
fsdp2, zero_3, hf_fsdp2, megatron   the peak, by engine
decoder, transformers               the layers that they train
attention, rings                    what each method holds around its attention
"""

from collections.abc import Callable, Mapping
from typing import Any

from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.costs.memory import fsdp2, hf_fsdp2, megatron, zero_3
from sp_bench.costs.memory.decoder import kept_bytes
from sp_bench.costs.memory.held import (
    PROCESS_BYTES,
    held_bytes,
    held_bytes_per_token,
    held_on_host_bytes,
    needed_on_host_bytes,
    offloaded_bytes,
)
from sp_bench.costs.memory.parts import Peak
from sp_bench.costs.memory.rings import ring_held_elements

__all__ = [
    "PROCESS_BYTES",
    "Peak",
    "held_bytes",
    "held_bytes_per_token",
    "held_on_host_bytes",
    "kept_bytes",
    "needed_on_host_bytes",
    "offloaded_bytes",
    "peak",
    "peak_of_row",
    "ring_held_elements",
    "unmodelled_reason",
]

PEAKS: Mapping[str, Callable[[TrialConfig, int, bool], Peak]] = {  # engines of which committed rows have peaks
    "fsdp2": fsdp2.peak,
    "hf_deepspeed": zero_3.peak,
    "hf_trainer": zero_3.peak,
    "trl_sft": zero_3.peak,
    "hf_fsdp2": hf_fsdp2.peak,
    "megatron": megatron.peak,
}


def unmodelled_reason(config: TrialConfig) -> Prose | None:
    """Why `peak` says nothing of a trial, or None. It speaks of what committed rows hold it to, and of options whose
    tensors follow from code that such rows ran."""
    engine, workload = config.engine.name, config.workload
    if workload.name not in TRAINING:
        return f"workload {workload.name} is no training"
    if workload.linear_dtype != "model" and engine == "fsdp2" and workload.model_code != "compiled":
        return f"no committed row has the peak of products in FP8 with workload.model_code={workload.model_code}"
    if "delta" in config.model.kinds and (engine != "fsdp2" or config.kernel_of("delta") != "fla"):
        return "no committed row has the peak with layers of kind delta, but of engine fsdp2 and kernel.delta=fla"
    if config.model.kv_lora_rank is not None:
        return "no committed row has the peak with latents"
    if engine not in PEAKS:
        return f"no committed row has the peak of engine {engine}"
    if engine == "fsdp2":
        return fsdp2.unmodelled_reason(config)
    if config.dtype != "bfloat16" or workload.optimizer != "adamw":
        return f"committed rows of engine {engine} have AdamW in bfloat16"
    return None


def peak_of_row(config: TrialConfig, row: Mapping[str, Any]) -> Peak:
    """`peak`, for the code that measured the row."""
    return peak(config, copies=4 if row["batch_loading"] else 5, tiles_overlap=row["loss_gradients"] is None)


def peak(config: TrialConfig, *, copies: int = 4, tiles_overlap: bool = False) -> Peak:
    """The estimated peak of a training step, of which `unmodelled_reason` has nothing to say.

    copies: fp32 values of a parameter while the optimizer updates it: itself, its gradient and Adam's two moments. An
    optimizer that is not fused makes one more, as that of rows older than column `batch_loading` did.
    tiles_overlap: in `fsdp2` autograd makes the gradients of the loss's tiles, compiled or not, and a tile's gradient
    of the head is there until the next one's, as in rows older than column `loss_gradients`.

    It leaves out buffers of NCCL, and of exchanges that end before a kernel begins. What attention holds is that of
    bfloat16, dkv_dtype=input and merge_dtype=float32. docs/PROJECTION.md says how far committed rows are from it.
    """
    return PEAKS[config.engine.name](config, copies, tiles_overlap)
