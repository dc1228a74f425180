"""run_sweep.sh: what it makes of its words, and of a Python that lacks what it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "run_sweep.sh"


def run_sweep(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SP_BENCH_PYTHON": str(python)}
    return subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True)


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "sweep=smoke"),
        (["seq_len=512", "seed=1"], "sweep=smoke seq_len=512 seed=1"),
        (["parity"], "sweep=parity"),
        (["parity", "seq_len=512"], "sweep=parity seq_len=512"),
        (["sweep=parity", "seq_len=512"], "sweep=parity seq_len=512"),
    ],
)
def test_the_first_word_is_the_name_of_a_sweep_unless_it_is_an_override(tmp_path, words, said):
    done = run_sweep(executable(tmp_path / "python", 'test "$1" = -c || echo "$@"'), *words)
    assert (done.returncode, done.stdout) == (0, f"-m sp_bench run {said}\n"), done.stderr


def test_a_python_that_cannot_run_the_package_is_one_line_with_the_way_out(tmp_path):
    bare = executable(tmp_path / "python", f'exec {sys.executable} -S "$@"')  # without its installed packages
    done = run_sweep(bare)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "No module named 'typer'" in line
    assert "pip install -e '.' first" in line
