"""Runs trials on this machine, one after another: two at once would disturb each other's times."""

from collections.abc import Sequence
from itertools import takewhile

from sp_bench import attempt
from sp_bench.plan import Trial, process_key
from sp_bench.progress import Progress


def launch(trials: Sequence[Trial], campaign: attempt.Campaign, progress: Progress) -> None:
    """Each trial in order; whatever becomes of one, the next follows, in fresh processes if its own are gone."""
    left = list(trials)
    while left:
        progress.start(left[0])
        for status in attempt.launch(_sharing_processes(left), campaign, progress.enter_phase):
            progress.finish(left.pop(0), status)
            if status == "ok" and left:
                progress.start(left[0])  # in the same processes, or next


def _sharing_processes(trials: Sequence[Trial]) -> list[Trial]:
    """The first trials, which may run in one set of processes; the first alone unless it allows that."""
    key = process_key(trials[0].config)
    return list(takewhile(lambda planned: process_key(planned.config) == key, trials)) if key else [trials[0]]
