"""What names the code that was measured: the column `git_sha`, whether the code runs from a checkout or from a copy."""

import hashlib
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from sp_bench import programs
from sp_bench.hardware import PACKAGE

TREE = "tree:"  # begins the part of `git_sha` that names the code by the hash of its files


def state() -> tuple[str | None, bool | None]:
    """(what names the code that runs, whether the package or conf has uncommitted changes).

    In a checkout: the commit; with changes `<commit>+tree:<hash>`, with the hash of `code_tree`. In a copy: the commit
    that `git archive` wrote into .git_archival.txt, or `tree:<hash>`; whether an unpacked archive was edited is not
    known. None: what is not known.
    """
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return _archived_commit(root / ".git_archival.txt") or _tree_name(), None
    commit = _git("rev-parse", "--verify", "HEAD")
    if commit is None:  # git is not installed, or nothing is committed
        return _tree_name(), None
    changes = _git("status", "--porcelain", "--", PACKAGE.name, "conf")
    return f"{commit}+{_tree_name()}" if changes else commit, None if changes is None else bool(changes)


def short(git_sha: str, digits: int = 7) -> str:
    """The beginning of a `git_sha`: 0a1b2c3, or tree:0a1b2c3 where no commit is known."""
    return git_sha[: digits + len(TREE) * git_sha.startswith(TREE)]


def code_tree(folder: Path) -> str | None:
    """The hash that git gives a folder of code, as `git rev-parse COMMIT:sp_bench` prints it, wherever a copy lies.

    What git does not keep is left out: caches, hidden files, and the copy of conf that a wheel has in the package.
    None: there is no file in the folder.
    """
    entries = []
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__" or path == PACKAGE / "conf":
            continue
        if path.is_dir():
            mode, found = b"40000", code_tree(path)
        else:  # no file of the package is executable, whatever a copy makes of it
            content = path.read_bytes()
            mode, found = b"100644", hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if found:
            name = path.name.encode()
            sorts_as = name + b"/" if path.is_dir() else name
            entries.append((sorts_as, mode + b" " + name + b"\0" + bytes.fromhex(found)))
    body = b"".join(entry for _, entry in sorted(entries))
    return hashlib.sha1(b"tree %d\0" % len(body) + body).hexdigest() if body else None


def commits_of_trees(git_shas: Iterable[str]) -> dict[str, str]:
    """The first commit of this checkout's history with the code that a `git_sha` names as a tree, by that `git_sha`;
    those that the history does not have are absent."""
    trees = {git_sha: git_sha.partition(TREE)[2] for git_sha in git_shas if TREE in git_sha}
    if not trees:
        return {}
    commits = (_git("rev-list", "HEAD", "--topo-order", "--reverse") or "").split()
    asked = "\n".join(f"{commit}:{PACKAGE.name}" for commit in commits)
    answers = (_git("cat-file", "--batch-check=%(objectname)", stdin=asked) or "").splitlines()
    first: dict[str, str] = {}
    for commit, tree in zip(commits, answers, strict=False):  # without git there are none of either
        first.setdefault(tree, commit)
    return {git_sha: first[tree] for git_sha, tree in trees.items() if tree in first}


def _tree_name() -> str | None:
    found = code_tree(PACKAGE)
    return f"{TREE}{found}" if found else None


def _archived_commit(path: Path) -> str | None:
    try:
        found = re.fullmatch(r"node: ([0-9a-f]{40})\n?", path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None


def _git(*words: str, stdin: str = "") -> str | None:
    """What git prints about this checkout; None, with a warning the first time, if it does not answer."""
    try:
        return programs.answer(["git", "-C", str(PACKAGE.parent), *words], stdin=stdin).strip()
    except programs.NoAnswer as error:
        _warn_once(f"the commit of the code, or whether it was edited, stays unknown: {error}")
        return None


@cache
def _warn_once(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
