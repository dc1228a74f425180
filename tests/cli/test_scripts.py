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


REAL = f'test "$1" = -c && exec {sys.executable} "$@" || echo "$@"'  # what is asked of it, it knows; it runs nothing


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
    done = run_sweep(executable(tmp_path / "python", REAL), *words)
    assert (done.returncode, done.stdout) == (0, f"-m sp_bench run {said}\n"), done.stderr


def test_a_python_that_cannot_run_the_package_is_one_line_with_the_way_out(tmp_path):
    bare = executable(tmp_path / "python", f'exec {sys.executable} -S "$@"')  # without its installed packages
    done = run_sweep(bare)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "No module named 'typer'" in line
    assert "pip install -e '.' first" in line


def another_checkout(folder: Path) -> Path:
    (folder / "sp_bench").mkdir(parents=True)
    for name in ("__init__", "cli"):
        (folder / "sp_bench" / f"{name}.py").touch()
    return folder


def test_with_another_checkout_installed_this_ones_code_runs(tmp_path):
    """From any folder, as tests start commands."""
    other = another_checkout(tmp_path / "other")
    where = f"cd {tmp_path} && exec {sys.executable} -c 'import sp_bench; print(sp_bench.__path__[0])'"
    installed = f'export PYTHONPATH="$PYTHONPATH:{other}"; test "$1" = -c && exec {sys.executable} "$@"; {where}'
    done = run_sweep(executable(tmp_path / "python", installed))
    assert (done.returncode, done.stdout.strip()) == (0, str(SCRIPT.parent / "sp_bench")), done.stderr


def test_a_python_that_runs_another_checkout_whatever_it_is_told_is_refused(tmp_path):
    other = another_checkout(tmp_path / "other")
    stubborn = executable(tmp_path / "python", f'export PYTHONPATH={other}; exec {sys.executable} "$@"')
    done = run_sweep(stubborn)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"runs the code of {other}/sp_bench, not that of {SCRIPT.parent}" in done.stderr
