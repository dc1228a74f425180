"""Files beside rows: plans, proofs, submissions and the campaign's file. Others may have written them."""

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


def text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is a link or no plain file, has more than max_bytes, or is no UTF-8.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a plain file")
    if found.st_size > max_bytes:
        raise ValueError(f"{found.st_size:,} bytes; at most {max_bytes:,}")
    return path.read_text("utf-8")


def json_of(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError, ValueError: as for `text`, or it is not JSON of a depth that can be read.
    """
    try:
        return json.loads(text(path))
    except RecursionError:
        raise ValueError("nested too deeply") from None
