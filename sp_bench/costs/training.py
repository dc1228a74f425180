"""Closed forms for one training step: parameters, FLOPs, and the bytes that one rank sends off-rank.

N = dp_shard_size * sp_size ranks share one replica of the parameters. There are R = dp_replicate_size replicas, and
N * R ranks in all. A step is an optimizer step with all its micro-batches.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from math import prod
from statistics import median

from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.shape import ELEMENT_BYTES
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.attention import (
    Traffic,
    add_traffic,
    attention_forward_flops,
    backward_per_forward,
    computed,
    scale_traffic,
)
from sp_bench.costs.work import LOSS_OP, NORM_OP, SWIGLU_OP, ExpectedWork, KernelCalls, projection_flops

# What each model code leaves no call of in the layers. The final norm is in none, and not compiled: norms' operation
# still runs there.
REPLACED_OPS: Mapping[str, tuple[str, ...]] = {"compiled": (SWIGLU_OP,), "liger": (SWIGLU_OP, NORM_OP)}
E4M3 = "float8_e4m3fn"  # torch's name
# workload.linear_dtype -> of what rows and columns of both factors are a multiple on CUDA
FLOAT8_MULTIPLE = {"float8_rowwise": 16, "float8_tensorwise": 16, "float8_blockwise": 128}
ParameterShapes = Mapping[str, tuple[int, ...]]  # name -> shape, as in the decoder's state
UP = "attention.up.weight"  # up-projections of latents: the attention multiplies by them, as often as its method needs


def block_shapes(model: ModelConfig, kind: str = "full") -> ParameterShapes:
    """The parameters of one decoder layer with attention of a kind, which is one FSDP group."""
    hidden, q_size, kv_size = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    around: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "feed_forward_norm.weight": (hidden,),
        "feed_forward.gate.weight": (model.intermediate_size, hidden),
        "feed_forward.up.weight": (model.intermediate_size, hidden),
        "feed_forward.down.weight": (hidden, model.intermediate_size),
    }
    if kind == "delta":
        return around | _delta_shapes(model)
    if model.kv_lora_rank is not None:
        return around | _latent_shapes(model, model.kv_lora_rank)
    shapes = around | {
        "attention.q.weight": (q_size, hidden),
        "attention.k.weight": (kv_size, hidden),
        "attention.v.weight": (kv_size, hidden),
        "attention.out.weight": (hidden, q_size),
    }
    if model.qkv_bias:
        shapes |= {"attention.q.bias": (q_size,), "attention.k.bias": (kv_size,), "attention.v.bias": (kv_size,)}
    if model.qk_norm:
        shapes |= {"attention.q_norm.weight": (model.head_dim,), "attention.k_norm.weight": (model.head_dim,)}
    return shapes | {"attention.sinks": (model.num_heads,)} if model.sinks else shapes


def _delta_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    heads, kv_heads, dim = (size or 0 for size in (model.delta_heads, model.delta_kv_heads, model.delta_head_dim))
    hidden = model.hidden_size
    return {
        "attention.log_rate": (heads,),
        "attention.q.weight": (kv_heads * dim, hidden),
        "attention.k.weight": (kv_heads * dim, hidden),
        "attention.v.weight": (heads * dim, hidden),
        "attention.decay.weight": (heads, hidden),
        "attention.decay.bias": (heads,),
        "attention.beta.weight": (heads, hidden),
        "attention.out_norm.weight": (dim,),
        "attention.out.weight": (hidden, heads * dim),
    }


def _latent_shapes(model: ModelConfig, rank: int) -> dict[str, tuple[int, ...]]:
    hidden, heads, rope = model.hidden_size, model.num_heads, model.rope_dim
    value_dim = model.v_head_dim or model.head_dim
    return {
        "attention.q.weight": (heads * model.head_dim, hidden),
        "attention.down.weight": (rank + rope, hidden),
        "attention.latent_norm.weight": (rank,),
        UP: (heads * (model.head_dim - rope + value_dim), rank),
        "attention.out.weight": (hidden, heads * value_dim),
    }


def of_layers(model: ModelConfig, count: Callable[[ParameterShapes], int]) -> int:
    """The sum over all layers of what `count` gives of the parameters of one."""
    return sum(number * count(block_shapes(model, kind)) for kind, number in Counter(model.kinds).items())


def _elements(shapes: ParameterShapes) -> int:
    return sum(map(prod, shapes.values()))


def root_shapes(model: ModelConfig) -> ParameterShapes:
    """The parameters outside the layers, which are the root FSDP group."""
    shapes = {"embedding.weight": (model.vocab_size, model.hidden_size), "norm.weight": (model.hidden_size,)}
    return shapes if model.tie_embeddings else shapes | {"head.weight": (model.vocab_size, model.hidden_size)}


def takes_mean_of_means(config: TrialConfig) -> bool:
    """Whether the stack takes the mean of its micro-batches' and data-parallel ranks' means, which is the mean over
    labels only where all have equally many, as in our texts. So it is proven on such a text, and its row is flagged.

    Neither DeepSpeed's loop in the post about Ulysses nor transformers' `deepspeed_sp_compute_loss` has an option for
    another mean. Without sequence parallelism the Trainer divides by the labels of all ranks and micro-batches.
    """
    averages = config.engine.facts.hf_on_zero_3 and (config.sp_size > 1 or not config.engine.facts.is_trainer)
    return averages and config.workload.num_micro_batches * config.world_size // config.sp_size > 1


def num_parameters(model: ModelConfig) -> int:
    """Elements of all parameters."""
    return _elements(root_shapes(model)) + of_layers(model, _elements)


def layers_matmul_parameters(model: ModelConfig) -> int:
    """Elements of all layers' matrices but `UP`. Each element costs 2 FLOPs a token in the forward."""

    def of_one(shapes: ParameterShapes) -> int:
        return sum(prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != UP)

    return of_layers(model, of_one)


def matmul_parameters(model: ModelConfig) -> int:
    """Elements of all matrices that are multiplied by. The head counts, tied or not; the embedding lookup does not."""
    return layers_matmul_parameters(model) + model.vocab_size * model.hidden_size


def _attention_flops(config: TrialConfig, seq_len: int) -> int:
    """FLOPs of the attention forwards of one step, of all sequences."""
    of_kinds = (
        number * attention_forward_flops(replace(config.attention_shape(seq_len, kind), batch_size=1))
        for kind, number in attended(config).items()
    )
    return config.num_sequences * sum(of_kinds)


def attended(config: TrialConfig) -> Mapping[str, int]:
    """The number of `attended_layers` of each kind."""
    return Counter(config.model.kinds[index] for index in attended_layers(config))


def attended_layers(config: TrialConfig) -> set[int]:
    """Layers that compute their attention: all, or with `workload.fit` those in whose backward a step may hold most.

    That is the last, when all that layers keep is there. In `fsdp2` gradients pile up from the last layer to the first,
    so it may also be the first. Or it is the second, if more of the first is there by then: its parameters, which FSDP
    gathers ahead where ranks share them, or its checkpoints, which waited in host memory. Where FSDP gathers more
    layers ahead (`engine.backward_prefetch`), it may be any of so many. Attention of one kind may hold more than that
    of another, so it is these of each kind.
    """
    kinds, engine = config.model.kinds, config.engine
    if not config.workload.fit:
        return set(range(len(kinds)))
    ahead = (engine.backward_prefetch or 1) if config.num_shards > 1 else 0
    first = 1 + max(ahead, config.workload.checkpoint_offload) if engine.name == "fsdp2" else 0
    of_kinds = ([index for index, each in enumerate(kinds) if each == kind] for kind in set(kinds))
    return {index for layers in of_kinds for index in (*layers[:first], layers[-1])}


def offloaded_inputs_bytes(config: TrialConfig) -> float:
    """Bytes of the inputs of all layers but the last on one rank: with `checkpoint_offload` they are in host memory,
    whatever else is kept."""
    tokens = config.batch_size * config.seq_len / config.sp_size
    return (config.model.num_layers - 1) * tokens * config.model.hidden_size * ELEMENT_BYTES[config.dtype]


def _tokens(config: TrialConfig, seq_len: int) -> int:
    """Tokens of one step over all ranks, at `seq_len` tokens a sequence."""
    return config.num_sequences * seq_len


def model_flops(config: TrialConfig) -> int:
    """FLOPs that one step needs, over all ranks: valid tokens only, backward 2x the forward, no recomputation.

    Source: arXiv 2204.02311, appendix B. Here the causal mask is counted exactly.
    """
    matmuls = 2 * matmul_parameters(config.model) * _tokens(config, config.seq_len)
    up = _projections(config, config.seq_len, MethodConfig("single"), 1, [0], backward=False)
    return 3 * (matmuls + up + _attention_flops(config, config.seq_len))


def hardware_flops(config: TrialConfig, padded_seq_len: int) -> int:
    """FLOPs that one step really runs, over all ranks: padded tokens too, the flash backward at 2.5x the forward, and
    what activation checkpointing and TRL's loss compute again."""
    return matmul_flops(config, padded_seq_len) + attention_flops(config, padded_seq_len)


def _projections(
    config: TrialConfig, seq_len: int, method: MethodConfig, sp_size: int, ranks: Sequence[int], *, backward: bool
) -> int:
    """FLOPs in which the attention of all layers of one step multiplies by `UP`, on these of `sp_size` ranks of all
    sequences."""
    if config.model.kv_lora_rank is None:
        return 0
    shape = replace(config.attention_shape(seq_len), batch_size=config.num_sequences)
    layers = sum(attended(config).values())
    return layers * projection_flops(method, shape, sp_size, ranks, backward=backward)


def matmul_flops(config: TrialConfig, padded_seq_len: int, rank: int | None = None) -> int:
    """The part of `hardware_flops` that is matrix products outside the attention's kernel. rank: what all ranks would
    compute if each did as much as this one."""
    model, tokens = config.model, _tokens(config, padded_seq_len)
    flops = 3 * 2 * model.vocab_size * model.hidden_size * tokens
    flops += sum(_layer_flops(config, padded_seq_len))
    ranks = range(config.sp_size) if rank is None else [rank % config.sp_size] * config.sp_size
    of_all = config, padded_seq_len, config.method, config.sp_size, ranks
    flops += _projections(*of_all, backward=True)
    if _recomputed(config):
        flops += _projections(*of_all, backward=False)
    if config.engine.name == "trl_sft":  # the backward of its loss computes the logits again
        flops += 2 * model.vocab_size * model.hidden_size * (4 * _scored_tokens(config, padded_seq_len) - 3 * tokens)
    return flops


def _layer_flops(config: TrialConfig, padded_seq_len: int) -> tuple[int, int]:
    """FLOPs of the products of the layers' matrices in one step: of the forward, also where it is computed again, and
    of the backward."""
    tokens, matrices = 2 * _tokens(config, padded_seq_len), layers_matmul_parameters(config.model)
    return tokens * (matrices + _repeated_parameters(config)), tokens * 2 * matrices


def matmul_flops_by_dtype(config: TrialConfig, padded_seq_len: int, rank: int | None = None) -> dict[str, int]:
    """`matmul_flops` by the dtypes of the two factors. Recipes in FP8 have e4m3 everywhere, but e5m2 for the gradient
    of an output that has one scale."""
    whole = matmul_flops(config, padded_seq_len, rank)
    if config.workload.linear_dtype == "model":
        return {config.dtype: whole}
    forward, backward = _layer_flops(config, padded_seq_len)
    if config.workload.linear_dtype == "float8_tensorwise":
        return {config.dtype: whole - forward - backward, E4M3: forward, f"{E4M3}+float8_e5m2": backward}
    return {config.dtype: whole - forward - backward, E4M3: forward + backward}


def _scored_tokens(config: TrialConfig, padded_seq_len: int) -> int:
    """Tokens of one step whose logits TRL's loss computes, over all ranks. Its loss for GPUs takes out those without a
    label first. Its loader shifts the labels, so the last token of a sequence has none."""
    if config.hardware.device == "cuda":
        known = config.seq_len - (config.workload.packing == "none")
        return config.num_sequences * config.num_labels(known)
    return config.num_sequences * (padded_seq_len - (config.sp_size == 1))


def _repeated_parameters(config: TrialConfig) -> int:
    """Elements of all layers' matrices that activation checkpointing multiplies by again.

    A recomputed layer stops at the last tensor that its backward needs, the input of `feed_forward.down`. So the
    product with that matrix is not repeated. Under ZeRO-3 it is: DeepSpeed's linear layers keep their input when they
    have computed their output.
    """
    model, checkpointing = config.model, config.workload.activation_checkpointing
    if checkpointing in (None, "none"):
        return 0
    mlp = model.num_layers * model.hidden_size * model.intermediate_size  # one matrix of each layer
    if config.engine.name == "megatron" and checkpointing == "selective":
        return 3 * mlp  # its MLPs alone, and whole
    if config.engine.facts.sharding in ("zero_3", "megatron"):  # Megatron's checkpointing repeats whole layers
        # DeepSpeed's TiledMLP keeps its input alone, so its backward repeats its forward once more
        return layers_matmul_parameters(model) + (3 * mlp if config.workload.mlp_tile_tokens else 0)
    kept = 3 * mlp if checkpointing == "selective_mlp" else mlp
    if config.workload.linear_dtype != "model":  # as under ZeRO-3: an input is kept when the output is computed
        kept -= mlp
    return layers_matmul_parameters(model) - kept


def attention_flops(config: TrialConfig, padded_seq_len: int) -> int:
    """The part of `hardware_flops` that is attention."""
    total = 0
    for kind, number in attended(config).items():
        shape = replace(config.attention_shape(padded_seq_len, kind), batch_size=1)
        forward = config.num_sequences * number * attention_forward_flops(computed(config.method_of(kind), shape))
        total += (1 + _recomputed(config)) * forward + int(forward * backward_per_forward(shape))
    return total


def _recomputed(config: TrialConfig) -> bool:
    """Whether the attention of each layer runs its forward twice."""
    return config.workload.activation_checkpointing == "full"


def updated_elements(config: TrialConfig, rank: int) -> int:
    """Elements that the optimizers of all ranks update in one step, for our engines; in a world of one rank, those of
    `rank`.

    FSDP2 updates each parameter once a replica. ZeRO-3 cuts each flat into equal parts over all ranks, and pads it.
    """
    on_fsdp2 = config.engine.facts.sharding == "fsdp2"
    if on_fsdp2 and config.world == "one_rank":
        shard = rank % config.num_shards

        def of_rank(shapes: ParameterShapes) -> int:
            return sum(_elements_of_shard(shape, shard, config.num_shards) for shape in shapes.values())

        return of_rank(root_shapes(config.model)) + of_layers(config.model, of_rank)
    if on_fsdp2:
        return config.dp_replicate_size * num_parameters(config.model)
    size = config.world_size

    def padded(shapes: ParameterShapes) -> int:
        return sum(-(-prod(shape) // size) * size for shape in shapes.values())

    elements = padded(root_shapes(config.model)) + of_layers(config.model, padded)
    return elements if config.world == "ranks" else elements // size


def _updated_by(config: TrialConfig) -> str:
    """The class of the optimizer and the device on which it updates, for engines that train with torch's or
    DeepSpeed's."""
    offload = config.engine.optimizer_offload
    if offload is not None:
        return {"deepspeed_cpu_adam": "DeepSpeedCPUAdam", "torch_adamw": "AdamW"}[offload] + " on cpu"
    return f"{'AdamW' if config.workload.optimizer == 'adamw' else 'SGD'} on {config.hardware.device}"


def _half_sums(config: TrialConfig) -> int | None:
    """Sums of two gradients of a matrix in half precision. None: torchao's products may add what they like, and so may
    other engines."""
    if config.engine.name != "fsdp2" or config.workload.linear_dtype not in (None, "model"):
        return None
    return config.workload.num_micro_batches * config.model.tie_embeddings  # what it gets as embedding and as head


def expected_work(
    config: TrialConfig, padded_seq_len: int, rank: int, calls: Mapping[str, KernelCalls] | None, *, products: bool
) -> ExpectedWork:
    """What one step must compute. An engine from outside trains what it likes, and transformers bring an attention of
    their own.

    rank: whose parameters are updated, in a world of one rank.
    calls: of this rank, in one attention call of each kind; None: it is not known how the method calls the kernel.
    products: whether all matrix products outside the kernel are the decoder's.
    """
    decoder, of_rank = config.engine.facts.decoder, rank if config.world == "one_rank" else None
    if decoder not in ("sp_bench", "transformers"):
        return ExpectedWork()
    expected = ExpectedWork(
        matmul_flops=matmul_flops_by_dtype(config, padded_seq_len, of_rank) if products else None,
        updated_elements=updated_elements(config, rank),
        replaced_ops=_replaced_ops(config),
        updated_by=_updated_by(config),
        half_sums=_half_sums(config),
    )
    if calls is None or decoder == "transformers":
        return expected
    layers = [(number * config.workload.num_micro_batches, calls[kind]) for kind, number in attended(config).items()]
    forward, backward = sum(n * each.forward for n, each in layers), sum(n * each.backward for n, each in layers)
    return replace(
        expected,
        attention_flops=attention_flops(config, padded_seq_len),
        kernel_calls=KernelCalls((1 + _recomputed(config)) * forward, backward),
    )


def loss_gradients(config: TrialConfig) -> str | None:
    """What makes the gradients of the loss's tiles of engine fsdp2: autograd | compiled. None: there are no tiles."""
    if config.engine.name != "fsdp2" or config.workload.loss_tile_tokens is None:
        return None
    return "compiled" if config.workload.model_code == "compiled" else "autograd"


def _replaced_ops(config: TrialConfig) -> tuple[str, ...]:
    """Operations of which one step has no call."""
    of_layers = REPLACED_OPS.get(config.workload.model_code or "eager", ())
    return (*of_layers, LOSS_OP) if loss_gradients(config) == "compiled" else of_layers


def _shard_elements(shapes: ParameterShapes, num_shards: int) -> int:
    """Elements of an FSDP group that one rank holds: each parameter is cut along dim 0 and padded to equal shards."""
    return sum(-(-shape[0] // num_shards) * prod(shape[1:]) for shape in shapes.values())


def _elements_of_shard(shape: tuple[int, ...], shard: int, num_shards: int) -> int:
    """Elements of one parameter in one of the shards: whole ones come first, and the last ones may be empty."""
    rows = -(-shape[0] // num_shards)
    return max(0, min(rows, shape[0] - shard * rows)) * prod(shape[1:])


def sharding_traffic(config: TrialConfig) -> Traffic:
    """Bytes of one step for FSDP2's parameters and gradients, with replicas (HSDP) or without.

    The parameters of a layer are gathered for the forward and, unless they are kept, again for the backward; those of
    the root once. Gradients are reduce-scattered over N ranks and all-reduced over R replicas. All of this happens in
    each micro-batch, because no rank keeps whole parameters between two of them, and whole gradients only if it is set
    to. Recomputation gathers nothing, because it runs while the backward's parameters are there. Source: arXiv
    2304.11277, with FSDP2's padding of each parameter.
    """
    num_shards, replicas = config.num_shards, config.dp_replicate_size
    root = _shard_elements(root_shapes(config.model), num_shards)
    blocks = of_layers(config.model, lambda shapes: _shard_elements(shapes, num_shards))
    gathers, element = 1 if config.engine.reshard_after_forward is False else 2, ELEMENT_BYTES[config.dtype]
    narrower = 0
    if gathers_float8(config):
        narrower = layers_matmul_parameters(config.model) // num_shards * (element - 1)
    gathered = (num_shards - 1) * ((root + gathers * blocks) * element - gathers * narrower)
    reduced = (root + blocks) * _reduce_bytes(config)
    gradients = {
        ("gradients", "reduce_scatter"): Fraction((num_shards - 1) * reduced),
        ("gradients", "all_reduce"): 2 * reduced * Fraction(replicas - 1, replicas),
    }
    times = config.workload.num_micro_batches
    reductions = 1 if config.engine.reduce_gradients == "last_micro_batch" else times
    return add_traffic(
        scale_traffic({("parameters", "all_gather"): Fraction(gathered)}, times), scale_traffic(gradients, reductions)
    )


def gathers_float8(config: TrialConfig) -> bool:
    """Whether FSDP2 gathers the layers' matrices in FP8: if they have one scale, and ranks share them. Their rows are
    then divisible by the ranks."""
    in_one_scale = config.workload.linear_dtype == "float8_tensorwise" and config.engine.name == "fsdp2"
    return in_one_scale and config.num_shards > 1


def _reduce_bytes(config: TrialConfig) -> int:
    """Bytes an element of gradients and of the loss while they are reduced: fp32, or fp64 if the trial is."""
    return max(ELEMENT_BYTES[config.dtype], ELEMENT_BYTES["float32"])


def train_step_traffic(config: TrialConfig, attention: Traffic) -> Traffic:
    """Bytes of one training step under FSDP2; `attention` is that of one attention call, in the mean over layers of
    several kinds. Phase `other`, the scalars of the gradient norm, is left out: it differs between torch versions."""
    return add_traffic(unsharded_traffic(config, attention), sharding_traffic(config))


def unsharded_traffic(config: TrialConfig, attention: Traffic) -> Traffic:
    """Bytes of one training step without parameters and gradients: attention in each micro-batch, and the loss once.
    They are the same for every engine that runs our decoder."""
    calls = config.model.num_layers * config.workload.num_micro_batches
    loss = 2 * Fraction(config.world_size - 1, config.world_size) * _reduce_bytes(config)
    return add_traffic(
        scale_traffic(attention, calls),
        scale_traffic(sent_again(config, attention), calls),
        {("loss", "all_reduce"): loss},
    )


def sent_again(config: TrialConfig, attention: Traffic) -> Traffic:
    """What recomputation sends of one attention call; `attention` is what the call itself sends.

    Whoever calls the attention again sends all of its forward again. Whoever kept its output calls no kernel, and so
    needs no other rank's KV; but heads are exchanged again, of q, k and v forwards and of the output backwards. UPipe
    does that in its backward anyway.
    """
    checkpointing = config.workload.activation_checkpointing
    forward = {op: size for (phase, op), size in attention.items() if phase == "forward"}
    if checkpointing == "selective_output":
        exchanges = config.method.name != "upipe"
        forward = {op: size for op, size in forward.items() if op == "all_to_all" and exchanges}
    elif checkpointing != "full":
        forward = {}
    return {("recompute", op): size for op, size in forward.items()}


def stage_times(
    stages: Sequence[tuple[int, int]], num_sequences: Sequence[int], step_ms: Sequence[float]
) -> list[dict[str, float | None]]:
    """Of each stage the first step's ms, the median of the others, and the tokens/s of that; None where there is one
    step. stages: (tokens of a sequence, steps). num_sequences: of a step of each stage."""
    found, steps = [], iter(step_ms)
    for (seq_len, number), sequences in zip(stages, num_sequences, strict=True):
        first, *others = islice(steps, number)
        middle = median(others) if others else None
        rate = middle and 1e3 * sequences * seq_len / middle
        found.append({"first_step_ms": first, "median_step_ms": middle, "tokens_per_s": rate})
    return found
