"""Lies planted in real trials, through the real command line: none of them may end as `ok`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from planted import LIES, SHORT, Lie

from sp_bench.hardware import package_versions
from sp_bench.testing import faults, lies


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


def run(folder: Path, lie: Lie, dtype: str) -> dict[str, object]:
    """The row of the one trial that tells this lie."""
    words = ("run", *lie.trial, *SHORT, f"dtype={dtype}", "campaign=lies", "--no-report")
    environment = os.environ | {faults.VARIABLE: f"{lie.name}:{lie.ranks}:{lie.phase}"}
    done = subprocess.run(
        [sys.executable, "-m", "sp_bench", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    rows = list((folder / "results" / "lies").glob("*.parquet"))
    assert len(rows) == 1, done.stdout + done.stderr
    return pq.read_table(rows[0]).to_pylist()[0]


@pytest.mark.parametrize(("lie", "dtype"), CASES)
def test_a_lie_ends_as_written_down(lie, dtype, tmp_path, record_property):
    row = run(tmp_path, lie, dtype)
    told = {"group": lie.group, "what": lie.what, "ranks": lie.ranks, "trial": " ".join(lie.trial), "dtype": dtype}
    for name, value in (told | {"status": row["status"], "reason": row["reason"]}).items():
        record_property(name, value)
    assert row["status"] == lie.status, row["reason"]
    assert re.search(lie.reason, str(row["reason"])), row["reason"]


def test_every_lie_is_planted_somewhere():
    assert {lie.name for lie in LIES} == lies.LIES.keys()
