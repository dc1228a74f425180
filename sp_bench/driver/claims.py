"""Claims: they decide which driver runs which attempt if several fill one campaign, and how its row is committed.

A claim is a directory in `_work/claims`: `<trial_id>-<env_id>-<attempt>.<owner>.<nonce>`. os.mkdir makes it and names
its owner in one step, its mtime is the owner's heartbeat, and no name is ever used twice. So

- no two drivers run one attempt: each makes its directory first and lists all of them after, and the second sees
  the first and lets go;
- a dead owner blocks nobody: its directory is renamed away;
- no attempt is committed twice: the row's file lies inside the directory until one os.replace moves it to the campaign
  (so it is on the same file system). Once the claim has been renamed away there is no such path, and a driver that
  was only slow is refused. If the slow driver committed first, the new owner finds that row
  once its claim holds, and stops.

The file system must only have an atomic mkdir and rename.
"""

import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_bench.driver import owner
from sp_bench.rows import store
from sp_bench.testing.kill_points import reach

FOLDER = "claims"
HEARTBEAT_S = 10.0
STALE_S = 60.0  # without a heartbeat for this long, an owner counts as dead wherever it runs
REPORT = "report"  # the key of the run that makes the campaign's report
COMMAND = "command"  # the key of the run that appends to the campaign's file
GONE = ".gone"  # ends the name of a directory that is no claim any more
_NAME = re.compile(rf"(?P<key>[0-9a-z-]+)\.{owner.PATTERN}\.(?P<nonce>[0-9a-f]+)")


class LostClaim(Exception):
    """Another driver has taken the claim over; its row is the one that counts."""


@dataclass(frozen=True)
class Claim:
    path: Path
    key: str  # of an attempt: <trial_id>-<env_id>-<attempt>
    owner: owner.Owner
    nonce: str


class Claims:
    """The claims that this process makes in one folder, kept alive by a thread while the context is open.

    Every method raises OSError where the folder cannot be used any more, but for `release`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner = owner.this_process()
        self._held: set[Path] = set()
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Claims":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._heart.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._heart.join()
        for path in tuple(self._held):
            self._let_go(path)

    def take(self, key: str, is_committed: Callable[[], bool]) -> Claim | None:
        """A claim on `key`; None when another driver holds it or has committed it."""
        return next(iter(self.take_all([key], lambda _: is_committed())), None)

    def take_all(self, keys: Collection[str], is_committed: Callable[[str], bool]) -> list[Claim]:
        """Claims on those of `keys` that no other driver holds or has committed, in their order. However many there
        are, the folder is listed twice."""
        taken = {key for key, claims in self._of(keys).items() if not all(map(self._is_dead, claims))}
        made = [self._make(key) for key in keys if key not in taken]
        others = self._of(keys)
        held = []
        for claim in made:
            if self._is_alone(claim, others[claim.key]) and not is_committed(claim.key):
                reach("claim_held")
                held.append(claim)
            else:
                self.release(claim)
        return held

    def _make(self, key: str) -> Claim:
        nonce = secrets.token_hex(8)
        claim = Claim(self.folder / f"{key}.{self._owner}.{nonce}", key, self._owner, nonce)
        self._held.add(claim.path)
        os.mkdir(claim.path)
        reach("claim_made")
        return claim

    def commit(self, claim: Claim, row: Mapping[str, Any], folder: Path) -> Path:
        """Make the row part of the campaign `folder`.

        Raises:
            LostClaim: another driver has taken over; nothing is written.
            OSError: the row cannot be written; `folder` holds whole rows only.
        """
        try:
            return store.write(row, folder, within=claim.path)
        except FileNotFoundError as error:
            if claim.path.exists() or not self.folder.exists():
                raise
            raise LostClaim(claim.key) from error

    def release(self, claim: Claim) -> None:
        """Let go of a claim, lost ones too. What cannot be removed is taken over when this process has ended."""
        self._let_go(claim.path)
        reach("claim_released")

    def holders(self) -> list[str]:
        """The other processes that hold claims, for people to read."""
        others = {claim.owner for claim in listed(self.folder) if claim.owner != self._owner}
        return sorted(f"process {other.pid} on {other.host}" for other in others)

    def _let_go(self, path: Path) -> None:
        self._held.discard(path)
        with suppress(OSError):
            _remove(path)

    def _is_alone(self, claim: Claim, of_its_key: Iterable[Claim]) -> bool:
        for other in of_its_key:
            if other.path == claim.path:
                continue
            if not self._is_dead(other):
                return False
            _bury(other)
        return True

    def _of(self, keys: Collection[str]) -> dict[str, list[Claim]]:
        """All claims on each of `keys`."""
        found: dict[str, list[Claim]] = {key: [] for key in keys}
        for claim in listed(self.folder):
            if claim.key in found:
                found[claim.key].append(claim)
        return found

    def _is_dead(self, claim: Claim) -> bool:
        if claim.owner.has_ended():
            return True
        try:
            return self._now() - _modified(claim.path) > STALE_S
        except FileNotFoundError:
            return True  # released meanwhile

    def _now(self) -> float:
        """The time by the clock that sets the heartbeats: the file system's, which may be another machine's."""
        os.utime(self.folder)
        return _modified(self.folder)

    def _sweep(self) -> None:
        """Remove what killed drivers have left."""
        for name in os.listdir(self.folder):
            if name.endswith(GONE):
                _remove(self.folder / name)
        for claim in listed(self.folder):
            if self._is_dead(claim):
                _bury(claim)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            for path in tuple(self._held):
                with suppress(OSError):  # taken over: `commit` raises. After any other error the next beat tries again
                    os.utime(path)


def listed(folder: Path) -> Iterator[Claim]:
    """All claims in a folder, those of dead owners included."""
    for name in os.listdir(folder):
        if (match := _NAME.fullmatch(name)) and (who := owner.parse(name[len(match["key"]) + 1 :])):
            yield Claim(folder / name, match["key"], who, match["nonce"])


def _modified(path: Path) -> float:
    """The mtime of a directory. It is opened for that: an NFS client answers a mere stat from its cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _bury(claim: Claim) -> None:
    """Make a claim void. Several processes may do so at the same time."""
    with suppress(FileNotFoundError):
        os.rename(claim.path, gone := claim.path.with_name(claim.path.name + GONE))
        reach("claim_taken_over")
        _remove(gone)


def _remove(path: Path) -> None:
    for remove, target in ((os.unlink, path / store.UNCOMMITTED), (os.rmdir, path)):
        try:
            remove(target)
        except OSError as error:
            # not empty: a network file system keeps a file that somebody has open; the next sweep removes it
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
