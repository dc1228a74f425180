"""How a list of trials is run: none of it changes what a trial measures, and so no worker reads it."""

from dataclasses import dataclass

from sp_bench.config.parsing import require_path, require_plain_name, require_positive


@dataclass(frozen=True)
class DeadlinesConfig:
    """Seconds that each phase of a trial may take before the trial is ended as `timeout`. The ledger's step has
    those of `measure`; the hand-over and the end have those of `init`."""

    init: float
    correctness: float
    warmup: float
    measure: float

    def __post_init__(self) -> None:
        require_positive(self, "init", "correctness", "warmup", "measure")


@dataclass(frozen=True)
class CampaignConfig:
    """How a list of cells is run; none of it changes what a trial measures."""

    campaign: str
    results_root: str
    replicates: int  # fresh-process repetitions of every cell, in randomised complete blocks
    order_seed: int
    deadlines: DeadlinesConfig
    resume: bool  # what ended as preempted, timeout or error is tried again
    max_attempts: int  # launches of one trial in one environment, all runs together
    plan_only: bool
    max_points: int  # a sweep of more points is refused before it is expanded

    def __post_init__(self) -> None:
        require_positive(self, "replicates", "max_attempts", "max_points")
        require_plain_name(self, "campaign")
        require_path(self, "results_root")
