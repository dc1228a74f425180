"""What the layers of our decoder keep and compute again."""

from sp_bench.config.shape import ELEMENT_BYTES
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory.attention import attention_elements, second_output_elements
from sp_bench.costs.memory.parts import FP32, FUSED, local_tokens


def kept_bytes(config: TrialConfig) -> float:
    """What one layer of one rank keeps from its forward to its backward, in one micro-batch."""
    model, workload = config.model, config.workload
    hidden, mlp = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    second_output = second_output_elements(config)
    # With nothing recomputed: inputs and outputs of both norms; q and k before and after theirs, v and the output; and
    # gate, up, their product, and what an eager layer makes of gate before that.
    normed, wide = 3 if model.qk_norm else 2, 3 if workload.model_code in FUSED else 4
    everything = 4 * hidden + normed * (q + kv) + second_output + wide * mlp
    if workload.linear_dtype != "model" and workload.model_code == "compiled":
        # Of the product of gate and up torch.compile keeps what it is made from, which is there anyway. Norms' outputs
        # it keeps as they are rounded, and of the attention's output the rounded one too.
        everything += (2 * hidden + q) / ELEMENT_BYTES[config.dtype] - 2 * hidden - mlp
    elements = {  # of a token
        "full": hidden,
        "selective": hidden + 2 * q + 2 * kv + second_output,
        "selective_output": hidden + q,
        "selective_mlp": 2 * hidden + 2 * q + 2 * kv + second_output + 2 * mlp,
    }.get(workload.activation_checkpointing or "none", everything)
    lse = 0 if workload.activation_checkpointing == "full" else FP32 * model.num_heads
    return local_tokens(config) * (elements * ELEMENT_BYTES[config.dtype] + lse)


def computed_elements(config: TrialConfig) -> float:
    """Elements of a token in the backward of a layer: the activations that it computes again and their gradients.
    Selective checkpoints compute the halves of a layer one after the other, of which that with the MLP has more. With
    `selective_mlp` that has gate and up already, which count as kept. Fused code writes gradients of the MLP's width
    over what they are of."""
    model, workload = config.model, config.workload
    hidden, mlp = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    fused = workload.model_code in FUSED
    before = 2 * hidden + 2 * q + (2 if fused else 3) * kv + (q + kv if model.qk_norm else 0)
    if workload.activation_checkpointing == "full":  # keeps neither output, so the layer makes both again
        before += second_output_elements(config)
    after = (2 if fused else 4) * hidden
    wide = (4 if fused else 6) * mlp
    if workload.activation_checkpointing == "selective_mlp":
        wide -= 2 * mlp
    if workload.mlp_tile_tokens is not None:  # only one tile has the MLP's width
        wide *= min(workload.mlp_tile_tokens / local_tokens(config), 1)
        after = 3 * hidden  # its input, and the gradients of its input and output
    selective = (workload.activation_checkpointing or "").startswith("selective")
    halves = max(before, after + wide) if selective else before + after + wide
    return max(halves, attention_elements(config))
