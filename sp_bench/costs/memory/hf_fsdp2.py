"""Engine hf_fsdp2: transformers' model on torch's FSDP2."""

from math import prod

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory import transformers
from sp_bench.costs.memory.parts import BF16, Peak, around_logits, head_elements, local_tokens, stored_bytes
from sp_bench.costs.training import block_shapes, num_parameters, root_shapes


def peak(config: TrialConfig, copies: int, _: bool) -> Peak:
    """Parameters, gradients and moments are fp32. A layer's are gathered in
    bf16, and its gradients travel in it. What belongs to no layer stays gathered."""
    model, ranks = config.model, config.num_shards
    block, root = (sum(map(prod, shapes(model).values())) for shapes in (block_shapes, root_shapes))
    state, kept = stored_bytes(config) / ranks, transformers.kept_bytes(config)
    held = 3 * state + BF16 * root
    computed = local_tokens(config) * BF16 * transformers.computed_elements(config)
    layer = held + BF16 * (head_elements(config) + 3 * block) + computed  # the next one is gathered, and gradients
    return Peak(
        held + model.num_layers * kept + transformers.logits_bytes(config) + around_logits(config),
        layer + model.num_layers * kept,
        layer + kept + state * (1 - root / num_parameters(model)),
        held + state + BF16 * root,
        copies * state,
    )
