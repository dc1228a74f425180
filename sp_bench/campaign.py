"""A campaign: plan the points, leave out what is committed, run the rest, say where the rows and the report are."""

import fcntl
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sp_bench import attempt, hardware, plan, results
from sp_bench.attempt import Campaign
from sp_bench.config import CampaignConfig, TrialConfig
from sp_bench.parsing import ConfigError
from sp_bench.progress import Progress, show_plan, summary

Launch = Callable[[Sequence[plan.Trial], Campaign, Progress], None]
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def run(configs: Sequence[TrialConfig], settings: CampaignConfig, launch: Launch) -> None:
    """Every trial that is not committed under this environment yet leaves one row. With `plan_only`, show it instead.

    Raises:
        ConfigError: a config that no trial can have, or a results folder that cannot be written; nothing is launched.
        SystemExit: 130 after an interrupt; the trial that ran leaves no row, what is committed stays.
    """
    campaign = _describe(configs, settings)
    cuda = any(config.hardware.device == "cuda" for config in configs)
    found = hardware.gpus() if cuda else None
    trials = plan.plan(configs, settings.replicates, settings.order_seed, len(found.devices) if found else None)
    done = {(row.trial_id, row.env_id): row.status for row in results.committed(campaign.folder)}
    statuses = [done.get((trial.trial_id, campaign.env_id(trial))) for trial in trials]
    if settings.plan_only:
        show_plan(trials, statuses)
        return
    left = [trial for trial, status in zip(trials, statuses, strict=True) if status is None]
    with _exclusive(campaign), _termination_interrupts(), Progress(len(trials), left) as progress:
        try:
            for trial in left:
                if trial.unsupported_reason:
                    progress.finish(trial, attempt.refuse(trial, campaign))
            launch([trial for trial in left if not trial.unsupported_reason], campaign, progress)
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
    from sp_bench import report  # draws with matplotlib, which planning does not need

    print(summary(campaign.folder, progress, _effort(campaign.folder), interrupted=interrupted))
    if interrupted:
        raise SystemExit(INTERRUPTED)
    built = report.build([campaign.folder])
    for problem in built.problems:
        print(problem)
    print(f"report: {built.page}")


def _effort(folder: Path) -> str:
    """How much of the campaign's wall time was measurement, this run's and earlier ones'."""
    from sp_bench.report.effort import effort

    rows, _ = results.read(folder, ("status", "duration_s", "phase_s"))
    return effort(rows.to_pylist()).summary()


def _describe(configs: Sequence[TrialConfig], settings: CampaignConfig) -> Campaign:
    devices = {config.hardware.device for config in configs}
    folder = Path(settings.results_root) / settings.campaign
    return Campaign(settings, folder, {device: hardware.env_id(device) for device in devices}, *hardware.git_state())


@contextmanager
def _exclusive(campaign: Campaign) -> Iterator[None]:
    """The campaign's folder, made, found writable, and ours alone: two runs at once would time each other's load."""
    folder = campaign.folder
    try:
        campaign.work.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
        lock = open(campaign.work / "lock", "a")  # noqa: SIM115 - closed below, after the run
    except OSError as error:
        raise ConfigError(
            f"cannot write results to {folder}: {error.strerror}; see results_root and campaign"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{folder} is being filled by another run; wait for it, or use another campaign"
            ) from error
        yield


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does, so that no rank outlives it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
