"""The documentation as a site: every link leads somewhere, and options and columns are those that are declared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sp_bench.config.options import OPTIONS
from sp_bench.rows.schema import COLUMNS

ROOT = Path(__file__).parents[2]


def test_the_site_builds_without_a_broken_link_and_names_every_option_and_column(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options, columns = ((tmp_path / name / "index.html").read_text() for name in ("OPTIONS", "COLUMNS"))
    assert all(f"<code>{option.path}</code>" in options for option in OPTIONS)
    assert all(f"<code>{column.name}</code>" in columns for column in COLUMNS)
    assert "Ulysses sequence parallelism or Ring Attention?" in (tmp_path / "index.html").read_text()
