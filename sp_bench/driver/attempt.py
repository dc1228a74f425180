"""One attempt at a trial becomes one row: who it is, what was asked for, and what came of it."""

import os
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from sp_bench import handover, hardware
from sp_bench.driver import identity, launcher
from sp_bench.driver.claims import Claim, Claims, LostClaim
from sp_bench.driver.plan import Trial, resolve
from sp_bench.driver.progress import Progress
from sp_bench.driver.settings import CampaignConfig
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.driver.storage import StorageError, keep
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
    devices: tuple[str, ...]  # what its trials measure on

    def claim(self, attempt: Attempt) -> Claim | None:
        """None: another driver has this attempt, or its row is there."""
        key = (attempt.planned.trial_id, attempt.env_id, attempt.number)
        return self.claims.take(attempt.key, lambda: store.is_committed(self.campaign.folder, *key))


class Ended(NamedTuple):
    """What an attempt's row says of it."""

    status: str
    reason: str | None
    median_step_ms: float | None


def launch(held: Sequence[tuple[Attempt, Claim]], driver: Driver) -> Generator[Ended | None, None, None]:
    """Run attempts that share their processes, commit a row for each as it ends, and yield what it says; None for a row
    that was refused, since another driver had taken the claim over.

    Ends after the first that is not ok: its processes are gone, and the rest have not run.

    Raises:
        Interrupted: a signal came; the attempt that ran is `preempted` if it says that the machine is taken away, else
            it has no row.
        StorageError: the campaign cannot be written.
    """
    watch = _Watch(driver)
    _drop_leftovers(held, driver.campaign)
    folders = [_folder(attempt, claim, driver.campaign) for attempt, claim in held]
    trials = [(attempt.planned.config, folder) for (attempt, _), folder in zip(held, folders, strict=True)]
    num_ended = 0
    with closing(launcher.run(trials, driver.campaign.settings.deadlines, watch.on_phase)) as outcomes:
        try:
            for result in outcomes:
                reach("trial_ended")
                lost = driver.signals.taken_away and result.status != "ok"  # its ranks may hear the signal first
                outcome = watch.preempted() if lost else Outcome.of(result.columns)
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
        environment = hardware.environment(config.hardware.device, launcher.environment(config))
        outcome = replace(outcome, environment=environment)
    row = _row(attempt, campaign, outcome).columns()
    try:
        driver.claims.commit(claim, row, campaign.folder)
    except LostClaim:
        return None
    except OSError as error:
        kept = keep(row, attempt.key, _folder(attempt, claim, campaign))
        raise StorageError(campaign.folder, error, kept) from error
    finally:
        driver.claims.release(claim)
    return Ended(outcome.status, outcome.reason, outcome.measured.get("median_step_ms"))


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
