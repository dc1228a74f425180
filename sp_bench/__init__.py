"""sp_bench: Ulysses sequence parallelism against Ring Attention, proven right before it is timed."""

import os
from importlib import import_module

TYPE_CHECKING = False  # a Ctrl-C is a traceback until `__main__` begins, after this file: `typing` alone takes 10 ms
if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any

    import pandas

__version__ = "0.1.0"


def load(paths: "str | Path | Iterable[str | Path]") -> "pandas.DataFrame":
    """The rows of one or several campaign folders, in the order of the folders and of their files.

    The columns are those of `sp_bench/rows/schema.py`; old rows are converted to it. Behind them are options that have
    no column there, such as `activation_checkpointing` and `loss_tile_tokens`. `campaign` is the name of the folder,
    and `campaign_as_run` the name in the row, since the folder may have been renamed. Files that are no rows are left
    out with a warning.

    Raises:
        OSError: a folder is missing or cannot be read.
        ValueError: no folders.
    """
    # imported by name: ranks import this file, and readers of rows must not count as their code
    return import_module("sp_bench.rows.frame").load(_listed(paths))


# Words are command-line arguments: `sp_bench.run("method=ring,ulysses", "sp_size=2")`. Refusals are ConfigErrors, which
# are ValueErrors, with the command line's message.


def plan(*words: str) -> "dict[str, Any]":
    """What `run` would do with the same words, as `sp-bench plan --json` prints it; launches nothing. `trials` have a
    config, the status of the row that counts as done (or None), and the reason if unsupported. `notes` are lines.

    Raises:
        ValueError: impossible words.
    """
    return import_module("sp_bench.api").plan(*words)


def run(*words: str) -> "pandas.DataFrame":
    """Run a sweep and return the rows of its trials, as `load` does. Trials that have rows are skipped. Makes no
    report.

    Raises:
        ValueError: impossible words, or a results folder that cannot be written.
        SystemExit: the run was interrupted; committed rows stay.
    """
    return import_module("sp_bench.api").run(*words)


def ratios(paths: "str | Path | Iterable[str | Path]", slow: str, fast: str) -> "pandas.DataFrame":
    """The step time of one method over another's, in every place where both ran: a line each, with `ratio`, the bounds
    `low` and `high` of its interval (null below 6 pairs), `pairs`, `verdict` and `grade`. Each method by its fastest
    variant; replicates pair within one campaign, machine and code. Methods are named as in the column `method`.

    Raises:
        OSError: a folder is missing or cannot be read.
        ValueError: no folders.
    """
    return import_module("sp_bench.api").ratios(_listed(paths), slow, fast)


def compare(a: "str | Path", b: "str | Path") -> "dict[str, Any]":
    """Compare two campaigns cell by cell, as `sp-bench compare --json` prints it. Ratios are B over A of step times.

    Raises:
        ValueError: a folder without rows, or two without a common cell.
    """
    return import_module("sp_bench.api").compare(a, b)


def _listed(paths: "str | Path | Iterable[str | Path]") -> "list[str | Path]":
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)
