"""What AdamW and SGD make of a gradient: the formulas against torch's optimizers, and what their budget tells apart."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from sp_bench.oracle.last_update import StepCount
from sp_bench.oracle.update import FORMULAS, MOMENTS, PARAMETER, ROUNDINGS
from sp_bench.training.train import MOMENTUM, make_moments, make_optimizer

LEARNING_RATE, SIZE = 1e-4, 4096
Make = Callable[[Any], torch.optim.Optimizer]


def worst(make: Make, formula: str, dtype: torch.dtype, steps: int = 3) -> dict[str, float]:
    """The largest error of parameter and moments over some steps, in roundings. Gradients of all sizes; some parameters
    are zero, as biases are at first."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in range(steps + 1)]
    sizes = torch.logspace(-9, 1, SIZE, dtype=torch.float64)
    parameter = torch.nn.Parameter((0.02 * values[0] * (torch.arange(SIZE) % 5 > 0)).to(dtype))
    optimizer, found = make([parameter]), {}
    for step in range(1, steps + 1):
        gradient = (values[step] * sizes).to(dtype)
        parameter.grad = gradient.clone()
        before = {PARAMETER: parameter.detach().double().clone()}
        for name in MOMENTS[formula]:
            kept = optimizer.state[parameter].get(name) if optimizer.state else None
            before[name] = torch.zeros(SIZE).double() if kept is None else kept.double().clone()
        predicted = FORMULAS[formula](step, LEARNING_RATE, gradient.double(), before)
        optimizer.step()
        after = {PARAMETER: parameter.detach(), **{n: optimizer.state[parameter][n] for n in MOMENTS[formula]}}
        for name, (value, scale) in predicted.items():
            off = (after[name] - value).abs() / (torch.finfo(dtype).eps * scale + torch.finfo(dtype).tiny)
            found[name] = max(found.get(name, 0.0), float(off.max()))
    return found


OURS: dict[str, Make] = {
    "fused": lambda p: AdamW(p, lr=LEARNING_RATE, fused=True),
    "foreach": lambda p: AdamW(p, lr=LEARNING_RATE, foreach=True),
    "one by one": lambda p: AdamW(p, lr=LEARNING_RATE, foreach=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OURS)
def test_adamw_is_within_some_roundings_of_its_formula(name, dtype):
    found = worst(OURS[name], "adamw", dtype)
    assert found.keys() == {PARAMETER, "exp_avg", "exp_avg_sq"}
    assert max(found.values()) <= ROUNDINGS * (2 if dtype == torch.float64 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_is_within_some_roundings_of_its_formula(dtype):
    found = worst(lambda p: SGD(p, lr=LEARNING_RATE, momentum=MOMENTUM), "sgd", dtype)
    assert max(found.values()) <= ROUNDINGS


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1.01 * LEARNING_RATE},
        {"weight_decay": 0.0},
        {"weight_decay": 0.1},
        {"betas": (0.95, 0.999)},
        {"betas": (0.9, 0.95)},
        {"eps": 1e-7},
    ],
)
def test_another_adamw_is_not(options):
    found = worst(lambda p: AdamW(p, **({"lr": LEARNING_RATE} | options)), "adamw", torch.float32)
    assert max(found.values()) > 1.5 * ROUNDINGS


@pytest.mark.parametrize(
    "options", [{"momentum": 0.95}, {"nesterov": True}, {"dampening": 0.1}, {"weight_decay": 1e-2}]
)
def test_another_sgd_is_not(options):
    options = {"lr": LEARNING_RATE, "momentum": MOMENTUM} | options
    assert max(worst(lambda p: SGD(p, **options), "sgd", torch.float32).values()) > 1.5 * ROUNDINGS


def test_an_adam_that_decays_through_its_gradient_is_no_adamw():
    make = lambda p: torch.optim.Adam(p, lr=LEARNING_RATE, weight_decay=1e-2)  # noqa: E731
    assert worst(make, "adamw", torch.float32)["exp_avg"] > 1e3


def test_a_parameter_of_bfloat16_is_no_parameter_of_fp32():
    def rounded(parameters):
        optimizer = AdamW(parameters, lr=LEARNING_RATE)
        optimizer.register_step_post_hook(
            lambda *_: [p.data.copy_(p.data.bfloat16()) for group in optimizer.param_groups for p in group["params"]]
        )
        return optimizer

    assert worst(rounded, "adamw", torch.float32)[PARAMETER] > 1e3


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("skipped", [(), (1,), (2,), (2, 3), (4,)])
def test_steps_of_sgd_are_counted_by_what_they_change_and_adamw_counts_its_own(make_config, skipped, early):
    """A skipped step is one that the hook sees and that changes nothing. The first tensor has no gradient."""
    workload = replace(make_config(workload="train_step").workload, optimizer="sgd", learning_rate=1e-9)
    module = torch.nn.Linear(3, 2)
    parameters = [torch.nn.Parameter(torch.ones(1)), *module.parameters()]
    for wanted in ("sgd", "adamw"):
        optimizer = make_optimizer(parameters, replace(workload, optimizer=wanted))
        if early:
            make_moments(optimizer)
        count = StepCount(workload)
        for step in range(1, 5):
            parameters[0].grad = None
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            count.before_update(optimizer)
            if step not in skipped:
                optimizer.step()
        assert count.taken() == (4 - len(skipped) if wanted == "sgd" else None)
