"""JSON files beside rows: plans, proofs and submissions. Others may have written them."""

import json
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 2**20  # a plan of 100,000 trials has 4 MB


def is_plain(path: Path) -> bool:
    """Whether it is a file itself: a link may lead out of the campaign, and a pipe would be waited for."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def read(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is a link or no plain file, has more than MAX_BYTES, or is not JSON of a depth that can be read.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
        raise ValueError(f"not a plain file of at most {MAX_BYTES:,} bytes")
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
