"""Lies planted in real trials, through the real command line: none of them may end as `ok`."""

import os
import re
from pathlib import Path

import lies
import pyarrow.parquet as pq
import pytest
from planted import LIES, SHORT, Lie

from sp_bench.hardware import package_versions
from sp_bench.testing import faults

from ..cli.console import console


def marks(lie: Lie, dtype: str) -> list[pytest.MarkDecorator]:
    """A quick lie is told in its last dtype in the ordinary tests, and in all of them with `-m faults`."""
    missing = [package for package in lie.needs if package not in package_versions()]
    skipped = pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")
    return [skipped] if lie.quick and dtype == lie.dtypes[-1] else [skipped, pytest.mark.faults]


CASES = [
    pytest.param(lie, dtype, id=f"{lie.name}-{lie.ranks}-{dtype}", marks=marks(lie, dtype))
    for lie in LIES
    for dtype in lie.dtypes
]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """The row of the one trial that tells a lie in a dtype."""

    def run(lie: Lie, dtype: str) -> dict[str, object]:
        words = ("run", *lie.trial, *SHORT, f"dtype={dtype}", "campaign=lies", "--no-report")
        monkeypatch.setenv("PYTHONPATH", str(Path(lies.__file__).parent), prepend=os.pathsep)
        monkeypatch.setenv(faults.VARIABLE, f"lies.{lie.name}:{lie.ranks}:{lie.phase}")
        monkeypatch.chdir(tmp_path)
        _, printed, errors = console(capfd, *words)
        rows = list((tmp_path / "results" / "lies").glob("*.parquet"))
        assert len(rows) == 1, printed + errors
        return pq.read_table(rows[0]).to_pylist()[0]

    return run


@pytest.mark.parametrize(("lie", "dtype"), CASES)
def test_a_lie_ends_as_written_down(lie, dtype, run, record_property):
    row = run(lie, dtype)
    told = {"group": lie.group, "what": lie.what, "ranks": lie.ranks, "trial": " ".join(lie.trial), "dtype": dtype}
    for name, value in (told | {"status": row["status"], "reason": row["reason"]}).items():
        record_property(name, value)
    assert row["status"] == lie.status, row["reason"]
    assert re.search(lie.reason, str(row["reason"])), row["reason"]


def test_every_lie_is_planted_somewhere():
    assert {lie.name for lie in LIES} == lies.LIES.keys()


def test_an_unknown_lie_is_an_error_and_not_silently_none():
    with pytest.raises(ValueError, match="use <kind>:<rank or all>:<phase> with a kind of kernel_returns_zeros, "):
        faults.strike("init", 0, {faults.VARIABLE: "lies.white:0:init"})
    with pytest.raises(ImportError):
        faults.strike("init", 0, {faults.VARIABLE: "no_such_module.kernel_returns_zeros:0:init"})
