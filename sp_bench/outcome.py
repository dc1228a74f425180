"""How a trial ended, from what it left behind: its record, its events, torchrun's summary and its logs."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_bench import handover
from sp_bench.logs import LAUNCHER_LOG, last_line

# Deaths that follow from a peer's: torchrun ends the others by SIGTERM, NCCL's watchdog aborts.
FOLLOW_ON_SIGNALS = (signal.SIGTERM, signal.SIGABRT)


@dataclass(frozen=True)
class Ending:
    """What the parent saw."""

    world_size: int
    exit_code: int | None  # of torchrun; None: the parent ended the trial
    expired: str | None  # which deadline passed
    oom_killed: bool  # the memory cgroup's oom_kill count rose meanwhile


@dataclass(frozen=True)
class Death:
    """A rank's end without zero, as torchrun's failure summary tells it."""

    rank: int
    exit_code: int  # negative: minus a signal's number

    def __str__(self) -> str:
        if self.exit_code >= 0:
            return f"rank {self.rank} exited with code {self.exit_code}"
        return f"rank {self.rank} died with {signal_name(-self.exit_code)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def classify(folder: Path, ending: Ending) -> dict[str, Any]:
    """Status, reason, phase and, when ok, the record's columns.

    In this order: a record and exit code 0 is ok; a rank killed outright (its peers' errors follow from that); the
    earliest failure that a rank told; a deadline; an end without a word.
    """
    events = handover.read_events(folder)
    phase = next((e.name for e in reversed(events) if e.name in handover.PHASES), "init")
    record = handover.read_record(folder)
    if ending.exit_code == 0 and record is not None:
        return {**record, "status": "ok", "phase": phase}
    told = next((e for e in events if e.name == "failed"), None)
    deaths = read_deaths(folder)
    silent = [d for d in deaths if not any(e.rank == d.rank and e.name == "failed" for e in events)]
    killed = next((d for d in silent if d.exit_code < 0 and -d.exit_code not in FOLLOW_ON_SIGNALS), None)
    if killed and not ending.expired:
        return _killed(killed, events, ending.oom_killed)
    if told:
        return {"status": told.status, "reason": told.reason, "oom_site": told.oom_site, "phase": phase}
    if ending.expired:
        return {"status": "timeout", "reason": ending.expired, "phase": phase}
    return {"status": "error", "reason": _silent_reason(folder, ending, silent, phase), "phase": phase}


def _killed(death: Death, events: Sequence[handover.Event], oom_killed: bool) -> dict[str, Any]:
    phase = next((e.name for e in reversed(events) if e.rank == death.rank and e.name in handover.PHASES), "init")
    reason = f"{death} in phase {phase}"
    if oom_killed and death.exit_code == -signal.SIGKILL:
        return {"status": "oom", "oom_site": "host", "reason": f"{reason}: out of host memory", "phase": phase}
    return {"status": "error", "reason": reason, "phase": phase}


def _silent_reason(folder: Path, ending: Ending, deaths: Sequence[Death], phase: str) -> str:
    if ending.exit_code == 0:
        return f"every rank exited with code 0, but rank 0 left no record; last phase {phase}"
    if deaths:
        line = last_line(handover.log_path(folder, deaths[0].rank)) or last_line(folder / LAUNCHER_LOG)
        return f"{deaths[0]} in phase {phase}: {line or 'no output'}"
    code = ending.exit_code or 0
    how = f"died with {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    return f"the launcher {how} in phase {phase}: {last_line(folder / LAUNCHER_LOG) or 'no output'}"


def read_deaths(folder: Path) -> list[Death]:
    """Each failed rank of torchrun's summary, the root cause first."""
    path = folder / LAUNCHER_LOG
    text = path.read_text(errors="replace") if path.exists() else ""
    before, _, root = text.rpartition("Root Cause")
    pattern = r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)"
    return [Death(int(rank), int(code)) for part in (root, before) for rank, code in re.findall(pattern, part)]


def oom_kills() -> int | None:
    """How often the kernel has killed for memory in this process's cgroup; None where no cgroup tells."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root = Path("/sys/fs/cgroup")
    candidates = [root / "memory" / name for name in _files(groups.get("memory"), "memory.oom_control")]
    candidates += [root / name for name in _files(groups.get(""), "memory.events")]
    for path in candidates:
        if path.exists() and (match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)):
            return int(match[1])
    return None


def _files(group: str | None, name: str) -> list[str]:
    """The control file of `group`, and the one at the top, which is this process's own inside a container."""
    return [] if group is None else [f"{group.strip('/')}/{name}".lstrip("/"), name]
