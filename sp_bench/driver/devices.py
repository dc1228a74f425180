"""One measurement at a time on a device: a lock on this machine, and the end of all processes that a trial started.

The lock holds for all runs of all users, whatever their campaigns.
"""

import errno
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil

from sp_bench.driver import owner

TOKEN = "SP_BENCH_TRIAL"  # the variable that marks every process of a launch; its value begins with the driver
SCOPE = "SP_BENCH_LOCK_SCOPE"  # the variable by which tests keep out of each other's way: runs of one scope take turns
POLL_S = 0.1
KILL_LIMIT_S = 30.0


@contextmanager
def reserved(devices: Sequence[str], check: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """While open, no other run on this machine measures on any of the `devices`. The kernel frees what a killed run
    held.

    check: called while waiting; may raise. say: called once with what is waited for.
    """
    with ExitStack() as held:
        for device in sorted(devices):  # all runs in one order, so that no two wait for each other
            with _locked(f"{device}.next", check, say):  # a waiting run gets the device before the run that had it last
                held.enter_context(_locked(device, check, say))
        yield


@contextmanager
def _locked(name: str, check: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock of this machine: an abstract socket, so that runs meet whatever their folders, users and umasks.
    One process at a time has it, and it ends with that process. A container with its own network has its own locks."""
    address = f"\0sp_bench-{os.environ.get(SCOPE, '')}-{name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        while not _bound(held, address):
            say("another run is measuring on this machine; waiting for it, since both would measure each other's load")
            check()
            time.sleep(POLL_S)
        yield


def _bound(held: socket.socket, address: str) -> bool:
    try:
        held.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def new_token() -> str:
    """The value of TOKEN for a launch of this process."""
    return f"{owner.this_process()}.{secrets.token_hex(16)}"


def kill_all(token: str) -> None:
    """End every process whose environment holds the token, with all descendants, and wait until none is left.

    Raises:
        RuntimeError: a process would not die.
    """
    deadline = time.monotonic() + KILL_LIMIT_S
    while found := _of_launch(token):
        for process in found:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        while any(map(_is_alive, found)) and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)  # a process that its parent never asks for stays, as a zombie: it is not waited for
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {[p.pid for p in found]} of a trial survive SIGKILL; the device hangs?")


def end_orphans() -> None:
    """End the launches on this machine whose driver was killed: they would disturb what is measured next.

    Raises:
        RuntimeError: a process would not die.
    """
    for token in {token for _, token in _marked()}:
        driver = owner.parse(token)
        if driver and driver.has_ended():
            kill_all(token)


def _marked() -> Iterator[tuple[psutil.Process, str]]:
    """Each process of any launch on this machine, with its token."""
    for process in psutil.process_iter():
        try:
            token = process.environ().get(TOKEN)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
        if token is not None:
            yield process, token


def _of_launch(token: str) -> list[psutil.Process]:
    """The living processes of a launch and their descendants, which may have another environment."""
    found: set[psutil.Process] = set()
    for process, its_token in _marked():
        if its_token == token:
            try:
                found |= {process, *process.children(recursive=True)}
            except psutil.NoSuchProcess:
                continue
    return [process for process in found if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
