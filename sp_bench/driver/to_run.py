"""Which planned trials are to run: the one rule of `run`, `resume`, `plan` and `submit`.

A trial is to run if it has no row in this environment, that is, no row with its `env_id` (`planning/identity.py`). A
trial with such a row is done, except in two cases:

- the row is `unsupported`, and nothing stands in the way of the trial any more (`plan.unsupported_reason`), however
  often it was attempted. What its own ranks refused stays done: the same code and options would be refused again;
- `resume` retries: the status is in RETRIED, and there were fewer than `max_attempts` attempts.

A trial that cannot run here gets a row that says why, without a launch.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sp_bench.driver.attempt import Attempt, Campaign
from sp_bench.planning.plan import Trial
from sp_bench.planning.settings import CampaignConfig
from sp_bench.rows import store
from sp_bench.rows.store import RowName

RETRIED = ("preempted", "timeout", "error")  # by `resume`; with another status a trial would end the same way


@dataclass(frozen=True)
class TrialState:
    """How far a planned trial is in this environment."""

    trial: Trial
    latest: RowName | None  # the row of its last attempt
    next: Attempt | None  # None: it is done

    @property
    def done(self) -> str | None:
        """The status that the trial ended with; None: it is to run."""
        return self.latest.status if self.latest and self.next is None else None


def refused_by_ranks(rows: Iterable[RowName], folder: Path) -> set[RowName]:
    """Those of the `unsupported` rows whose trial was launched, and which its own ranks refused (`CannotTell`)."""
    names = {row.file_name for row in rows if row.status == "unsupported"}
    if not names:
        return set()
    table, _ = store.read(folder, (*store.IDENTITY, "phase"), names=names)
    launched = [row for row in table.to_pylist() if row["phase"] != "plan"]
    return {RowName(**{name: row[name] for name in store.IDENTITY}) for row in launched}


def next_attempt(
    latest: RowName | None, trial: Trial, settings: CampaignConfig, refused: Collection[RowName] = ()
) -> int | None:
    """The number of the next attempt at a trial, given the row of the last one; None: the trial is done. refused: rows
    of trials that their ranks refused."""
    if latest is None:
        return 0
    if latest.status == "unsupported":
        return None if trial.unsupported_reason or latest in refused else latest.attempt + 1
    again = settings.resume and latest.status in RETRIED and latest.attempt + 1 < settings.max_attempts
    return latest.attempt + 1 if again else None


def states(trials: Sequence[Trial], campaign: Campaign) -> list[TrialState]:
    """The state of each trial, by the names of the rows in the campaign's folder; of `unsupported` ones that could run
    here, by what they hold."""
    found = store.latest(store.committed(campaign.folder))
    known = [(trial, env_id := campaign.env_id(trial), found.get((trial.trial_id, env_id))) for trial in trials]
    free = (latest for trial, _, latest in known if latest and not trial.unsupported_reason)
    refused = refused_by_ranks(free, campaign.folder)
    made = []
    for trial, env_id, latest in known:
        number = next_attempt(latest, trial, campaign.settings, refused)
        made.append(TrialState(trial, latest, None if number is None else Attempt(trial, env_id, number)))
    return made
