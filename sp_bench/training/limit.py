"""What a training step would take if its kernels were all that it did: the limit that `share_of_limit` is of.

Attention forward and backward once, and the products of each matrix, forward and for both gradients: nothing is
recomputed, nothing is pointwise, nothing is sent. Each kernel is timed alone, at the shapes of one rank of the step and
on its device, right after the timed steps. Timed in short bursts, limits of one step differed by 10% (h200x1_engines):
a GPU's clocks seem not to have settled. So each kernel runs for a while before it is timed.

That takes 2.5 s on an H200. What one trial has found holds for later ones of the same options and device, as long as
the largest product takes as long as it did.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from sp_bench import kernels
from sp_bench.attention.masked import of_shape
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import block_shapes
from sp_bench.measure.timing import release_memory, time_steps
from sp_bench.training import float8

REPETITIONS = 3
SETTLING_MS = 300  # of a kernel on a GPU, before it is timed
ROWS = 8192  # of a matrix product; that of more tokens takes so many times longer
AS_FAST = 0.03  # relative difference of the head's products, below which a device is as fast as it was


class Limit(NamedTuple):
    ms: float  # of this rank's share of one step
    head_ms: float  # of the products of the head alone, in one micro-batch


def measured(config: TrialConfig, device: torch.device, earlier: Limit | None = None) -> Limit:
    """`earlier` is what this rank of a trial of the same options and device has measured. It is returned if the head's
    products take as long now."""
    release_memory(device)
    model, tokens = config.model, config.batch_size * config.seq_len / config.sp_size
    head_ms = _products_ms((model.vocab_size, model.hidden_size), config, tokens, device)
    if earlier is not None and abs(head_ms / earlier.head_ms - 1) < AS_FAST:
        return earlier
    shapes = (shape for kind in model.kinds for shape in block_shapes(model, kind).values())
    matrices = Counter(shape for shape in shapes if len(shape) == 2)  # of all layers
    in_float8 = config.workload.linear_dtype != "model"
    of_products = (
        number * _products_ms(shape, config, tokens, device, in_float8=in_float8) for shape, number in matrices.items()
    )
    layers = sum(of_products) + sum(
        number * _attention_ms(config, kind, device) for kind, number in config.kinds.items()
    )
    release_memory(device)
    return Limit(config.workload.num_micro_batches * (layers + head_ms), head_ms)


def _attention_ms(config: TrialConfig, kind: str, device: torch.device) -> float:
    """The kernel alone on whole sequences of a rank's share of the heads, forward and backward."""
    ranks, shape, named = config.sp_size, config.attention_shape(config.seq_len, kind), config.kernel_of(kind)
    share = math.gcd(ranks, shape.num_heads, shape.num_kv_heads)  # so each part has whole groups of heads
    part = replace(shape, num_heads=shape.num_heads // share, num_kv_heads=shape.num_kv_heads // share)
    part = replace(part, kv_lora_rank=None, qk_rope_head_dim=None)  # up-projections are products of their own
    new = partial(torch.randn, dtype=getattr(torch, config.dtype), device=device)
    drawn, scale = [new(*size) for size in part.sizes(config.seq_len)], shape.head_dim**-0.5
    if shape.gated_delta:
        q, k, v, g, beta, dout = drawn
        leaves = [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, -g.float().abs(), beta.sigmoid())]
        rule = cast(kernels.DeltaKernel, kernels.get(named))

        def call() -> None:
            torch.autograd.grad(rule.attend(*leaves, state=None, scale=scale)[0], leaves, dout)

    else:
        (q, k, v, dout), kernel = drawn, of_shape(kernels.get(named), shape)
        mask = {"causal": True, "scale": scale}

        def call() -> None:
            out, lse = kernel.forward(q, k, v, **mask)
            kernel.backward(dout, q, k, v, out, lse, **mask)

    return _alone_ms(call, device) * share / ranks


def _products_ms(
    shape: tuple[int, ...], config: TrialConfig, tokens: float, device: torch.device, *, in_float8: bool = False
) -> float:
    """y = x w', dx = dy w, dw = dy' x of a matrix w [out,in] and x [tokens,in]. In FP8 nothing is rounded: factors come
    as the products take them."""
    rows = min(ROWS, max(int(tokens), 1))
    new = partial(torch.randn, dtype=getattr(torch, config.dtype), device=device)
    w, x, dy = new(*shape), new(rows, shape[1]), new(rows, shape[0])

    def call() -> tuple[Tensor, ...]:
        return x @ w.T, dy @ w, dy.T @ x

    return _alone_ms(float8.products(x, w, dy) if in_float8 else call, device) * tokens / rows


def _alone_ms(call: Callable[[], object], device: torch.device) -> float:
    call()
    if device.type == "cuda":
        (once_ms,), *_ = time_steps(call, 1, device)
        time_steps(call, max(1, round(SETTLING_MS / max(once_ms, 0.1))), device)
    return statistics.median(time_steps(call, REPETITIONS, device)[0])
