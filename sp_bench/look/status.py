"""The state of a campaign: rows by status, planned and remaining trials, running processes, and reasons of failures.
Counts come from file names. Rows are opened for the reasons of failures, and to name those that readers skip.
"""

import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sp_bench import handover
from sp_bench.cluster import slurm
from sp_bench.config.parsing import shown
from sp_bench.driver import claims
from sp_bench.driver.progress import duration
from sp_bench.formats import counted
from sp_bench.rows import campaign_file, consistency, packed, plans, store, submissions
from sp_bench.rows.store import RowName

FAILED = ("error", "incorrect", "timeout", "oom", "preempted")
MAX_REASONS = 20  # the newest failed rows, which are opened for their reasons
MAX_CHECKED = 1000  # rows of a campaign that are all opened, to check and time them; loose ones take about 7 ms each
REASON_WIDTH = 160


@dataclass(frozen=True)
class Running:
    """An attempt that a run has claimed. The fields are what --json shows."""

    trial_id: str
    host: str
    pid: int
    phase: str | None  # None while it waits for its turn or the device
    seconds: float  # since it was claimed
    quiet_s: float  # since the last sign of life of the run
    dead: bool  # the process is gone; the next run takes the trial over


@dataclass(frozen=True)
class Job:
    """A job of `submit` that waits or runs. The fields are what --json shows."""

    job_id: int
    state: str  # squeue's: PENDING, RUNNING, ...
    used: str  # run time so far, in squeue's format
    where: str  # its nodes, or the reason why it waits, in brackets
    trials: int  # the number of its trials


@dataclass(frozen=True)
class Failure:
    status: str
    reason: str  # of one trial; those of the others differ only in numbers
    trials: tuple[str, ...]


@dataclass(frozen=True)
class Overview:
    """The state of a campaign. Its fields are those of --json."""

    campaign: str
    counts: Mapping[str, int]  # status -> number of latest attempts, per trial and environment
    env_ids: int
    planned: int | None  # trials of all runs; None if no run wrote a plan
    left: int | None  # planned trials without a row
    eta_s: float | None  # at the pace of the last run; None if nothing ended in it or nothing is left
    running: tuple[Running, ...]
    jobs: tuple[Job, ...]
    queue_problem: str | None  # why the jobs are unknown; None if they are known or `submit` was never used
    failures: tuple[Failure, ...]
    # unfinished searches for the longest sequence: name -> the bracket so far, in words; empty if nothing was tried
    open_searches: Mapping[str, str]
    passed_over: tuple[str, ...]  # files that are not rows, and rows that are damaged or contradict themselves

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def overview(folder: Path, *, reasons: bool = True) -> Overview:
    """The current state of a campaign. reasons: open failed rows for their reasons."""
    latest = store.latest(store.committed(folder))
    started, planned = _planned(folder)
    left = None if planned is None else sum(trial not in latest for trial in planned)
    found = latest.values()
    passed_over = sorted(store.passed_over(folder))
    if reasons and 0 < len(latest) <= MAX_CHECKED:
        passed_over = list(dict.fromkeys([*passed_over, *consistency.read(folder, store.IDENTITY)[1]]))
    jobs, queue_problem = _jobs(folder)
    return Overview(
        campaign=folder.name,
        counts=dict.fromkeys(store.STATUSES, 0) | Counter(row.status for row in found),
        env_ids=len({row.env_id for row in found}),
        planned=None if planned is None else len(planned),
        left=left,
        eta_s=_eta_s(folder, [latest[trial] for trial in planned or () if trial in latest], started, left or 0),
        running=tuple(_running(folder)),
        jobs=jobs,
        queue_problem=queue_problem,
        failures=tuple(_failures(folder, [row for row in found if row.status in FAILED])) if reasons else (),
        open_searches=plans.open_searches(plans.read(folder)),
        passed_over=(*passed_over, *campaign_file.read_all([folder])[1]),
    )


def notes(folder: Path, *, whole: bool) -> Iterator[str]:
    """Lines from the campaign's file. whole: all of it, or only which campaign supersedes it."""
    for file in campaign_file.read_all([folder])[0]:
        for what, text in file.texts():
            if whole or what == "superseded by":
                yield f"  {shown(folder.name)}: {what}: {shown(' '.join(text.split()), 10_000)}"


def _planned(folder: Path) -> tuple[float, set[tuple[str, str]] | None]:
    """(start of the last run, trials of all runs); None if no run wrote a plan. A trial that several runs planned has
    the environment of the newest."""
    found = plans.read(folder)
    if not found:
        return 0.0, None
    environments = {trial.trial_id: trial.env_id for plan in found for trial in plan.trials}
    return found[-1].started, {*environments.items()}


def _eta_s(folder: Path, done: Collection[RowName], started: float, left: int) -> float | None:
    """Seconds left at the pace at which launched trials ended since `started`."""
    launched = [row for row in done if row.status != "unsupported"]
    ended = [at for row in launched if (at := _written_at(folder, row)) > started] if left else []
    return left * (max(ended) - started) / len(ended) if ended else None


def _written_at(folder: Path, row: RowName) -> float:
    """When the row's file, or the pack that has it, was written."""
    own = folder / row.file_name
    return (own if own.exists() else folder / packed.PACK).stat().st_mtime


def _running(folder: Path) -> Iterator[Running]:
    place = folder / store.WORK / claims.FOLDER
    now = time.time()
    for claim in claims.listed(place) if place.is_dir() else ():
        if claim.key in (claims.REPORT, claims.COMMAND):
            continue
        with suppress(FileNotFoundError):  # released meanwhile
            quiet_s = now - claim.path.stat().st_mtime
            ranks = folder / store.WORK / "trials" / f"{claim.key}.{claim.nonce}"
            trial = ranks / handover.TRIAL
            entered = [event.name for event in handover.read_events(ranks) if event.name in handover.PHASES]
            since = trial.stat().st_mtime if trial.exists() else now
            yield Running(
                trial_id=claim.key.partition("-")[0],
                host=claim.owner.host,
                pid=claim.owner.pid,
                phase=entered[-1] if entered else None,
                seconds=max(0.0, now - since),
                quiet_s=max(0.0, quiet_s),
                dead=claim.owner.has_ended(),
            )


def _jobs(folder: Path) -> tuple[tuple[Job, ...], str | None]:
    """(the campaign's jobs in the queue, why they are unknown)."""
    submitted = submissions.jobs(folder)
    if not submitted:
        return (), None
    try:
        queue = slurm.queue()
    except slurm.NoAnswer as error:
        return (), f"whether its submitted jobs wait or run is not known: {error}"
    return tuple(
        Job(job_id, job.state, job.used, job.where, len(submitted[job_id]))
        for job_id, job in sorted(queue.items())
        if job_id in submitted
    ), None


def _failures(folder: Path, rows: list[RowName]) -> Iterator[Failure]:
    """Failures counted by status and reason, without the numbers in the reason; the most frequent first. Only the
    newest MAX_REASONS rows are opened."""
    if not rows:
        return
    newest = sorted(rows, key=lambda row: _written_at(folder, row))[-MAX_REASONS:]
    table, _ = store.read(folder, ("status", "trial_id", "reason"), names={row.file_name for row in newest})
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault((row["status"], re.sub(r"\d+", "0", row["reason"] or "")), []).append(row)
    for (status, _), same in sorted(groups.items(), key=lambda item: -len(item[1])):
        yield Failure(status, same[0]["reason"] or "", tuple(row["trial_id"] for row in same))


def lines(found: Overview) -> Iterator[str]:
    """Lines for people, with everything but the counts."""
    if found.planned is not None and (found.left or found.running):
        left = f"{found.left:,} of {found.planned:,} planned left"
        eta = f", ETA {duration(found.eta_s)}" if found.eta_s is not None and found.running else ""
        yield f"{shown(found.campaign)}: {left}{eta}{'' if found.running else '; nothing runs'}"
    for name, bracket in found.open_searches.items():
        yield f"  not ended: search {shown(name)}{f': {shown(bracket)}' if bracket else ''}"
    for job in found.jobs:
        where = f"on {job.where} for {job.used}" if job.state == "RUNNING" else job.where
        yield f"  job {job.job_id}: {shown(job.state.lower())} {shown(where)}, {counted(job.trials, 'trial')}"
    if found.queue_problem:
        yield f"  {found.queue_problem}"
    for each in found.running:
        at_work = f"in {each.phase} for {duration(each.seconds)}" if each.phase else "waits for its turn"
        if each.dead or each.quiet_s > claims.STALE_S:
            at_work = f"gave no sign of life for {duration(each.quiet_s)}; the next run takes it over"
        yield f"  trial {each.trial_id}: {at_work}, process {each.pid} on {each.host}"
    if sum(found.counts.values()) > MAX_CHECKED:
        yield f"  over {MAX_CHECKED:,} rows: damage and time spent are in `sp-bench report` alone"
    for failure in found.failures:
        trials = " ".join(failure.trials[:3]) + (" ..." if len(failure.trials) > 3 else "")
        yield f"  {len(failure.trials)} {failure.status}: {_short(failure.reason)} (trial {trials})"


def _short(reason: str) -> str:
    words = shown(" ".join(reason.split()), 10_000)
    return words if len(words) <= REASON_WIDTH else f"{words[:REASON_WIDTH]} ..."
