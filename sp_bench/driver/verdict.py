"""How a trial ended, from what it left behind: its record, its events, torchrun's summary and its logs."""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_bench import handover
from sp_bench.driver.logs import LAUNCHER_LOG, last_line

# Deaths that follow from a peer's: torchrun ends the others by SIGTERM, NCCL's watchdog aborts.
FOLLOW_ON_SIGNALS = (signal.SIGTERM, signal.SIGABRT)


# How an error reads that is the echo of a peer's end.
LOST_PEER = re.compile(r"connection|peer|broken pipe|remote|TCPStore|abort|timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Ending:
    """What the parent saw."""

    exit_code: int | None  # of torchrun; None: the parent ended the trial
    expired: str | None  # which deadline passed
    oom_killed: bool  # the memory cgroup's oom_kill count rose meanwhile
    ended_at: float = math.inf  # seconds since the epoch; what is told later tells of the parent's own SIGKILL


@dataclass(frozen=True)
class Death:
    """A rank's end without a word of its own, by the process that watched over it, or else by torchrun's summary."""

    rank: int
    exit_code: int  # negative: minus a signal's number
    at: float = math.inf  # seconds since the epoch; torchrun's summary does not tell

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

    In this order: a record and exit code 0 is ok; the first failure, told or silent; a deadline; an end without a word.
    """
    events = [event for event in handover.read_events(folder) if event.at <= ending.ended_at]
    phase = _phase(events)
    record = handover.read_record(folder)
    if ending.exit_code == 0 and record is not None:
        return {**record, "status": "ok", "phase": phase}
    told = next((e for e in events if e.name == "failed"), None)
    deaths = _silent_deaths(folder, events)
    death = next((d for d in deaths if _is_cause(d, told)), None)
    if death:
        return _died(folder, death, _phase(events, death.rank), ending.oom_killed)
    if told:
        own_phase = _phase([e for e in events if e.at <= told.at], told.rank)
        return {"status": told.status, "reason": told.reason, "oom_site": told.oom_site, "phase": own_phase}
    if ending.expired:
        return {"status": "timeout", "reason": ending.expired, "phase": phase}
    if deaths:
        return _died(folder, deaths[0], _phase(events, deaths[0].rank), ending.oom_killed)
    return _launcher_died(folder, ending, phase)


def _phase(events: Sequence[handover.Event], rank: int | None = None) -> str:
    """The phase entered last, by the rank or by any."""
    entered = [e.name for e in events if e.name in handover.PHASES and rank in (None, e.rank)]
    return entered[-1] if entered else handover.PHASES[0]


def _silent_deaths(folder: Path, events: Sequence[handover.Event]) -> list[Death]:
    """Ranks that ended without saying why, the first first; torchrun's own word counts where nobody else tells."""
    exits = [Death(e.rank, e.exit_code, e.at) for e in events if e.exit_code is not None]
    spoke = {e.rank for e in events if e.name == "failed"}
    done = {e.rank for e in events if e.name == "done"}
    silent = [d for d in exits if d.rank not in spoke and not (d.exit_code == 0 and d.rank in done)]
    known = spoke | {d.rank for d in exits}
    return silent + [d for d in read_deaths(folder) if d.rank not in known]


def _is_cause(death: Death, told: handover.Event | None) -> bool:
    """Whether the death came first: it did, unless it is of the kind that follows from a peer's, or a failure that is
    no echo was told before."""
    if -death.exit_code == signal.SIGTERM:
        return False
    if math.isinf(death.at):  # by torchrun's word: a signal tells more than an exit code that a message explains
        return death.exit_code < 0 and -death.exit_code not in FOLLOW_ON_SIGNALS
    if told is None or death.at <= told.at:
        return True
    # The echo of a peer's end may be stamped first, since the watching process has to wake up.
    is_echo = told.status == "error" and LOST_PEER.search(told.reason or "") is not None
    return is_echo and -death.exit_code not in FOLLOW_ON_SIGNALS


def _died(folder: Path, death: Death, phase: str, oom_killed: bool) -> dict[str, Any]:
    reason = f"{death} in phase {phase}"
    if oom_killed and death.exit_code == -signal.SIGKILL:
        return {"status": "oom", "oom_site": "host", "reason": f"{reason}: out of host memory", "phase": phase}
    if death.exit_code >= 0:
        line = last_line(handover.log_path(folder, death.rank)) or last_line(folder / LAUNCHER_LOG)
        reason = f"{reason}: {line or 'no output'}"
    return {"status": "error", "reason": reason, "phase": phase}


def _launcher_died(folder: Path, ending: Ending, phase: str) -> dict[str, Any]:
    code = ending.exit_code or 0
    if ending.exit_code == 0:
        reason = f"every rank exited with code 0, but rank 0 left no record; last phase {phase}"
    else:
        how = f"died with {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        reason = f"the launcher {how} in phase {phase}: {last_line(folder / LAUNCHER_LOG) or 'no output'}"
    if ending.oom_killed and code == -signal.SIGKILL:
        return {"status": "oom", "oom_site": "host", "reason": f"{reason}; out of host memory", "phase": phase}
    return {"status": "error", "reason": reason, "phase": phase}


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
