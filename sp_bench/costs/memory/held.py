"""What a trial must hold, whatever its method does: a lower bound, so that above the machine's memory it cannot run."""

import math

from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.costs.memory import fsdp2, zero_3
from sp_bench.costs.memory.decoder import kept_bytes
from sp_bench.costs.memory.parts import stored_bytes

PROCESS_BYTES = 11 * 2**27  # that a rank on a GPU takes of its host; in all committed rows of training it takes more


def held_bytes_per_token(config: TrialConfig) -> int:
    """Bytes of the attention workload for each token of the sequence, over all ranks: q, k, v, the output and its
    gradient, and with a backward the gradients of q, k and v."""
    model = config.model
    shape = config.attention_shape(config.seq_len)
    if shape.gated_delta:
        *read, output = map(math.prod, shape.sizes(1))
        return (sum(read) * (1 + (config.workload.pass_kind == "forward_backward")) + 2 * output) * shape.element_bytes
    q, output = model.num_heads * shape.head_dim, model.num_heads * shape.value_dim
    kv = model.num_kv_heads * (shape.head_dim + shape.value_dim)
    if config.method.sends == "latent":
        kv = (shape.kv_lora_rank or 0) + (shape.qk_rope_head_dim or 0)
    elements = q + kv + 2 * output
    if config.workload.pass_kind == "forward_backward":
        elements += q + kv
    return config.batch_size * elements * shape.element_bytes


def held_bytes(config: TrialConfig) -> int:
    """Bytes that all ranks of a trial hold together at one moment, on the devices or on the host."""
    if config.workload.name == "attention":
        return held_bytes_per_token(config) * config.seq_len
    if config.workload.name not in TRAINING:
        return 0
    tensors = 4 if config.workload.optimizer == "adamw" else 2  # parameters and gradients; Adam's two moments
    return tensors * stored_bytes(config) * _copies(config)


def held_on_host_bytes(config: TrialConfig) -> int:
    """Bytes of them that are in the memory of each host: all of a trial on the CPU; with an optimizer that was
    offloaded the parameters and moments that it steps, and their gradients; and offloaded checkpoints. What a process
    holds without them, 2 to 3 GiB on GPUs, is left out."""
    held = round(config.world_size * offloaded_bytes(config))
    if config.hardware.device == "cpu":
        held += held_bytes(config)
    elif config.workload.name in TRAINING and config.engine.optimizer_offload is not None:
        of_rank = (fsdp2 if config.engine.name == "fsdp2" else zero_3).host_bytes(config)
        held += round(config.world_size * of_rank)
    return held // config.num_nodes


def needed_on_host_bytes(config: TrialConfig) -> int:
    """Bytes that a trial needs of each host, at least: `held_on_host_bytes`, and beside them on GPUs PROCESS_BYTES for
    each rank. 0: it holds nothing there."""
    held = held_on_host_bytes(config)
    return held + config.ranks_per_node * PROCESS_BYTES if held and config.hardware.device == "cuda" else held


def offloaded_bytes(config: TrialConfig) -> float:
    """Bytes of one rank's checkpoints in host memory, at least: what all layers but the last keep. It leaves out
    padding of the sequence, and the 512 bytes to which each tensor is rounded."""
    if not config.workload.checkpoint_offload:
        return 0
    return (config.model.num_layers - 1) * kept_bytes(config)


def _copies(config: TrialConfig) -> int:
    return config.dp_replicate_size if config.engine.facts.sharding == "fsdp2" else 1  # others shard over all ranks
