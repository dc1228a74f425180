"""Settings of a campaign. None changes what a trial measures, so no worker reads them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sp_bench.config.parsing import ConfigError, require_path, require_plain_name, require_positive


@dataclass(frozen=True)
class DeadlinesConfig:
    """Seconds that each phase of a trial may take; after them the trial ends as `timeout`.

    The step that the ledger counts has the deadline of `measure`. The hand-over and the shutdown have that of `init`.
    """

    init: float
    correctness: float
    warmup: float
    measure: float

    def __post_init__(self) -> None:
        require_positive(self, "init", "correctness", "warmup", "measure")


@dataclass(frozen=True)
class SearchConfig:
    """Settings of the search that seq_len=max starts (planning/search.py)."""

    resolution: float  # the bracket's width over its shorter end
    max_probes: int  # trials of one search in one run; existing rows do not count
    start: int | None  # tokens of the first probe; None: where the memory model expects the edge
    longest: int | None  # tokens; nothing longer is tried. None: no limit

    def __post_init__(self) -> None:
        require_positive(self, "resolution", "max_probes", "start", "longest")


def require_price(price: float | None) -> float | None:
    """`price` as it is. Refuses a GPU-hour that costs nothing."""
    if price is not None and not price > 0:
        raise ConfigError(f"price={price:g} must be positive; leave it out, and no cost is shown")
    return price


@dataclass(frozen=True)
class CampaignConfig:
    """The settings of one campaign."""

    campaign: str
    results_root: str
    replicates: int  # trials of every cell, each in fresh processes; one randomised complete block a replicate
    order_seed: int
    deadlines: DeadlinesConfig
    resume: bool  # try again what ended as preempted, timeout or error
    max_attempts: int  # launches of one trial in one environment, counted over all runs
    plan_only: bool  # show the trials and launch none
    max_points: int  # a sweep of more points is refused before it is expanded
    proofs: str | None = None  # folder of campaigns whose rows prove what one rank computes; None: results_root
    proof: Literal["auto", "always"] = "auto"  # auto: a trial relies on what one of the same key has proven
    price: float | None = None  # of a GPU-hour, in any currency
    search: SearchConfig = field(default_factory=lambda: SearchConfig(0.02, 16, None, None))

    def __post_init__(self) -> None:
        require_positive(self, "replicates", "max_attempts", "max_points")
        require_price(self.price)
        require_plain_name(self, "campaign")
        require_path(self, "results_root")
        if self.proofs is not None:
            require_path(self, "proofs")

    @property
    def proofs_folder(self) -> Path:
        return Path(self.proofs or self.results_root)

    @property
    def folder(self) -> Path:
        """The folder of the campaign's rows."""
        return Path(self.results_root) / self.campaign
