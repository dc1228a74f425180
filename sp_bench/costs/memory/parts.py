"""What the estimates of all engines share."""

import math
from typing import NamedTuple

from sp_bench.config.shape import ELEMENT_BYTES
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import num_parameters

FUSED = ("compiled", "liger")  # workload.model_code
FP8, BF16, FP32 = 1, 2, 4


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


def local_tokens(config: TrialConfig) -> float:
    """Tokens of one micro-batch on one rank."""
    return config.batch_size * config.seq_len / config.sp_size


def stored_bytes(config: TrialConfig) -> int:
    """Bytes of all parameters once: fp32, or fp64 in trials of that dtype."""
    return num_parameters(config.model) * stored_element_bytes(config)


def stored_element_bytes(config: TrialConfig) -> int:
    return max(ELEMENT_BYTES[config.dtype], FP32)


def around_logits(config: TrialConfig) -> float:
    """The last hidden states, what their norm keeps, and their gradients."""
    return 5 * local_tokens(config) * config.model.hidden_size * ELEMENT_BYTES[config.dtype]


def tile_tokens(config: TrialConfig) -> float:
    """Tokens whose logits are there at once."""
    tokens = local_tokens(config)
    return min(config.workload.loss_tile_tokens or tokens, tokens)


def head_elements(config: TrialConfig) -> int:
    return config.model.vocab_size * config.model.hidden_size


def page_locked(num_bytes: float) -> int:
    """What torch's allocator of page-locked memory takes for a tensor: the next power of two."""
    return 1 << (math.ceil(num_bytes) - 1).bit_length() if num_bytes else 0
