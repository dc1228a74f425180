"""The trials of a run that have no row yet, beside other runs of the campaign."""

import random
import time
from collections.abc import Sequence

from sp_bench.driver import attempt
from sp_bench.driver.attempt import Attempt, Campaign, Driver
from sp_bench.driver.plan import Trial
from sp_bench.driver.progress import number_of
from sp_bench.driver.settings import CampaignConfig
from sp_bench.rows import store
from sp_bench.rows.store import RowName

RETRIED = ("preempted", "timeout", "error")  # by `resume`; with another status a trial would end the same way
POLL_S = 0.5  # between looks at what other runs have committed


def latest_rows(trials: Sequence[Trial], campaign: Campaign) -> list[RowName | None]:
    """The row of the last attempt at each trial in this environment."""
    latest = store.latest(store.committed(campaign.folder))
    return [latest.get((trial.trial_id, campaign.env_id(trial))) for trial in trials]


def next_attempt(latest: RowName | None, trial: Trial, settings: CampaignConfig) -> int | None:
    """The number of the next attempt at a trial, given the row of the last one; None: make none.

    An unsupported trial is attempted once nothing stands in its way any more: a machine may have had too few devices.
    """
    if latest is None:
        return 0
    if latest.status == "unsupported":
        return None if trial.unsupported_reason else latest.attempt + 1
    again = settings.resume and latest.status in RETRIED and latest.attempt + 1 < settings.max_attempts
    return latest.attempt + 1 if again else None


def fill(attempts: Sequence[Attempt], driver: Driver) -> None:
    """Run what no other run has claimed; wait for the rows of what others have claimed."""
    left = {each.key: each for each in attempts}
    while left:
        driver.signals.check()
        before = len(left)
        for each in [a for a in left.values() if a.trial.unsupported_reason]:
            driver.signals.check()
            if attempt.refuse(each, driver):
                del left[each.key]
        for each in attempt.run_next([a for a in left.values() if not a.trial.unsupported_reason], driver):
            del left[each.key]
        for row in store.committed(driver.campaign.folder) if left else ():
            if each := left.pop(f"{row.trial_id}-{row.env_id}-{row.attempt}", None):
                driver.progress.finish_elsewhere(each.trial, row.status)
        if len(left) < before:
            continue
        if holders := driver.claims.holders():
            driver.progress.note(f"waiting for {number_of(len(left))} of other runs: {', '.join(holders)}")
        end = time.monotonic() + POLL_S * random.uniform(1, 2)  # two runs that want the same trial must not keep step
        while time.monotonic() < end:
            driver.signals.check()
            time.sleep(0.1)
