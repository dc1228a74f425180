"""Observes the optimizer of the measured steps once more, in the one that is not timed, or with `workload.single_step`
in the only one: it must still be the formula's, with the trial's learning rate, and must have taken every step.

A sample of parameters and moments is read before and after that step, outside the timed window. Inside it, one of the
gradient is copied as the optimizer gets it.

What it finds belongs to this execution: every trial checks it again.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.measure.timing import Schedule
from sp_bench.oracle.full_depth import SAMPLE
from sp_bench.oracle.training_step import Finding, Findings, compare_update, held, worst_of_ranks
from sp_bench.oracle.update import PARAMETER
from sp_bench.training import train
from sp_bench.training.train import Tick

COUNTED = 64  # elements of a moment, by which steps are told apart


@dataclass
class Seen:
    """A sample of one tensor that an optimizer updates."""

    optimizer: torch.optim.Optimizer
    updated: Tensor
    before: dict[str, Tensor]  # parameter and moments
    received: Tensor | None = None  # the gradient


class StepCount:
    """Counts the steps that an optimizer has taken on one tensor of this rank, the smallest. Where the optimizer counts
    them itself, as AdamW does, nothing is read. SGD does not: each of its steps changes the moments, of which a few
    elements are copied on the device before the next one."""

    def __init__(self, workload: WorkloadConfig) -> None:
        self._workload = workload
        self._counted: tuple[torch.optim.Optimizer, Tensor] | None = None
        self._moments: list[Tensor] = []

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        updated = [each for group in optimizer.param_groups for each in group["params"]]
        if self._counted is None:
            mine = [each for each in updated if each.grad is not None and _local(each).numel()]
            self._counted = (optimizer, min(mine, key=torch.numel)) if mine else None
        elif any(each is self._counted[1] for each in updated):
            self._note()

    def _note(self) -> None:
        assert self._counted is not None
        optimizer, updated = self._counted
        _, *moments = held(optimizer, updated, self._workload).values()
        if moments and "step" not in optimizer.state[updated]:
            self._moments.append(_sample(moments[0], COUNTED))

    def taken(self) -> int | None:
        """After the last step. None: the optimizer counts them itself, or this rank updates nothing."""
        if self._counted is None or "step" in self._counted[0].state.get(self._counted[1], {}):
            return None
        self._note()
        at_first = map(torch.zeros_like, self._moments[:1])
        return sum(not torch.equal(*pair) for pair in pairwise([*at_first, *self._moments]))


class LastUpdate:
    """Wraps the ticks of the measured steps. Tensors become known in warm-up steps, or in the first step."""

    def __init__(self, config: TrialConfig, schedule: Schedule) -> None:
        self._workload, self._stored = config.workload, train.stored_dtype(config.dtype)
        self._schedule = schedule
        self._seen: dict[int, Seen] = {}  # by their ids
        self._num_ticks = 0  # so the number of the step that runs
        self._steps = StepCount(config.workload)
        self._found: Findings = {}

    @contextmanager
    def watched(self, tick: Tick) -> Iterator[Tick]:
        """Yields what the engine is to call instead of `tick`."""
        hook = register_optimizer_step_pre_hook(self._before_update)

        def ticking() -> bool | None:
            next_is_last = self._num_ticks + 1 == self._schedule.last
            if next_is_last and self._workload.single_step:  # `tick` begins the timed window
                self._read()
            is_last = tick()
            self._num_ticks += 1
            if next_is_last and not self._workload.single_step:  # `tick` has ended it
                self._read()
            if is_last:
                self._compare()
            return is_last

        try:
            yield ticking
        finally:
            hook.remove()
            self._seen.clear()

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._num_ticks:  # before the first an engine may only make moments
            self._steps.before_update(optimizer)
        if self._num_ticks > max(self._workload.warmup_steps, 1) and self._num_ticks != self._schedule.last:
            return  # a timed step; the tensors are known
        for updated in (each for group in optimizer.param_groups for each in group["params"]):
            seen = self._seen.setdefault(id(updated), Seen(optimizer, updated, {}))
            if self._num_ticks == self._schedule.last and updated.grad is not None:
                seen.received = _sample(updated.grad)

    def _read(self) -> None:
        for seen in self._seen.values():
            found = held(seen.optimizer, seen.updated, self._workload)
            seen.before = {key: _sample(tensor) for key, tensor in found.items()}

    def _compare(self) -> None:
        counted = self._steps.taken()
        for number, seen in enumerate(self._seen.values()):
            name = f"tensor {number} of the optimizer"
            for error, budget, message in self._errors(name, seen, counted):
                whole: Prose = f"in the step that is not timed: {message}"
                found = Finding(error, budget, whole, name)
                if "update" not in self._found or found.excess > self._found["update"].excess:
                    self._found["update"] = found

    def _errors(self, name: str, seen: Seen, counted: int | None) -> Iterator[tuple[float, float, str]]:
        """counted: steps of an optimizer that does not count them itself."""
        last = self._schedule.last
        assert last is not None, "there was no last step"
        if seen.received is None or not seen.before:
            missed: Prose = f"step {last} updates no {name}"
            yield math.inf, 0, missed
            return
        taken = seen.optimizer.state.get(seen.updated, {}).get("step", counted)
        if taken is not None and int(taken) != last:
            fewer: Prose = f"the optimizer took {int(taken)} of {last} steps on {name}"
            yield math.inf, 0, fewer
        if last == 1 and (left := [key for key, x in seen.before.items() if key != PARAMETER and x.any()]):
            old: Prose = f"before the only step {' and '.join(left)} of {name} are not zero"
            yield math.inf, 0, old
        after = held(seen.optimizer, seen.updated, self._workload)
        before, after = (
            {key: tensor.double() for key, tensor in tensors.items()}
            for tensors in (seen.before, {key: _sample(tensor) for key, tensor in after.items()})
        )
        # DeepSpeed's buffers have gaps, whose weights are whatever the memory held. No gradient reaches them.
        real = before[PARAMETER].isfinite() | (seen.received != 0)
        before, after = ({key: tensor[real] for key, tensor in tensors.items()} for tensors in (before, after))
        if real.any():
            yield from compare_update(
                *(self._workload, self._stored, seen.optimizer, name, seen.updated.dtype, last),
                *(seen.received[real].double(), before, after),
            )

    def findings(self) -> Findings:
        """The worst of any rank; the same on every rank."""
        return worst_of_ranks(self._found, ("update",))


def _sample(tensor: Tensor, most: int = SAMPLE) -> Tensor:
    """A copy of evenly spread elements of this rank's part."""
    flat = _local(tensor).detach().flatten()
    return flat[:: max(-(-flat.numel() // most), 1)].clone()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
