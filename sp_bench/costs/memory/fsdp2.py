"""Engine fsdp2: our decoder on torch's FSDP2."""

from math import prod

from sp_bench.config.prose import Prose
from sp_bench.config.shape import ELEMENT_BYTES
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory.attention import is_known
from sp_bench.costs.memory.decoder import computed_elements, kept_bytes
from sp_bench.costs.memory.parts import (
    FP8,
    FP32,
    Peak,
    around_logits,
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
    of_layers,
    root_shapes,
)


def peak(config: TrialConfig, copies: int, tiles_overlap: bool) -> Peak:
    """Parameters, gradients and moments are fp32; each layer's are gathered in the trial's dtype, or in FP8."""
    model, element = config.model, ELEMENT_BYTES[config.dtype]
    gathered = FP8 if gathers_float8(config) else element
    tokens = local_tokens(config)
    block, root = (sum(map(prod, shapes(model).values())) for shapes in (block_shapes, root_shapes))
    ranks = config.num_shards
    state, of_root, of_block = stored_bytes(config) / ranks, 4 * root / ranks, 4 * block / ranks
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
    head, loss = head_elements(config), _loss_bytes(config, tiles_overlap)
    layer = leaving + head * element + block * (2 * gathered + 4) + tokens * computed_elements(config) * element
    if config.workload.mlp_tile_tokens is not None:  # gradients of the MLP's matrices, over the tiles
        layer += 3 * model.hidden_size * model.intermediate_size * 4
    return Peak(
        held + at_loss * kept + loss + around_logits(config),
        held + at_last * kept + layer,
        held + at_first * kept + layer + state - of_root - of_block,
        # Parameters are no longer whole. Gradients of what belongs to no layer are, in fp32. Beside these are first the
        # gradients as they were made, and then this rank's part of their sum. One rank alone divides into a new tensor.
        4 * state - of_root + max(root * (element + 4), root * (8 if ranks == 1 else 4) + of_root),
        copies * state,
    )


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
