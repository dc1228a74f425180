"""Closed forms for one training step: parameters, FLOPs, and the bytes that one rank sends off-rank.

N = dp_shard_size * sp_size ranks share one replica of the parameters. There are R = dp_replicate_size replicas, and
N * R ranks in all. A step is an optimizer step with all its micro-batches.
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import prod

from sp_bench.config.trial import ELEMENT_BYTES, ModelConfig, TrialConfig
from sp_bench.costs.attention import FLASH_BACKWARD, Traffic, add_traffic, attention_forward_flops, scale_traffic

ParameterShapes = Mapping[str, tuple[int, ...]]  # name -> shape, as in the decoder's state


def block_shapes(model: ModelConfig) -> ParameterShapes:
    """The parameters of one decoder layer, which is one FSDP group."""
    hidden, q_size, kv_size = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "attention.q.weight": (q_size, hidden),
        "attention.k.weight": (kv_size, hidden),
        "attention.v.weight": (kv_size, hidden),
        "attention.out.weight": (hidden, q_size),
        "feed_forward_norm.weight": (hidden,),
        "feed_forward.gate.weight": (model.intermediate_size, hidden),
        "feed_forward.up.weight": (model.intermediate_size, hidden),
        "feed_forward.down.weight": (hidden, model.intermediate_size),
    }
    if model.qkv_bias:
        shapes |= {"attention.q.bias": (q_size,), "attention.k.bias": (kv_size,), "attention.v.bias": (kv_size,)}
    if model.qk_norm:
        shapes |= {"attention.q_norm.weight": (model.head_dim,), "attention.k_norm.weight": (model.head_dim,)}
    return shapes


def root_shapes(model: ModelConfig) -> ParameterShapes:
    """The parameters outside the layers, which are the root FSDP group."""
    shapes = {"embedding.weight": (model.vocab_size, model.hidden_size), "norm.weight": (model.hidden_size,)}
    return shapes if model.tie_embeddings else shapes | {"head.weight": (model.vocab_size, model.hidden_size)}


def num_parameters(model: ModelConfig) -> int:
    """Elements of all parameters."""
    block, root = (sum(map(prod, shapes(model).values())) for shapes in (block_shapes, root_shapes))
    return root + model.num_layers * block


def block_matmul_parameters(model: ModelConfig) -> int:
    """Elements of one layer's matrices. Each element costs 2 FLOPs a token in the forward."""
    return sum(prod(shape) for shape in block_shapes(model).values() if len(shape) == 2)


def matmul_parameters(model: ModelConfig) -> int:
    """Elements of all matrices that are multiplied by. The head counts, tied or not; the embedding lookup does not."""
    return model.num_layers * block_matmul_parameters(model) + model.vocab_size * model.hidden_size


def _attention_flops(config: TrialConfig, seq_len: int) -> int:
    """FLOPs of the attention forwards of one step: of all layers and all sequences."""
    one_sequence = replace(config.attention_shape(seq_len), batch_size=1)
    return config.model.num_layers * config.num_sequences * attention_forward_flops(one_sequence)


def _tokens(config: TrialConfig, seq_len: int) -> int:
    """Tokens of one step over all ranks, at `seq_len` tokens a sequence."""
    return config.num_sequences * seq_len


def model_flops(config: TrialConfig) -> int:
    """FLOPs that one step needs, over all ranks: valid tokens only, backward 2x the forward, no recomputation.

    Source: arXiv 2204.02311, appendix B. Here the causal mask is counted exactly.
    """
    matmuls = 2 * matmul_parameters(config.model) * _tokens(config, config.seq_len)
    return 3 * (matmuls + _attention_flops(config, config.seq_len))


def hardware_flops(config: TrialConfig, padded_seq_len: int) -> int:
    """FLOPs that one step really runs, over all ranks: padded tokens too, the flash backward at 2.5x the forward, and
    what activation checkpointing and TRL's loss compute again.

    A recomputed layer stops at the last tensor that its backward needs, the input of `feed_forward.down`. So the
    product with that matrix is not repeated.
    """
    model, tokens = config.model, _tokens(config, padded_seq_len)
    attention = _attention_flops(config, padded_seq_len)
    flops = 3 * 2 * matmul_parameters(model) * tokens + attention + int(attention * FLASH_BACKWARD)
    if config.workload.activation_checkpointing == "full":
        repeated = block_matmul_parameters(model) - model.hidden_size * model.intermediate_size
        flops += 2 * model.num_layers * repeated * tokens + attention
    if config.engine.name == "trl_sft":  # the backward of its loss computes the logits again
        flops += 2 * model.vocab_size * model.hidden_size * tokens
    return flops


def _shard_elements(shapes: ParameterShapes, num_shards: int) -> int:
    """Elements of an FSDP group that one rank holds: each parameter is cut along dim 0 and padded to equal shards."""
    return sum(-(-shape[0] // num_shards) * prod(shape[1:]) for shape in shapes.values())


def sharding_traffic(config: TrialConfig) -> Traffic:
    """Bytes of one step for FSDP2's parameters and gradients, with replicas (HSDP) or without.

    The parameters of a layer are gathered for the forward and again for the backward, those of the root once. Gradients
    are reduce-scattered over N ranks and all-reduced over R replicas. All of this happens in each micro-batch, because
    no rank keeps whole parameters or whole gradients between two of them. Recomputation gathers nothing, because it
    runs while the backward's parameters are there. Source: arXiv 2304.11277, with FSDP2's padding of each parameter.
    """
    num_shards, replicas = config.dp_shard_size * config.sp_size, config.dp_replicate_size
    root = _shard_elements(root_shapes(config.model), num_shards)
    blocks = config.model.num_layers * _shard_elements(block_shapes(config.model), num_shards)
    gathered = (num_shards - 1) * (root + 2 * blocks) * ELEMENT_BYTES[config.dtype]
    reduced = (root + blocks) * _reduce_bytes(config)
    once = {
        ("parameters", "all_gather"): Fraction(gathered),
        ("gradients", "reduce_scatter"): Fraction((num_shards - 1) * reduced),
        ("gradients", "all_reduce"): 2 * reduced * Fraction(replicas - 1, replicas),
    }
    return add_traffic(scale_traffic(once, config.workload.num_micro_batches))


def _reduce_bytes(config: TrialConfig) -> int:
    """Bytes an element of gradients and of the loss while they are reduced: fp32, or fp64 if the trial is."""
    return max(ELEMENT_BYTES[config.dtype], ELEMENT_BYTES["float32"])


def train_step_traffic(config: TrialConfig, attention: Traffic) -> Traffic:
    """Bytes of one training step under FSDP2; `attention` is that of one attention call. Phase `other`, the scalars of
    the gradient norm, is left out: it differs between torch versions."""
    return add_traffic(unsharded_traffic(config, attention), sharding_traffic(config))


def unsharded_traffic(config: TrialConfig, attention: Traffic) -> Traffic:
    """Bytes of one training step without parameters and gradients: attention in each micro-batch, and the loss once.
    They are the same for every engine that runs our decoder."""
    calls = config.model.num_layers * config.workload.num_micro_batches
    recomputed: Traffic = {}
    if config.workload.activation_checkpointing == "full":
        recomputed = {("recompute", op): size for (phase, op), size in attention.items() if phase == "forward"}
    loss = 2 * Fraction(config.world_size - 1, config.world_size) * _reduce_bytes(config)
    return add_traffic(
        scale_traffic(attention, calls),
        scale_traffic(recomputed, calls),
        {("loss", "all_reduce"): loss},
    )
