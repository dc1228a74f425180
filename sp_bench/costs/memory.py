"""What a trial must hold, whatever its method does: a lower bound, so that above the machine's memory it cannot run.
And an estimate of the peak of a training step."""

import math
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from sp_bench.config.prose import Prose
from sp_bench.config.trial import ELEMENT_BYTES, TRAINING, TrialConfig
from sp_bench.costs.training import FSDP2, block_shapes, loss_gradients, num_parameters, root_shapes

# Methods that keep the output by heads, for their backward, and by tokens, for the projection after it. UPipe's
# backward sends it again, from where it lies by tokens.
KEEPS_OUTPUT_TWICE = ("ulysses", "usp", "deepspeed_ulysses", "yunchang")
FUSED = ("compiled", "liger")  # workload.model_code
RINGS = ("ring", "double_ring")
# Their exchange and their kernel are functions of their own in autograd. So the output's gradient by tokens is gone
# when the kernel runs on that by heads.
EXCHANGE_APART = ("deepspeed_ulysses", "deepspeed_ulysses_hf")
# What others hold in the backward of attention is not known.
ATTENTION_KNOWN = ("single", "ulysses", "upipe", "all_gather", *RINGS, *EXCHANGE_APART)
# Engines of which committed rows have peaks.
MODELLED = ("fsdp2", "hf_deepspeed", "hf_trainer", "trl_sft", "hf_fsdp2", "megatron")
BF16, FP32 = 2, 4
PROCESS_BYTES = 3 * 2**29  # that a rank on a GPU takes of its host; in all committed rows of training it takes more
# DeepSpeed's defaults, which our settings leave as they are: stage3_max_live_parameters and sub_group_size.
MAX_LIVE_PARAMETERS = SUB_GROUP_PARAMETERS = 10**9


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
    """Bytes of them that are in the memory of each host: all of a trial on the CPU; with an optimizer that was
    offloaded the parameters and moments that it steps, and their gradients; and offloaded checkpoints. What a process
    holds without them, 2 to 3 GiB on GPUs, is left out."""
    held = round(config.world_size * offloaded_bytes(config))
    if config.hardware.device == "cpu":
        held += held_bytes(config)
    elif config.workload.name in TRAINING and config.engine.optimizer_offload is not None:
        of_rank = _fsdp2_host_bytes(config) if config.engine.name == "fsdp2" else _zero_3_host_bytes(config)
        held += round(config.world_size * of_rank)
    return held // config.num_nodes


def needed_on_host_bytes(config: TrialConfig) -> int:
    """Bytes that a trial needs of each host, at least: `held_on_host_bytes`, and beside them on GPUs PROCESS_BYTES for
    each rank. 0: it holds nothing there."""
    held = held_on_host_bytes(config)
    return held + config.ranks_per_node * PROCESS_BYTES if held and config.hardware.device == "cuda" else held


def _fsdp2_host_bytes(config: TrialConfig) -> float:
    """Of one rank's parameters, gradients and moments. FSDP2 page-locks its part of each parameter, and each of its
    gradients."""
    ranks, element = config.num_shards, _stored_element_bytes(config)
    block, root = (
        sum(_page_locked(-(-rows // ranks) * prod(rest) * element) for rows, *rest in shapes(config.model).values())
        for shapes in (block_shapes, root_shapes)
    )
    return 2 * (config.model.num_layers * block + root) + 2 * _stored_bytes(config) / ranks


def _zero_3_host_bytes(config: TrialConfig) -> float:
    """Of one rank: fp32 parameters and moments; fp32 gradients, page-locked for each group of parameters that is
    updated at once; sums of gradients in the trial's dtype, page-locked in one buffer; and one group's new parameters
    in that dtype, on their way to the device. Source: deepspeed/runtime/zero/stage3.py."""
    mine, element = num_parameters(config.model) / config.world_size, ELEMENT_BYTES[config.dtype]
    groups, rest = divmod(mine, SUB_GROUP_PARAMETERS)
    gradients = groups * _page_locked(FP32 * SUB_GROUP_PARAMETERS) + _page_locked(FP32 * rest)
    cast = element * min(mine, SUB_GROUP_PARAMETERS) if element != FP32 else 0
    return 3 * FP32 * mine + gradients + _page_locked(element * mine) + cast


def _page_locked(num_bytes: float) -> int:
    """What torch's allocator of page-locked memory takes for a tensor: the next power of two."""
    return 1 << (math.ceil(num_bytes) - 1).bit_length() if num_bytes else 0


def offloaded_bytes(config: TrialConfig) -> float:
    """Of one rank's checkpoints in host memory, at least: what all layers but the last keep. It leaves out padding of
    the sequence, and the 512 bytes to which each tensor is rounded."""
    if not config.workload.checkpoint_offload:
        return 0
    return (config.model.num_layers - 1) * kept_bytes(config)


def kept_bytes(config: TrialConfig) -> float:
    """What one layer of one rank keeps from its forward to its backward, in one micro-batch."""
    model, workload = config.model, config.workload
    hidden, mlp = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    second_output = _second_output_elements(config)
    # With nothing recomputed: inputs and outputs of both norms; q and k before and after theirs, v and the output; and
    # gate, up, their product, and what an eager layer makes of gate before that.
    normed, wide = 3 if model.qk_norm else 2, 3 if workload.model_code in FUSED else 4
    everything = 4 * hidden + normed * (q + kv) + second_output + wide * mlp
    elements = {  # of a token
        "full": hidden,
        "selective": hidden + 2 * q + 2 * kv + second_output,
        "selective_output": hidden + q,
        "selective_mlp": 2 * hidden + 2 * q + 2 * kv + second_output + 2 * mlp,
    }.get(workload.activation_checkpointing or "none", everything)
    lse = 0 if workload.activation_checkpointing == "full" else FP32 * model.num_heads
    return _local_tokens(config) * (elements * ELEMENT_BYTES[config.dtype] + lse)


def _second_output_elements(config: TrialConfig) -> int:
    """Of a token: the output by heads, which these methods keep beside the one by tokens; 0 for others."""
    if config.method.name not in KEEPS_OUTPUT_TWICE or config.sp_size == 1:
        return 0
    return config.model.num_heads * config.model.head_dim


def _local_tokens(config: TrialConfig) -> float:
    """Of one micro-batch on one rank."""
    return config.batch_size * config.seq_len / config.sp_size


def _stored_bytes(config: TrialConfig) -> int:
    """Of all parameters once: fp32, or fp64 where that is asked for."""
    return num_parameters(config.model) * _stored_element_bytes(config)


def _stored_element_bytes(config: TrialConfig) -> int:
    return max(ELEMENT_BYTES[config.dtype], FP32)


def _copies(config: TrialConfig) -> int:
    return config.dp_replicate_size if config.engine.name in FSDP2 else 1  # other engines shard over all ranks


class Peak(NamedTuple):
    """Bytes of one rank at the five moments at which a training step may need most."""

    loss: float  # around the logits: all that is kept, and one tile of logits
    last_layer: float  # its backward: all that is kept, and what that layer computes again
    first_layer: float  # its backward, or the second's: the gradients of all others, and what it computes again
    reduce: float  # at the end of the backward: all gradients, and whole ones of embedding and head
    update: float  # parameters, gradients and moments

    @property
    def bytes(self) -> float:
        return max(self)


def unmodelled_reason(config: TrialConfig) -> Prose | None:
    """Why `peak` says nothing of a trial, or None. It speaks of what committed rows hold it to, and of options whose
    tensors follow from code that such rows ran."""
    engine, workload = config.engine.name, config.workload
    if workload.name not in TRAINING:
        return f"workload {workload.name} is no training"
    if engine not in MODELLED:
        return f"no committed row has the peak of engine {engine}"
    if engine == "fsdp2":
        return _unmodelled_option(config)
    if config.dtype != "bfloat16" or workload.optimizer != "adamw":
        return f"committed rows of engine {engine} have AdamW in bfloat16"
    return None


def _unmodelled_option(config: TrialConfig) -> Prose | None:
    """Options that keep more of a model whole than the estimate has, or of which the peak is where nobody counted."""
    engine, several = config.engine, (config.workload.micro_batches or 1) > 1
    tiles_elsewhere = config.method.name not in ATTENTION_KNOWN and config.workload.mlp_tile_tokens is not None
    keeps = {
        f"method={config.method.name} and tiles of the MLP": tiles_elsewhere,
        "engine.reshard_after_forward=false": engine.reshard_after_forward is False,
        "engine.reduce_gradients=last_micro_batch": several and engine.reduce_gradients == "last_micro_batch",
        "engine.forward_prefetch": engine.forward_prefetch is not None,
        "engine.backward_prefetch": engine.backward_prefetch is not None,
    }
    named = [option for option, kept in keeps.items() if kept]
    return f"no committed row has the peak with {' and '.join(named)}" if named else None


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
    match config.engine.name:
        case "fsdp2":
            return _fsdp2_peak(config, copies, tiles_overlap)
        case "hf_fsdp2":
            return _hf_fsdp2_peak(config, copies)
        case "megatron":
            return _megatron_peak(config)
        case _:
            return _zero_3_peak(config, copies)


def _fsdp2_peak(config: TrialConfig, copies: int, tiles_overlap: bool) -> Peak:
    """Of our decoder. Parameters, gradients and moments are fp32; each layer's are gathered in the trial's dtype."""
    model, element = config.model, ELEMENT_BYTES[config.dtype]
    tokens = _local_tokens(config)
    block, root = (sum(map(prod, shapes(model).values())) for shapes in (block_shapes, root_shapes))
    ranks = config.num_shards
    state, of_root, of_block = _stored_bytes(config) / ranks, 4 * root / ranks, 4 * block / ranks
    leaving = 0.0
    if config.engine.optimizer_offload is not None:
        leaving = of_block  # a layer's gradients on their way to the host, while the next one computes
        state = of_root = of_block = 0  # parameters, gradients and moments are there
    held = 3 * state + root * element  # parameters and moments
    layers, kept, offloads = model.num_layers, kept_bytes(config), config.workload.checkpoint_offload
    # with offload the last layer's at the end of the forward, and then each layer's with those of the one below it
    at_loss, at_last = (1, min(2, layers)) if offloads else (layers, layers)
    # While the second layer computes, ranks that share parameters have gathered the first's, and what the first keeps
    # is there. Rows agree with as many gradients as in the first's backward, as if the third's were still summed.
    at_first = min(2, layers) if offloads or (ranks > 1 and layers > 2) else 1
    head, loss = _head_elements(config), _fsdp2_loss_bytes(config, tiles_overlap)
    layer = leaving + head * element + block * (2 * element + 4) + tokens * _computed_elements(config) * element
    if config.workload.mlp_tile_tokens is not None:  # gradients of the MLP's matrices, over the tiles
        layer += 3 * model.hidden_size * model.intermediate_size * 4
    return Peak(
        held + at_loss * kept + loss + _around_logits(config),
        held + at_last * kept + layer,
        held + at_first * kept + layer + state - of_root - of_block,
        # Parameters are no longer whole. Gradients of what belongs to no layer are, in fp32. Beside these are first the
        # gradients as they were made, and then this rank's part of their sum. One rank alone divides into a new tensor.
        4 * state - of_root + max(root * (element + 4), root * (8 if ranks == 1 else 4) + of_root),
        copies * state,
    )


def _fsdp2_loss_bytes(config: TrialConfig, tiles_overlap: bool) -> float:
    """Of the logits and the gradients that are made from them."""
    element, tile = ELEMENT_BYTES[config.dtype], _tile_tokens(config)
    each, head = tile * config.model.vocab_size, _head_elements(config)
    # In bf16 the logits and their gradient are there in both dtypes. In wider ones they are there once, as are the
    # logarithms of their softmax.
    by_autograd = each * (2 * element + 2 * FP32 if element < FP32 else 3 * element)
    made_by = loss_gradients(config)
    if made_by is None:
        return by_autograd
    if tiles_overlap:
        return by_autograd + head * (element + FP32)
    # first the gradient of the logits, from them; then the head's, from that; and the sum of the head's over all tiles
    return max(2 * each * element if made_by == "compiled" else by_autograd, (each + head) * element) + head * FP32


def _zero_3_peak(config: TrialConfig, copies: int) -> Peak:
    """Of transformers' model on DeepSpeed's ZeRO-3, all ranks of which share each parameter.

    Parameters and gradients are bf16, each in one buffer. Their fp32 copies and the moments are the optimizer's. The
    prefetcher runs ahead until so many parameters are whole as its limit allows.
    """
    model, tokens = config.model, _local_tokens(config)
    number, head = num_parameters(model), _head_elements(config)
    mine, matrix = number / config.world_size, max(map(prod, block_shapes(model).values()))
    offloads = config.engine.optimizer_offload is not None
    held = mine * (BF16 if offloads else 2 * BF16 + 3 * FP32)
    whole = BF16 * min(number, MAX_LIVE_PARAMETERS + matrix) if config.world_size > 1 else 0
    kept = model.num_layers * _transformers_kept(config)
    # A tied head's gradient waits for the embedding's.
    waits = BF16 * head if model.tie_embeddings else 0
    layer = held + whole + kept + waits + tokens * BF16 * _transformers_computed_elements(config)
    # With sequence parallelism DeepSpeed reduces gradients in fp32.
    reduced = head * (2 * BF16 + (FP32 if config.sp_size > 1 else 0))
    updated = 0 if offloads else FP32 * min(mine, SUB_GROUP_PARAMETERS)  # the gradients of one group at a time
    return Peak(
        held + whole + kept + _transformers_logits(config) + _around_logits(config),
        layer,
        layer,
        held + reduced,
        held + (copies - 3) * updated,
    )


def _hf_fsdp2_peak(config: TrialConfig, copies: int) -> Peak:
    """Of transformers' model on torch's FSDP2. Parameters, gradients and moments are fp32. A layer's are gathered in
    bf16, and its gradients travel in it. What belongs to no layer stays gathered."""
    model, ranks = config.model, config.num_shards
    block, root = (sum(map(prod, shapes(model).values())) for shapes in (block_shapes, root_shapes))
    state, kept = _stored_bytes(config) / ranks, _transformers_kept(config)
    held = 3 * state + BF16 * root
    computed = _local_tokens(config) * BF16 * _transformers_computed_elements(config)
    layer = held + BF16 * (_head_elements(config) + 3 * block) + computed  # the next one is gathered, and gradients
    return Peak(
        held + model.num_layers * kept + _transformers_logits(config) + _around_logits(config),
        layer + model.num_layers * kept,
        layer + kept + state * (1 - root / num_parameters(model)),
        held + state + BF16 * root,
        copies * state,
    )


def _transformers_kept(config: TrialConfig) -> float:
    """What one layer of transformers' model keeps for its backward on one rank."""
    full = config.workload.activation_checkpointing == "full"
    elements = config.model.hidden_size if full else _transformers_elements(config)
    return _local_tokens(config) * BF16 * elements


def _transformers_logits(config: TrialConfig) -> float:
    """Logits, or what an engine has in their place. The softmax in fp32, the gradient of its logarithm and that of the
    logits live at once; the bf16 logits are gone by then."""
    model, tile, tokens = config.model, _tile_tokens(config), _local_tokens(config)
    if config.engine.name == "trl_sft":  # logits are of a few thousand tokens and words at a time: gradients remain
        return _head_elements(config) * (FP32 + BF16) + tokens * model.hidden_size * FP32
    tiled = _head_elements(config) * 2 * BF16 if tile < tokens else 0  # the head's gradient, and that of one tile
    return tile * model.vocab_size * 3 * FP32 + tiled


def _transformers_elements(config: TrialConfig) -> float:
    """What one layer of transformers' model keeps of a token where nothing is recomputed. Each norm keeps its input in
    fp32, its normalised input and its output; Liger's keeps input and output. Rotated q and k are new tensors."""
    model, liger = config.model, config.workload.model_code == "liger"
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norms = 2 * (2 if liger else 4) * model.hidden_size
    norms += (1 if liger else 3) * (q + kv) if model.qk_norm else 0
    attention = 2 * q + 2 * kv + (q if config.sp_size > 1 else 0)  # the output by heads, and by tokens
    mlp = model.hidden_size if config.workload.mlp_tile_tokens else (3 if liger else 4) * model.intermediate_size
    return norms + attention + mlp + 2 * model.head_dim  # and the angles


def _transformers_computed_elements(config: TrialConfig) -> float:
    """Of a token in the backward of a layer: what it keeps, the gradient of its output, and the gradients of the MLP's
    width, two more than the product that is gone by then. Liger's overwrite what they are of. Where an MLP in tiles
    leaves its width out, the backward of attention has more."""
    model, workload = config.model, config.workload
    gradients = (1 if workload.model_code == "liger" else 2) * model.intermediate_size
    if workload.mlp_tile_tokens is not None:  # only one tile has the MLP's width; it is computed once more
        gradients = 6 * model.intermediate_size * min(workload.mlp_tile_tokens / _local_tokens(config), 1)
    return max(_transformers_elements(config) + model.hidden_size + gradients, _attention_elements(config))


def _megatron_peak(config: TrialConfig) -> Peak:
    """Of Megatron-Core's model. Parameters in bf16 and gradients in fp32 are whole on each rank; fp32 copies and
    moments are shared by all. TransformerEngine's loss keeps bf16 logits and their gradient."""
    model, tokens, number = config.model, _local_tokens(config), num_parameters(config.model)
    held = number * (BF16 + FP32) + 3 * FP32 * number / config.world_size
    kept = model.num_layers * tokens * _megatron_kept_bytes(config)
    layer = held + kept + BF16 * (_head_elements(config) + tokens * _computed_elements(config))
    logits = tokens * model.vocab_size * 2 * BF16
    return Peak(held + kept + logits + _around_logits(config), layer, layer, held, held)


def _megatron_kept_bytes(config: TrialConfig) -> int:
    """What a layer keeps of a token: its input. Where only its MLP runs again (`selective`), also all that its
    attention's half keeps, and the MLP's input. Where nothing runs again, also the MLP's normed
    input, gate, up and their product."""
    model, checkpointing = config.model, config.workload.activation_checkpointing
    if checkpointing == "full":
        return model.hidden_size * BF16
    q_and_k = (model.num_heads + model.num_kv_heads) * model.head_dim
    attended = q_and_k + (model.num_kv_heads + model.num_heads) * model.head_dim  # q, k, v and the output
    # that comes back from an exchange of heads as another tensor
    returned = model.num_heads * model.head_dim if config.method.variant == "a2a" else 0
    normed = q_and_k if model.qk_norm else 0  # what the norms of q and k read
    elements = 3 * model.hidden_size + normed + attended + returned
    norms = 1 + (model.num_heads + model.num_kv_heads if model.qk_norm else 0)  # one fp32 each, and the log-sum-exp's
    if checkpointing == "none":
        elements += model.hidden_size + 3 * model.intermediate_size  # normed; gate, up and their product
        norms += 1
    return elements * BF16 + (norms + model.num_heads) * FP32


def _around_logits(config: TrialConfig) -> float:
    """The last hidden states, what their norm keeps, and their gradients."""
    return 5 * _local_tokens(config) * config.model.hidden_size * ELEMENT_BYTES[config.dtype]


def _tile_tokens(config: TrialConfig) -> float:
    """Tokens whose logits are there at once."""
    tokens = _local_tokens(config)
    return min(config.workload.loss_tile_tokens or tokens, tokens)


def _head_elements(config: TrialConfig) -> int:
    return config.model.vocab_size * config.model.hidden_size


def _computed_elements(config: TrialConfig) -> float:
    """Of a token in the backward of a layer, the activations that it computes again and their gradients. Selective
    checkpoints compute the halves of a layer one after the other, of which that with the MLP has more. With
    `selective_mlp` that has gate and up already, which count as kept. Fused code writes gradients of the MLP's width
    over what they are of."""
    model, workload = config.model, config.workload
    hidden, mlp = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    fused = workload.model_code in FUSED
    before = 2 * hidden + 2 * q + (2 if fused else 3) * kv + (q + kv if model.qk_norm else 0)
    if workload.activation_checkpointing == "full":  # keeps neither output, so the layer makes both again
        before += _second_output_elements(config)
    after = (2 if fused else 4) * hidden
    wide = (4 if fused else 6) * mlp
    if workload.activation_checkpointing == "selective_mlp":
        wide -= 2 * mlp
    if workload.mlp_tile_tokens is not None:  # only one tile has the MLP's width
        wide *= min(workload.mlp_tile_tokens / _local_tokens(config), 1)
        after = 3 * hidden  # its input, and the gradients of its input and output
    selective = (workload.activation_checkpointing or "").startswith("selective")
    halves = max(before, after + wide) if selective else before + after + wide
    return max(halves, _attention_elements(config))


def _attention_elements(config: TrialConfig) -> float:
    """Of a token, beside what the layer keeps, while the kernel of its attention runs backward. That is the most where
    an MLP in tiles leaves its width out, or is narrow.

    Kernels add dq up in fp32, and dk and dv of each query head in fp32 or twice in the trial's dtype: 4q. UPipe has it
    all for one stage's heads, but q, k, v, the output and the gradients lie by tokens. An all-gather has keys and
    values of all ranks, and at its largest run of queries the gradients of all that they see.
    """
    model, kept = config.model, config.workload.activation_checkpointing
    hidden, q, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Made again before the kernel runs: its inputs, what norms made q and k of, and the layer's normed input.
    # `selective` keeps the kernel's inputs, and makes what is before them again after the kernel.
    again = hidden + q + 2 * kv + (q + kv if model.qk_norm else 0)
    if kept in (None, "none", "selective", "selective_mlp"):
        again = 0
    output = q if kept == "full" else 0
    gradients, kernel = 2 * q + 2 * kv, 4 * q  # of the output, q, k and v
    if config.method.name == "upipe" and config.sp_size > 1:
        kernel = _stage_elements(config)
    elif config.method.name == "all_gather" and config.sp_size > 1:
        at_once = (config.method.head_stride or model.num_kv_heads) / model.num_kv_heads
        # of one rank's tokens; in zigzag order its last run is half of them, and only its own last chunk comes later
        queries, keys = (0.5, config.sp_size - 0.5) if config.method.layout == "zigzag" else (1, config.sp_size - 1)
        gradients += 2 * kv + at_once * 2 * kv * (config.sp_size + keys)
        kernel = at_once * 2 * q * (queries + keys)
    elif config.method.name in RINGS and config.sp_size > 1:
        gradients, kernel = q, _ring_elements(config)
    elif config.sp_size > 1 and config.method.name not in EXCHANGE_APART:
        gradients += q  # of the output, by heads and by tokens
    return hidden + again + output + gradients + kernel


def _stage_elements(config: TrialConfig) -> float:
    """Of a token in the backward of one of UPipe's stages: what the kernel has of the stage's heads, with their q, dq,
    output and its gradient. Keys and values come by KV heads. Where several stages read the same ones, they share
    them, and fp32 sums of dk and dv."""
    model, size = config.model, config.sp_size
    q, kv_heads = model.num_heads * model.head_dim, max(model.num_kv_heads, size)  # replicated where ranks are more
    stages, mine = config.method.head_stages or model.num_heads // size, kv_heads // size
    at_hand = 2 * kv_heads * model.head_dim / min(stages, mine)
    return 8 * q / stages + at_hand + (2 * at_hand if stages > mine else 0)


def _ring_elements(config: TrialConfig) -> float:
    """Of a token in a ring's backward, beside the output's gradient: what a rank holds as a kernel begins, the kernel's
    own work space, and what it finds."""
    model = config.model
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Of a shard, the queries and the keys of a kernel. In zigzag order the last rank computes all its queries and half
    # of each other shard's keys, and the first rank half of its queries and whole shards.
    blocks = ((1.0, 0.5), (0.5, 1.0)) if config.method.layout == "zigzag" else ((1.0, 1.0),)
    half_of_own = 2.5 * q + kv
    found: list[float] = []
    for queries, keys in blocks:
        first, *steps, last = ring_held_elements(q, kv, config.sp_size, queries)
        of_step = queries * 3 * q + keys * (2 * q + 2 * kv)
        if config.method.name == "double_ring":
            of_step += 4 * kv  # the shard that goes to the next window, and what was found of the one at hand
        found += [first + half_of_own, *(held + of_step for held in steps), last + half_of_own]
    return max(found)


def ring_held_elements(q: int, kv: int, size: int, queries: float) -> list[float]:
    """Of a token: what a ring of `size` ranks holds in bfloat16 as each kernel of its backward begins, beside its
    inputs. First and last are two halves of the own heads; between them is a step for each other rank. `queries`: which
    part of the rank's queries sees keys of another shard."""
    own, at_hand = 2 * kv, 2 * kv  # keys and values
    parts = 0.5 * q  # of dq that are not merged yet: of half the own heads, and then of each step
    held: list[float] = [own + at_hand]
    for step in range(1, size):
        next_one = 2 * kv if step < size - 1 else 0
        sums = 4 * kv if step > 1 else 0  # of dk and dv: those that leave, and those that arrive
        held.append(own + at_hand + next_one + sums + kv + parts)  # kv: dk and dv of half the own heads
        parts += queries * q
        parts = 2 * q if parts >= 3 * q else parts  # merged, in fp32
    return [*held, own + 4 * kv + kv + parts]
