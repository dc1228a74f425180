"""Several micro-batches a step: what is asked for, whose cell it is, what a whole step costs, what a report says."""

import json
from fractions import Fraction
from typing import Any

import pytest
import torch

from sp_bench.analysis.pattern_bytes import pattern_bytes
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.driver import progress
from sp_bench.driver.derived import derived
from sp_bench.engines import hugging_face
from sp_bench.planning import plan
from sp_bench.training import text, train

from .records import record_of
from .rows import asked_for, cells_of, hf_step, row


@pytest.fixture
def make(make_config):
    """A training step with this many micro-batches; None: not said."""

    def make(micro_batches: int | None, workload: str = "train_step", **changes: Any) -> TrialConfig:
        return make_config(workload=workload, workload__micro_batches=micro_batches, **changes)

    return make


@pytest.mark.parametrize("workload", ["train_step", "parity"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, r"workload\.micro_batches=0 must be positive"),
        (-8, r"workload\.micro_batches=-8 must be positive"),
        (2.0, r"workload\.micro_batches=2\.0 must be a whole number"),
        (True, r"workload\.micro_batches=True must be a whole number"),
        ("many", r"workload\.micro_batches='many' must be a whole number"),
        (65_537, r"workload\.micro_batches=65537 is more than 65536; use less"),
    ],
)
def test_an_impossible_number_is_refused(make, workload: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(value, workload)


@pytest.mark.parametrize("workload", ["attention", "collective"])
@pytest.mark.parametrize("number", [1, 8])
def test_workloads_without_an_optimizer_step_have_no_micro_batches(make_config, workload: str, number: int) -> None:
    message = rf"workload\.micro_batches={number}: workload {workload} takes no optimizer step; .* workload=train_step"
    with pytest.raises(ConfigError, match=message):
        make_config(workload=workload, workload__micro_batches=number)


def test_identities_of_before_there_were_micro_batches_hold(make) -> None:
    """Computed from the tree before: an old row is still the row of its cell, and one micro-batch is what it had."""
    for number in (None, 1):
        assert plan.cell_id(make(number, workload__learning_rate=1e-4)) == "2eb7e912ac74"
        assert plan.cell_id(make(number, "parity")) == "f9b0c6ac9042"


def test_one_and_none_are_one_cell_and_several_are_another(make) -> None:
    assert len(plan.plan([make(None), make(1), make(2), make(8)], 1, 0, None)) == 3
    assert "micro_batches" not in json.loads(plan.canonical(make(1)))["workload"]
    several = make(8)
    assert parse(TrialConfig, json.loads(plan.canonical(several))) == several


def test_a_plan_tells_cells_of_different_numbers_apart(make) -> None:
    trials = plan.plan([make(None), make(8)], 1, 0, None)
    options = progress.apart(trials)
    assert sorted(options.values()) == [[("workload.micro_batches", number)] for number in (1, 8)]


def test_a_row_says_how_many_and_nothing_where_there_is_no_step(make, make_config) -> None:
    assert asked_for(make(None))["micro_batches"] == 1
    assert asked_for(make(8))["micro_batches"] == 8
    assert asked_for(make_config())["micro_batches"] is None


def test_a_step_of_several_has_the_sequences_and_the_work_of_as_many_steps(make) -> None:
    changes = {"batch_size": 2, "dp_shard_size": 2, "workload__activation_checkpointing": "full"}
    one, eight = make(None, **changes), make(8, **changes)
    assert (one.num_sequences, eight.num_sequences) == (4, 32)
    assert training_costs.model_flops(eight) == 8 * training_costs.model_flops(one)
    assert training_costs.hardware_flops(eight, 2048) == 8 * training_costs.hardware_flops(one, 2048)


def test_a_step_of_several_sends_all_but_the_loss_as_often(make) -> None:
    attention = {("forward", "all_to_all"): Fraction(10), ("backward", "all_to_all"): Fraction(12)}
    changes = {"dp_replicate_size": 2, "workload__activation_checkpointing": "full"}
    one, three = (training_costs.train_step_traffic(make(n, **changes), attention) for n in (None, 3))
    assert one.keys() == three.keys()
    assert {op for _, op in one} == {"all_to_all", "all_gather", "reduce_scatter", "all_reduce"}
    for key, size in one.items():
        assert three[key] == (size if key[0] == "loss" else 3 * size), key


def test_the_rate_is_of_all_tokens_of_the_optimizer_step(make) -> None:
    configs = [make(n, batch_size=2, seq_len=1000, workload__timed_steps=1) for n in (None, 8)]
    rows = [derived(config, 1000, record_of(config, 400.0), None) for config in configs]
    assert [r["tokens_per_s"] for r in rows] == [pytest.approx(n * 2 * 1000 / 0.4) for n in (1, 8)]
    assert rows[1]["tokens_per_s_per_gpu"] == pytest.approx(rows[1]["tokens_per_s"] / 2)


def test_a_steps_sequences_are_cut_in_order(make) -> None:
    config = make(3, batch_size=2, dp_shard_size=2, seq_len=16)
    sequences = text.sequences(0, config.num_sequences, 16)
    parts = train.micro_batches(config, sequences)
    assert [tuple(part.shape) for part in parts] == [(4, 17)] * 3
    assert torch.equal(torch.cat(parts), sequences)


def test_steps_on_one_text_share_its_samples(make) -> None:
    config = make(2, batch_size=2, sp_size=1, seq_len=8)
    first, second = (text.sequences(number, config.num_sequences, 8) for number in (0, 1))
    texts = hugging_face.texts_of([first, first, second, first], config, 0)
    different, places = hugging_face.distinct(texts)
    assert places == [0, 1, 0, 1, 2, 3, 0, 1]
    assert [each.tolist() for each in different] == [each.tolist() for each in (*first.split(2), *second.split(2))]


@pytest.mark.parametrize(("number", "sp_size", "num_steps"), [(1, 4, 6), (2, 2, 3), (3, 2, 2), (2, 4, 1), (8, 4, 3)])
def test_the_adapter_hands_out_all_steps_micro_batches_in_order(
    make, number: int, sp_size: int, num_steps: int
) -> None:
    """It cuts the sample of each of a sequence's ranks in turn, so the n-th micro-batch is of rank n % P."""
    config = make(number, sp_size=sp_size, batch_size=2, dp_shard_size=2, seq_len=8)
    texts = [text.sequences(i * config.num_sequences, config.num_sequences, 8) for i in range(num_steps)]
    of_ranks = [hugging_face.texts_of(texts, config, rank) for rank in range(config.world_size)]
    expected = [part for each in texts for part in train.micro_batches(config, each)]
    for n, sequences in enumerate(expected):
        sample, sequence_rank = divmod(n, sp_size)
        got = [of_ranks[data_rank * sp_size + sequence_rank][sample] for data_rank in range(2)]
        assert torch.equal(torch.cat(got), sequences), n


def test_old_rows_are_rows_of_one_micro_batch() -> None:
    old, new = row(seq_len=1024), row(seq_len=2048, micro_batches=1)
    cells = cells_of([old, new])
    assert {cell.micro_batches for cell in cells} == {1}
    assert len({cell.setting for cell in cells}) == 1
    assert "micro-batch" not in cells[0].setting


def test_steps_of_different_numbers_share_no_figure_and_the_setting_names_the_number() -> None:
    cells = cells_of([hf_step(seq_len=n, micro_batches=m) for n in (8192, 65536) for m in (1, 4, 8)])
    settings = {m: {c.setting for c in cells if c.micro_batches == m} for m in (1, 4, 8)}
    assert all(len(each) == 1 for each in settings.values())
    assert len(set.union(*settings.values())) == 3
    for number, (setting,) in settings.items():
        assert (f"{number} micro-batches a step" in setting) == (number > 1)


def test_attention_bytes_of_a_step_are_those_of_all_its_micro_batches() -> None:
    comm = [{"phase": "forward", "op": "send", "calls": 1, "predicted_bytes": 1.0, "counted_bytes": 1.0}]
    step: dict[str, Any] = {"workload": "train_step", "pass_kind": "step", "num_layers": 3, "comm": comm}
    one, several = (pattern_bytes(cells_of([row(micro_batches=n, **step)])[0]) for n in (1, 4))
    assert one is not None
    assert several is not None
    assert several.closed_form == 4 * one.closed_form
