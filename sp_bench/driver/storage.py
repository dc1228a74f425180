"""Disk trouble in the middle of a campaign: what is said of it, and where a finished trial's record is kept."""

import errno
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sp_bench import handover
from sp_bench.config.parsing import ConfigError

WAYS_OUT: Mapping[int, str] = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "mount it writable",
    errno.EACCES: "make it writable for you",
    errno.EPERM: "make it writable for you",
    errno.ENOENT: "it was deleted or moved while the campaign ran; put it back or begin anew",
}


class StorageError(ConfigError):
    """The campaign's folder cannot be used any more. The message says why, what is kept, and the way out."""

    def __init__(self, folder: Path, error: OSError, kept: str = "") -> None:
        way_out = WAYS_OUT.get(error.errno or 0, "see to it")
        where = f" ({error.filename})" if error.filename else ""
        super().__init__(
            f"cannot write to {folder} any more: {error.strerror or error}{where}; the campaign stops, what it has "
            f"committed stays{kept}; {way_out}, then go on with sp-bench resume and the same words"
        )


def keep(row: Mapping[str, Any], key: str, trial_folder: Path) -> str:
    """Where the record of a trial whose row cannot be committed is, in words; writes it if it is nowhere yet."""
    record = trial_folder / handover.RECORD
    if record.exists():  # rank 0 wrote it, whole
        return f"; the record of the trial that just ended is in {record}"
    spool = Path(tempfile.gettempdir()) / f"sp_bench-{key}.json"
    try:
        spool.write_text(json.dumps(row, default=str))
    except OSError as error:
        return f"; the record of the trial that just ended is lost: {spool}: {error.strerror}"
    return f"; the record of the trial that just ended is in {spool}"
