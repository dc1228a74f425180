"""What the layers of our decoder keep, and what they hold in their backward beside it."""

from collections.abc import Mapping
from typing import NamedTuple

from sp_bench.config.shape import ELEMENT_BYTES
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory import attention, delta
from sp_bench.costs.memory.parts import FP32, FUSED, local_tokens


def kept_bytes(config: TrialConfig, kind: str = "full") -> float:
    """What one layer of a kind keeps on one rank from its forward to its backward, in one micro-batch."""
    workload, element, tokens = config.workload, ELEMENT_BYTES[config.dtype], local_tokens(config)
    hidden, mlp, q = config.model.hidden_size, config.model.intermediate_size, _output_elements(config, "full")
    attended, beside = attention.kept_elements(config), FP32 * config.model.num_heads * tokens  # the log-sum-exp
    if kind == "delta":
        attended, beside = delta.kept_elements(config), delta.kept_in_fp32_bytes(config)
    if workload.activation_checkpointing == "full":
        return tokens * hidden * element
    elements = {  # of a token
        "selective": hidden + attended,
        "selective_output": hidden + q,
        "selective_mlp": 2 * hidden + attended + 2 * mlp,
    }.get(workload.activation_checkpointing or "none")
    if elements is None:
        # With nothing recomputed also outputs of the attention's norm and inputs and outputs of the MLP's; what is
        # before and after the attention; gate, up and their product; and statistics.
        elements = 4 * hidden + attended + _around_attention(config, kind) + _kept_wide(config)
        beside += FP32 * _statistics(config, kind) * tokens
        if workload.linear_dtype != "model" and workload.model_code == "compiled":
            # Of the product of gate and up torch.compile keeps what it is made from, which is there anyway. Norms'
            # outputs it keeps as they are rounded, and of the attention's output the rounded one too.
            elements += (2 * hidden + q) / element - 2 * hidden - mlp
    return tokens * elements * element + beside


class Moment(NamedTuple):
    """Of a layer's backward, beside what it kept."""

    elements: float  # of a token: activations that were computed again, and gradients of activations
    gradient_bytes: float  # gradients of the layer's parameters that are there by then


# What is of the MLP's width in its backward, beside what is kept of it, in fused code and in eager: gate, an eager
# layer's silu of it, up, and gradients of their product, of silu and of up. Fused code writes gradients over what they
# are of, unless a checkpoint holds that.
WIDE: Mapping[str, tuple[int, int]] = {"none": (1, 2), "selective_mlp": (3, 4)}
WIDE_AGAIN = (4, 6)  # where the MLP is computed again


def backward_moments(config: TrialConfig, kind: str = "full") -> list[Moment]:
    """The three at which a layer of a kind may hold most: when the MLP's width is there, when all gradients of the
    MLP's matrices are, and when its attention's kernel runs."""
    element, hidden, mlp = ELEMENT_BYTES[config.dtype], config.model.hidden_size, config.model.intermediate_size
    checkpointing, matrix = config.workload.activation_checkpointing or "none", element * hidden * mlp
    wide = mlp * WIDE.get(checkpointing, WIDE_AGAIN)[config.workload.model_code not in FUSED]
    around = hidden  # the gradient of the output
    if checkpointing not in WIDE:  # the residual stream before the MLP, and normed
        around += 2 * hidden + (delta.values(config) if kind == "delta" else 0)  # and the attention's output, normed
    ends, sums = around + 2 * hidden + mlp - _kept_wide(config), 0  # by then two parts of the gradient of its input
    if (tile := config.workload.mlp_tile_tokens) is not None:  # only one tile has the MLP's width
        share = min(tile / local_tokens(config), 1)
        around = 3 * hidden  # its input, and the gradients of its input and output
        wide, ends, sums = share * wide, around + share * mlp, 3 * FP32 * hidden * mlp  # of gradients, over the tiles
    if checkpointing == "full":  # all of the attention's half is there again
        again = hidden + attention.kept_elements(config) + _around_attention(config, kind)
        around, ends = around + again, ends + again
    return [
        Moment(around + wide, sums + (3 if sums else 1) * matrix),  # with those of the tile before
        Moment(ends, sums + (6 if sums else 3) * matrix),  # those of the last tile, and the sums in the trial's dtype
        Moment(_attention_elements(config, kind), 3 * matrix + element * hidden * _output_elements(config, kind)),
    ]


def _attention_elements(config: TrialConfig, kind: str) -> float:
    """While the kernel runs. Of what the layer keeps that is gone which its MLP's half and its projection have used."""
    checkpointing, hidden = config.workload.activation_checkpointing or "none", config.model.hidden_size
    used = {"none": 2 * hidden + _kept_wide(config), "selective_mlp": hidden + _kept_wide(config)}.get(checkpointing, 0)
    if kind == "delta":
        used += delta.values(config) * ((checkpointing == "none") + (config.sp_size > 1))  # the output, normed
        return delta.backward_elements(config) - used
    if checkpointing in ("none", "selective", "selective_mlp"):
        used += attention.second_output_elements(config)
    return attention.attention_elements(config) - used


def _around_attention(config: TrialConfig, kind: str) -> int:
    """What norms of queries and keys read, which in layers of kind delta is fp32; and there what the norm of the output
    gives."""
    model = config.model
    if kind == "delta":
        return 4 * delta.keys(config) + delta.values(config)
    return (model.num_heads + model.num_kv_heads) * model.head_dim if model.qk_norm else 0


def _statistics(config: TrialConfig, kind: str) -> int:
    """Numbers in fp32 of a token: one of each row of a norm; and in layers of kind delta three of each head of values,
    from which its gate and beta are made."""
    model = config.model
    if kind == "delta":
        return 2 + 4 * (model.delta_heads or 0) + 2 * (model.delta_kv_heads or 0)
    return 2 + (model.num_heads + model.num_kv_heads if model.qk_norm else 0)


def _kept_wide(config: TrialConfig) -> int:
    """Elements of a token of the MLP's width that a layer keeps: gate and up; with nothing recomputed their product,
    and what an eager layer makes of gate before that."""
    checkpointing, mlp = config.workload.activation_checkpointing or "none", config.model.intermediate_size
    if checkpointing == "none":
        return (3 if config.workload.model_code in FUSED else 4) * mlp
    return 2 * mlp if checkpointing == "selective_mlp" else 0


def _output_elements(config: TrialConfig, kind: str) -> int:
    return delta.values(config) if kind == "delta" else config.model.num_heads * config.model.head_dim
