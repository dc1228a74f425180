"""Proves a step whose products are in FP8, which is lossy: its error is that of rounding to FP8.

The step: the engine's gradients are compared, parameter by parameter, with those of one process that computes in the
trial's dtype without FP8. One process that rounds the factors of each product to FP8 by plain casts (`quantised`) says
what rounding costs, and the engine may be twice as far off. It is not nearer to that process: an input that differs in
its last bit is rounded to another FP8 number here and there, and after a few products all roundings are others.

The products: each shape of a layer, with equal factors on both sides, must be what plain casts make of them, to half of
what rounding costs. So a scale that is another's shows here.

In both it is the second run that is compared. Before it the layers' matrices grow, and it has other inputs, so that a
scale which was kept from the first shows.

Engine megatron has products of its own library, so it has the first alone. That it rounds at all shows in the step's
error, which must not be much smaller than what rounding costs.

The step without FP8 is proven in fp32 (`training_step`), where rounding hides nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from sp_bench import engines
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import block_shapes
from sp_bench.oracle import decoder, one_process, quantised
from sp_bench.oracle.training_step import (
    FLOAT8_EPS,
    Finding,
    Findings,
    full_precision,
    proof_config,
    proof_seq_len,
    relative,
    require,
    worst_of_ranks,
)
from sp_bench.training import float8, model_code, text
from sp_bench.training.train import Part

GROWTH = 4.0  # of the layers' matrices: with the scale of before a quarter of their elements would be cut off
NO_RATE = 1e-30  # of the optimizer: an update that moves no weight
STEP_FACTOR, PRODUCT_FACTOR = 2.0, 0.5  # of what rounding to FP8 costs
GRADIENT_SIZE = 1e-4  # of the random gradients of outputs, about as large as a step's
STEP, PRODUCTS, ROUNDED = "float8_grad_error", "float8_product_error", "rounded"  # the first two are columns
LEAST_SHARE = 0.25  # of what rounding to FP8 costs: a step that is nearer to that without FP8 rounded nothing to it


def prove(config: TrialConfig, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Returns row columns. Every rank of the world calls it.

    Raises:
        Incorrect: an error is above its budget; the message is the same on every rank.
    """
    found: Findings = {}
    for finding in _products(config, device) if config.engine.name == "fsdp2" else ():
        _note(found, PRODUCTS, finding)
    comparison = _second_step(config, mesh, device)
    worst = worst_of_ranks(found | comparison.findings(), (*found, STEP, ROUNDED))
    require(worst)
    return {kind: worst[kind].column() for kind in (*found, STEP)}


def _note(found: Findings, kind: str, finding: Finding) -> None:
    if kind not in found or finding.excess > found[kind].excess:
        found[kind] = finding


def _products(config: TrialConfig, device: torch.device) -> Iterator[Finding]:
    """The error of y = x w', dx and dw of each shape of a layer's matrices, with as many tokens as a rank proves."""
    tokens, dtype = proof_seq_len(config) // config.sp_size, getattr(torch, config.dtype)
    generator = torch.Generator(device).manual_seed(config.seed)

    def drawn(rows: int, columns: int, size: float = 1.0) -> Tensor:
        """Rows of several sizes."""
        rows_by_1 = torch.randn(rows, 1, device=device, generator=generator).exp() * size
        return (torch.randn(rows, columns, device=device, generator=generator) * rows_by_1).to(dtype)

    recipe = quantised.RECIPES[config.workload.linear_dtype]
    for rows, columns in sorted({shape for shape in block_shapes(config.model).values() if len(shape) == 2}):
        linear = nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)
        linear = float8.converted(linear, config, gathers=False)
        multiply, w = model_code.named(config.workload.model_code, device).part(linear), linear.weight
        with torch.no_grad():
            w.copy_(drawn(rows, columns, columns**-0.5))
        first = drawn(tokens, columns).requires_grad_()
        torch.autograd.grad(multiply(first), (first, w), drawn(tokens, rows, GRADIENT_SIZE))
        with torch.no_grad():
            w.mul_(GROWTH)
        x, dy = drawn(tokens, columns).requires_grad_(), drawn(tokens, rows, GRADIENT_SIZE)
        y = multiply(x)
        found = y.detach(), *torch.autograd.grad(y, (x, w), dy)
        with full_precision():
            exact, plain = (quantised.of_product(x.detach(), w.detach(), dy, each) for each in (None, recipe))
        for name, got, want, without in zip(("y", "dx", "dw"), found, plain, exact, strict=True):
            cost = relative(want, without)
            error, budget = relative(got, want), PRODUCT_FACTOR * cost
            what: Prose = f"{name} of a matrix of {rows} x {columns}"
            message: Prose = (
                f"{what} in FP8 differs from the product of factors that are rounded by plain casts by {error:.3g} "
                f"(relative), budget {budget:.3g}; rounding to FP8 makes a difference of {cost:.3g}"
            )
            yield Finding(error, budget, message, what)


def _second_step(config: TrialConfig, mesh: DeviceMesh, device: torch.device) -> "Comparison":
    """What was found of the second of two steps on different texts, with few layers at the reduced length."""
    small = proof_config(config)
    workload = replace(small.workload, learning_rate=NO_RATE, max_grad_norm=None)
    small = replace(small, workload=workload)
    first, second = (
        text.sequences(begin, config.num_sequences, proof_seq_len(config)) for begin in (config.num_sequences, 0)
    )
    exact, plain = _references(small, second, device) if dist.get_rank() == 0 else ({}, {})
    comparison = Comparison(exact, plain)
    with comparison.growing():
        engines.get(config.engine.name).run(
            small, [first, second], mesh, device, lambda: None, token_losses=0, watch=comparison.watch
        )
    return comparison


def _references(config: TrialConfig, sequences: Tensor, device: torch.device) -> list[dict[str, Tensor]]:
    """The gradients of one process without FP8 and with it."""
    weights = one_process.initial(config, decoder.shapes(config.model), device)
    grown = {n: w * GROWTH if one_process.in_layer(n, w) else w for n, w in weights.items()}
    computed, without = getattr(torch, config.dtype), replace(config.workload, linear_dtype="model")
    with full_precision():
        return [
            one_process.of_weights(each, grown, sequences.to(device), computed).of
            for each in (replace(config, workload=without), config)
        ]


class Comparison:
    """Of the gradients of the second step; on rank 0, which has the references."""

    def __init__(self, exact: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
        self._exact, self._plain = exact, plain
        self._steps = 0
        self._matrices: dict[int, Tensor] = {}  # that the optimizer updates: of layers, by their ids
        self._found: Findings = {}
        self._share = 0.0  # the largest error over what rounding costs

    def findings(self) -> Findings:
        """The worst gradient, and whether any is as far off as rounding makes it; empty but on rank 0."""
        message: Prose = (
            f"gradients in FP8 differ from the step without FP8 by up to {self._share:.3g} of what rounding to FP8 "
            f"costs, and by {LEAST_SHARE} or more if factors are rounded: products are not in FP8"
        )
        rounded = Finding(0.0 if self._share >= LEAST_SHARE else 1.0, 0.0, message)
        return self._found | {ROUNDED: rounded} if self._exact else {}

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Multiplies the layers' matrices by GROWTH after the first step."""

        def grow(*_: Any) -> None:
            if self._steps == 1:
                with torch.no_grad():
                    for updated in self._matrices.values():
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
            if self._steps == 1 and one_process.in_layer(part.name, part.whole):
                self._matrices[id(part.updated)] = part.updated
            if self._steps == 2 and self._exact:
                self._compare(part)

    def _compare(self, part: Part) -> None:
        exact, plain = self._exact[part.name], self._plain[part.name]
        cost, error = relative(plain, exact), relative(part.whole, exact)
        budget = STEP_FACTOR * (cost + FLOAT8_EPS)
        message: Prose = (
            f"the gradient of {part.name} in FP8 differs from the step without FP8 by {error:.3g} (relative), budget "
            f"{budget:.3g}; rounding to FP8 by plain casts makes a difference of {cost:.3g}"
        )
        _note(self._found, STEP, Finding(error, budget, message, part.name))
        self._share = max(self._share, error / cost if cost else 0.0)
