"""What layers with the gated delta rule hold, by the kernels of fla-core 0.6.0.

By heads a rank computes all tokens of its heads, by states its own tokens of all heads; either is as many elements of a
token of a rank. By states values are twice as wide: half of them are zeros, which give the transition of the state.
"""

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory.parts import FP32, local_tokens

CHUNK = 64  # tokens; of each chunk the kernels keep a matrix, and in the backward they hold the state before it


def keys(config: TrialConfig) -> int:
    """Elements of a token's keys, and of its queries."""
    return (config.model.delta_kv_heads or 0) * _head_dim(config)


def values(config: TrialConfig) -> int:
    """Elements of a token's values, and of its output."""
    return _heads(config) * _head_dim(config)


def kept_elements(config: TrialConfig) -> float:
    """Inputs but for the gate, the kernel's output and a matrix of each head and chunk; and the output by tokens, where
    that is another tensor."""
    outputs = _width(config) + (config.sp_size > 1)
    return 2 * keys(config) + (_width(config) + outputs) * values(config) + (1 + CHUNK) * _heads(config)


def kept_in_fp32_bytes(config: TrialConfig) -> float:
    """The gate, as it came and summed up in each chunk; and states."""
    matrix = FP32 * config.batch_size * _head_dim(config) ** 2 * _heads(config)  # a state of each head
    of_gate = 2 * FP32 * _heads(config) * local_tokens(config)
    if not _by_states(config):
        return of_gate + matrix / config.sp_size  # after the last token
    # States and transitions before the first token and after the last one; those of all ranks, and the states that the
    # last rank makes of them; and the state before its tokens, rounded. From rank to rank only the latter travels.
    of_ranks = 3 * config.sp_size - 1 if config.method.states == "gather" else 1
    return of_gate + (4 + of_ranks + 0.5) * matrix


def backward_elements(config: TrialConfig) -> float:
    """Elements of a token while the kernel runs backward, beside what the layer keeps: the gradient of the residual
    stream; w, u and the new values, made again, and the states before all chunks; the gradients of all of these, of the
    output and of values; two of keys and one of queries, of each head of values, or summed where several share
    theirs."""
    wide = _width(config) * values(config)
    states = wide * _head_dim(config) / CHUNK
    of_keys = 3 * keys(config) if keys(config) < values(config) else 2 * keys(config)
    return config.model.hidden_size + 5 * wide + 2 * states + 3 * values(config) + of_keys


def _by_states(config: TrialConfig) -> bool:
    return config.method.states is not None and config.sp_size > 1


def _width(config: TrialConfig) -> int:
    """How many times as wide values are in the kernel."""
    return 2 if _by_states(config) else 1


def _heads(config: TrialConfig) -> int:
    return config.model.delta_heads or 0


def _head_dim(config: TrialConfig) -> int:
    return config.model.delta_head_dim or 0
