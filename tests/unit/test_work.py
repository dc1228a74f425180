"""What a step computes, counted: products by their shapes and dtypes, calls of the kernel, updated parameters."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sp_bench import kernels
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.training import expected_work
from sp_bench.costs.work import ExpectedWork, KernelCalls
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.ledger import CountedKernel, Ledger
from sp_bench.measure.work import Work, columns
from sp_bench.training import cross_entropy

BF16 = torch.bfloat16


def test_products_are_counted_by_the_dtype_of_their_factors() -> None:
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    with Ledger() as book:
        left @ right
        torch.addmm(torch.ones(7), left, right)
        torch.ones(3, 7).addmm_(left, right)
        torch.mm(left, right, out=torch.empty(3, 7))
        torch.baddbmm(torch.ones(2, 3, 7), left.expand(2, 3, 5), right.expand(2, 5, 7))
        torch.ones(2, 3, 7).baddbmm_(left.expand(2, 3, 5), right.expand(2, 5, 7))
        left.to(BF16) @ right.to(BF16)
    one = 2 * 3 * 5 * 7
    assert book.work.matmul_flops == {"float32": 4 * one + 4 * one, "bfloat16": one}


def test_a_batched_product_that_sums_over_nothing_is_none() -> None:
    """transformers' rotary tables: positions times frequencies, in fp32 in a model of any dtype."""
    with Ledger() as book:
        torch.ones(2, 8, 1) @ torch.ones(2, 1, 16)
    assert book.work.matmul_flops == {}


@pytest.mark.parametrize(("keys", "causal", "pairs"), [(6, True, 21), (6, False, 36), (2, False, 12)])
def test_a_call_of_the_kernel_counts_the_scores_that_its_mask_shows(keys: int, causal: bool, pairs: int) -> None:
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, keys, 2, 8), torch.randn(2, keys, 2, 8)
    kernel = CountedKernel(kernels.get("math"))
    with Ledger() as book:
        out, lse = kernel.forward(q, k, v, causal=causal, scale=1.0)
    forward = 2 * 2 * 8 * pairs * 4 * 2  # two products of 2 D for each pair, head and sequence
    assert book.work.attention_flops == forward
    with Ledger() as book:
        kernel.backward(out, q, k, v, out, lse, causal=causal, scale=1.0)
    assert book.work.attention_flops == 2.5 * forward
    assert book.work.calls == {"backward": 1}
    assert book.work.attention_dtypes == {"float32"}
    assert book.work.matmul_flops == {}  # its own are attention


def test_without_a_ledger_a_kernel_is_called_as_it_is() -> None:
    q = torch.randn(1, 4, 2, 8)
    out, lse = CountedKernel(kernels.get("math")).forward(q, q, q, causal=True, scale=1.0)
    expected = kernels.get("math").forward(q, q, q, causal=True, scale=1.0)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_a_kernel_that_fails_is_left() -> None:
    kernel, q = CountedKernel(kernels.get("math")), torch.randn(1, 4, 2, 8)
    with Ledger() as book:
        with pytest.raises(IndexError):
            kernel.forward(q, q[0, 0], q, causal=True, scale=1.0)
        q[0] @ q[0].mT
    assert book.work.matmul_flops.total() > 0


def test_attention_outside_the_kernel_is_seen() -> None:
    q = torch.randn(1, 2, 4, 8)
    with Ledger() as book:
        nn.functional.scaled_dot_product_attention(q, q, q)
    assert book.work.other_ops == {"aten::_scaled_dot_product_flash_attention_for_cpu": 1}


def test_sums_of_two_matrices_in_half_precision_are_counted() -> None:
    half, wide = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3)
    with Ledger() as book:
        wide += half
        half[None] + half[None]
        half + 1
        assert book.work.half_sums == 0
        half += half
        half.clone().add_(half) + half
    assert book.work.half_sums == 3


def test_a_tied_matrix_gets_two_gradients_in_each_micro_batch(make_config: Callable[..., TrialConfig]) -> None:
    def most(**options: Any) -> int | None:
        config = make_config(workload="train_step", batch_size=2, workload__micro_batches=2, **options)
        return expected_work(config, config.seq_len, 0, None, products=True).half_sums

    assert (most(), most(model__tie_embeddings=True), most(engine="deepspeed")) == (0, 2, None)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_what_the_optimizer_updates_is_counted(optimizer: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 5)
    unused = nn.Linear(7, 7)
    own = optimizer([*model.parameters(), *unused.parameters()])
    model(torch.ones(1, 3)).sum().backward()
    with Ledger() as book:
        own.step()
    assert book.work.updated_elements == 3 * 5 + 5
    assert book.work.updated_by == {f"{optimizer.__name__} on cpu"}
    own.step()
    assert book.work.updated_elements == 3 * 5 + 5  # the hook went with the ledger


def test_what_an_optimizer_updates_has_a_device() -> None:
    """A device of torch without data stands in for a GPU."""
    model = nn.Linear(3, 5, device="meta")
    model(torch.ones(1, 3, device="meta")).sum().backward()
    own = torch.optim.SGD(model.parameters())
    with Ledger() as book:
        own.step()
    assert book.work.updated_by == {"SGD on meta"}


def test_an_mlp_and_a_norm_that_torch_runs_call_by_call_are_seen() -> None:
    """Where other code has replaced them, they are not to be seen."""
    with Ledger() as book:
        nn.RMSNorm(4)(nn.functional.silu(torch.ones(2, 4)))
    assert book.work.eager_ops == {"aten::silu": 1, "aten::rsqrt": 1}


@pytest.mark.parametrize("way", [None, cross_entropy.with_gradient])
def test_tiles_of_the_loss_that_are_not_compiled_are_seen(way: cross_entropy.WithGradient | None) -> None:
    hidden, weight, labels = torch.ones(1, 6, 4), torch.ones(8, 4), torch.zeros(1, 6, dtype=torch.int64)
    with Ledger() as book:
        cross_entropy.tiled(hidden, weight, labels, divisor=6, tile_tokens=3, compiled=way)
    assert book.work.eager_ops == {"aten::_log_softmax": 2}


def test_where_the_loss_is_to_be_compiled_it_may_not_run_call_by_call(make_config: Callable[..., TrialConfig]) -> None:
    def replaced(**options: Any) -> tuple[str, ...]:
        config = make_config(workload="train_step", **options)
        return expected_work(config, config.seq_len, 0, None, products=True).replaced_ops

    compiled, tiles = {"workload__model_code": "compiled"}, {"workload__loss_tile_tokens": 4}
    assert "aten::_log_softmax" in replaced(**compiled, **tiles)
    assert not any("aten::_log_softmax" in replaced(**options) for options in ({}, compiled, tiles))


RIGHT = Work(
    matmul_flops=Counter(bfloat16=60),
    calls=Counter(forward=2, backward=3),
    attention_flops=50,
    attention_dtypes={"bfloat16"},
    eager_ops=Counter({"aten::rsqrt": 5}),
    updated_elements=11,
    updated_by={"AdamW on cpu"},
)
EXPECTED = ExpectedWork({"bfloat16": 120}, 100, KernelCalls(2, 3), 22, ("aten::silu",), "AdamW on cpu", 0)


def test_what_was_counted_is_the_sum_over_the_ranks() -> None:
    assert columns("bfloat16", [RIGHT, RIGHT], [EXPECTED, EXPECTED]) == {
        "counted_matmul_flops": 120.0,
        "counted_attention_flops": 100.0,
        "counted_parameters": 22,
    }


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"matmul_flops": Counter(bfloat16=30)}, r"on all ranks: in bfloat16 counted 90, predicted 120$"),
        (
            {"matmul_flops": Counter(float32=60)},
            r"in bfloat16 counted 60, predicted 120; in float32 counted 60, predicted 0$",
        ),
        ({"calls": Counter(forward=2, backward=2)}, r"rank 1 called .* 2 times forward and 2 backward; .* 2 and 3$"),
        ({"attention_flops": 25}, r"FLOPs of attention: counted 75 on all ranks, predicted 100$"),
        ({"attention_dtypes": {"float32"}}, r"rank 1 called the attention kernel in float32, not in dtype=bfloat16$"),
        ({"other_ops": Counter(fmha=2)}, r"rank 1 computed attention outside the kernel: 2 x fmha$"),
        ({"updated_elements": 0}, r"updated 11 elements on all ranks, predicted 22$"),
        ({"updated_by": {"AdamW on cuda"}}, r"^AdamW on cpu was to update the parameters, and AdamW on cuda did$"),
        ({"half_sums": 3}, r"a rank added two of them 3 times in half precision; expected 0$"),
        (
            {"eager_ops": Counter({"aten::silu": 2, "aten::rsqrt": 5})},
            r"^workload.model_code replaces aten::silu, and in one step a rank ran 2 x aten::silu$",
        ),
    ],
)
def test_other_work_than_expected_is_incorrect_and_said_in_numbers(wrong: dict, reason: str) -> None:
    with pytest.raises(Incorrect, match=reason):
        columns("bfloat16", [RIGHT, replace(RIGHT, **wrong)], [EXPECTED, EXPECTED])


def test_what_has_no_closed_form_is_null() -> None:
    found = columns("bfloat16", [RIGHT], [ExpectedWork({"bfloat16": 60})])
    assert found == {"counted_matmul_flops": 60.0, "counted_attention_flops": None, "counted_parameters": None}
