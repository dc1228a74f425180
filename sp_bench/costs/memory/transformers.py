"""What the layers and the loss of transformers' model hold."""

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory.attention import attention_elements
from sp_bench.costs.memory.parts import BF16, FP32, head_elements, local_tokens, tile_tokens


def kept_bytes(config: TrialConfig) -> float:
    """What one layer of transformers' model keeps for its backward on one rank."""
    full = config.workload.activation_checkpointing == "full"
    elements = config.model.hidden_size if full else _elements(config)
    return local_tokens(config) * BF16 * elements


def logits_bytes(config: TrialConfig) -> float:
    """Logits, or what an engine has in their place. The softmax in fp32, the gradient of its logarithm and that of the
    logits live at once; the bf16 logits are gone by then."""
    model, tile, tokens = config.model, tile_tokens(config), local_tokens(config)
    if config.engine.name == "trl_sft":  # logits are of a few thousand tokens and words at a time: gradients remain
        return head_elements(config) * (FP32 + BF16) + tokens * model.hidden_size * FP32
    tiled = head_elements(config) * 2 * BF16 if tile < tokens else 0  # the head's gradient, and that of one tile
    return tile * model.vocab_size * 3 * FP32 + tiled


def _elements(config: TrialConfig) -> float:
    """What one layer of transformers' model keeps of a token where nothing is recomputed. Each norm keeps its input in
    fp32, its normalised input and its output; Liger's keeps input and output. Rotated q and k are new tensors."""
    model, liger = config.model, config.workload.model_code == "liger"
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norms = 2 * (2 if liger else 4) * model.hidden_size
    norms += (1 if liger else 3) * (q + kv) if model.qk_norm else 0
    attention = 2 * q + 2 * kv + (q if config.sp_size > 1 else 0)  # the output by heads, and by tokens
    mlp = model.hidden_size if config.workload.mlp_tile_tokens else (3 if liger else 4) * model.intermediate_size
    return norms + attention + mlp + 2 * model.head_dim  # and the angles


def computed_elements(config: TrialConfig) -> float:
    """Elements of a token in the backward of a layer: what it keeps, the gradient of its output, and the gradients of
    the MLP's width, two more than the product that is gone by then. Liger's overwrite what they are of. Where an MLP in
    tiles leaves its width out, the backward of attention has more."""
    model, workload = config.model, config.workload
    gradients = (1 if workload.model_code == "liger" else 2) * model.intermediate_size
    if workload.mlp_tile_tokens is not None:  # only one tile has the MLP's width; it is computed once more
        gradients = 6 * model.intermediate_size * min(workload.mlp_tile_tokens / local_tokens(config), 1)
    return max(_elements(config) + model.hidden_size + gradients, attention_elements(config))
