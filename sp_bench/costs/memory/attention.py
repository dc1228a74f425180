"""What each method holds around its attention. Elements are of one token of a rank."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.memory import rings


class Form(NamedTuple):
    """What a method holds, where more than one rank shares a sequence."""

    # Where ranks are more than heads of keys, each has a copy of one.
    copies_kv: bool = False
    # The output by heads, for the method's backward, beside that by tokens, for the projection after it.
    keeps_output_twice: bool = False
    # Elements of the output's gradient, of q, k, v and of what the kernel works on, while it runs backward. None: not
    # known, so that it is taken for an exchange of heads.
    backward: Callable[[TrialConfig], float] | None = None


def attention_elements(config: TrialConfig) -> float:
    """Beside what the layer keeps, while the kernel of its attention runs backward. That is the most where an MLP in
    tiles leaves its width out, or is narrow."""
    model, kept = config.model, config.workload.activation_checkpointing
    hidden, (q, kv) = model.hidden_size, _widths(config)
    # Made again before the kernel runs: its inputs, what norms made q and k of, and the layer's normed input.
    # `selective` keeps the kernel's inputs, and makes what is before them again after the kernel.
    again = hidden + q + 2 * kv + (q + kv if model.qk_norm else 0)
    if kept in (None, "none", "selective", "selective_mlp"):
        again = 0
    output = q if kept == "full" else 0
    backward = _form(config).backward or _by_heads
    return hidden + again + output + (backward(config) if config.sp_size > 1 else _alone(config))


def second_output_elements(config: TrialConfig) -> int:
    """The output by heads, where a method keeps it beside the one by tokens; 0 for others."""
    return _widths(config)[0] if _form(config).keeps_output_twice and config.sp_size > 1 else 0


def kept_elements(config: TrialConfig) -> int:
    """q, k, v and the output, as the kernel takes and gives them; and the output by tokens, where that is another."""
    return 2 * _widths(config)[0] + 2 * _kv_by_heads(config) + second_output_elements(config)


def _kv_by_heads(config: TrialConfig) -> int:
    """Keys, or values, as the kernel takes them."""
    model, degree = config.model, config.method.ulysses_degree or config.sp_size
    heads = max(model.num_kv_heads, degree) if _form(config).copies_kv else model.num_kv_heads
    return heads * model.head_dim


def is_known(config: TrialConfig) -> bool:
    """Whether it is known what the method holds in its backward."""
    return _form(config).backward is not None


def _form(config: TrialConfig) -> Form:
    return FORMS.get(config.method.name, Form())


def _widths(config: TrialConfig) -> tuple[int, int]:
    """(elements per token of all query heads, of all key heads)."""
    model = config.model
    return model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim


def _sums_elements(config: TrialConfig, q: float, kv: float) -> float:
    """Where the kernel adds up dk and dv, of a key: of each query head in the trial's dtype. FlashAttention-3 and -4 do
    it of each key head in fp32, and need no place for it where these are as many."""
    if config.kernel.name in ("flash_attn_3", "flash_attn_4"):
        return 4 * kv if q > kv else 0
    return 2 * q


def _alone(config: TrialConfig) -> float:
    """Gradients of the output, q, k and v, and what the kernel adds dq (in fp32), dk and dv up in."""
    q, kv = _widths(config)
    return 4 * q + 2 * kv + _sums_elements(config, q, kv)


def _by_heads(config: TrialConfig) -> float:
    """The output's gradient is there by heads and by tokens."""
    (q, _), kv = _widths(config), _kv_by_heads(config)
    return 5 * q + 2 * kv + _sums_elements(config, q, kv)


def _upipe(config: TrialConfig) -> float:
    """The gradients by tokens, and what the kernel has of one stage's heads, with their q, dq, output and its gradient.
    Keys and values come by KV heads. Where several stages read the same ones, they share them, and fp32 sums of dk and
    dv."""
    model, size, (q, kv) = config.model, config.sp_size, _widths(config)
    kv_heads = max(model.num_kv_heads, size)  # replicated where ranks are more
    stages, mine = config.method.head_stages or model.num_heads // size, kv_heads // size
    at_hand = 2 * kv_heads * model.head_dim / min(stages, mine)
    sums = _sums_elements(config, q / stages, at_hand / 2)
    return 2 * q + 2 * kv + 6 * q / stages + sums + at_hand + (2 * at_hand if stages > mine else 0)


def _all_gather(config: TrialConfig) -> float:
    """Keys and values of all ranks, and at the largest run of queries the gradients of all that they see. Of several
    groups of heads, the next one's keys and values arrive and the last one's gradients leave meanwhile."""
    model, size, (q, kv) = config.model, config.sp_size, _widths(config)
    groups = -(-model.num_kv_heads // (config.method.head_stride or model.num_kv_heads))
    at_once = (config.method.head_stride or model.num_kv_heads) / model.num_kv_heads
    # of one rank's tokens; in zigzag order its last run is half of them, and only its own last chunk comes later
    queries, keys = (0.5, size - 0.5) if config.method.layout == "zigzag" else (1, size - 1)
    sums = 2 * q * queries + _sums_elements(config, q, kv) * keys
    # messages, each with a rank's own part; and what the group has of dq, which goes into that of all heads
    beside = min(groups - 1, 2) * 2 * kv * (size + 1) + (q if groups > 1 else 0)
    return 2 * q + 4 * kv + at_once * (2 * kv * (size + keys) + sums + beside)


def _ring(config: TrialConfig) -> float:
    q, kv = _widths(config)
    return q + rings.backward_elements(q, kv, _sums_elements(config, q, kv), config.sp_size, config.method.layout)


def _double_ring(config: TrialConfig) -> float:
    """A step also has the shard that goes to the next window, and what was found of the one at hand."""
    q, kv = _widths(config)
    sums = _sums_elements(config, q, kv)
    return q + rings.backward_elements(q, kv, sums, config.sp_size, config.method.layout, beside_step=4 * kv)


FORMS: Mapping[str, Form] = {
    "single": Form(backward=_alone),
    "ulysses": Form(copies_kv=True, keeps_output_twice=True, backward=_by_heads),
    "upipe": Form(backward=_upipe),  # its backward sends the output again, from where it lies by tokens
    "all_gather": Form(backward=_all_gather),
    "ring": Form(backward=_ring),
    "double_ring": Form(backward=_double_ring),
    "usp": Form(copies_kv=True, keeps_output_twice=True),
    "yunchang": Form(keeps_output_twice=True),
    # Their exchange and their kernel are functions of their own in autograd. So the output's gradient by tokens is gone
    # when the kernel runs on that by heads.
    "deepspeed_ulysses": Form(keeps_output_twice=True, backward=_alone),
    "deepspeed_ulysses_hf": Form(backward=_alone),
}
