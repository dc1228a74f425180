"""Trials in a fresh process session: one, or several that share it; a deadline a phase; each classified into one row.

Knows the worker by its module name only. Never imports torch and never touches a device.
"""

import os
import secrets
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sp_bench import handover
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import owner
from sp_bench.driver.logs import LAUNCHER_LOG, bound_logs
from sp_bench.driver.settings import DeadlinesConfig
from sp_bench.driver.verdict import Ending, classify, oom_kills

TOKEN = "SP_BENCH_TRIAL"  # marks every process of a trial, driver first: torchrun gives each rank its own session
POLL_S = 0.1
FAILURE_GRACE_S = 10.0  # for the peers of a failed rank to write their logs and leave
KILL_LIMIT_S = 30.0
TORCHRUN_FILES = "torchrun"  # else it makes a temporary folder that nobody removes

OnPhase = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What became of one launch: `columns` of the row that only the launch knows."""

    status: str
    columns: Mapping[str, Any]


def torchrun(world_size: int, folders: Sequence[Path]) -> list[str]:
    """The command that starts all ranks on this machine, at a rendezvous of their own, for the trials in `folders`."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={world_size}", "--max-restarts=0"),
        f"--log-dir={folders[0] / TORCHRUN_FILES}",
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={folders[0].name}-{secrets.token_hex(4)}"),
        *("-m", "sp_bench.worker", *(str(folder / handover.TRIAL) for folder in folders)),
    ]


def environment(config: TrialConfig) -> dict[str, str]:
    """The variables of a trial's processes: this process's own, the fabric's, and the threads of a rank. Ranks import
    the code that this process runs, not that of another checkout which this Python has installed."""
    variables = {**os.environ, **config.fabric.env}
    source = str(Path(__file__).resolve().parents[2])
    if source not in (*site.getsitepackages(), site.getusersitepackages()):  # which belong behind the standard library
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    if config.hardware.threads_per_rank is not None:
        variables["OMP_NUM_THREADS"] = str(config.hardware.threads_per_rank)
    return variables


def run(
    trials: Sequence[tuple[TrialConfig, Path]],
    deadlines: DeadlinesConfig,
    on_phase: OnPhase,
    command: Sequence[str] | None = None,
) -> Generator[Result, None, None]:
    """Launch trials in one set of processes, each with its new folder, and yield what became of each, in order.

    Ends after the first that is not ok, since the processes are gone with it, and before one that no rank has begun.
    Leaves no process behind, whatever ends this generator, an interrupt too. `command` stands in for torchrun. All
    trials have one world size and one environment.
    """
    trials = [(config, _prepare(config, folder.resolve())) for config, folder in trials]
    first = trials[0][0]
    token = f"{owner.this_process()}.{secrets.token_hex(16)}"
    started = _clocks()
    command = command or torchrun(first.world_size, [folder for _, folder in trials])
    process = _start(command, first, [folder for _, folder in trials], token)
    try:
        for config, folder in trials:
            oom_before = oom_kills()
            is_last = folder == trials[-1][1]
            exit_code, expired = _watch(process, config, folder, deadlines, on_phase, to_its_exit=is_last)
            ended_at = time.time()
            if expired or is_last or process.poll() is not None:
                kill_all(token)
            if exit_code is not None and folder != trials[0][1] and not _begun(folder):
                return
            bound_logs(folder)
            oom_killed = (oom_kills() or 0) > (oom_before or 0)
            ending = Ending(exit_code, expired, oom_killed, ended_at)
            result = _result(folder, ending, *started)
            yield result
            if result.status != "ok":
                return
            started = _clocks()
    finally:
        try:
            kill_all(token)
        except KeyboardInterrupt:  # a second Ctrl-C: at once, but the processes first
            kill_all(token)
            raise
        process.wait()
        for _, folder in trials:
            _tidy(folder)


def _clocks() -> tuple[datetime, float]:
    return datetime.now(UTC), time.monotonic()


def _prepare(config: TrialConfig, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted launch of the same attempt left
    folder.mkdir(parents=True)
    handover.write_trial(folder, config)
    return folder


def _begun(folder: Path) -> bool:
    return any(event.name in handover.PHASES for event in handover.read_events(folder))


def _tidy(folder: Path) -> None:
    """Bound what the last processes still wrote, and remove what only they needed."""
    bound_logs(folder)
    if (folder / handover.RECORD_TEMPORARY).exists():  # rank 0 was killed while it wrote
        (folder / handover.RECORD_TEMPORARY).unlink()
    if (folder / TORCHRUN_FILES).exists():
        shutil.rmtree(folder / TORCHRUN_FILES)


def _start(command: Sequence[str], config: TrialConfig, folders: Sequence[Path], token: str) -> subprocess.Popen[bytes]:
    log = folders[0] / LAUNCHER_LOG
    log.touch()
    for folder in folders[1:]:
        os.link(log, folder / LAUNCHER_LOG)  # one launcher speaks for all of them
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            cwd=folders[0],
            env={**environment(config), TOKEN: token},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _watch(
    process: subprocess.Popen[bytes],
    config: TrialConfig,
    folder: Path,
    deadlines: DeadlinesConfig,
    on_phase: OnPhase,
    *,
    to_its_exit: bool,
) -> tuple[int | None, str | None]:
    """(exit code of torchrun, or 0 when the trial is done and others follow; what was waited for in vain)."""
    clock = PhaseClock(config.world_size, deadlines)
    while True:
        exit_code = process.poll()
        expired = clock.expired(handover.read_events(folder), time.monotonic())
        on_phase(clock.phase)
        bound_logs(folder)
        if clock.phase == "done" and not to_its_exit:
            return 0, None
        if exit_code is not None:
            return exit_code, None
        if expired:
            return None, expired
        time.sleep(POLL_S)


def _result(folder: Path, ending: Ending, started_at: datetime, start: float) -> Result:
    duration_s = time.monotonic() - start
    verdict = classify(folder, ending)
    times = {"started_at": started_at, "duration_s": duration_s}
    phase_s = _phase_seconds(folder, started_at.timestamp(), duration_s)
    return Result(verdict["status"], {**verdict, **times, "phase_s": phase_s})


class PhaseClock:
    """Measures each phase against its deadline, from when the rank that is furthest behind entered it."""

    def __init__(self, world_size: int, deadlines: DeadlinesConfig) -> None:
        self._world_size = world_size
        self._limit_s = vars(deadlines) | {
            "ledger": deadlines.measure,
            "handover": deadlines.init,
            "done": deadlines.init,
        }
        self._mark: tuple[str, float] = ("init", 0.0)
        self._since: float | None = None
        self._failed_since: float | None = None

    @property
    def phase(self) -> str:
        return self._mark[0]

    def expired(self, events: Sequence[handover.Event], now: float) -> str | None:
        """What is overdue at monotonic time `now`, or None."""
        if self._failed_since is None and _any_rank_failed(events):
            self._failed_since = now
        if self._failed_since is not None and now - self._failed_since > FAILURE_GRACE_S:
            return f"the other ranks did not end within {FAILURE_GRACE_S:.0f} s of the first failure"
        entered = dict.fromkeys(range(self._world_size), ("init", 0.0))
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


def _any_rank_failed(events: Sequence[handover.Event]) -> bool:
    """One has said so, or ended before it was done: torchrun, too, waits for ever for peers of a rank that exits 0."""
    done = {e.rank for e in events if e.name == "done"}
    return any(e.name == "failed" or (e.name == "exited" and e.rank not in done) for e in events)


def kill_all(token: str) -> None:
    """End every process whose environment holds the token, with all descendants, and wait until none is left.

    Raises:
        RuntimeError: a process would not die.
    """
    deadline = time.monotonic() + KILL_LIMIT_S
    while found := _processes(token):
        for process in found:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=1)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {[p.pid for p in found]} of a trial survive SIGKILL; the device hangs?")


def _processes(token: str) -> list[psutil.Process]:
    marked = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN) == token:
                marked += [process, *process.children(recursive=True)]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    return [process for process in set(marked) if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _phase_seconds(folder: Path, started: float, duration_s: float) -> dict[str, float]:
    """Seconds rank 0 spent in each phase, from the launch on; a phase entered twice has the sum."""
    entries = [("init", started)]
    entries += [(e.name, e.at) for e in handover.read_events(folder) if e.rank == 0 and e.name in handover.PHASES[1:]]
    ends = [at for _, at in entries[1:]] + [started + duration_s]
    seconds = dict.fromkeys((name for name, _ in entries), 0.0)
    for (name, at), end in zip(entries, ends, strict=True):
        seconds[name] += max(0.0, end - at)
    return seconds
