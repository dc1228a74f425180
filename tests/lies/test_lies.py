"""Lies planted in real trials, through the real command line: none of them may end as `ok`."""

import os
import re
import shutil
from pathlib import Path

import lies
import pyarrow.parquet as pq
import pytest
from planted import LIES, SHORT, Lie

from sp_bench.hardware import package_versions
from sp_bench.testing import faults

from ..cli.console import console


def marks(lie: Lie, dtype: str, quick: bool) -> list[pytest.MarkDecorator]:
    """A quick lie is told in its last dtype in the ordinary tests, and in all of them with `-m faults`."""
    missing = [package for package in lie.needs if package not in package_versions()]
    skipped = pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")
    return [skipped] if quick and dtype == lie.dtypes[-1] else [skipped, pytest.mark.faults]


CASES = [
    pytest.param(lie, dtype, id=f"{lie.name}-{lie.ranks}-{dtype}", marks=marks(lie, dtype, lie.quick))
    for lie in LIES
    for dtype in lie.dtypes
]


# Told by a trial that relies on a proof, these pass: they begin after the first step, are below a budget, as a scale of
# a matrix that has hardly moved, or show with the unequal labels of the proof alone.
OF_THE_PROOF_ALONE = (
    *("negated_after_step_3", "updates_late_by_a_step", "documents_leak", "checkpoints_of_the_step_before"),
    "micro_batch_repeated_from_step_4",
    *("mean_of_means", "mean_of_data_ranks", "loss_averaged_over_ranks", "float8_gathered_scales_stale"),
)
QUICK = "gradients_negated"  # the one of the others that is told in the ordinary tests
LATER = [
    pytest.param(
        *(lie, lie.dtypes[-1]),
        id=f"{lie.name}-{lie.ranks}-{len(lie.trial)}",
        marks=marks(lie, lie.dtypes[-1], lie.name == QUICK),
    )
    for lie in LIES
    if lie.name not in OF_THE_PROOF_ALONE
    if lie.group != "The record"  # which is checked alike, whoever proved the trial
    # DeepSpeed's optimizer gets one flat gradient, of which those of norms are a small part
    if (lie.name, lie.needs) != ("norm_gradients_missing", ("deepspeed",))
]


@pytest.fixture(scope="session")
def proven() -> dict[tuple[str, ...], Path]:
    """Folders with the row and the proof of an honest trial, by its words. Lies about one trial share them."""
    return {}


@pytest.fixture
def run(tmp_path, tmp_path_factory, monkeypatch, capfd, proven):
    """The row of the one trial that tells a lie in a dtype; `relies`: on the proof of an honest one before it."""

    def run(lie: Lie, dtype: str, *, relies: bool = False) -> dict[str, object]:
        given = {word.split("=")[0] for word in lie.trial}
        short = [word for word in SHORT if word.split("=")[0] not in given]
        words = ("run", *lie.trial, *short, f"dtype={dtype}", "campaign=lies", "--no-report")
        if relies and words not in proven:
            proven[words] = tmp_path_factory.mktemp("honest")
            monkeypatch.chdir(proven[words])
            console(capfd, *words)
        if relies:
            shutil.copytree(proven[words] / "results", tmp_path / "results")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(Path(lies.__file__).parent), prepend=os.pathsep)
        monkeypatch.setenv(faults.VARIABLE, f"lies.{lie.name}:{lie.ranks}:{lie.phase}")
        _, printed, errors = console(capfd, *words, f"replicates={1 + relies}")
        rows = [pq.read_table(path).to_pylist()[0] for path in (tmp_path / "results" / "lies").glob("*.parquet")]
        assert len(rows) == 1 + relies, printed + errors
        return max(rows, key=lambda row: row["replicate"])

    return run


@pytest.mark.parametrize(("lie", "dtype"), CASES)
def test_a_lie_ends_as_written_down(lie, dtype, run, record_property):
    row = run(lie, dtype)
    told = {"group": lie.group, "what": lie.what, "ranks": lie.ranks, "trial": " ".join(lie.trial), "dtype": dtype}
    for name, value in (told | {"status": row["status"], "reason": row["reason"]}).items():
        record_property(name, value)
    assert row["status"] == lie.status, row["reason"]
    assert re.search(lie.reason, str(row["reason"])), row["reason"]


@pytest.mark.parametrize(("lie", "dtype"), LATER)
def test_a_lie_told_by_a_trial_that_relies_on_an_honest_proof_ends_as_it_must(lie, dtype, run):
    row = run(lie, dtype, relies=True)
    assert row["status"] == lie.status, row["reason"]


def test_every_lie_is_planted_somewhere():
    assert {lie.name for lie in LIES} == lies.LIES.keys()


def test_an_unknown_lie_is_an_error_and_not_silently_none():
    with pytest.raises(ValueError, match=r"use <kind>:<rank or all>:<phase> with a kind of .*kernel_returns_zeros, "):
        faults.strike("init", 0, {faults.VARIABLE: "lies.white:0:init"})
    with pytest.raises(ImportError):
        faults.strike("init", 0, {faults.VARIABLE: "no_such_module.kernel_returns_zeros:0:init"})
