"""Runs attempts until each has its row, beside other runs of the campaign."""

import random
import time
from collections.abc import Sequence

from sp_bench.driver import attempt
from sp_bench.driver.attempt import Attempt, Driver
from sp_bench.formats import counted
from sp_bench.rows import store

POLL_S = 0.5  # between looks at what other runs have committed


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
            driver.progress.note(f"waiting for {counted(len(left), 'trial')} of other runs: {', '.join(holders)}")
        end = time.monotonic() + POLL_S * random.uniform(1, 2)  # two runs that want the same trial must not keep step
        while time.monotonic() < end:
            driver.signals.check()
            time.sleep(0.1)
