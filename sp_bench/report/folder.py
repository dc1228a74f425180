"""The folder of a report: each file appears whole or not at all, and files that an earlier report left are removed."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from sp_bench.config.parsing import shown
from sp_bench.rows import store

PAGE = "index.html"
MANIFEST = ".report-files"  # names of the files that reports made here, one a line


def obstacle(out: Path, campaigns: Sequence[Path]) -> str | None:
    """Why a report cannot be written to `out`; None if it can. Reasons: no folder, no permission, files that no report
    made, or a place among the rows of a campaign, where readers of rows would find it."""
    target = out.resolve()
    others = (folder for folder in (target, *target.parents) if _is_campaign(folder))
    for campaign in (*(campaign.resolve() for campaign in campaigns), *others):
        if target.is_relative_to(campaign) and target.relative_to(campaign).parts[:1] != (store.WORK,):
            return f"lies among the rows of {campaign.name}; use another folder, or leave it out"
    try:
        nearest = next(path for path in (target, *target.parents) if path.exists())
    except OSError as error:  # not a valid name
        return f"cannot be written: {error.strerror}"
    if not nearest.is_dir():
        return f"cannot be made: {nearest.name} is not a folder"
    if target.is_dir() and not (target / MANIFEST).exists() and (found := next(target.iterdir(), None)):
        return f"has files that no report made, such as {shown(found.name)}; use a folder that is new or empty"
    if (target / PAGE).exists() and PAGE not in _manifest(target):
        return f"has an {PAGE} that no report made; use another folder, or move it away"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"cannot be written: {nearest.name} is read-only, or another user's; give --out another folder"
    return None


def _is_campaign(folder: Path) -> bool:
    try:
        return next(store.committed(folder), None) is not None
    except OSError:  # unreadable, so it holds no rows
        return False


def write(out: Path, files: Mapping[str, bytes]) -> None:
    """Write these files into `out`, remove those of earlier reports, and keep all others.

    files: path in `out`, with forward slashes -> content. They are written in order, so the page comes last: it shows
    the others. After an interruption the next report cleans up.

    Raises:
        OSError: a file cannot be written.
    """
    earlier = _manifest(out)
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / MANIFEST, _listed([*earlier, *files]))
    for name, content in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
    for name in sorted(set(earlier) - set(files)):
        stale = out / name
        stale.unlink(missing_ok=True)
        if stale.parent != out and stale.parent.is_dir() and not any(stale.parent.iterdir()):
            stale.parent.rmdir()
    _replace(out / MANIFEST, _listed(files))


def _manifest(out: Path) -> list[str]:
    """The files of earlier reports. Names that lead out of the folder are ignored."""
    path = out / MANIFEST
    names = path.read_text("utf-8").splitlines() if path.is_file() else []
    inside = (PurePosixPath(name) for name in names if name)
    return [str(name) for name in inside if not name.is_absolute() and ".." not in name.parts]


def _listed(names: Mapping[str, bytes] | list[str]) -> bytes:
    return "".join(f"{name}\n" for name in sorted(set(names))).encode()


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
