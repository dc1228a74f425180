"""What a trial must hold, whatever its method does: a lower bound, so that above the machine's memory it cannot run."""

from sp_bench.config.trial import TRAINING, TrialConfig
from sp_bench.costs.training import num_parameters


def held_bytes_per_token(config: TrialConfig) -> int:
    """Bytes of the attention workload for each token of the sequence, over all ranks: q, k, v, the output and its
    gradient, and with a backward the gradients of q, k and v."""
    model = config.model
    heads = 3 * model.num_heads + 2 * model.num_kv_heads
    if config.workload.pass_kind == "forward_backward":
        heads += model.num_heads + 2 * model.num_kv_heads
    return config.batch_size * heads * model.head_dim * config.attention_shape(config.seq_len).element_bytes


def held_bytes(config: TrialConfig) -> int:
    """Bytes that all ranks of a trial hold together at one moment, on the devices or on the host."""
    if config.workload.name == "attention":
        return held_bytes_per_token(config) * config.seq_len
    if config.workload.name not in TRAINING:
        return 0
    tensors = 4 if config.workload.optimizer == "adamw" else 2  # parameters and gradients; Adam's two moments
    return tensors * _stored_bytes(config) * _copies(config)


def held_on_host_bytes(config: TrialConfig) -> int:
    """Bytes of them that are in host memory: all of a trial on the CPU, and with an optimizer that was offloaded the
    parameters and moments that it steps."""
    if config.hardware.device == "cpu":
        return held_bytes(config)
    if config.workload.name in TRAINING and config.engine.optimizer_offload is not None:
        return 3 * _stored_bytes(config) * _copies(config)
    return 0


def _stored_bytes(config: TrialConfig) -> int:
    """Of all parameters once: fp32, or fp64 where that is asked for."""
    return num_parameters(config.model) * (8 if config.dtype == "float64" else 4)


def _copies(config: TrialConfig) -> int:
    return config.dp_replicate_size if config.engine.name == "fsdp2" else 1  # other engines shard over all ranks
