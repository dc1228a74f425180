"""sp_bench: Ulysses sequence parallelism against Ring Attention, proven right before it is timed."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

__version__ = "0.1.0"


def load(paths: "str | Path | Iterable[str | Path]") -> "pandas.DataFrame":
    """The rows of one campaign folder, or of several: a line each, in the order of the folders and of their files.

    The columns are those of `sp_bench/rows/schema.py`, old rows as they would be written today. `campaign` is the name
    of the folder, and `campaign_as_run` what the row itself says: a folder may have been renamed since. Files that are
    no rows are left out with a warning.

    Raises:
        OSError: a folder is missing or cannot be read.
        ValueError: no folders.
    """
    # by its name, because ranks import this file: readers of rows are no part of what they run
    return import_module("sp_bench.rows.frame").load([paths] if isinstance(paths, str | Path) else list(paths))


# The words of these are those of the command line: `sp_bench.run("method=ring,ulysses", "sp_size=2")`. What it refuses
# is a ConfigError, which is a ValueError, with the same message.


def plan(*words: str) -> "dict[str, Any]":
    """What `run` would do with the same words, and launch nothing: `trials`, each with its config, status (of the row
    that counts as done, else None) and reason if it is unsupported; and `notes`. It is what `sp-bench plan --json`
    prints.

    Raises:
        ValueError: words that no trial can have.
    """
    return import_module("sp_bench.api").plan(*words)


def run(*words: str) -> "pandas.DataFrame":
    """Run a sweep and return the rows of its trials, as `load` does. Trials that have rows are not run again. No report
    is made.

    Raises:
        ValueError: words that no trial can have, or a results folder that cannot be written.
        SystemExit: the run was interrupted; committed rows stay.
    """
    return import_module("sp_bench.api").run(*words)


def compare(a: "str | Path", b: "str | Path") -> "dict[str, Any]":
    """Two campaigns cell by cell: what `sp-bench compare --json` prints. Ratios are B over A of step times.

    Raises:
        ValueError: a folder without rows, or two without a common cell.
    """
    return import_module("sp_bench.api").compare(a, b)
