"""One attempt at a trial becomes one row: its identity, its options and its outcome."""

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from sp_bench import handover, hardware
from sp_bench.config.parsing import ConfigError
from sp_bench.driver import devices, launch, proven, ranks
from sp_bench.driver.claims import Claim, Claims, LostClaim
from sp_bench.driver.nodes import Nodes
from sp_bench.driver.progress import Progress
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.planning import identity, proofs
from sp_bench.planning.plan import Trial, process_key, resolve
from sp_bench.planning.settings import CampaignConfig
from sp_bench.rows import proofs as records
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
        """The folder of everything that is not a row."""
        return self.folder / store.WORK

    @property
    def trials(self) -> Path:
        """The folder with a folder for the ranks of each attempt."""
        return self.work / "trials"

    def env_id(self, trial: Trial) -> str:
        return identity.env_id(trial.config)


@dataclass(frozen=True)
class Attempt:
    """An attempt at a trial that has no row yet."""

    trial: Trial
    env_id: str
    number: int  # 0 for the first attempt in this environment

    @property
    def key(self) -> str:
        return f"{self.trial.trial_id}-{self.env_id}-{self.number}"


@dataclass(frozen=True)
class Claimed:
    """An attempt that this driver has claimed."""

    attempt: Attempt
    claim: Claim
    folder: Path  # where its ranks work; never used again, since those of a driver that was given up may still write

    @property
    def trial(self) -> Trial:
        return self.attempt.trial


@dataclass(frozen=True)
class Driver:
    """This process at work on a campaign, perhaps beside others."""

    campaign: Campaign
    claims: Claims
    signals: Signals
    progress: Progress
    devices: tuple[str, ...]  # what its trials measure on, here
    # called with the campaign's folder and each committed row
    on_row: Callable[[Path, Mapping[str, Any]], None] = lambda campaign, row: None
    nodes: Nodes | None = None  # all hosts of this run; None: this one

    @contextmanager
    def reserved(self, left: Sequence[Attempt]) -> Iterator[None]:
        """While open, no other run measures where these attempts may run."""
        configs = [each.trial.config for each in left]
        num_nodes = max((config.num_hosts for config in configs), default=1)
        if self.nodes is None or num_nodes == 1:
            with devices.reserved(self.devices, self.signals.check, self.progress.note):
                yield
        else:
            kinds = sorted({config.hardware.device for config in configs})
            with self.nodes.reserved(num_nodes, self.devices, kinds, self.signals.check, self.progress.note):
                yield

    def claim(self, attempts: Iterable[Attempt]) -> list[Claimed]:
        """Those that no other driver has, and whose rows are not there."""
        by_key = {each.key: each for each in attempts}

        def is_committed(key: str) -> bool:
            attempt = by_key[key]
            return store.is_committed(self.campaign.folder, attempt.trial.trial_id, attempt.env_id, attempt.number)

        return [
            Claimed(by_key[claim.key], claim, self.campaign.trials / f"{claim.key}.{claim.nonce}")
            for claim in self.claims.take_all(by_key, is_committed)
        ]


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
    """Code was edited while a campaign ran. The message names the trial and the way out."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        super().__init__(
            f"code of trial {trial.trial_id} ({trial.config.method.name}) was edited while this run went on, so it "
            f"has no row, which would name the older code. The rows in {folder} stay. Run the same words again: what "
            "the edit concerns is measured anew"
        )


def run_next(left: Sequence[Attempt], driver: Driver) -> list[Attempt]:
    """Run the first unclaimed attempt, and those that share its processes. Returns the attempts that got rows; empty:
    other drivers have them all.

    One launch at a time runs on a machine, since two would disturb each other's times. Whatever becomes of one attempt,
    the next call goes on, in fresh processes if its own are gone.
    """
    with driver.reserved(left):
        held = _claim_next(left, driver)
        if not held:
            return []
        devices.end_orphans()
        try:
            return _run_together(held, driver)
        finally:
            for each in held:
                driver.claims.release(each.claim)


def _require_unedited(attempt: Attempt, campaign: Campaign) -> None:
    """
    Raises:
        EditedCode: the attempt's code is not what it was when it was planned.
    """
    if identity.is_edited(attempt.trial.config, attempt.env_id):
        raise EditedCode(attempt.trial, campaign.folder)


def _claim_next(left: Sequence[Attempt], driver: Driver) -> list[Claimed]:
    """The first attempt that can be claimed, and those after it that may run in its processes. An attempt of another
    replicate may not."""
    together = groupby(left, lambda each: (process_key(each.trial.config) or each.key, each.trial.replicate))
    return next(filter(None, (driver.claim(group) for _, group in together)), [])


def _run_together(held: Sequence[Claimed], driver: Driver) -> list[Attempt]:
    """Run attempts in one set of processes and commit the row of each as it ends. Returns the attempts that got rows.

    After the first that is not ok the processes are gone: the rest have not run.

    Raises:
        Interrupted: a signal came. If it says that the machine is taken away, the attempt that ran is `preempted`; else
            it has no row.
        EditedCode: the code is not what it was when the attempts were planned.
        StorageError: the campaign cannot be written.
    """
    campaign, progress, signals = driver.campaign, driver.progress, driver.signals
    watch, done = _Watch(driver), []
    _require_unedited(held[0].attempt, campaign)
    _drop_leftovers(held, campaign)
    trials = [(each.trial.config, each.folder) for each in held]
    given = _known_proofs([each.attempt for each in held], driver)
    launched = launch.launch(
        trials,
        campaign.settings.deadlines,
        watch.on_phase,
        replicate=held[0].trial.replicate,
        nodes=driver.nodes,
        proofs=[{machine: proof.found for machine, proof in known.items()} for known in given],
    )
    with closing(launched) as outcomes:
        for current, known in zip(held, given, strict=True):
            progress.start(current.trial)
            watch.begin()
            try:
                outcome = next(outcomes, None)
            except Interrupted:
                if signals.taken_away:
                    _commit(current, watch.preempted(), driver)
                raise
            if outcome is None:  # the processes are gone
                break
            reach("trial_ended")
            if signals.taken_away and outcome.status != "ok":  # its ranks may get the signal first
                outcome = watch.preempted()
            _require_unedited(current.attempt, campaign)
            outcome = proven.relied_on(outcome, current.folder, campaign.settings.campaign, known)
            if _commit(current, outcome, driver):
                done.append(current.attempt)
                _keep_proof(current, outcome, known, driver)
            else:
                progress.refuse(current.trial)
    return done


def _known_proofs(attempts: Sequence[Attempt], driver: Driver) -> list[proven.Known]:
    """What each attempt may rely on. The records are listed once, however many attempts there are."""
    campaign = driver.campaign
    kept = {} if campaign.settings.proof == "always" else records.by_cell(campaign.folder)
    note = driver.progress.note
    return [proven.known(each.trial, each.env_id, kept.get(each.trial.cell_id, []), note) for each in attempts]


def _keep_proof(claimed: Claimed, outcome: Outcome, given: proven.Known, driver: Driver) -> None:
    """
    Raises:
        StorageError: the campaign cannot be written.
    """
    attempt, folder = claimed.attempt, driver.campaign.folder
    row = store.RowName(attempt.trial.trial_id, attempt.env_id, attempt.number, outcome.status)
    try:
        proven.keep(outcome, claimed.folder, attempt.trial, row, folder, given, driver.progress.note)
    except OSError as error:
        raise StorageError(folder, error) from error


class _Watch:
    """The phase and the start of the attempt that runs, for its row should the machine be taken away."""

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


def refuse(attempt: Attempt, driver: Driver) -> bool:
    """Commit the row of a trial that cannot run; nothing is launched. False: another driver does or did so."""
    if not (held := driver.claim([attempt])):
        return False
    outcome = Outcome("unsupported", "plan", attempt.trial.unsupported_reason, started_at=datetime.now(UTC))
    return _commit(held[0], outcome, driver)


def _drop_leftovers(held: Sequence[Claimed], campaign: Campaign) -> None:
    """Remove what interrupted launches of these attempts left, but for records, which a message may have named."""
    keys = {each.attempt.key for each in held}
    for name in os.listdir(campaign.trials) if campaign.trials.exists() else ():
        if name.partition(".")[0] in keys and not (campaign.trials / name / handover.RECORD).exists():
            shutil.rmtree(campaign.trials / name)


def _commit(claimed: Claimed, outcome: Outcome, driver: Driver) -> bool:
    """Make the attempt's row part of the campaign and show it. False: another driver has taken the claim over, so the
    row is refused.

    Raises:
        StorageError: the campaign cannot be written.
    """
    campaign, config = driver.campaign, claimed.trial.config
    if outcome.environment is None and outcome.phase != "plan":
        environment = hardware.environment(config.hardware.device, ranks.environment(config))
        outcome = replace(outcome, environment=environment)
    if config.world == "one_rank" and outcome.status == "ok":
        proof = proofs.find(config, campaign.settings.proofs_folder)
        outcome = replace(outcome, measured={**outcome.measured, "proof": proof})
    row = _row(claimed.attempt, campaign, outcome).columns()
    try:
        driver.claims.commit(claimed.claim, row, campaign.folder)
    except LostClaim:
        return False
    except OSError as error:
        raise StorageError(campaign.folder, error, _keep(row, claimed)) from error
    finally:
        driver.claims.release(claimed.claim)
    driver.on_row(campaign.folder, row)
    has_logs = outcome.status != "ok" and outcome.phase != "plan"
    driver.progress.finish(claimed.trial, outcome, claimed.folder if has_logs else None)
    return True


def _keep(row: Mapping[str, Any], claimed: Claimed) -> str:
    """Says where the record of a trial is whose row cannot be committed. Writes it if it is nowhere yet."""
    record = claimed.folder / handover.RECORD
    if record.exists():  # rank 0 wrote it, whole
        return f"; the record of the trial that just ended is in {record}"
    spool = Path(tempfile.gettempdir()) / f"sp_bench-{claimed.attempt.key}.json"
    try:
        spool.write_text(json.dumps(row, default=str))
    except OSError as error:
        return f"; the record of the trial that just ended is lost: {spool}: {error.strerror}"
    return f"; the record of the trial that just ended is in {spool}"


def _row(attempt: Attempt, campaign: Campaign, outcome: Outcome) -> Row:
    trial = attempt.trial
    named = Identity(
        campaign=campaign.settings.campaign,
        cell_id=trial.cell_id,
        trial_id=trial.trial_id,
        env_id=attempt.env_id,
        core_id=identity.core_id(trial.config.hardware.device),
        method_source=identity.method_source(trial.config.method.name),
        replicate=trial.replicate,
        attempt=attempt.number,
        order_index=trial.order_index,
        order_seed=campaign.settings.order_seed,
        git_sha=campaign.git_sha,
        git_dirty=campaign.git_dirty,
    )
    return Row(named, trial.config, resolve(trial.config), outcome)
