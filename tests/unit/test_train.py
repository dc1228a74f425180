"""The update that all training steps end with."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sp_bench import kernels
from sp_bench.training import limit, train

LEARNING_RATE = 0.5


@pytest.mark.parametrize(("max_grad_norm", "step_length"), [(None, 10.0), (1.0, 1.0), (20.0, 10.0)])
def test_a_gradient_is_clipped_if_asked_and_its_norm_is_that_of_before(max_grad_norm, step_length) -> None:
    """Without the clipping that its config asks for, a training compares with no other; and the norm that a row keeps
    would hide that one was wanted."""
    layer = torch.nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.tensor([[6.0, 8.0]])
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    norm = train.update([*layer.parameters()], optimizer, max_grad_norm)
    assert float(norm) == pytest.approx(10.0)
    moved = before - layer.weight.detach()
    assert float(moved.norm()) == pytest.approx(LEARNING_RATE * step_length, rel=1e-4)
    assert torch.allclose(moved / moved.norm(), torch.tensor([[0.6, 0.8]]))
    assert layer.weight.grad is None


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_that_has_its_moments_takes_the_same_first_step(optimizer: str, make_config: Any) -> None:
    workload = replace(make_config(workload="train_step").workload, optimizer=optimizer, learning_rate=0.1)
    plain, early = (torch.nn.Linear(3, 2) for _ in range(2))
    early.load_state_dict(plain.state_dict())
    optimizers = [train.make_optimizer(module.parameters(), workload) for module in (plain, early)]
    gradients = []  # of each step that makes moments
    watched = optimizers[1].register_step_pre_hook(
        lambda *_: gradients.append(sum(p.grad is not None for p in early.parameters()))
    )
    train.make_moments(optimizers[1])
    watched.remove()
    assert gradients == [1, 1]
    for name, parameter in early.named_parameters():
        assert torch.equal(parameter, plain.state_dict()[name])
        assert parameter.grad is None
        moments = [v for key, v in optimizers[1].state[parameter].items() if key != "step"]
        assert moments
        assert not any(moment.any() for moment in moments)
    for _ in range(2):
        for module, each in zip((plain, early), optimizers, strict=True):
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            each.step()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), early.parameters(), strict=True))


def test_the_norm_of_gradients_in_host_memory_is_right_for_large_tensors() -> None:
    """torch's own is 2% off here, because a CPU sums fp32 in fp32."""
    shards = [torch.full((1 << 14, 1 << 10), 1e-3), torch.full((1 << 10,), 1e-3)]
    expected = 1e-3 * sum(shard.numel() for shard in shards) ** 0.5
    assert float(train._host_norm(shards)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("heads", "ranks", "share"), [((28, 4), 8, 4), ((28, 4), 4, 4), ((32, 8), 16, 8), ((6, 1), 2, 1)]
)
def test_the_limits_kernel_has_as_many_heads_as_a_rank_would_or_the_next_more_that_divide(
    heads: tuple[int, int], ranks: int, share: int, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads of a long sequence on one device would take as long as the whole step on all ranks."""
    config = make_config(method="ring", workload="train_step", kernel="math", sp_size=ranks, seq_len=64 * ranks)
    config = replace(config, model=replace(config.model, num_heads=heads[0], num_kv_heads=heads[1]))
    seen, real = [], kernels.get("math").forward

    class Seen:
        forward = staticmethod(lambda q, k, v, **mask: seen.append((q.shape[2], k.shape[2])) or real(q, k, v, **mask))
        backward = staticmethod(kernels.get("math").backward)

    monkeypatch.setattr(limit, "of_shape", lambda kernel, shape: Seen)
    monkeypatch.setattr(limit, "_alone_ms", lambda call, device: (call(), 8.0)[1])
    assert limit._attention_ms(config, *config.kinds, torch.device("cpu")) == 8.0 * share / ranks
    assert seen == [(heads[0] // share, heads[1] // share)]


@pytest.mark.parametrize(("head_ms", "is_earlier"), [(10.2, True), (9.8, True), (10.4, False), (11.5, False)])
def test_an_earlier_limit_holds_as_long_as_the_heads_products_take_as_long(
    head_ms: float, is_earlier: bool, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, timed = make_config(workload="train_step", kernel="math"), []
    head = (config.model.vocab_size, config.model.hidden_size)

    def products_ms(shape: tuple[int, ...], *_: Any, **__: Any) -> float:
        timed.append(shape)
        return head_ms if shape == head else 1.0

    monkeypatch.setattr(limit, "_products_ms", products_ms)
    monkeypatch.setattr(limit, "_attention_ms", lambda *_: 2.0)
    earlier = limit.Limit(100.0, 10.0)
    found = limit.measured(config, torch.device("cpu"), earlier)
    assert (found == earlier) == is_earlier == (timed == [head])
    if not is_earlier:
        assert found == limit.measured(config, torch.device("cpu")) == limit.Limit(found.ms, head_ms)
        assert found.ms == config.model.num_layers * (2 + 7) + head_ms  # of a layer: attention and seven matrices
