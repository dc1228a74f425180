"""Real commands, each in a working folder of its own."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from .console import console

Command = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")


def sp_bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sp_bench", *arguments], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """`command("plan", ...)` runs `sp-bench plan ...` in an empty folder, in this process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with chdir(tmp_path):
            code, out, err = console(capfd, *arguments)
        return subprocess.CompletedProcess(arguments, code, out, err)

    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...], str]:
    """A folder in which one campaign ran, its arguments and what it printed: ring on 3 ranks is ok, and ulysses, which
    cannot split 8 heads over 3, is unsupported."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = ("method=ring,ulysses", "sp_size=3", "seq_len=192", "campaign=small", *SMALL)
    done = sp_bench(folder, "run", "-m", *arguments)
    assert done.returncode == 0, done.stderr
    return folder, arguments, done.stdout
