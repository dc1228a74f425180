"""Runs trials on this machine, one after another: two at once would disturb each other's times."""

from collections.abc import Sequence

from sp_bench import attempt
from sp_bench.plan import Trial
from sp_bench.progress import Progress


def launch(trials: Sequence[Trial], campaign: attempt.Campaign, progress: Progress) -> None:
    """Each trial in order; whatever becomes of one, the next follows."""
    for planned in trials:
        progress.start(planned)
        progress.finish(planned, attempt.launch(planned, campaign, progress.enter_phase))
