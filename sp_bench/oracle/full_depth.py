"""Proves training steps with all layers, at the reduced length, where one process may not hold the model.

The first step's losses are compared with one process, which has one layer's weights at a time.

The engine takes UPDATES steps with the trial's own learning rate and clipping. What its optimizer makes of each
gradient is compared with the formula, in a sample of elements (`training_step.Observer`). Then the optimizer stands
still, and the weights w move by a small change D against the gradient g. The loss L must fall as the gradients say:

    L(w + D) - L(w) = <g(w) + g(w + D), D> / 2

This holds but for the third order of D, and it needs no reference: a gradient that is wrong in any layer says another
fall than the forward shows. D moves the elements of a parameter by one size, and each parameter so far that all add as
much to the fall: the gradients of norms, biases and sinks, which are few, count as those of matrices do.
Where it does not hold, a D a 16th as long tells a third order, which is then 1/256, from a wrong gradient, which is as
wrong as before.

What it finds belongs to the code, the options and the machine: one trial's proof holds for others of the same.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.flags import MAX_FALL_BUDGET
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import one_process
from sp_bench.oracle.training_step import (
    PROOF_LAYERS,
    TOLERANCES,
    Finding,
    Findings,
    Observer,
    dot,
    worst_of_ranks,
)
from sp_bench.training.train import Part, StepResult

UPDATES = 5  # of the optimizer; the proof of few layers sees three, and the last two of these are one odd and one even
SAMPLE = 2**12  # elements of a rank's part of a parameter that are compared: there are hundreds of parameters
MOST_MOVED = 2.0**-7  # of an element, where a parameter's gradient is almost zero; weights of norms are 1
FALL = 0.02  # nats that the loss falls by, within a factor of 1.42, if the gradient is as in the step before
NEARER = 16  # so many times shorter is the second D
# D is kept as whole numbers of 1/LEVELS of its size: a byte for each element. Size and LEVELS are powers of two, as the
# distances between floating-point numbers are, so these are exact. Otherwise all weights of one binade are off alike.
LEVELS = 32
# Right runs of small models in fp32 and fp64 were off by 1.8e-4 at most, of which 7e-5 is the third order.
FALL_TOLERANCE = 1e-3
KINDS = ("zero_gradient", "received", "update")


class Fall(NamedTuple):
    """How far the fall of the loss is off what the gradients say, relative to that. Above MAX_FALL_BUDGET the budget is
    too wide to tell anything."""

    error: float
    budget: float
    message: Prose

    def columns(self) -> dict[str, float]:
        return {"fall_error": self.error, "fall_budget": self.budget}


def check_losses(
    config: TrialConfig, sequences: Tensor, losses: Tensor, labelled: Tensor, device: torch.device
) -> Findings:
    """Compare `losses` [m*D*B,S] of a first step, of the tokens that are `labelled` [S], with one process, which
    computes one layer after the other. The same on every rank."""
    want = torch.zeros_like(losses)
    if dist.get_rank() == 0:
        found = one_process.token_losses(config, sequences, device)
        # either may be without the last token: an engine may have no label for it, and in a pack it has none anyway
        want[:, : found.shape[1]] = found[:, : want.shape[1]]
    dist.broadcast(want, 0)
    error = float((losses - want)[:, labelled].norm() / want[:, labelled].norm())
    budget = TOLERANCES[config.dtype] * max(1.0, config.model.num_layers / PROOF_LAYERS)
    message: Prose = f"the tokens' losses differ from one process by {error:.3g} (relative), budget {budget:.3g}"
    return {"loss": Finding(error, budget, message)}


@dataclass
class Moved:
    """One parameter's change, in this rank's part."""

    levels: Tensor  # int8
    unit: float
    whole_size: float  # sum of the absolute values of its gradient, and of this rank's part of it
    local_size: float
    slopes: list[float]  # <g, D> of this rank's part: before and after


class FullDepth:
    """Watches `num_steps` steps of an engine: `updates` of its optimizer, and two between which the weights move.

    sizes: of each parameter the sum of the elements of its gradient without their signs, about, if there are no updates
    to take them from.
    distance: nats that the loss falls by, about, as the weights move.
    """

    def __init__(
        self,
        config: TrialConfig,
        updates: int = UPDATES,
        sizes: Mapping[str, float] | None = None,
        distance: float = FALL,
    ) -> None:
        self._observer = Observer(config, {}, {}, sample=SAMPLE)
        self._updates, self._distance = updates, distance
        self.num_steps = updates + 2
        self._seen = 0  # steps
        self.sizes = [] if sizes is None else [sizes]  # of the gradients in each step
        self._moved: dict[str, Moved] = {}
        self._zero: Findings = {"zero_gradient": Finding(0.0, 0.0, "")}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Looks at every step of every optimizer of this process."""
        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._seen <= self._updates:
            self._observer.before_update(optimizer)
        else:
            stand_still(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._seen <= self._updates:
            self._observer.after_update(optimizer)

    def watch(self, parts: Iterable[Part]) -> None:
        """The engine calls it in each optimizer step, before it clips."""
        self._seen += 1
        sized = self._sized(parts)
        if self._seen <= self._updates:
            self._observer.watch(sized)
        elif self._seen == self._updates + 1:
            self._move(sized)
        else:
            for part in sized:
                moved = self._moved[part.name]
                moved.slopes.append(moved.unit * dot(part.local, moved.levels))

    def _sized(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The same parts, whose sizes come last in `sizes`."""
        found: dict[str, float] = {}
        for part in parts:
            size = found[part.name] = _size(part.whole)
            if not size > 0:
                message: Prose = f"the gradient of {part.name} in step {self._seen} is {size:.3g}: nothing trains it"
                self._zero = {"zero_gradient": Finding(math.inf, 0.0, message, part.name)}
            yield part
        self.sizes.append(found)

    def _move(self, parts: Iterable[Part]) -> None:
        sizes = self.sizes[-1]  # of the step before
        for part in parts:
            share = self._distance / len(sizes) / (sizes[part.name] or 1e-9)
            _, exponent = math.frexp(math.sqrt(2) * min(share, MOST_MOVED))
            distance = 2.0 ** (exponent - 1)  # of each element
            unit = distance / LEVELS
            updated, gradient = part.updated.detach(), part.local.detach().flatten()
            values = (updated.to_local() if isinstance(updated, DTensor) else updated).view(-1)
            where = part.offset
            if not isinstance(where, Tensor):
                where = slice(where, where + gradient.numel())
            old = values[where].clone()
            values[where] = old - distance * gradient.sign().to(old)
            change = values[where] - old  # rounded as the weights are: of large weights to 0 or more than `distance`
            levels = (change / unit).round_().clamp_(-127, 127).to(torch.int8)
            slopes = [dot(gradient, change)]
            self._moved[part.name] = Moved(levels, unit, _size(part.whole), _size(gradient), slopes)

    def findings(self, results: Sequence[StepResult]) -> Findings:
        """The worst of each kind of any rank; the same on every rank. results: of all steps."""
        return worst_of_ranks(self._zero | self._observer.findings(results[: self._updates]), KINDS)

    def fall(self, before: Tensor, after: Tensor) -> Fall:
        """The same on every rank. before, after: losses of all labelled tokens of all ranks in the last two steps, in
        fp64 [m*D*B,n]."""
        moved = [self._moved[name] for name in sorted(self._moved)]
        mine = torch.tensor([[*each.slopes, each.local_size] for each in moved], dtype=torch.float64)
        sums = mine.to(before.device)
        dist.all_reduce(sums)
        # Replicas have the same parts, and the ranks' parts together are so many wholes.
        copies = sums[:, 2] / torch.tensor([each.whole_size for each in moved]).to(sums)
        start, end = (sums[:, :2] / copies[:, None]).sum(0).tolist()
        predicted, fall = (start + end) / 2, float((after - before).mean())
        error, curvature = abs(fall / (predicted or math.inf) - 1), abs(end / (start or math.inf) - 1)
        # The third order grows with the square of D, and is about 1/12 of the square of what the gradient changes by.
        budget = FALL_TOLERANCE * max(1.0, abs(predicted) / FALL) ** 2 + curvature**2
        message: Prose = f"the loss changes by {fall:.6g} nats where the gradients say {predicted:.6g}"
        return Fall(error, budget, message)


def stand_still(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of the optimizer: let it move no weight. Weight decay is a part of the rate."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0


def require_fall(fall: Fall, where: Prose) -> None:
    """
    Raises:
        Incorrect: it is off by more than its budget, and the budget tells something.
    """
    if fall.budget <= MAX_FALL_BUDGET and not fall.error <= fall.budget:
        raise Incorrect(f"{where}: {fall.message}: off by {fall.error:.3g}, budget {fall.budget:.3g}")


def nearer(first: Fall, second: Fall) -> Fall:
    """The second fall, over a way NEARER times as short, where the first was above its budget or that could tell
    nothing. A third order shrinks with the square of the way, so half as much again as it leaves is in the budget.
    Where a first error above its budget hardly shrinks, the budget is MAX_FALL_BUDGET at most: such a gradient is
    wrong, or another each time."""
    budget = max(second.budget, min(1.5 * first.error / NEARER**2, MAX_FALL_BUDGET))
    shrinks = second.error <= first.error / 2 or first.error <= first.budget
    return second._replace(budget=budget if shrinks else min(budget, MAX_FALL_BUDGET))


def _size(x: Tensor) -> float:
    """The sum of the elements without their signs, in fp64."""
    return dot(x, x.sign())
