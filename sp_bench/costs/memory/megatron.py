"""Engine megatron: Megatron-Core's model."""

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory.attention import attention_elements, second_output_elements
from sp_bench.costs.memory.parts import BF16, FP8, FP32, FUSED, Peak, around_logits, head_elements, local_tokens
from sp_bench.costs.training import layers_matmul_parameters, num_parameters


def peak(config: TrialConfig, *_: object) -> Peak:
    """Parameters in bf16 and gradients in fp32 are whole on each rank; fp32 copies and
    moments are shared by all. TransformerEngine's loss keeps bf16 logits and their gradient. In FP8 it keeps the
    layers' matrices twice more from step to step, by row and transposed."""
    model, tokens, number = config.model, local_tokens(config), num_parameters(config.model)
    held = number * (BF16 + FP32) + 3 * FP32 * number / config.world_size
    if config.workload.linear_dtype != "model":
        held += 2 * FP8 * layers_matmul_parameters(model)
    kept = model.num_layers * tokens * _kept_bytes(config)
    layer = held + kept + BF16 * (head_elements(config) + tokens * _computed_elements(config))
    logits = tokens * model.vocab_size * 2 * BF16
    return Peak(held + kept + logits + around_logits(config), layer, layer, held, held)


def _kept_bytes(config: TrialConfig) -> int:
    """What a layer keeps of a token: its input. Where only its MLP runs again (`selective`), also all that its
    attention's half keeps, and the MLP's input. Where nothing runs again, also the MLP's normed
    input, gate, up and their product. In FP8 what a norm or that product gives is kept rounded; of the attention's
    output, which is kept anyway, Megatron has no rounded one."""
    model, checkpointing = config.model, config.workload.activation_checkpointing
    rounded = BF16 if config.workload.linear_dtype == "model" else FP8
    if checkpointing == "full":
        return model.hidden_size * BF16
    q_and_k = (model.num_heads + model.num_kv_heads) * model.head_dim
    attended = q_and_k + (model.num_kv_heads + model.num_heads) * model.head_dim  # q, k, v and the output
    # that comes back from an exchange of heads as another tensor
    returned = model.num_heads * model.head_dim if config.method.variant == "a2a" else 0
    normed = q_and_k if model.qk_norm else 0  # what the norms of q and k read
    elements, of_products = 2 * model.hidden_size + normed + attended + returned, model.hidden_size
    norms = 1 + (model.num_heads + model.num_kv_heads if model.qk_norm else 0)  # one fp32 each, and the log-sum-exp's
    if checkpointing == "none":
        elements += 2 * model.intermediate_size  # gate and up
        of_products += model.hidden_size + model.intermediate_size
        norms += 1
    return elements * BF16 + of_products * rounded + (norms + model.num_heads) * FP32


def _computed_elements(config: TrialConfig) -> float:
    """Elements of a token in the backward of a layer: the activations that it computes again and their gradients. With
    `selective` the MLP's half, which has more, runs without the other."""
    model, fused = config.model, config.workload.model_code in FUSED
    q, kv, hidden = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, model.hidden_size
    before = 2 * hidden + 2 * q + (2 if fused else 3) * kv + (q + kv if model.qk_norm else 0)
    if config.workload.activation_checkpointing == "full":  # keeps neither output, so the layer makes both again
        before += second_output_elements(config)
    mlp = (2 if fused else 4) * hidden + (4 if fused else 6) * model.intermediate_size
    selective = config.workload.activation_checkpointing == "selective"
    return max(max(before, mlp) if selective else before + mlp, attention_elements(config))
