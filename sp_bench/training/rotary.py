"""The rotary embedding, RoPE (arXiv 2104.09864), and how it is stretched beyond the length it was trained with."""

import math

import torch
from torch import Tensor

from sp_bench.config.model import ModelConfig
from sp_bench.training.model_code import Rotation

# In rotations over the original length: Llama 3.1's config.json has low_freq_factor=1 and high_freq_factor=4
LLAMA3_FEWEST, LLAMA3_MOST = 1.0, 4.0
# YaRN, arXiv 2309.00071, section 3.2: alpha=1, beta=32
YARN_FEWEST, YARN_MOST = 1.0, 32.0


def rotation(positions: Tensor, model: ModelConfig, dtype: torch.dtype) -> Rotation:
    """RoPE's cos and sin at global `positions` [s], each [s,1,D/2] in `dtype`."""
    # Angles are computed in fp64: at position 1e6 an fp32 angle is wrong by up to 0.06 rad.
    angles = positions.double()[:, None, None] * frequencies(model, positions.device)
    cos, sin = angles.cos(), angles.sin()
    if model.rope_scaling == "yarn" and model.rope_factor is not None:
        scale = 0.1 * math.log(model.rope_factor) + 1  # of q and of k: sharpens the softmax, section 3.3
        cos, sin = scale * cos, scale * sin
    return cos.to(dtype), sin.to(dtype)


def frequencies(model: ModelConfig, device: torch.device) -> Tensor:
    """Radians per token of each pair of elements [D/2], fp64."""
    exponent = torch.arange(0, model.rope_dim, 2, dtype=torch.float64, device=device) / model.rope_dim
    unscaled = model.rope_theta**-exponent
    if model.rope_scaling is None or model.rope_factor is None or model.rope_original_seq_len is None:
        return unscaled
    if model.rope_scaling == "llama3":
        rotations = model.rope_original_seq_len * unscaled / (2 * math.pi)
        kept = ((rotations - LLAMA3_FEWEST) / (LLAMA3_MOST - LLAMA3_FEWEST)).clamp(0, 1)
    else:
        first, last = _yarn_pair(model, YARN_MOST), _yarn_pair(model, YARN_FEWEST)
        low, high = max(math.floor(first), 0), min(math.ceil(last), model.head_dim - 1)
        pair = torch.arange(model.head_dim // 2, dtype=torch.float64, device=device)
        kept = 1 - ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return kept * unscaled + (1 - kept) * unscaled / model.rope_factor


def _yarn_pair(model: ModelConfig, rotations: float) -> float:
    """Which pair rotates so often over the original length, between whole pairs."""
    assert model.rope_original_seq_len is not None
    turn = model.rope_original_seq_len / (2 * math.pi * rotations)
    return model.head_dim * math.log(turn) / (2 * math.log(model.rope_theta))
