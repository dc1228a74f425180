"""sp_bench: Ulysses sequence parallelism against Ring Attention, proven right before it is timed."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

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
