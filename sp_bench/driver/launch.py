"""Launches trials: starts a process per rank, and watches them under a deadline per phase. `verdict` decides how they
ended, and `record_check` whether their record can be true.

Several trials may share the processes of one launch. This file knows the worker by its module name only, never imports
torch and never touches a device.
"""

import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from sp_bench import handover
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import devices
from sp_bench.driver.neighbours import Neighbours
from sp_bench.driver.nodes import Nodes, SpreadRanks
from sp_bench.driver.ranks import Ranks
from sp_bench.driver.record_check import checked
from sp_bench.driver.verdict import Ending, Exit, classify, oom_kills
from sp_bench.driver.watched_time import WatchedTime
from sp_bench.planning.settings import DeadlinesConfig
from sp_bench.rows.row import Outcome

POLL_S = 0.1
LOGS_A_POLL = 8  # folders of other trials whose logs are bounded at a poll: all of 2,000 would take half of it
UNEQUAL_NODES = "unequal_nodes"  # the flag of a row whose hosts differ in processors, GPUs, drivers or packages
ECHO_S = 0.5  # how long the peers of a failed rank may go on, to report their own errors
FAILURE_GRACE_S = 10.0  # how long all ranks may take to end after the first failure
MAX_LOG_BYTES, LOG_HEAD_BYTES, LOG_TAIL_BYTES = 4 * 2**20, 2**20, 2**20

OnPhase = Callable[[str], None]


def launch(
    trials: Sequence[tuple[TrialConfig, Path]],
    deadlines: DeadlinesConfig,
    on_phase: OnPhase,
    command: Sequence[str] | None = None,
    replicate: int = 0,
    nodes: Nodes | None = None,
    proofs: Sequence[Mapping[str, Any]] | None = None,
) -> Generator[Outcome, None, None]:
    """Run trials one after another in one set of processes, each in its own new folder; yield the outcome of each.

    The generator ends after the first trial that is not ok, because its processes are gone, and before a trial that no
    rank has begun. It leaves no process behind, even if it is interrupted. All trials have the same world size,
    environment and replicate. `command` runs instead of the worker, once per rank. `nodes`: the hosts of this run, for
    trials over several. `proofs`: for each trial, what earlier ones have proven, by machine; None: nothing.
    """
    trials = [(config, folder.resolve()) for config, folder in trials]
    folders = [folder for _, folder in trials]
    for (config, folder), proven in zip(trials, proofs or [{}] * len(trials), strict=True):
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted launch of the same attempt
        folder.mkdir(parents=True)
        handover.write_trial(folder, config, replicate)
        if proven:
            handover.write_proofs(folder, proven)
    num_nodes = trials[0][0].num_hosts
    assert num_nodes == 1 or nodes, "a plan refuses more hosts than the run has"
    ranks = nodes.ranks(num_nodes) if nodes and num_nodes > 1 else Ranks()
    started_at, start = datetime.now(UTC), handover.now()
    try:
        ranks.start(command or worker(folders), trials[0][0], folders[0], devices.new_token())
        in_turn = cycle(folders)
        for config, folder in trials:
            is_last = folder == folders[-1]
            oom_before = oom_kills()
            neighbours = Neighbours(config)
            expired = _watch(ranks, config, folder, is_last, in_turn, deadlines, on_phase, neighbours)
            ended_at = handover.now()
            if expired or is_last or ranks.exits:
                ranks.kill()
            begun = any(event.name in handover.PHASES for event in handover.read_events(folder))
            if ranks.exits and not (expired or begun or folder == folders[0]):
                return
            bound_logs(folder)
            oom_killed = (oom_kills() or 0) > (oom_before or 0)
            exits = ranks.exits if is_last else _exits_during(folder, ranks.exits)
            outcome = checked(classify(folder, Ending(exits, expired, oom_killed, ended_at)), config)
            if outcome.status == "ok":
                flags = [*(outcome.measured.get("flags") or []), *{*neighbours.flags(), *ranks.flags()}]
                outcome = replace(outcome, measured={**outcome.measured, "flags": flags})
            if nodes and num_nodes > 1:
                outcome = with_nodes(outcome, nodes.environments(num_nodes))
            duration_s = handover.now() - start
            phase_s = _phase_seconds(folder, start, duration_s)
            yield replace(outcome, started_at=started_at, duration_s=duration_s, phase_s=phase_s)
            if outcome.status != "ok":
                return
            started_at, start = datetime.now(UTC), handover.now()
    finally:
        try:
            ranks.kill()
        except KeyboardInterrupt:  # a second Ctrl-C ends the driver at once, but the processes first
            ranks.kill()
            raise
        ranks.join()
        for folder in folders:
            bound_logs(folder)
            (folder / handover.RECORD_TEMPORARY).unlink(missing_ok=True)  # if rank 0 was killed while it wrote


def with_nodes(outcome: Outcome, environments: Sequence[Mapping[str, Any]]) -> Outcome:
    """The outcome with the environment of each host, and a flag if hosts differ."""
    measured = {**outcome.measured, "node_environments": [dict(each) for each in environments]}
    if outcome.status == "ok" and any(_compared(each) != _compared(environments[0]) for each in environments[1:]):
        measured["flags"] = [*(measured.get("flags") or []), UNEQUAL_NODES]
    return replace(outcome, measured=measured)


def _compared(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment that equal hosts have in common."""
    return {name: value for name, value in environment.items() if name not in ("hostname", "device_uuids", "env")}


def worker(folders: Sequence[Path]) -> list[str]:
    """The command of one rank for the trials in `folders`."""
    return [sys.executable, "-P", "-m", "sp_bench.worker", *(str(folder / handover.TRIAL) for folder in folders)]


def _watch(
    ranks: Ranks | SpreadRanks,
    config: TrialConfig,
    folder: Path,
    is_last: bool,
    in_turn: Iterator[Path],
    deadlines: DeadlinesConfig,
    on_phase: OnPhase,
    neighbours: Neighbours,
) -> str | None:
    """Wait for the end of the trial in `folder`: all ranks have ended, or they are done and another trial follows.
    `in_turn` gives the folders of all trials again and again. Returns which deadline passed, or None."""
    clock = PhaseClock(config.num_processes, deadlines)
    asked_to_end = False
    with WatchedTime() as watched:
        while True:
            # before the events: who has ended has written all of them
            all_ended = len(ranks.exits) == config.num_processes
            exits = tuple(ranks.exits) if is_last else _exits_during(folder, ranks.exits)
            now = watched.now()
            expired = clock.expired(handover.read_events(folder), exits, now)
            on_phase(clock.phase)
            neighbours.on_phase(clock.phase)
            ranks.enter_phase(clock.phase)
            # what a rank started in an earlier trial may still write to that trial's log
            for each in {folder, *islice(in_turn, LOGS_A_POLL)}:
                bound_logs(each)
            if all_ended or (clock.phase == "done" and not is_last):
                return None
            if expired:
                return expired
            if clock.failed_since is not None and now - clock.failed_since > ECHO_S and not asked_to_end:
                ranks.terminate()  # a peer may wait in a collective for ever
                asked_to_end = True
            time.sleep(POLL_S)


def _exits_during(folder: Path, exits: Sequence[Exit]) -> list[Exit]:
    """The exits of ranks that were not done with the trial in `folder`."""
    done = {event.rank for event in handover.read_events(folder) if event.name == "done"}
    return [each for each in exits if each.rank not in done]


class PhaseClock:
    """Measures each phase against its deadline, from when the rank that is furthest behind entered it. Its times are
    those of `WatchedTime`."""

    def __init__(self, num_processes: int, deadlines: DeadlinesConfig) -> None:
        self._num_processes = num_processes
        self._limit_s = vars(deadlines) | {
            "ledger": deadlines.measure,
            "handover": deadlines.init,
            "done": deadlines.init,
        }
        self._mark: tuple[str, float] = ("init", 0.0)
        self._since: float | None = None
        self.failed_since: float | None = None  # when a failure was first seen

    @property
    def phase(self) -> str:
        return self._mark[0]

    def expired(self, events: Sequence[handover.Event], exits: Sequence[Exit], now: float) -> str | None:
        """Says which deadline has passed at `now`; None if none has."""
        if self.failed_since is None and _any_rank_failed(events, exits):
            self.failed_since = now
        if self.failed_since is not None and now - self.failed_since > FAILURE_GRACE_S:
            return f"the other ranks did not end within {FAILURE_GRACE_S:.0f} s of the first failure"
        entered = dict.fromkeys(range(self._num_processes), ("init", 0.0))
        entered |= {e.rank: (e.name, e.at) for e in events if e.name in handover.PHASES}
        lowest = min((name for name, _ in entered.values()), key=handover.PHASES.index)
        mark = (lowest, max(at for name, at in entered.values() if name == lowest))
        if self._since is None or mark[0] != self._mark[0] or (mark != self._mark and lowest != "init"):
            self._since = now  # init's clock runs from the launch: its events say only that a rank began
        self._mark = mark
        if now - self._since <= self._limit_s[lowest]:
            return None
        behind = [str(rank) for rank, (name, _) in entered.items() if name == lowest]
        ranks = f"ranks {', '.join(behind)}" if len(behind) > 1 else f"rank {behind[0]}"
        return f"phase {lowest} passed its deadline of {self._limit_s[lowest]:g} s in {ranks}"


def _any_rank_failed(events: Sequence[handover.Event], exits: Sequence[Exit]) -> bool:
    """Whether a rank has reported a failure, exited with an error, or left before it was done."""
    done = {e.rank for e in events if e.name == "done"}
    return any(e.name == "failed" for e in events) or any(e.code != 0 or e.rank not in done for e in exits)


def bound_logs(folder: Path) -> None:
    """Cut each log that has outgrown its limit down to its head and its last MiB.

    The writers append (O_APPEND), so their next line follows the cut; a line written during the cut may be lost.
    """
    for path in folder.glob("rank*.log"):
        size = path.stat().st_size
        if size <= MAX_LOG_BYTES:
            continue
        with open(path, "r+b") as file:
            file.seek(size - LOG_TAIL_BYTES)
            tail = file.read(LOG_TAIL_BYTES)
            file.seek(LOG_HEAD_BYTES)
            file.write(b"\n[... %d bytes left out ...]\n" % (size - LOG_HEAD_BYTES - LOG_TAIL_BYTES) + tail)
            file.truncate()


def _phase_seconds(folder: Path, started: float, duration_s: float) -> dict[str, float]:
    """Seconds rank 0 spent in each phase, from the launch on, when it imports its code; a phase entered twice has the
    sum. A warm rank has imported it already, and may enter a trial before the driver looks at it."""
    entries = [("imports", started)]
    events = [e for e in handover.read_events(folder) if e.rank == 0 and e.name in handover.PHASES]
    entries += [(e.name, max(e.at, started)) for e in events]
    ends = [at for _, at in entries[1:]] + [started + duration_s]
    seconds = dict.fromkeys((name for name, _ in entries), 0.0)
    for (name, at), end in zip(entries, ends, strict=True):
        seconds[name] += max(0.0, end - at)
    return seconds
