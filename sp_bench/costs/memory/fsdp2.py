"""Engine fsdp2: our decoder on torch's FSDP2."""

from math import prod

from sp_bench.config.prose import Prose
from sp_bench.config.shape import ELEMENT_BYTES
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory.attention import is_known
from sp_bench.costs.memory.decoder import backward_moments, kept_bytes
from sp_bench.costs.memory.parts import (
    FP8,
    FP32,
    Peak,
    head_elements,
    local_tokens,
    page_locked,
    stored_bytes,
    stored_element_bytes,
    tile_tokens,
)
from sp_bench.costs.training import (
    ParameterShapes,
    block_shapes,
    gathers_float8,
    loss_gradients,
    num_parameters,
    of_layers,
    root_shapes,
)

# For products of matrices on Hopper GPUs torch gives cuBLAS 32 MiB in each thread, of which the backward has its own.
# Source: `_parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp.
WORKSPACES_BYTES = 2 * 32 * 2**20


def peak(config: TrialConfig, copies: int, tiles_overlap: bool) -> Peak:
    """Parameters, gradients and moments are fp32; each layer's are gathered in the trial's dtype, or in FP8."""
    model, element = config.model, ELEMENT_BYTES[config.dtype]
    hidden_states = local_tokens(config) * model.hidden_size * element
    root, state = _elements(root_shapes(model)), _shards_bytes(config, num_parameters(model))
    workspaces = WORKSPACES_BYTES if config.hardware.device == "cuda" else 0
    angles = FP32 * model.head_dim * config.seq_len / config.sp_size  # of RoPE
    held = workspaces + angles + 3 * state + root * element  # parameters and moments; and whole, those of no layer
    kept = [kept_bytes(config, kind) for kind in model.kinds]
    loss = _loss_bytes(config, tiles_overlap) + 2 * hidden_states  # the last ones, and normed
    if config.workload.loss_tile_tokens is not None:
        loss += hidden_states  # their gradient
        if config.num_shards > 1:  # inside the forward the message of the last layer's parameters is still there
            loss += _gathered_bytes(config) * _elements(block_shapes(model, model.kinds[-1]))
    head_gradient = head_elements(config) * element
    *others, last = _layers_bytes(config, kept)
    return Peak(
        held + (kept[-1] if config.workload.checkpoint_offload else sum(kept)) + loss,
        held + head_gradient + last,
        held + head_gradient + max(others or [last]),
        workspaces + 4 * state - _shards_bytes(config, root) + _end_bytes(config),
        workspaces + copies * state,
    )


def _layers_bytes(config: TrialConfig, kept: list[float]) -> list[float]:
    """In each layer's backward: what this and those below it keep; its largest moment; parameters and gradients."""
    model, kinds, gathered = config.model, config.model.kinds, _gathered_bytes(config)
    blocks = [_elements(block_shapes(model, kind)) for kind in kinds]
    moments = {kind: _moment_bytes(config, kind) for kind in config.kinds}
    residual = local_tokens(config) * model.hidden_size * ELEMENT_BYTES[config.dtype]  # its gradient
    found: list[float] = []
    above = 0.0  # this rank's part of gradients of all layers above
    for index in reversed(range(len(kinds))):
        # with offload a layer's checkpoints are there with those of the one below it
        first = max(index - 1, 0) if config.workload.checkpoint_offload else 0
        # As messages FSDP holds parameters of the layer below, which it gathers ahead, and gradients of the one above,
        # in fp32, until its own are made and its parameters no longer whole.
        below = gathered * blocks[index - 1] if index and config.num_shards > 1 else 0
        computes = kept[index] + moments[kinds[index]] + gathered * blocks[index] + FP32 * sum(blocks[index + 1 :][:1])
        reduces = residual + _reduce_bytes(config, blocks[index], model.hidden_size * model.intermediate_size)
        found.append(sum(kept[first:index]) + below + max(computes, reduces) + above)
        above += _shards_bytes(config, blocks[index])
    return found[::-1]


def _end_bytes(config: TrialConfig) -> float:
    """As the backward ends, what belongs to no layer, beside shards of parameters, moments and layers' gradients.

    First parameters are whole, and so are, as they were made, the gradients of the embedding and of the head, which may
    be one parameter; the first layer's are a message. Then theirs are reduced.
    """
    model, element = config.model, ELEMENT_BYTES[config.dtype]
    root, head = _elements(root_shapes(model)), head_elements(config)
    made = element * (root + 2 * head) + FP32 * _elements(block_shapes(model, model.kinds[0]))
    return max(made, _reduce_bytes(config, root, model.hidden_size if model.tie_embeddings else head))


def _reduce_bytes(config: TrialConfig, elements: int, last: int) -> float:
    """While gradients of so many elements are reduced, of which the last parameter has `last`: first as they were made,
    and as a message in fp32; then the message, this rank's part of the sum, and still the last one as it was made, to
    which FSDP refers. One rank alone divides into a new tensor."""
    element, ranks = ELEMENT_BYTES[config.dtype], config.num_shards
    summed = 3 * FP32 * elements if ranks == 1 else FP32 * elements * (1 + 1 / ranks) + element * last
    return max((element + FP32) * elements, summed)


def _gathered_bytes(config: TrialConfig) -> int:
    """Of an element of a layer's gathered parameters."""
    return FP8 if gathers_float8(config) else ELEMENT_BYTES[config.dtype]


def _shards_bytes(config: TrialConfig, elements: float) -> float:
    """This rank's part of parameters, or of their gradients, on the device."""
    offloads = config.engine.optimizer_offload is not None
    return 0 if offloads else stored_element_bytes(config) * elements / config.num_shards


def _moment_bytes(config: TrialConfig, kind: str) -> float:
    """The largest moment of the backward of a layer of a kind."""
    of_token = local_tokens(config) * ELEMENT_BYTES[config.dtype]
    return max(of_token * each.elements + each.gradient_bytes for each in backward_moments(config, kind))


def _elements(shapes: ParameterShapes) -> int:
    return sum(map(prod, shapes.values()))


def _loss_bytes(config: TrialConfig, tiles_overlap: bool) -> float:
    """Bytes of the logits and the gradients that are made from them."""
    element, tile = ELEMENT_BYTES[config.dtype], tile_tokens(config)
    each, head = tile * config.model.vocab_size, head_elements(config)
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


def host_bytes(config: TrialConfig) -> float:
    """Bytes of one rank's parameters, gradients and moments with an offloaded optimizer. FSDP2 page-locks its part of
    each parameter, and each of its gradients."""
    ranks, element = config.num_shards, stored_element_bytes(config)

    def locked(shapes: ParameterShapes) -> int:
        return sum(page_locked(-(-rows // ranks) * prod(rest) * element) for rows, *rest in shapes.values())

    return 2 * (of_layers(config.model, locked) + locked(root_shapes(config.model))) + 2 * stored_bytes(config) / ranks


def unmodelled_reason(config: TrialConfig) -> Prose | None:
    """Names the options that keep more of a model whole than the estimate has, or that peak where nobody counted; or
    None."""
    engine, several = config.engine, (config.workload.micro_batches or 1) > 1
    tiles_elsewhere = not is_known(config) and config.workload.mlp_tile_tokens is not None
    keeps = {
        f"method={config.method.name} and tiles of the MLP": tiles_elsewhere,
        "engine.reshard_after_forward=false": engine.reshard_after_forward is False,
        "engine.reduce_gradients=last_micro_batch": several and engine.reduce_gradients == "last_micro_batch",
        "engine.forward_prefetch": engine.forward_prefetch is not None,
        "engine.backward_prefetch": engine.backward_prefetch is not None,
    }
    named = [option for option, kept in keeps.items() if kept]
    return f"no committed row has the peak with {' and '.join(named)}" if named else None
