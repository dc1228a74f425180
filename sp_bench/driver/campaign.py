"""A campaign: plan the points, leave out what is committed, run the rest, say where the rows and the report are."""

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from sp_bench import hardware
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import attempt, plan
from sp_bench.driver.attempt import Attempt, Campaign, Driver
from sp_bench.driver.claims import FOLDER, Claims
from sp_bench.driver.plan import Trial
from sp_bench.driver.progress import Progress, number_of, show_plan, summary
from sp_bench.driver.settings import CampaignConfig
from sp_bench.driver.signals import Interrupted, Signals
from sp_bench.driver.storage import StorageError
from sp_bench.rows import store
from sp_bench.rows.containment import require_contained
from sp_bench.rows.store import RowName

Launch = Callable[[Sequence[Attempt], Driver], Sequence[Attempt]]


class Built(Protocol):
    """A report that was made."""

    @property
    def page(self) -> Path: ...

    @property
    def problems(self) -> Sequence[str]:
        """One line for each file that was passed over."""
        ...

    @property
    def num_unread(self) -> int:
        """How many of them are named as rows are."""
        ...


class Reporter(Protocol):
    """Makes the report of a campaign; the driver itself draws nothing."""

    def effort(self, folder: Path) -> str:
        """How much of the campaign's wall time was measurement, this run's and earlier ones'; empty without rows."""
        ...

    def build(self, folder: Path) -> Built: ...


INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
RETRIED = ("preempted", "timeout", "error")  # by `resume`: the others would end the same way
POLL_S = 0.5  # between looks at what other runs have committed
REPORT = "report"  # claimed by the run that makes it


def run(configs: Sequence[TrialConfig], settings: CampaignConfig, launch: Launch, reporter: Reporter) -> None:
    """Every trial that is not committed under this environment yet leaves one row; other runs of the campaign may share
    the work. With `resume`, some that are committed are tried again. With `plan_only`, show it instead.

    Raises:
        ConfigError: a config that no trial can have, or a results folder that cannot be written; nothing is launched.
        StorageError: the folder cannot be written any more; what is committed stays.
        SystemExit: 130 after a signal; what is committed stays.
    """
    campaign = _describe(configs, settings)
    cuda = any(config.hardware.device == "cuda" for config in configs)
    found = hardware.gpus() if cuda else None
    _require_devices(configs, found, settings)
    trials = plan.plan(configs, settings.replicates, settings.order_seed, len(found.devices) if found else None)
    rows = _rows(trials, campaign)
    numbers = [next_attempt(row, trial, settings) for row, trial in zip(rows, trials, strict=True)]
    if settings.plan_only:
        show_plan(trials, [row.status if row and n is None else None for row, n in zip(rows, numbers, strict=True)])
    if note := _measured_elsewhere([t for t, row in zip(trials, rows, strict=True) if row is None], campaign):
        print(note)
    if settings.plan_only:
        return
    left = [Attempt(t, campaign.env_id(t), n) for t, n in zip(trials, numbers, strict=True) if n is not None]
    before = [row for row, number in zip(rows, numbers, strict=True) if row and number is None]
    cpu = any(config.hardware.device == "cpu" for config in configs)
    devices = ("cpu",) * cpu + tuple(gpu.uuid for gpu in (found.devices if found else ()))
    _make_writable(campaign)
    try:
        with Claims(campaign.work / FOLDER) as claims:
            interrupted = _run(left, before, campaign, claims, devices, launch, reporter)
            if hint := _hint(trials, campaign):
                print(hint)
            if interrupted:
                raise SystemExit(INTERRUPTED)
            _report(campaign, claims, reporter)
    except OSError as error:
        raise StorageError(campaign.folder, error) from error


def _require_devices(configs: Sequence[TrialConfig], found: hardware.Gpus | None, settings: CampaignConfig) -> None:
    """Rows say which hardware was asked for, so it must be what is here. Without any, a plan can still be shown."""
    kinds = sorted({config.hardware.name for config in configs if config.hardware.device == "cuda"})
    if found is None:
        if not settings.plan_only and all(config.hardware.device == "cuda" for config in configs):
            raise ConfigError(
                f"hardware={', '.join(kinds)} needs CUDA devices, and there is no NVIDIA driver here: run this on the "
                "machine that has them, or use hardware=cpu; `sp-bench plan` shows what would run"
            )
        return
    for model, kind in itertools.product(sorted({gpu.name for gpu in found.devices}), kinds):
        if not hardware.describes(kind, model):
            raise ConfigError(
                f"hardware={kind}, but this machine has {model}; use the hardware of that name, or add a file to "
                "conf/hardware that is named as the device is"
            )


def next_attempt(latest: RowName | None, trial: Trial, settings: CampaignConfig) -> int | None:
    """The number of the attempt to make at a trial, from its latest row; None: none.

    What was refused is asked for again whenever it is not refused any more: a machine may have had too few devices."""
    if latest is None:
        return 0
    if latest.status == "unsupported":
        return None if trial.unsupported_reason else latest.attempt + 1
    again = settings.resume and latest.status in RETRIED and latest.attempt + 1 < settings.max_attempts
    return latest.attempt + 1 if again else None


def _rows(trials: Sequence[Trial], campaign: Campaign) -> list[RowName | None]:
    """The last attempt at each trial in this environment."""
    latest = store.latest(store.committed(campaign.folder))
    return [latest.get((trial.trial_id, campaign.env_id(trial))) for trial in trials]


def _measured_elsewhere(without_row: Sequence[Trial], campaign: Campaign) -> str:
    """Why there are rows of trials that are to run all the same; empty without any."""
    asked = {trial.trial_id: campaign.env_id(trial) for trial in without_row}
    committed = store.committed(campaign.folder)  # another run may have added rows of this very environment
    found = [row for row in committed if asked.get(row.trial_id, row.env_id) != row.env_id]
    if not found:
        return ""
    there, here = {row.env_id for row in found}, {asked[row.trial_id] for row in found}
    return (
        f"{len({row.trial_id for row in found})} of {number_of(len(asked))} without a row of this environment (env_id "
        f"{', '.join(sorted(here))}) have one of {', '.join(sorted(there))}: other libraries, another device or other "
        "measuring code. Those rows stay; a report shows each cell's newest environment"
    )


def _hint(trials: Sequence[Trial], campaign: Campaign) -> str:
    """What to do about trials that stand as they failed; empty without any."""
    most = campaign.settings.max_attempts
    failed = [row for row in _rows(trials, campaign) if row and row.status in RETRIED]
    spent = sum(row.attempt + 1 >= most for row in failed)
    words = []
    if again := len(failed) - spent:
        words.append(f"{number_of(again)} failed; `sp-bench resume` with the words of this run tries again")
    if spent:
        words.append(f"{number_of(spent)} failed max_attempts={most} times; a larger one lets `resume` try again")
    return "\n".join(words)


def _run(
    left: Sequence[Attempt],
    before: Sequence[RowName],
    campaign: Campaign,
    claims: Claims,
    devices: tuple[str, ...],
    launch: Launch,
    reporter: Reporter,
) -> bool:
    """Give every attempt its row and say what came of it; whether a signal ended that early."""
    with Signals() as signals, Progress([a.planned for a in left], [row.status for row in before]) as progress:
        interrupted = False
        try:
            _fill(left, Driver(campaign, claims, signals, progress, devices), launch)
        except Interrupted:
            interrupted = True
        except KeyboardInterrupt:  # the second Ctrl-C: at once
            return True
    print(summary(campaign.folder, progress, reporter.effort(campaign.folder), interrupted=interrupted))
    return interrupted


def _fill(attempts: Sequence[Attempt], driver: Driver, launch: Launch) -> None:
    """What nobody has claimed is run here, for what others have claimed their rows are waited for."""
    left = {each.key: each for each in attempts}
    while left:
        driver.signals.check()
        before = len(left)
        for each in [a for a in left.values() if a.planned.unsupported_reason]:
            driver.signals.check()
            if ended := attempt.refuse(each, driver):
                driver.progress.finish(each.planned, *ended)
                del left[each.key]
        for each in launch([a for a in left.values() if not a.planned.unsupported_reason], driver):
            del left[each.key]
        for row in store.committed(driver.campaign.folder) if left else ():
            if each := left.pop(f"{row.trial_id}-{row.env_id}-{row.attempt}", None):
                driver.progress.finish_elsewhere(each.planned, row.status)
        if len(left) == before:
            _wait(len(left), driver)


def _wait(num_left: int, driver: Driver) -> None:
    if holders := driver.claims.holders():
        driver.progress.note(f"waiting for {number_of(num_left)} of other runs: {', '.join(holders)}")
    end = time.monotonic() + POLL_S * random.uniform(1, 2)  # not in step with a run that wants the same trial
    while time.monotonic() < end:
        driver.signals.check()
        time.sleep(0.1)


def _report(campaign: Campaign, claims: Claims, reporter: Reporter) -> None:
    claim = claims.take(REPORT, lambda: False)
    if claim is None:
        print(f"report: another run is making that of {campaign.folder}")
        return
    built = reporter.build(campaign.folder)
    for problem in built.problems:
        print(problem)
    if built.num_unread:
        print("a row that cannot be read counts as done: move its file away, and a run measures that trial again")
    print(f"report: {built.page}")


def _describe(configs: Sequence[TrialConfig], settings: CampaignConfig) -> Campaign:
    folder = Path(settings.results_root) / settings.campaign
    require_contained(folder)
    return Campaign(settings, folder, *hardware.git_state())


def _make_writable(campaign: Campaign) -> None:
    """The campaign's folder, made and found writable."""
    folder = campaign.folder
    try:
        campaign.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write results to {folder}: {error.strerror}; see results_root and campaign"
        ) from error
