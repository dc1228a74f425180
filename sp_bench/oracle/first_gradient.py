"""The gradients that this rank's optimizers get in the first of the measured steps, against those of the trial whose
proof this one relies on: weights and text are the same, so only rounding may differ.

Of each tensor a sample of elements is kept as its norm and its products with a few vectors of signs, whose differences
are on average as large as the difference of the samples.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.oracle.full_depth import SAMPLE
from sp_bench.oracle.training_step import TOLERANCES, Finding, worst_of_ranks
from sp_bench.training.train import Tick

NUM_SIGNS = 4  # products of a tensor's sample
BUDGET, HALF_BUDGET = 0.01, 0.25  # relative difference; the second in half precision, where kernels add in any order
FLOAT8_BUDGET = 0.45  # where products are in FP8: what kernels add otherwise is rounded to other FP8 numbers
NOISE = 0.01  # of the root mean square over all tensors: what a gradient that is mathematically zero may have
Sketch = Sequence[float]  # number of elements, norm, products


class FirstGradient:
    """Watches the first step between ticks. The order of the tensors is that in which optimizers update them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._num_ticks = device, 0
        self.sketches: list[Sketch] = []  # of this rank

    @contextmanager
    def watched(self, tick: Tick) -> Iterator[Tick]:
        """Yields what the engine is to call instead of `tick`."""
        pending: list[tuple[int, Tensor]] = []
        signs = _signs(self._device)  # before the steps: what the hook does must not make the host wait

        def before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self._num_ticks == 1:
                given = (each.grad for group in optimizer.param_groups for each in group["params"])
                local = (g.to_local() if isinstance(g, DTensor) else g for g in given if g is not None)
                pending.extend((gradient.numel(), _sketch(gradient, signs)) for gradient in local)

        def ticking() -> bool | None:
            is_last = tick()
            self._num_ticks += 1
            return is_last

        hook = register_optimizer_step_pre_hook(before_update)
        try:
            yield ticking
        finally:
            hook.remove()
        self.sketches = [[float(f"{number:.6g}") for number in (numel, *sketch.tolist())] for numel, sketch in pending]

    def compared(self, config: TrialConfig, grad_norm: float, proof: Mapping[str, Any]) -> Finding:
        """The worst difference of any rank from the same rank of the trial that left `proof`; the same on every rank.

        grad_norm: of the first step, as the engine reports it. Clipping hides from the optimizer what it is.
        """
        budget = BUDGET if config.dtype in TOLERANCES else HALF_BUDGET
        budget = budget if config.workload.linear_dtype == "model" else FLOAT8_BUDGET
        error, number = max(_errors(self.sketches, proof["gradients"][dist.get_rank()]), default=(math.inf, 0))
        of_norm = abs(grad_norm / proof["grad_norm"] - 1)
        what: Prose = "the gradient norm" if of_norm > error else f"the gradient of tensor {number} of the optimizer"
        error = max(error, of_norm)
        message: Prose = (
            f"{what} in the first step differs from that of the trial whose proof this one relies on by {error:.3g} "
            f"(relative), budget {budget:.3g}"
        )
        return worst_of_ranks({"gradient": Finding(error, budget, message)}, ("gradient",))["gradient"]


def _errors(got: Sequence[Sketch], want: Sequence[Sketch]) -> Iterator[tuple[float, int]]:
    """The relative difference of each tensor, and its number."""
    total, squares = sum(each[0] for each in want), sum(each[1] ** 2 for each in want)
    for number, (mine, other) in enumerate(zip(got, want, strict=False)):
        size = other[1] + NOISE * math.sqrt(squares / total * other[0])
        differences = [a - b for a, b in zip(mine[2:], other[2:], strict=True)]
        difference = max(abs(mine[1] - other[1]), math.hypot(*differences) / math.sqrt(NUM_SIGNS))
        yield (difference / size if size else 0.0), number
    if [each[0] for each in got] != [each[0] for each in want]:
        yield math.inf, min(len(got), len(want))


def _sketch(gradient: Tensor, signs: Tensor) -> Tensor:
    """The norm of a sample and its products with `signs`, on the gradient's device."""
    flat = gradient.detach().flatten()
    # DeepSpeed's buffers have gaps, which hold whatever the memory held
    sample = flat[:: max(-(-flat.numel() // SAMPLE), 1)].double().nan_to_num(0.0, 0.0, 0.0)
    return torch.cat([sample.norm()[None], signs[:, : sample.numel()] @ sample])


def _signs(device: torch.device) -> Tensor:
    """[NUM_SIGNS,SAMPLE], equal in every process. Not kept: they would lie in the next trial's memory."""
    drawn = torch.randint(2, (NUM_SIGNS, SAMPLE), generator=torch.Generator().manual_seed(0))
    return (2 * drawn - 1).double().to(device)
