"""Proves a step whose products are in FP8, which is lossy: its error is that of rounding to FP8, and no more.

The engine's gradients are compared, parameter by parameter, with those of one process that computes in the trial's
dtype without FP8, and with those of one that rounds the factors of each product to FP8 by plain casts (`quantised`).
How far these two are from each other is what rounding costs. The engine may be twice as far from the first. It is
nearer to the second: the two round alike, but for what their inputs differ by.

It is the second step that is compared. Between the steps all weights are multiplied by GROWTH, and the second has
another text, so a scale that was kept from the first shows.

The step without FP8 is proven in fp32 (`training_step`), where rounding hides nothing.
"""

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from sp_bench import engines
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.oracle import decoder, one_process
from sp_bench.oracle.training_step import (
    Finding,
    Findings,
    full_precision,
    proof_config,
    proof_seq_len,
    relative,
    require,
    worst_of_ranks,
)
from sp_bench.training import text
from sp_bench.training.train import Part

GROWTH = 1.5  # exact in every dtype
NO_RATE = 1e-30  # of the optimizer: an update that moves no weight
MODEL_FACTOR, SHARE = 2.0, 0.75  # of what rounding to FP8 costs: the error against no FP8, and against plain casts
KINDS = ("float8_grad_error", "quantised_grad_error")


def prove(config: TrialConfig, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Returns row columns. Every rank of the world calls it.

    Raises:
        Incorrect: an error is above its budget; the message is the same on every rank.
    """
    small = proof_config(config)
    workload = replace(small.workload, learning_rate=NO_RATE, max_grad_norm=None, fit=False, single_step=False)
    small = replace(small, workload=workload)
    first, second = (
        text.sequences(begin, config.num_sequences, proof_seq_len(config)) for begin in (config.num_sequences, 0)
    )
    exact, plain = _references(small, second, device) if dist.get_rank() == 0 else ({}, {})
    comparison = Comparison(exact, plain, torch.finfo(getattr(torch, config.dtype)).eps)
    with comparison.growing():
        engines.get(config.engine.name).run(
            small, [first, second], mesh, device, lambda: None, token_losses=0, watch=comparison.watch
        )
    found = worst_of_ranks(comparison.found, KINDS)
    require(found)
    return {kind: finding.column() for kind, finding in found.items()}


def _references(config: TrialConfig, sequences: Tensor, device: torch.device) -> list[dict[str, Tensor]]:
    """The gradients of one process without FP8 and with it."""
    weights = one_process.initial(config, decoder.shapes(config.model), device)
    grown = {name: weight * GROWTH for name, weight in weights.items()}
    computed, without = getattr(torch, config.dtype), replace(config.workload, linear_dtype="model")
    with full_precision():
        return [
            one_process.of_weights(each, grown, sequences.to(device), computed).of
            for each in (replace(config, workload=without), config)
        ]


class Comparison:
    """Of the gradients of the second step; on rank 0, which has the references."""

    def __init__(self, exact: dict[str, Tensor], plain: dict[str, Tensor], eps: float) -> None:
        self._exact, self._plain, self._eps = exact, plain, eps
        self._steps = 0
        self.found: Findings = {}

    @contextmanager
    def growing(self) -> Any:
        """Multiplies all weights by GROWTH after the first step of each optimizer."""

        def grow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self._steps == 1:
                with torch.no_grad():
                    for updated in (each for group in optimizer.param_groups for each in group["params"]):
                        updated.mul_(GROWTH)

        hook = register_optimizer_step_post_hook(grow)
        try:
            yield
        finally:
            hook.remove()

    def watch(self, parts: Iterable[Part]) -> None:
        """The engine calls it in each optimizer step, before it clips."""
        self._steps += 1
        for part in parts:
            if self._steps == 2 and self._exact:
                self._compare(part)

    def _compare(self, part: Part) -> None:
        exact, plain = self._exact[part.name], self._plain[part.name]
        cost = relative(plain, exact)
        for kind, reference, want, budget in (
            (KINDS[0], "the step without FP8", exact, MODEL_FACTOR * (cost + self._eps)),
            (KINDS[1], "the step quantised by plain casts", plain, SHARE * cost + 2 * self._eps),
        ):
            error = relative(part.whole, want)
            message: Prose = (
                f"the gradient of {part.name} in FP8 differs from {reference} by {error:.3g} (relative), budget "
                f"{budget:.3g}; rounding to FP8 makes a difference of {cost:.3g}"
            )
            found = Finding(error, budget, message, part.name)
            if kind not in self.found or found.excess > self.found[kind].excess:
                self.found[kind] = found
