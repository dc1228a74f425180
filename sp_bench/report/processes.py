"""Processes that share the reading and drawing of a large report."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sp_bench.rows import store

MANY = 100  # rows; with fewer the processes would take longer to start than they save
MOST = 8  # processes; each takes about 300 MB


@contextmanager
def processes(folders: Sequence[Path]) -> Iterator[Executor | None]:
    """Processes for the rows of these campaigns; None if there are few rows. They are spawned, so a script that uses
    them needs `if __name__ == "__main__"`."""
    number = min(len(os.sched_getaffinity(0)), MOST)
    if number == 1 or sum(1 for folder in folders for _ in store.committed(folder)) < MANY:
        yield None
        return
    with ProcessPoolExecutor(number, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor
