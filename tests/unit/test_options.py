"""Options are declared once, and what is made of the declarations."""

import hashlib
import json
from pathlib import Path

import pytest

from sp_bench.config.options import BY_PATH, OPTIONS
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import plan
from sp_bench.rows import schema, store

RESULTS = Path(__file__).parents[2] / "results"
# Its rows are older than workload.attribution, which identities say since.
BEFORE_ATTRIBUTION = "h200x4_headline"


@pytest.mark.parametrize("folder", sorted(p.name for p in RESULTS.iterdir() if p.is_dir()))
def test_committed_rows_keep_their_identity(folder):
    table, problems = store.read(RESULTS / folder, ["cell_id", "trial_id", "replicate", "config"])
    assert problems == []
    assert table.num_rows
    for row in table.to_pylist():
        cell = hashlib.sha256(row["config"].encode()).hexdigest()[:12]
        config = parse(TrialConfig, json.loads(row["config"]))
        if folder != BEFORE_ATTRIBUTION:
            assert plan.canonical(config) == row["config"]
            assert plan.cell_id(config) == cell
        assert (row["cell_id"], row["trial_id"]) == (cell, plan.trial_id(cell, row["replicate"]))


def test_a_default_of_a_later_option_leaves_the_identity_as_it_was(make_config):
    plain = make_config(workload="train_step")
    said = make_config(workload="train_step", workload__micro_batches=1, engine="fsdp2")
    assert plan.cell_id(said) == plan.cell_id(plain)
    assert plan.cell_id(make_config(workload="train_step", workload__micro_batches=2)) != plan.cell_id(plain)


def test_each_option_is_explained_and_each_column_is_declared_once():
    assert all(option.doc for option in OPTIONS)
    names = [column.name for column in schema.COLUMNS]
    assert len(names) == len(set(names))
    declared = {option.column: option for option in OPTIONS if option.column}
    assert {c.name: c.doc for c in schema.COLUMNS if c.name in declared} == {n: o.doc for n, o in declared.items()}


def test_an_option_knows_its_path_type_and_what_old_rows_mean():
    launch, chunks = BY_PATH["workload.launch"], BY_PATH["method.head_chunks"]
    assert (launch.column, launch.type, launch.old_rows) == ("launch", str, "eager")
    assert (chunks.column, chunks.type, chunks.old_rows, chunks.none_means) == ("head_chunks", int, None, 1)
    assert BY_PATH["method.name"].column == "method"
    assert BY_PATH["seed"].column is None
