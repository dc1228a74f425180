"""First losses of training steps: a page says that methods agree, or which do not, and marks rows that lack a check."""

from typing import Any

import pytest

from sp_bench.analysis.losses import sentences
from sp_bench.analysis.provenance import origin
from sp_bench.report.caveats import caveats

from .rows import cells_of, row


def step(method: str, loss: float, **columns: Any) -> dict[str, Any]:
    degrees = {"ulysses_degree": 2, "ring_degree": 1} if method == "ulysses" else {}
    trained = {"loss": [loss, 1.0], "num_layers": 2, "warmup_steps": 2, "comm": []}
    return row(workload="train_step", pass_kind="step", method=method, **degrees | trained | columns)


def points(*rows: dict[str, Any]) -> list[str]:
    return sentences(cells_of(rows))


def test_first_losses_that_agree_are_one_sentence() -> None:
    rows = [
        step("ring", 5.0),
        step("ulysses", 5.00002),
        step("ring", 4.0, seq_len=2048),
        step("ulysses", 4.0, seq_len=2048),
    ]
    assert points(*rows) == ["First losses of 4 cells agree between methods, within 4.0e-06 (allowed: 1e-05 in fp32)."]


def test_methods_whose_first_losses_differ_are_named() -> None:
    rows = [
        step("ring", 5.0),
        step("ulysses", 5.001),
        step("ring", 4.0, seq_len=2048),
        step("ulysses", 4.0, seq_len=2048),
    ]
    assert points(*rows) == [
        "At 1,024 tokens on 2 CPU ranks first losses differ: the contiguous ring with aten's CPU flash has 5.00000 and "
        "Ulysses with aten's CPU flash has 5.00100 nats a token, by 2.0e-04 (allowed: 1e-05 in fp32). One of them is "
        "wrong."
    ]


@pytest.mark.parametrize(("loss", "agrees"), [(5.09, True), (5.11, False)])
def test_half_precision_may_differ_by_2_percent(loss: float, agrees: bool) -> None:
    (said,) = points(step("ring", 5.0, dtype="bfloat16"), step("ulysses", loss, dtype="bfloat16"))
    assert said.startswith("First losses of 2 cells agree") == agrees


@pytest.mark.parametrize("change", [{"seq_len": 2048}, {"dtype": "bfloat16"}, {"sp_size": 4, "ulysses_degree": 4}])
def test_cells_that_differ_in_more_than_the_method_are_not_compared(change: dict[str, Any]) -> None:
    assert points(step("ring", 5.0), step("ulysses", 7.0, **change)) == []


def test_replicates_of_one_cell_are_no_two_methods() -> None:
    assert points(step("ring", 5.0), step("ring", 6.0, replicate=1)) == []
    assert points(row()) == []


def test_rows_of_before_gradients_were_checked_at_the_timed_length_are_marked() -> None:
    old, new = row(sampled_grad_error=None), row(seq_len=2048)
    (cell, checked) = cells_of([old, new])
    assert (cell.num_unsampled, checked.num_unsampled) == (1, 0)
    assert "gradients unchecked at the timed length: 1 row;" in origin([cell, checked])
    assert "unchecked" not in origin([checked])
    assert "Gradients were not checked at the timed length in 1 older row." in caveats([cell, checked], [], [])
    forward = row(pass_kind="forward", sampled_grad_error=None)
    assert cells_of([forward])[0].num_unsampled == 0
