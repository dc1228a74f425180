"""What lies in a folder of results stays there: a link that leads out is refused or passed over, never followed."""

import os
from pathlib import Path

from sp_bench.parsing import ConfigError

WORK = "_work"  # where all lies that is not a row


def stays(path: Path, root: Path) -> bool:
    """Whether `path` is inside `root` once links are followed; a loop of links leads nowhere."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def require_contained(campaign: Path) -> None:
    """Neither the campaign's folder nor what we write to below it is a link to somewhere else.

    Raises:
        ConfigError: such a link, or a folder that is none or cannot be read.
    """
    if campaign.is_symlink() and not stays(campaign, campaign.parent):
        raise ConfigError(
            f"{campaign} is a link that leads out of {campaign.parent}; give the folder {os.path.realpath(campaign)} "
            "itself, or move it here"
        )
    try:
        if campaign.exists():
            os.scandir(campaign).close()
        work = campaign / WORK
        entries = [work, *work.iterdir()] if work.is_dir() else [work]
    except OSError as error:
        raise ConfigError(f"{campaign} cannot be read: {error.strerror}") from error
    for path in entries:
        if path.is_symlink() and not stays(path, campaign):
            raise ConfigError(f"{path} is a link that leads out of {campaign}; remove it, or use another campaign")
