"""The update that all training steps end with."""

from typing import cast

import pytest
import torch

from sp_bench.training import train
from sp_bench.training.model import Decoder

LEARNING_RATE = 0.5


@pytest.mark.parametrize(("max_grad_norm", "step_length"), [(None, 10.0), (1.0, 1.0), (20.0, 10.0)])
def test_a_gradient_is_clipped_if_asked_and_its_norm_is_that_of_before(max_grad_norm, step_length) -> None:
    """Without the clipping that its config asks for, a training compares with no other; and the norm that a row keeps
    would hide that one was wanted."""
    layer = torch.nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.tensor([[6.0, 8.0]])
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    norm = train.update(cast(Decoder, layer), optimizer, max_grad_norm)
    assert float(norm) == pytest.approx(10.0)
    moved = before - layer.weight.detach()
    assert float(moved.norm()) == pytest.approx(LEARNING_RATE * step_length, rel=1e-4)
    assert torch.allclose(moved / moved.norm(), torch.tensor([[0.6, 0.8]]))
    assert layer.weight.grad is None
