"""Folders of results: what lies in one stays there. A link that leads out is refused or passed over, never followed."""

import os
from collections.abc import Sequence
from pathlib import Path

from sp_bench.config.parsing import ConfigError, shown

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


def require_campaigns(folders: Sequence[Path]) -> list[Path]:
    """Folders of results that a user named, each of which can be read.

    Raises:
        ConfigError: one is none, cannot be read, leads elsewhere, or holds campaigns instead of rows.
    """
    for folder in folders:
        try:
            is_folder = folder.is_dir()
        except OSError as error:  # a name that no file system takes
            raise ConfigError(f"{shown(folder)} cannot be read: {error.strerror}") from None
        if not is_folder:
            raise ConfigError(f"{shown(folder)} is not a folder of results")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(f"{folder} cannot be read: permission denied")
        require_contained(folder)
        _require_no_parent(folder)
    return list(folders)


def _require_no_parent(folder: Path) -> None:
    """A folder of campaigns has no rows of its own: its report would be empty.

    Raises:
        ConfigError: it has none, and folders in it have some.
    """
    if any(folder.glob("*.parquet")):
        return
    if campaigns := sorted({row.parent.name for row in folder.glob("[!._]*/*.parquet")}):
        several = ", ".join(campaigns[:5]) + (", ..." if len(campaigns) > 5 else "")
        raise ConfigError(f"{shown(folder)} holds campaigns, not rows: name one or more of {shown(several)}")
