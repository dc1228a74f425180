"""Where a library may keep the code that it compiles, from one launch to the next."""

import os
import stat
import tempfile
from pathlib import Path


def own_folder(name: str) -> Path:
    """A folder on this machine that this user alone may write to: what lies there is loaded as code. Others cannot
    replace it where the folder for temporary files is sticky, as /tmp is.

    Raises:
        OSError: it cannot be made, is no folder, or others may write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"sp_bench-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} is not a folder that you alone can write to, and code is loaded from it: remove it")
    return folder
