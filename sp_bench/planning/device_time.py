"""Estimates how long trials keep GPUs busy, so that `plan` shows whether a sweep fits the time one has. Pure.

It rests on rows of trials of the same kind, and where there are none on the constants below. What is beside the steps
was estimated for each of 111 committed GPU campaigns from the others: 81 took half to twice as long, and 18 longer.
Shares of the peak differ by kernel and length.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sp_bench import hardware, methods
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import TRAINING
from sp_bench.costs.flops import step_flops

# The share of the devices' peak that steps reach, for two purposes. The likely share estimates how long GPUs are
# needed. The best share refuses trials, and must refuse none that would have ended in time.
LIKELY_SHARE = 0.4  # the median of committed rows is 0.41 for attention and 0.52 for steps of fsdp2
BEST_SHARE = 0.6  # of a step of minutes, nearly all attention, on the fastest kernel here
# Seconds beside the steps, in fresh processes or with new code to compile, and in a warm group: about the medians of
# committed rows, of trials that prove themselves and of those that rely on a kept proof.
BESIDE_S = {"attention": (20, 3), "fsdp2": (40, 12), "other engines": (60, 36)}
BESIDE_RELYING_S = {"attention": (12, 2), "fsdp2": (23, 5), "other engines": (26, 26)}
# 3: the step that the ledger counts, the proof at the timed length, and the arms
OTHER_STEPS = 3
COLUMNS = (
    *("status", "campaign", "started_at", "method", "kernel", "model", "world_size", "hardware", "engine", "isolation"),
    *(
        "evidence",
        "proof",
        "duration_s",
        "phase_s",
        "hfu",
        "window_ms",
        "median_step_ms",
        "warmup_steps",
        "single_step",
    ),
)  # what `measured` needs of a row


def peak_device(config: TrialConfig, device_name: str | None) -> str:
    """The name of the device whose peak rate is used: that of the GPUs here, or without any, the one that `hardware`
    names."""
    return device_name or f"{config.hardware.name.upper()} SXM"


def step_s(config: TrialConfig, device_name: str | None, share: float) -> float | None:
    """Seconds of one step at a share of the peak. None on the CPU, without FLOPs to count, or if no peak is known."""
    workload = config.workload
    peak = hardware.peak_flops(peak_device(config, device_name), config.dtype)
    if config.hardware.device != "cuda" or workload.name not in ("attention", *TRAINING) or peak is None:
        return None
    layout = methods.layout_of(config)
    return step_flops(config, layout.padded(config.seq_len))["hardware_flops"] / (config.world_size * peak * share)


class Kind(NamedTuple):
    """Trials of one kind take about as long beside their steps."""

    hardware: str
    engine: str | None  # None: attention alone
    isolation: str
    world: str
    relies: bool  # on the proof of an earlier trial
    first: bool  # of its campaign with this code: it starts processes, or compiles


class Rates(NamedTuple):
    """What trials of one kind reach."""

    share: float  # of the devices' peak
    beside_s: float  # seconds beside the steps


def kind(config: TrialConfig, *, relies: bool, first: bool) -> Kind:
    return Kind(config.hardware.name, _engine(config), config.isolation, config.world, relies, first)


def _engine(config: TrialConfig) -> str | None:
    return config.engine.name if config.workload.name in TRAINING else None


def firsts(configs: Iterable[TrialConfig]) -> list[bool]:
    """Which of these trials, in the order in which they run, are the first with their code."""
    of_each = [(c.method.name, c.kernel.name, c.model.name, c.world_size, _engine(c), c.world) for c in configs]
    return _firsts(of_each)


def _firsts(codes: Iterable[tuple[Any, ...]]) -> list[bool]:
    seen: set[tuple[Any, ...]] = set()
    return [not (code in seen or seen.add(code)) for code in codes]


def measured(rows: Iterable[Mapping[str, Any]]) -> dict[Kind, Rates]:
    """The rates of each kind among rows, which need COLUMNS: the median share, and the mean of what is beside. A row
    without times, as of ranks that share a GPU, has no share, and all but its phase `measure` is beside."""
    ended = [row for row in rows if row["status"] == "ok" and _finite(row["duration_s"])]
    ended.sort(key=lambda row: row["started_at"])
    codes = ("campaign", "method", "kernel", "model", "world_size", "engine", "evidence")
    shares: dict[Kind, list[float]] = defaultdict(list)
    beside: dict[Kind, list[float]] = defaultdict(list)
    for row, first in zip(ended, _firsts(tuple(row[name] for name in codes) for row in ended), strict=True):
        world = "one_rank" if row["evidence"] == "one_rank" else "ranks"
        relies = world == "ranks" and row["proof"] is not None
        each = Kind(row["hardware"], row["engine"], row["isolation"], world, relies, first)
        if _finite(row["hfu"]) and row["hfu"] > 0:
            shares[each].append(row["hfu"])
        beside[each].append(max(row["duration_s"] - _steps_s(row), 0.0))
    return {
        each: Rates(statistics.median(shares[each] or [LIKELY_SHARE]), statistics.mean(seconds))
        for each, seconds in beside.items()
    }


def _steps_s(row: Mapping[str, Any]) -> float:
    """Seconds that a trial spent in steps."""
    window_ms, median_ms = row["window_ms"] or (), row["median_step_ms"]
    if not window_ms or not _finite(*window_ms, median_ms, row["warmup_steps"]):
        return dict(row["phase_s"] or ()).get("measure", 0.0)
    other_steps = row["warmup_steps"] + (0 if row["single_step"] else OTHER_STEPS)
    return (max(window_ms) + other_steps * median_ms) / 1e3


def _finite(*numbers: float | None) -> bool:
    return all(number is not None and math.isfinite(number) for number in numbers)


class TrialTime(NamedTuple):
    """Likely seconds of a trial."""

    whole: float
    timed: float  # of its timed steps


def trial_time(
    config: TrialConfig,
    device_name: str | None,
    *,
    relies: bool = False,
    first: bool = False,
    known: Mapping[Kind, Rates] | None = None,
) -> TrialTime | None:
    """None as for `step_s`. first: of `firsts`. known: of `measured`."""
    workload = config.workload
    table = BESIDE_RELYING_S if relies else BESIDE_S
    fresh, warm = table.get("attention" if workload.name == "attention" else config.engine.name, table["other engines"])
    guess = Rates(LIKELY_SHARE, warm if config.isolation == "group" and not first else fresh)
    share, beside_s = (known or {}).get(kind(config, relies=relies, first=first), guess)
    if (one_step_s := step_s(config, device_name, share)) is None:
        return None
    timed_s = workload.num_timed_steps(1e3 * one_step_s) * one_step_s
    if config.stages:
        stages = zip(config.of_stages, config.stages, strict=True)
        timed_s = sum((step_s(stage, device_name, share) or 0.0) * steps for stage, (_, steps) in stages)
    other_steps = workload.warmup_steps + (0 if workload.single_step else OTHER_STEPS)
    return TrialTime(beside_s + other_steps * one_step_s + timed_s, timed_s)


def minutes(seconds: float) -> str:
    number = max(round(seconds / 60), 1)
    return f"{number} minute{'s' * (number != 1)}"
