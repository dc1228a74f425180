"""Products of the layers' matrices in FP8 by torchao's recipes, forward and backward.

Both factors of each product are scaled to the range of an FP8 type and rounded to it, with one scale for each row
(float8_rowwise: e4m3, scales are powers of two) or for each tensor (float8_tensorwise: e4m3, and e5m2 for gradients of
outputs). Parameters, gradients and activations keep their dtypes.

Embedding and head stay in the trial's dtype, as in torchtitan's recipes: the head's rounding errors would reach the
loss directly, and a lookup multiplies nothing.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import gathers_float8
from sp_bench.measure import ledger
from sp_bench.training.model import Decoder


def convert(decoder: Decoder, config: TrialConfig) -> None:
    """Have the linear modules of all layers multiply in FP8. Before FSDP: where it gathers FP8, parameters are tensors
    that know how."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    recipe = Float8LinearConfig.from_recipe_name(config.workload.linear_dtype.removeprefix("float8_"))
    recipe = replace(recipe, enable_fsdp_float8_all_gather=gathers_float8(config))
    for block in decoder.blocks:
        convert_to_float8_training(block, config=recipe)


def scale_gathered(decoder: Decoder) -> None:
    """Compute the scales of parameters that FSDP gathers in FP8, over all ranks, at one all_reduce. They hold until the
    next update."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # pyright: ignore[reportMissingImports]

    with ledger.phase("other"):
        precompute_float8_dynamic_scale_for_fsdp(decoder)


def master(shard: Tensor) -> Tensor:
    """The values of a rank's part of a parameter, in the same memory: of one that is gathered in FP8, what is cast."""
    return getattr(shard, "_tensor", shard)


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x [n,K] in e4m3 times the transpose of w [N,K] in e4m3 or e5m2, with scales of 1, in bf16. The product alone."""
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
