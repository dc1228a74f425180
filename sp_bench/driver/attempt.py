"""One attempt at a trial becomes one row: who it is, what was asked for, and what came of it."""

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sp_bench import handover, hardware
from sp_bench.config.parsing import ConfigError
from sp_bench.driver import devices, identity, launch, proofs, ranks
from sp_bench.driver.claims import Claim, Claims, LostClaim
from sp_bench.driver.nodes import Nodes
from sp_bench.driver.plan import Trial, process_key, resolve
from sp_bench.driver.progress import Progress
from sp_bench.driver.settings import CampaignConfig
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.rows import store
from sp_bench.rows.row import Identity, Outcome, Row
from sp_bench.testing.kill_points import reach


@dataclass(frozen=True)
class Campaign:
    """A folder of rows being filled, and what all its rows share."""

    settings: CampaignConfig
    folder: Path
    git_sha: str | None
    git_dirty: bool | None

    @property
    def work(self) -> Path:
        """Where all lies that is not a row."""
        return self.folder / store.WORK

    def env_id(self, planned: Trial) -> str:
        return identity.env_id(planned.config)


@dataclass(frozen=True)
class Attempt:
    """A launch of a trial that has no row yet."""

    planned: Trial
    env_id: str
    number: int  # launches of this trial that have rows

    @property
    def key(self) -> str:
        return f"{self.planned.trial_id}-{self.env_id}-{self.number}"


@dataclass(frozen=True)
class Driver:
    """This process at work on a campaign, perhaps beside others."""

    campaign: Campaign
    claims: Claims
    signals: Signals
    progress: Progress
    devices: tuple[str, ...]  # what its trials measure on, here
    # is told of each row once it is committed, with the campaign
    hear: Callable[[Path, Mapping[str, Any]], None] = lambda campaign, row: None
    nodes: Nodes | None = None  # all hosts of this run; None: this one

    @contextmanager
    def reserved(self, left: Sequence[Attempt]) -> Iterator[None]:
        """While open, no other run measures where these attempts may run."""
        configs = [each.planned.config for each in left]
        num_nodes = max((config.num_hosts for config in configs), default=1)
        if self.nodes is None or num_nodes == 1:
            with devices.reserved(self.devices, self.signals.check, self.progress.note):
                yield
        else:
            kinds = sorted({config.hardware.device for config in configs})
            with self.nodes.reserved(num_nodes, self.devices, kinds, self.signals.check, self.progress.note):
                yield

    def claim(self, attempt: Attempt) -> Claim | None:
        """None: another driver has this attempt, or its row is there."""
        key = (attempt.planned.trial_id, attempt.env_id, attempt.number)
        return self.claims.take(attempt.key, lambda: store.is_committed(self.campaign.folder, *key))


WAYS_OUT: Mapping[int, str] = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "mount it writable",
    errno.EACCES: "make it writable for you",
    errno.EPERM: "make it writable for you",
    errno.ENOENT: "it was deleted or moved while the campaign ran; put it back or begin anew",
}


class StorageError(ConfigError):
    """The campaign's folder cannot be used any more. The message says why, what is kept, and the way out."""

    def __init__(self, folder: Path, error: OSError, kept: str = "") -> None:
        way_out = WAYS_OUT.get(error.errno or 0, "see to it")
        where = f" ({error.filename})" if error.filename else ""
        super().__init__(
            f"cannot write to {folder} any more: {error.strerror or error}{where}; the campaign stops, what it has "
            f"committed stays{kept}; {way_out}, then go on with sp-bench resume and the same words"
        )


class EditedCode(ConfigError):
    """Code was edited while a campaign ran. The message says whose, and the way out."""

    def __init__(self, planned: Trial, folder: Path) -> None:
        super().__init__(
            f"code of trial {planned.trial_id} ({planned.config.method.name}) was edited while this run went on, so it "
            f"has no row, which would name the older code. The rows in {folder} stay. Run the same words again: what "
            "the edit concerns is measured anew"
        )


class Ended(NamedTuple):
    """What an attempt's row says of it."""

    status: str
    reason: str | None
    median_step_ms: float | None
    flags: Sequence[str]
    logs: Path | None  # the folder with those of its ranks, where a launch failed


def run_next(left: Sequence[Attempt], driver: Driver) -> list[Attempt]:
    """Run the first unclaimed attempt, and those that share its processes. Returns the attempts that got rows; empty:
    other drivers have them all.

    One launch at a time runs on a machine, since two would disturb each other's times. Whatever becomes of one attempt,
    the next call goes on, in fresh processes if its own are gone.
    """
    progress, done = driver.progress, []
    with driver.reserved(left):
        held = _claim_next(left, driver)
        if not held:
            return []
        devices.end_orphans()
        progress.start(held[0][0].planned)
        try:
            _require_unedited(held[0][0], driver.campaign)
            with closing(_commit_each(held, driver)) as ends:
                # ends first: it must hear that there are no more, to end what is left of the processes
                for ended, (current, _), (following, _) in zip(ends, held, [*held[1:], held[-1]], strict=False):
                    if ended is None:
                        progress.refuse(current.planned)
                    else:
                        progress.finish(current.planned, *ended)
                        done.append(current)
                    if following is not current:
                        progress.start(following.planned)  # in the same processes, if they are left
        finally:
            for _, claim in held:
                driver.claims.release(claim)
    return done


def _require_unedited(attempt: Attempt, campaign: Campaign) -> None:
    """
    Raises:
        EditedCode: the attempt's code is not what it was when it was planned.
    """
    if identity.is_edited(attempt.planned.config, attempt.env_id):
        raise EditedCode(attempt.planned, campaign.folder)


def _claim_next(left: Sequence[Attempt], driver: Driver) -> list[tuple[Attempt, Claim]]:
    """The first attempt to be had, and those that follow it and may run in its processes: not those of another
    replicate, which is a launch of its own."""
    held: list[tuple[Attempt, Claim]] = []
    for current in left:
        first = held[0][0].planned if held else current.planned
        keys = [(process_key(each.config), each.replicate) for each in (first, current.planned)]
        if held and (not keys[0][0] or keys[0] != keys[1]):
            break
        if claim := driver.claim(current):
            held.append((current, claim))
    return held


def _commit_each(held: Sequence[tuple[Attempt, Claim]], driver: Driver) -> Generator[Ended | None, None, None]:
    """Run attempts that share their processes, commit a row for each as it ends, and yield what it says; None for a row
    that was refused, since another driver had taken the claim over.

    Ends after the first that is not ok: its processes are gone, and the rest have not run.

    Raises:
        Interrupted: a signal came; the attempt that ran is `preempted` if it says that the machine is taken away, else
            it has no row.
        EditedCode: the code is not what it was when the attempts were planned.
        StorageError: the campaign cannot be written.
    """
    watch = _Watch(driver)
    _drop_leftovers(held, driver.campaign)
    folders = [_folder(attempt, claim, driver.campaign) for attempt, claim in held]
    trials = [(attempt.planned.config, folder) for (attempt, _), folder in zip(held, folders, strict=True)]
    num_ended = 0
    deadlines, replicate = driver.campaign.settings.deadlines, held[0][0].planned.replicate
    with closing(launch.launch(trials, deadlines, watch.on_phase, replicate=replicate, nodes=driver.nodes)) as outcomes:
        try:
            for result in outcomes:
                reach("trial_ended")
                lost = driver.signals.taken_away and result.status != "ok"  # its ranks may hear the signal first
                outcome = watch.preempted() if lost else result
                _require_unedited(held[num_ended][0], driver.campaign)
                num_ended += 1
                yield _commit(*held[num_ended - 1], driver, outcome)
                watch.begin()
        except Interrupted:
            if driver.signals.taken_away and num_ended < len(held):
                yield _commit(*held[num_ended], driver, watch.preempted())
            raise


class _Watch:
    """What is known of the attempt that runs, should it be taken away."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.begin()

    def begin(self) -> None:
        self._phase, self._started_at, self._start = "init", datetime.now(UTC), time.monotonic()

    def on_phase(self, phase: str) -> None:
        reach("trial_launched")
        self._phase = phase
        self._driver.progress.enter_phase(phase)
        self._driver.signals.check()

    def preempted(self) -> Outcome:
        return Outcome(
            "preempted",
            self._phase,
            f"{self._driver.signals.taken_away} in phase {self._phase}: the machine was taken away",
            started_at=self._started_at,
            duration_s=time.monotonic() - self._start,
        )


def refuse(attempt: Attempt, driver: Driver) -> Ended | None:
    """Commit the row of a trial that cannot run; nothing is launched. None: another driver does or did so."""
    claim = driver.claim(attempt)
    if claim is None:
        return None
    outcome = Outcome("unsupported", "plan", attempt.planned.unsupported_reason, started_at=datetime.now(UTC))
    return _commit(attempt, claim, driver, outcome)


def _folder(attempt: Attempt, claim: Claim, campaign: Campaign) -> Path:
    """Where the attempt's ranks work: its own, since those of a driver that was given up may still write to theirs."""
    return campaign.work / "trials" / f"{attempt.key}.{claim.nonce}"


def _drop_leftovers(held: Sequence[tuple[Attempt, Claim]], campaign: Campaign) -> None:
    """Remove what interrupted launches of these attempts left, but for records, which a message may have named."""
    keys = {attempt.key for attempt, _ in held}
    parent = campaign.work / "trials"
    for name in os.listdir(parent) if parent.exists() else ():
        if name.partition(".")[0] in keys and not (parent / name / handover.RECORD).exists():
            shutil.rmtree(parent / name)


def _commit(attempt: Attempt, claim: Claim, driver: Driver, outcome: Outcome) -> Ended | None:
    campaign, config = driver.campaign, attempt.planned.config
    if outcome.environment is None and outcome.phase != "plan":
        environment = hardware.environment(config.hardware.device, ranks.environment(config))
        outcome = replace(outcome, environment=environment)
    if config.world == "one_rank" and outcome.status == "ok":
        proof = proofs.find(config, campaign.settings.proofs_folder)
        outcome = replace(outcome, measured={**outcome.measured, "proof": proof})
    row = _row(attempt, campaign, outcome).columns()
    try:
        driver.claims.commit(claim, row, campaign.folder)
    except LostClaim:
        return None
    except OSError as error:
        kept = _keep(row, attempt.key, _folder(attempt, claim, campaign))
        raise StorageError(campaign.folder, error, kept) from error
    finally:
        driver.claims.release(claim)
    driver.hear(campaign.folder, row)
    logs = None if outcome.status == "ok" or outcome.phase == "plan" else _folder(attempt, claim, campaign)
    measured = outcome.measured
    return Ended(outcome.status, outcome.reason, measured.get("median_step_ms"), measured.get("flags") or (), logs)


def _keep(row: Mapping[str, Any], key: str, trial_folder: Path) -> str:
    """Where the record of a trial whose row cannot be committed is, in words; writes it if it is nowhere yet."""
    record = trial_folder / handover.RECORD
    if record.exists():  # rank 0 wrote it, whole
        return f"; the record of the trial that just ended is in {record}"
    spool = Path(tempfile.gettempdir()) / f"sp_bench-{key}.json"
    try:
        spool.write_text(json.dumps(row, default=str))
    except OSError as error:
        return f"; the record of the trial that just ended is lost: {spool}: {error.strerror}"
    return f"; the record of the trial that just ended is in {spool}"


def _row(attempt: Attempt, campaign: Campaign, outcome: Outcome) -> Row:
    planned = attempt.planned
    named = Identity(
        campaign=campaign.settings.campaign,
        cell_id=planned.cell_id,
        trial_id=planned.trial_id,
        env_id=attempt.env_id,
        core_id=identity.core_id(planned.config.hardware.device),
        method_source=identity.method_source(planned.config.method.name),
        replicate=planned.replicate,
        attempt=attempt.number,
        order_index=planned.order_index,
        order_seed=campaign.settings.order_seed,
        git_sha=campaign.git_sha,
        git_dirty=campaign.git_dirty,
    )
    return Row(named, planned.config, resolve(planned.config), outcome)
