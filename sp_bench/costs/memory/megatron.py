"""Engine megatron: Megatron-Core's model."""

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory.decoder import computed_elements
from sp_bench.costs.memory.parts import BF16, FP32, Peak, around_logits, head_elements, local_tokens
from sp_bench.costs.training import num_parameters


def peak(config: TrialConfig, *_: object) -> Peak:
    """Parameters in bf16 and gradients in fp32 are whole on each rank; fp32 copies and
    moments are shared by all. TransformerEngine's loss keeps bf16 logits and their gradient."""
    model, tokens, number = config.model, local_tokens(config), num_parameters(config.model)
    held = number * (BF16 + FP32) + 3 * FP32 * number / config.world_size
    kept = model.num_layers * tokens * _kept_bytes(config)
    layer = held + kept + BF16 * (head_elements(config) + tokens * computed_elements(config))
    logits = tokens * model.vocab_size * 2 * BF16
    return Peak(held + kept + logits + around_logits(config), layer, layer, held, held)


def _kept_bytes(config: TrialConfig) -> int:
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
