"""The share of a campaign's wall time that was measurement, from its rows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sp_bench.formats import number

TIMED = "measure"  # the phase of the timed steps
MEASUREMENT = ("warmup", TIMED, "ledger")  # the phases that produce a row's numbers
COLUMNS = ("status", "duration_s", "phase_s")  # what `effort` needs of a row
PROOF = ("correctness",)


@dataclass(frozen=True)
class Effort:
    """Seconds of launched trials, from launch to exit, that have times of phases; `wall_s` is their sum, not the span
    of the campaign."""

    wall_s: float
    timed_s: float  # TIMED phase of ok rows
    measured_s: float  # MEASUREMENT phases of ok rows
    proof_s: float  # PROOF phases of ok rows
    failed_s: float  # all phases of rows that are not ok
    num_trials: int

    @property
    def measured_share(self) -> float | None:
        """The measured share of `wall_s`; None if nothing was launched or it is unknown."""
        return self.measured_s / self.wall_s if self.wall_s else None

    def summary(self) -> str:
        """A few words for the last line of a run; empty if nothing is known."""
        if self.measured_share is None:
            return ""
        spent = f"{number(self.measured_s)} of the campaign's {number(self.wall_s)} s"
        return f"measuring took {spent} ({self.measured_share:.0%}; timed steps {self.timed_s / self.wall_s:.0%})"

    @property
    def shares(self) -> dict[str, float]:
        """Activity -> its share of `wall_s`; empty if nothing is known."""
        if not self.wall_s:
            return {}
        parts = {
            "timed steps": self.timed_s,
            "warm-up, counted steps and arms": self.measured_s - self.timed_s,
            "proofs of correctness": self.proof_s,
            "trials that are not ok": self.failed_s,
            "starting and ending processes": self.wall_s - self.measured_s - self.proof_s - self.failed_s,
        }
        return {what: seconds / self.wall_s for what, seconds in parts.items() if seconds > 0}


def effort(rows: Iterable[Mapping[str, Any]]) -> Effort:
    """Add up rows, which need COLUMNS. Trials that were never launched have no duration."""
    wall_s = timed_s = measured_s = proof_s = failed_s = 0.0
    num_trials = 0
    for row in rows:
        duration_s, phase_s = _known(row["duration_s"]), _phases(row["phase_s"])
        if not duration_s or not phase_s:
            continue
        num_trials += 1
        wall_s += duration_s
        if row["status"] != "ok":
            failed_s += duration_s
            continue
        timed_s += phase_s.get(TIMED, 0.0)
        measured_s += sum(phase_s.get(name, 0.0) for name in MEASUREMENT)
        proof_s += sum(phase_s.get(name, 0.0) for name in PROOF)
    return Effort(wall_s, timed_s, measured_s, proof_s, failed_s, num_trials)


def _phases(value: Any) -> dict[str, float]:
    """A map column, which pyarrow and pandas give as pairs; empty if missing."""
    return dict(value) if isinstance(value, Iterable) else {}


def _known(seconds: Any) -> float | None:
    return seconds if isinstance(seconds, float) and math.isfinite(seconds) else None
