"""What an optimizer makes of a gradient, in fp64: the formulas of AdamW and of SGD with momentum.

Each function takes this optimizer step's gradient, and the parameter and its moments before the step, in fp64. It
returns what they must be after the step, and the size that the optimizer's own rounding errors are relative to.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from sp_bench.training.train import BETAS, EPS, MOMENTUM, WEIGHT_DECAY

PARAMETER = "parameter"
ROUNDINGS = 4  # that an error may have, in units in the last place of `Moved.scale`; 2.7 were seen
# Some keep their betas in fp32: torch's fused AdamW on CUDA, DeepSpeed's on CPUs. A beta and 1 - beta are then off by
# up to a quarter of a unit in the last place of 1.
BETA_ERROR = 1 / 4 / ROUNDINGS


class Moved(NamedTuple):
    value: Tensor
    scale: Tensor  # what was added up to it, without signs: terms may cancel, their rounding errors do not


def adamw(step: int, learning_rate: float, gradient: Tensor, before: Mapping[str, Tensor]) -> dict[str, Moved]:
    """step: 1 for the first. Source: arXiv 1711.05101, as torch has it: decay first, and eps outside the root."""
    beta1, beta2 = BETAS
    old, old_square, parameter = before["exp_avg"], before["exp_avg_sq"], before[PARAMETER]
    moment = beta1 * old + (1 - beta1) * gradient
    moment_scale = beta1 * old.abs() + (1 - beta1 + BETA_ERROR) * gradient.abs()
    square = beta2 * old_square + (1 - beta2) * gradient.square()
    unit = learning_rate / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + EPS)
    value = parameter * (1 - learning_rate * WEIGHT_DECAY) - unit * moment
    # half of the relative error of 1 - beta2 comes through the root from `square`, and half from 1 - beta2**step
    kept = parameter.abs() * (1 + learning_rate * WEIGHT_DECAY)
    scale = kept + unit * moment_scale * (1 + BETA_ERROR / (1 - beta2))
    return {
        PARAMETER: Moved(value, scale),
        "exp_avg": Moved(moment, moment_scale),
        "exp_avg_sq": Moved(square, square + BETA_ERROR * gradient.square()),
    }


def sgd(step: int, learning_rate: float, gradient: Tensor, before: Mapping[str, Tensor]) -> dict[str, Moved]:
    old, parameter = before["momentum_buffer"], before[PARAMETER]
    moment = Moved(MOMENTUM * old + gradient, MOMENTUM * old.abs() + gradient.abs())
    moved = Moved(parameter - learning_rate * moment.value, parameter.abs() + learning_rate * moment.scale)
    return {PARAMETER: moved, "momentum_buffer": moment}


FORMULAS: Mapping[str, Callable[..., dict[str, Moved]]] = {"adamw": adamw, "sgd": sgd}
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}  # their names in the optimizer's state
