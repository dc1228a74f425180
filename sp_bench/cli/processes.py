"""Processes that share the reading and drawing of a large report."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sp_bench import programs
from sp_bench.rows import store

MANY = 100  # rows; with fewer the processes would take longer to start than they save
MOST = 8  # processes; each takes about 300 MB


@contextmanager
def processes(folders: Sequence[Path]) -> Iterator[Executor | None]:
    """Processes for the rows of these campaigns, which end with this one; None if there are few rows."""
    number = min(len(os.sched_getaffinity(0)), MOST)
    if number == 1 or sum(1 for folder in folders for _ in store.committed(folder)) < MANY:
        yield None
        return
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(number, spawned, initializer=programs.end_with, initargs=(os.getpid(),)) as executor:
        yield executor
