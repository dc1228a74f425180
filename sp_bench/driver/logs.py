"""The log files of a trial, kept short while its ranks write them."""

import re
from pathlib import Path

LAUNCHER_LOG = "launcher.log"  # torchrun's own output, and that of ranks which have no log of their own yet
# from where on torchrun tells of a rank's failure: what is before it, the rank said
_TORCHRUN_TELLS = re.compile(r"^E\d{4} \d\d:.*torch/distributed/elastic.*failed \(exitcode", re.MULTILINE)
MAX_BYTES, HEAD_BYTES, TAIL_BYTES = 4 * 2**20, 2**20, 2**20


def bound_logs(folder: Path) -> None:
    """Cut each log that has outgrown its limit down to its head and its last MiB.

    The writers append (O_APPEND), so their next line follows the cut; a line written during the cut may be lost.
    """
    for path in [folder / LAUNCHER_LOG, *folder.glob("rank*.log")]:
        size = path.stat().st_size if path.exists() else 0
        if size <= MAX_BYTES:
            continue
        with open(path, "r+b") as file:
            file.seek(size - TAIL_BYTES)
            tail = file.read(TAIL_BYTES)
            file.seek(HEAD_BYTES)
            file.write(b"\n[... %d bytes left out ...]\n" % (size - HEAD_BYTES - TAIL_BYTES) + tail)
            file.truncate()


def last_line(path: Path) -> str | None:
    """The last line with text, at most 500 characters of it: what failed said, where that is known, not torchrun."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        text = file.read().decode(errors="replace")
    told = _TORCHRUN_TELLS.search(text)
    said = text[: told.start()] if told else ""
    lines = (said if said.strip() else text).split("\n")
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), None)
