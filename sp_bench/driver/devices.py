"""One measurement at a time on a device: a lock of this machine, for this user's runs whatever their campaigns."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

POLL_S = 0.1


@contextmanager
def reserved(devices: Sequence[str], check: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """While open, no other run of this user measures on any of the `devices`. The kernel frees what a killed run held.

    check: called while waiting; may raise. say: hears once what is waited for.

    Raises:
        OSError: the folder for temporary files cannot be used.
    """
    with ExitStack() as held:
        for device in sorted(devices):  # all runs in one order, so that no two wait for each other
            with _locked(f"{device}.next", check, say):  # who waits gets the device before who had it last
                held.enter_context(_locked(device, check, say))
        yield


@contextmanager
def _locked(name: str, check: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"sp_bench-{os.getuid()}-{name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        while not _is_free(descriptor):
            say("another run is measuring on this machine; waiting for it, since both would measure each other's load")
            check()
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Locks it if so."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
