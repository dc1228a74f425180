"""Names the process that owns something, so that any other process can find out whether it still lives."""

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PATTERN = r"(?P<host>[A-Za-z0-9-]+)\.(?P<machine>[0-9a-f]{8})\.(?P<pid>\d+)\.(?P<started>\d+)"


@dataclass(frozen=True)
class Owner:
    """A process. As text it can be part of a file's name."""

    host: str  # for people to read
    machine: str  # 8 hex digits: one boot of one machine, and in it one space of process ids
    pid: int
    started: int  # clock ticks after the boot: a later process with the same id has another

    def __str__(self) -> str:
        return f"{self.host}.{self.machine}.{self.pid}.{self.started}"

    def has_ended(self) -> bool:
        """Whether the process is known to be gone. False if it runs on another machine, where nobody can say."""
        if self.machine != _machine():
            return False
        try:
            state, started = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return not _answers(self.pid)
        return state in "ZX" or started != self.started


def this_process() -> Owner:
    host = re.sub("[^A-Za-z0-9-]", "-", socket.gethostname())[:64] or "unnamed"
    return Owner(host, _machine(), os.getpid(), _stat(os.getpid())[1])


def parse(text: str) -> Owner | None:
    """The owner that `text` begins with, if it does."""
    match = re.match(PATTERN, text)
    return match and Owner(match["host"], match["machine"], int(match["pid"]), int(match["started"]))


def _stat(pid: int) -> tuple[str, int]:
    """(state, start in clock ticks). Not psutil's create time, which moves when somebody sets the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _answers(pid: int) -> bool:
    """Whether the process exists, if /proc hides the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
