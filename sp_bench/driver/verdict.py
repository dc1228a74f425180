"""Decides how a trial ended, from its record, its events, its logs and the exits of its processes.

A rank that fails reports its status itself (`worker._failure`). `_died` decides for a rank that died without a report.
"""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sp_bench import handover, hardware
from sp_bench.rows.row import Outcome

# An error with one of these words may be the echo of a peer's end.
LOST_PEER = re.compile(r"connection|peer|broken pipe|remote|TCPStore|abort|timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Exit:
    """A rank's process ended."""

    rank: int
    code: int | None  # negative: minus a signal's number; None: its host was lost
    at: float  # seconds since the epoch

    def __str__(self) -> str:
        if self.code is None:
            return f"the host of rank {self.rank} was lost"
        if self.code >= 0:
            return f"rank {self.rank} exited with code {self.code}"
        return f"rank {self.rank} died with {_signal_name(-self.code)}"


@dataclass(frozen=True)
class Ending:
    """How the driver saw a trial end."""

    exits: Sequence[Exit]
    expired: str | None  # which deadline passed
    oom_killed: bool  # the memory cgroup's oom_kill count rose meanwhile
    ended_at: float = math.inf  # seconds since the epoch; what comes later follows from the driver's own SIGKILL


def classify(folder: Path, ending: Ending) -> Outcome:
    """The outcome of a trial: why and in which phase it failed, or its record, which is not checked here.

    A trial is ok if it left a record and every process exited with code 0. Else its status is that of the first
    failure, whether a rank reported it or died of it; or of the deadline; or of any exit that came too early. The loss
    of a peer counts as a failure only where nobody reports another one.
    """
    events = [event for event in handover.read_events(folder) if event.at <= ending.ended_at]
    exits = sorted((each for each in ending.exits if each.at <= ending.ended_at), key=lambda each: each.at)
    phase = _phase(events)
    record = handover.read_record(folder)
    if record is not None and ending.expired is None and all(each.code == 0 for each in exits):
        return Outcome("ok", phase, measured=record)
    failures = [event for event in events if event.name == "failed"]
    report = next((each for each in failures if not _is_echo(each)), next(iter(failures), None))
    # Ranks of a lost host may live on for a moment and report the peers that the driver then ended.
    lost = {each.rank for each in exits if each.code is None and (report is None or each.at <= report.at)}
    spoke = {each.rank for each in failures} - lost
    done = {e.rank for e in events if e.name == "done"}
    silent = [each for each in exits if each.rank not in spoke and not (each.code == 0 and each.rank in done)]
    cause = next((each for each in silent if _is_cause(each, report)), None)
    if cause:
        return _died(folder, cause, _phase(events, cause.rank), ending.oom_killed)
    if report:
        own_phase = _phase([e for e in events if e.at <= report.at], report.rank)
        assert report.status is not None  # a failure has one
        return Outcome(report.status, own_phase, report.reason, report.oom_site)
    if ending.expired:
        return Outcome("timeout", phase, f"{ending.expired}{_last_words(folder, events)}")
    if silent:
        return _died(folder, silent[0], _phase(events, silent[0].rank), ending.oom_killed)
    reason = f"every rank exited with code 0, but rank 0 left no record; last phase {phase}"
    return Outcome("error", phase, reason)


def _phase(events: Sequence[handover.Event], rank: int | None = None) -> str:
    """The phase that was entered last, by this rank or, with None, by any."""
    entered = [e.name for e in events if e.name in handover.PHASES and rank in (None, e.rank)]
    return entered[-1] if entered else handover.PHASES[0]


def _is_cause(silent: Exit, report: handover.Event | None) -> bool:
    """Whether the exit of a rank without a report is the first failure, and not the consequence of a peer's.

    SIGTERM never is: the driver sends it to the peers of a failed rank. What a rank reported first is the cause unless
    it reads like the loss of a peer, because such an echo may be stamped before the exit that caused it is seen.
    SIGABRT is how NCCL's watchdog ends a rank whose peer is gone, so it must come first to be the cause.
    """
    if silent.code == -signal.SIGTERM:
        return False
    if report is None or silent.at <= report.at:
        return True
    return _is_echo(report) and silent.code != -signal.SIGABRT


def _is_echo(report: handover.Event) -> bool:
    """Whether a failure reads like the loss of a peer. It may be stamped before the peer's own report."""
    return report.status == "error" and LOST_PEER.search(report.reason or "") is not None


def _died(folder: Path, exit_: Exit, phase: str, oom_killed: bool) -> Outcome:
    reason = f"{exit_} in phase {phase}"
    if oom_killed and exit_.code == -signal.SIGKILL:
        return Outcome("oom", phase, f"{reason}: out of host memory", "host")
    if exit_.code is not None and exit_.code >= 0:
        reason = f"{reason}: {_last_line(handover.log_path(folder, exit_.rank)) or 'no output'}"
    return Outcome("error", phase, reason)


def _last_words(folder: Path, events: Sequence[handover.Event]) -> str:
    """The last line of the rank that is furthest behind, in words; empty if no rank wrote any."""
    logs = {int(path.stem.removeprefix("rank")): path for path in folder.glob("rank*.log")}
    for rank in sorted(logs, key=lambda rank: (handover.PHASES.index(_phase(events, rank)), rank)):
        if line := _last_line(logs[rank]):
            return f"; the last line of rank {rank}: {line}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(path: Path) -> str | None:
    """The last line with text, at most 500 characters of it."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), None)


def oom_kills() -> int | None:
    """How often the kernel has killed for memory in this process's cgroup; None if no cgroup counts."""
    for path in hardware.cgroup_files("memory.oom_control", "memory.events"):
        if path.exists() and (match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)):
            return int(match[1])
    return None
