"""Products of the layers' matrices in FP8 by torchao's recipes, forward and backward.

Both factors of each product are scaled to the range of an FP8 type and rounded to it, with one scale for each row
(float8_rowwise: e4m3, scales are powers of two) or for each tensor (float8_tensorwise: e4m3, and e5m2 for gradients of
outputs). Parameters, gradients and activations keep their dtypes.

Embedding and head stay in the trial's dtype, as in torchtitan's recipes: the head's rounding errors would reach the
loss directly, and a lookup multiplies nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from sp_bench.config.trial import TrialConfig
from sp_bench.measure import ledger
from sp_bench.training.model import Decoder

Module = TypeVar("Module", bound=nn.Module)


def converted(module: Module, config: TrialConfig, *, gathers: bool) -> Module:
    """`module`, with its linear modules in FP8. gathers: their parameters become tensors that FSDP, which comes after,
    gathers in FP8."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    recipe = Float8LinearConfig.from_recipe_name(config.workload.linear_dtype.removeprefix("float8_"))
    recipe = replace(recipe, enable_fsdp_float8_all_gather=gathers)
    return cast(Module, convert_to_float8_training(module, config=recipe))


def scale_gathered(decoder: Decoder) -> None:
    """Compute the scales of parameters that FSDP gathers in FP8, over all ranks, at one all_reduce. They hold until the
    next update."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # pyright: ignore[reportMissingImports]

    with ledger.phase("other"):
        precompute_float8_dynamic_scale_for_fsdp(decoder)


def master(shard: Tensor) -> Tensor:
    """The values of a rank's part of a parameter, in the same memory: of one that is gathered in FP8, what is cast."""
    return getattr(shard, "_tensor", shard)


def products(x: Tensor, w: Tensor, dy: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """What computes y = x w', dx = dy w and dw = dy' x of x [n,K], w [N,K] and dy [n,N] in e4m3, with scales of 1, in
    bf16: the products alone, of factors that are rounded and laid out already. As in the recipes, that of the forward
    adds up faster."""
    one = torch.ones((), device=x.device)
    factors = [each.to(torch.float8_e4m3fn).contiguous() for each in (x, w, dy, w.t(), dy.t(), x.t())]

    def call() -> tuple[Tensor, ...]:
        pairs = zip(factors[0::2], factors[1::2], strict=True)
        return tuple(
            torch.ops.aten._scaled_mm.default(
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=not number
            )
            for number, (a, b) in enumerate(pairs)
        )

    return call
