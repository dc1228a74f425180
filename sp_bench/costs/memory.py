"""What a trial must hold, whatever its method does: a lower bound, so that above the machine's memory it cannot run.
And an estimate of the peak of a training step."""

from math import prod
from typing import NamedTuple

from sp_bench.config.trial import ELEMENT_BYTES, TRAINING, TrialConfig
from sp_bench.costs.training import block_shapes, num_parameters, root_shapes

# Methods that keep the output by heads, for their backward, and by tokens, for the projection after it. UPipe's
# backward sends it again, from where it lies by tokens.
KEEPS_OUTPUT_TWICE = ("ulysses", "usp", "deepspeed_ulysses", "yunchang")


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
    """Bytes of them that are in host memory: all of a trial on the CPU; with an optimizer that was offloaded the
    parameters and moments that it steps, and under fsdp2 their gradients; and offloaded checkpoints."""
    checkpoints = round(config.world_size * offloaded_bytes(config))
    if config.hardware.device == "cpu":
        return held_bytes(config) + checkpoints
    if config.workload.name in TRAINING and config.engine.optimizer_offload is not None:
        tensors = 4 if config.engine.name == "fsdp2" else 3
        return tensors * _stored_bytes(config) * _copies(config) + checkpoints
    return checkpoints


def offloaded_bytes(config: TrialConfig) -> float:
    """Of one rank's checkpoints in host memory, at least: what all layers but the last keep. It leaves out LSEs,
    padding of the sequence, and the 512 bytes to which each tensor is rounded."""
    if not config.workload.checkpoint_offload:
        return 0
    return (config.model.num_layers - 1) * kept_bytes(config)


def offloaded_inputs_bytes(config: TrialConfig) -> float:
    """The part of it that each `activation_checkpointing` has: the inputs of all layers but the last."""
    inputs = _local_tokens(config) * config.model.hidden_size * ELEMENT_BYTES[config.dtype]
    return (config.model.num_layers - 1) * inputs


def kept_bytes(config: TrialConfig) -> float:
    """What one layer of one rank keeps from its forward to its backward, in one micro-batch."""
    model, workload = config.model, config.workload
    hidden, mlp = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # where heads are exchanged, the output is kept as the kernel gave it, and once more as the layer goes on with it
    exchanged = q if config.method.name in KEEPS_OUTPUT_TWICE and config.sp_size > 1 else 0
    elements = {  # of a token
        "full": hidden,
        "selective": hidden + 2 * q + 2 * kv + exchanged,
        "selective_output": hidden + q,
        "selective_mlp": 2 * hidden + 2 * q + 2 * kv + exchanged + 2 * mlp,
    }.get(workload.activation_checkpointing or "none", 6 * hidden + 3 * q + 4 * kv + 3 * mlp)
    if workload.mlp_tile_tokens is not None:
        elements += hidden  # the residual stream before the MLP
    return _local_tokens(config) * elements * ELEMENT_BYTES[config.dtype]


def _local_tokens(config: TrialConfig) -> float:
    """Of one micro-batch on one rank."""
    return config.batch_size * config.seq_len / config.sp_size


def _stored_bytes(config: TrialConfig) -> int:
    """Of all parameters once: fp32, or fp64 where that is asked for."""
    return num_parameters(config.model) * (8 if config.dtype == "float64" else 4)


def _copies(config: TrialConfig) -> int:
    return config.dp_replicate_size if config.engine.name == "fsdp2" else 1  # other engines shard over all ranks


class Peak(NamedTuple):
    """Bytes of one rank at the five moments at which a training step may need most."""

    loss: float  # at the end of the forward: all that is kept, and one tile of logits
    last_layer: float  # its backward: all that is kept, and what that layer computes again
    first_layer: float  # its backward: the gradients of all others, and what that layer computes again
    reduce: float  # at the end of the backward: all gradients, and embedding and head gathered, with their whole ones
    update: float  # parameters, gradients and moments

    @property
    def bytes(self) -> float:
        return max(self)


def peak(config: TrialConfig, *, copies: int = 4) -> Peak:
    """The estimated peak of a training step of our decoder on fsdp2.

    copies: fp32 values of a parameter while the optimizer updates it: itself, its gradient and Adam's two moments. An
    optimizer that is not fused makes one more, as that of rows older than column `batch_loading` did.

    It leaves out what is small beside these: the buffers of exchanges, and what a kernel allocates. Each peak of the
    committed rows of fsdp2 on GPUs is within 3%, but for those of h200x2_fit, whose code was older.
    """
    model, element = config.model, ELEMENT_BYTES[config.dtype]
    hidden, vocab = model.hidden_size, model.vocab_size
    tokens = _local_tokens(config)
    block, root = (sum(map(prod, shapes(model).values())) for shapes in (block_shapes, root_shapes))
    ranks = config.sp_size * config.dp_shard_size
    state, of_root = _stored_bytes(config) / ranks, 4 * root / ranks
    if config.engine.optimizer_offload is not None:
        state = of_root = 0  # parameters, gradients and moments are in host memory
    held = 3 * state + root * element  # parameters and moments
    layers, kept, offloads = model.num_layers, kept_bytes(config), config.workload.checkpoint_offload
    # with offload the last layer's at the end of the forward, and then each layer's with those of the one below it
    at_loss, at_last, at_first = (1, min(2, layers), min(2, layers)) if offloads else (layers, layers, 1)
    tile = min(config.workload.loss_tile_tokens or tokens, tokens)
    logits = tile * vocab * (2 * element + 8)  # and their gradients, both in fp32 too
    head_gradient = vocab * hidden * element
    summed = head_gradient + 4 * vocab * hidden if tile < tokens else 0  # over the tiles
    layer = head_gradient + block * (2 * element + 4) + tokens * _computed_elements(config) * element
    return Peak(
        held + at_loss * kept + logits + summed + 5 * tokens * hidden * element,
        held + at_last * kept + layer,
        held + at_first * kept + layer + state - of_root,
        4 * state + root * (2 * element + 4) + 5 * tokens * hidden * element,
        copies * state,
    )


def _computed_elements(config: TrialConfig) -> float:
    """Of a token in the backward of a layer, the activations that it computes again and their gradients. Selective
    checkpoints compute the halves of a layer one after the other, of which that with the MLP has more. Fused code
    writes gradients of the MLP's width over what they are of."""
    model, workload = config.model, config.workload
    hidden, mlp = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    fused = workload.model_code in ("compiled", "liger")
    before = 2 * hidden + 3 * q + (3 if fused else 4) * kv
    after = (2 if fused else 4) * hidden
    wide = (4 if fused else 6) * mlp
    if workload.mlp_tile_tokens is not None:  # only one tile has the MLP's width
        wide *= min(workload.mlp_tile_tokens / _local_tokens(config), 1)
    if (workload.activation_checkpointing or "").startswith("selective"):
        return max(before, after + wide)
    return before + after + wide
