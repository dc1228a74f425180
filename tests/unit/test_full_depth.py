"""How far the weights move in the check of the loss's fall, and what is kept of it."""

import pytest
import torch

from sp_bench.oracle.full_depth import FALL, MOST_MOVED, Fall, FullDepth, nearer
from sp_bench.training.train import Part


@pytest.mark.parametrize("size", [3e-3, 1.0, 1e3, 3.7e5, 1e6])  # Qwen3-4B has about 3e5
def test_the_kept_move_is_that_of_the_weights(make_config, size):
    """Weights of several binades, as a model's: were all of one binade off alike, the fall would be off as well."""
    generator = torch.Generator().manual_seed(0)
    updated = torch.randn(200_000, generator=generator) / 50
    updated[-1000:] = 1.0  # of a norm, which may not move at all
    gradient = torch.randn(200_000, generator=generator)
    part = Part("w", gradient, gradient, updated, 0)
    depth, before = FullDepth(make_config(workload="train_step"), updates=0, sizes={"w": size}), updated.clone()
    depth.watch([part])  # the weights move
    depth.watch([part])  # the same gradient once more
    start, end = depth._moved["w"].slopes
    assert end == pytest.approx(start, rel=2e-5)
    moved = float((updated - before).abs().max())
    wanted = min(FALL / size, MOST_MOVED)
    assert wanted / 1.42 < moved < 2 * wanted + 6e-8


@pytest.mark.parametrize(
    ("first", "second", "is_right"),
    [
        (0.03, 0.0002, True),  # a third order is 1/256
        (0.3, 0.0017, True),
        (0.003, 0.003, False),  # a wrong gradient is as wrong nearby
        (0.5, 0.45, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_a_shorter_move_tells_a_third_order_from_a_wrong_gradient(first, second, is_right):
    fall = nearer(Fall(first, 1e-3, ""), Fall(second, 1e-3, ""))
    assert (fall.error <= fall.budget) == is_right
    assert fall.budget <= 0.01


def test_a_gradient_that_is_another_each_time_is_refused_although_its_budget_is_wide():
    assert nearer(Fall(0.34, 0.13, ""), Fall(0.42, 0.2, "")).budget == 0.01
    assert nearer(Fall(0.5, 0.4, ""), Fall(0.1, 0.05, "")).budget == 0.05  # it shrinks: the curve is sharp
