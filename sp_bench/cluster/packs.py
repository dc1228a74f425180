"""Packs: which trials one job of a cluster runs. Pure; no files, no processes.

The trials of a replicate with equal numbers of nodes and GPUs per node are one pack, so that methods are compared on
the same nodes. If they do not fit one job, trials that differ only in the method stay together.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.driver.progress import duration
from sp_bench.formats import cost_text
from sp_bench.planning import device_time
from sp_bench.planning.plan import Trial
from sp_bench.planning.settings import DeadlinesConfig

START_S = 300.0  # time of a job before its first trial and after its last
SLOWER = 2.0  # factor on the time of the slowest measured trial of a cell


@dataclass(frozen=True)
class Pack:
    """The trials of one job."""

    num_nodes: int
    gpus_per_node: int  # 0: its trials run on the CPU
    replicate: int
    trials: tuple[Trial, ...]
    estimate_s: float  # of all trials and the start of the job
    minutes: int  # requested: the estimate, or the limit if that is less


def at_most_s(trial: Trial, deadlines: DeadlinesConfig, slowest_s: Mapping[str, float]) -> float:
    """An upper bound on a trial's seconds: the sum of its phases' deadlines, or less if its cell was measured.

    slowest_s: cell_id -> seconds of the cell's slowest successful trial.
    """
    if trial.unsupported_reason:
        return 0.0
    every_phase_s = 3 * deadlines.init + deadlines.correctness + deadlines.warmup + 2 * deadlines.measure
    return min(every_phase_s, SLOWER * slowest_s.get(trial.cell_id, math.inf))


def packs(
    trials: Sequence[Trial], deadlines: DeadlinesConfig, slowest_s: Mapping[str, float], limit_minutes: int
) -> list[Pack]:
    """The jobs that run these trials, in the order of the plan. A trial that no node can run gets its row in a job of
    others; where there is none, it is in no job.

    Raises:
        ConfigError: a trial that may take longer than a job.
    """
    seconds = {trial.trial_id: at_most_s(trial, deadlines, slowest_s) for trial in trials}
    for trial in trials:
        _require_fits(trial, seconds[trial.trial_id], limit_minutes)
    groups: dict[tuple[int, int, int], list[Trial]] = {}
    for trial in trials:
        if not trial.unsupported_reason:
            key = (trial.replicate, trial.config.num_hosts, trial.config.gpus_per_node)
            groups.setdefault(key, []).append(trial)
    runnable = list(groups)
    for trial in trials:  # trials that cannot run go to the largest pack: their reasons may name the number of GPUs
        if trial.unsupported_reason and runnable:
            of_replicate = [key for key in runnable if key[0] == trial.replicate]
            groups[max(of_replicate or runnable)].append(trial)
    found = []
    for (replicate, num_nodes, num_gpus), group in sorted(groups.items()):
        for part in _parts(group, seconds, 60 * limit_minutes - START_S):
            estimate_s = START_S + sum(seconds[trial.trial_id] for trial in part)
            minutes = min(limit_minutes, math.ceil(estimate_s / 60))
            found.append(Pack(num_nodes, num_gpus, replicate, tuple(part), estimate_s, minutes))
    return found


def gpu_hours(packs: Sequence[Pack]) -> float:
    """The GPU-hours that the packs request; jobs may end earlier."""
    return sum(pack.num_nodes * pack.gpus_per_node * pack.minutes / 60 for pack in packs)


def likely_gpu_hours(packs: Sequence[Pack], slowest_s: Mapping[str, float]) -> float | None:
    """GPU-hours that the packs may take: each trial as its slowest row, else as `device_time` estimates. None if a
    trial has neither."""
    seconds: dict[str, float | None] = {**slowest_s}  # cell_id -> of one trial
    total = 0.0
    for pack, trial in [(each, trial) for each in packs for trial in each.trials if each.gpus_per_node]:
        if trial.unsupported_reason:
            continue
        if trial.cell_id not in seconds:
            estimate = device_time.trial_time(trial.config, None)
            seconds[trial.cell_id] = None if estimate is None else estimate.whole
        if (of_trial := seconds[trial.cell_id]) is None:
            return None
        total += pack.num_nodes * pack.gpus_per_node * of_trial / 3600
    return total


def hours_text(packs: Sequence[Pack], slowest_s: Mapping[str, float], price: float | None = None) -> str:
    """The GPU-hours of packs in words: an estimate, and what their jobs ask for, with the price of the latter."""
    likely = likely_gpu_hours(packs, slowest_s)
    about = "" if likely is None else f"{f'about {likely:,.1f}' if likely >= 0.1 else 'less than 0.1'} GPU-hours, "
    most = gpu_hours(packs)
    return f"{about}at most {most:,.1f} {cost_text(most, price)}"


def _require_fits(trial: Trial, seconds: float, limit_minutes: int) -> None:
    if START_S + seconds > 60 * limit_minutes:
        raise ConfigError(
            f"a trial of method={trial.config.method.name} seq_len={trial.config.seq_len} may take "
            f"{duration(seconds)}, and its job {duration(START_S)} to start and end; that is more than "
            f"time_limit_minutes={limit_minutes}. Give smaller deadlines, which add up to it (3 x init + correctness + "
            "warmup + 2 x measure), such as deadlines.measure=60, or a cluster with a higher limit"
        )


def _parts(group: Sequence[Trial], seconds: Mapping[str, float], limit_s: float) -> Iterator[list[Trial]]:
    """Cut a group into jobs. Trials that must stay together are never parted: if they do not fit one job, the rest is
    left to the next submission."""
    together: dict[str, list[Trial]] = {}
    for trial in group:
        together.setdefault(_apart_from_method(trial.config), []).append(trial)
    part, taken_s = [], 0.0
    for unit in together.values():
        unit_s = sum(seconds[trial.trial_id] for trial in unit)
        if part and taken_s + unit_s > limit_s:
            yield part
            part, taken_s = [], 0.0
        part += unit
        taken_s += unit_s
    yield part


def _apart_from_method(config: TrialConfig) -> str:
    return json.dumps({key: value for key, value in config.to_mapping().items() if key != "method"}, sort_keys=True)
