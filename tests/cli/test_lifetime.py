"""Processes end with the one that started them, whatever ends that."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from .conftest import SMALL

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a file for each of many rows, which processes read."""
    folder = tmp_path_factory.mktemp("results") / "many"
    shutil.copytree("results/h200x2_libraries_3", folder)
    subprocess.run([sys.executable, "-m", "sp_bench", "pack", "--undo", folder], check=True, capture_output=True)
    return str(folder)


def start(folder: Path, *words: str) -> psutil.Popen:
    """In a shell's background job SIGQUIT is ignored, and that is inherited: the process has it as in a terminal."""
    return psutil.Popen(
        [sys.executable, "-m", "sp_bench", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGQUIT, signal.SIG_DFL),
    )


def children(parent: psutil.Popen, enough: Callable[[list[psutil.Process]], bool]) -> list[psutil.Process]:
    """All that the process started, once there is enough of it."""
    deadline = time.monotonic() + PATIENCE_S
    while not enough(found := parent.children(recursive=True)):
        assert parent.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def semaphores(process: psutil.Process) -> set[Path]:
    """The files of the named semaphores that it uses."""
    return {Path(name) for name in re.findall(r"/dev/shm/sem\.\S+", Path(f"/proc/{process.pid}/maps").read_text())}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="a report has no processes on one core")
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, ("report", "{}", "--out", "page")),
        (signal.SIGTERM, ("report", "{}", "--findings", "findings.md")),
        (signal.SIGHUP, ("archive", "{}", "--out", "a.zip")),
        (signal.SIGQUIT, ("compare", "{}", "{}")),
    ],
)
def test_the_processes_of_a_report_end_with_it_and_leave_no_semaphore(campaign, tmp_path, number, words):
    parent = start(tmp_path, *(word.format(campaign) for word in words))
    started = children(parent, lambda found: sum("spawn_main" in " ".join(each.cmdline()) for each in found) >= 2)
    shared = semaphores(parent)
    assert shared
    parent.send_signal(number)
    _, alive = psutil.wait_procs([parent, *started], timeout=PATIENCE_S)
    for each in alive:
        each.kill()
    assert alive == []
    assert [path for path in shared if path.exists()] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_ranks_that_measure_end_with_their_driver(tmp_path, number):
    long = [word.replace("timed_steps=2", "timed_steps=1000000") for word in SMALL]
    driver = start(tmp_path, "run", "method=single", "sp_size=1", "seq_len=96,192", "isolation=group", *long)
    ranks = children(driver, lambda found: any("measure" in path.read_text() for path in tmp_path.rglob("*.jsonl")))
    assert ranks
    driver.send_signal(number)
    _, alive = psutil.wait_procs([driver, *ranks], timeout=PATIENCE_S)
    for each in alive:
        each.kill()
    assert alive == []
    assert list((tmp_path / "results").rglob("*.parquet")) == []
