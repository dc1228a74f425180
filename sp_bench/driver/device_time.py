"""Estimates how long trials keep GPUs busy, so that `plan` shows whether a sweep fits the time one has. Pure.

It rests on rows of trials of the same kind, and where there are none on the constants below. With these, 46 of 51
committed GPU campaigns took half to twice as long as estimated. Shares of the peak differ by kernel and length, and
trials that compile take longer.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sp_bench import hardware, methods
from sp_bench.config.trial import TRAINING, TrialConfig
from sp_bench.driver.derived import flops

# The share of the devices' peak that steps reach, for two purposes. The likely share estimates how long GPUs are
# needed. The best share refuses trials, and must refuse none that would have ended in time.
LIKELY_SHARE = 0.4  # the median of committed rows is 0.41 for attention and 0.52 for steps of fsdp2
BEST_SHARE = 0.6  # of a step of minutes, nearly all attention, on the fastest kernel here
# Seconds beside the steps, in fresh processes and in a warm group: about the medians of committed rows, of trials that
# prove themselves and of those that rely on a kept proof.
BESIDE_S = {"attention": (20, 3), "fsdp2": (40, 12), "other engines": (60, 36)}
BESIDE_RELYING_S = {"attention": (12, 2), "fsdp2": (23, 5), "other engines": (26, 26)}
# 3: the step that the ledger counts, the proof at the timed length, and the arms
OTHER_STEPS = 3
COLUMNS = (
    *("status", "hardware", "engine", "isolation", "evidence", "proof", "duration_s"),
    *("hfu", "window_ms", "median_step_ms", "warmup_steps", "single_step"),
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
    layout = methods.get(config.method.name).layout(config.method, config.sp_size)
    return flops(config, layout.padded(config.seq_len))["hardware_flops"] / (config.world_size * peak * share)


class Kind(NamedTuple):
    """Trials of one kind take about as long beside their steps."""

    hardware: str
    engine: str | None  # None: attention alone
    isolation: str
    world: str
    relies: bool  # on the proof of an earlier trial


class Rates(NamedTuple):
    """What trials of one kind reach."""

    share: float  # of the devices' peak
    beside_s: float  # seconds beside the steps


def kind(config: TrialConfig, *, relies: bool) -> Kind:
    engine = config.engine.name if config.workload.name in TRAINING else None
    return Kind(config.hardware.name, engine, config.isolation, config.world, relies)


def measured(rows: Iterable[Mapping[str, Any]]) -> dict[Kind, Rates]:
    """The rates of each kind among rows, which need COLUMNS: the median share, and the mean of what is beside. Rows
    without all of these numbers do not count."""
    found: dict[Kind, list[Rates]] = defaultdict(list)
    for row in rows:
        needed = [row[name] for name in ("hfu", "duration_s", "median_step_ms", "warmup_steps")]
        needed += row["window_ms"] or [None]
        if row["status"] != "ok" or not all(number is not None and math.isfinite(number) for number in needed):
            continue
        if row["hfu"] <= 0:
            continue
        other_steps = row["warmup_steps"] + (0 if row["single_step"] else OTHER_STEPS)
        steps_s = (max(row["window_ms"]) + other_steps * row["median_step_ms"]) / 1e3
        world = "one_rank" if row["evidence"] == "one_rank" else "ranks"
        relies = world == "ranks" and row["proof"] is not None
        each = Kind(row["hardware"], row["engine"], row["isolation"], world, relies)
        found[each].append(Rates(row["hfu"], max(row["duration_s"] - steps_s, 0.0)))
    return {
        each: Rates(statistics.median(r.share for r in rates), statistics.mean(r.beside_s for r in rates))
        for each, rates in found.items()
    }


class TrialTime(NamedTuple):
    """Likely seconds of a trial."""

    whole: float
    timed: float  # of its timed steps


def trial_time(
    config: TrialConfig, device_name: str | None, *, relies: bool = False, known: Mapping[Kind, Rates] | None = None
) -> TrialTime | None:
    """None as for `step_s`. known: of `measured`."""
    workload = config.workload
    table = BESIDE_RELYING_S if relies else BESIDE_S
    fresh, warm = table.get("attention" if workload.name == "attention" else config.engine.name, table["other engines"])
    guess = Rates(LIKELY_SHARE, warm if config.isolation == "group" else fresh)
    share, beside_s = (known or {}).get(kind(config, relies=relies), guess)
    if (one_step_s := step_s(config, device_name, share)) is None:
        return None
    timed_steps = workload.num_timed_steps(1e3 * one_step_s)
    other_steps = workload.warmup_steps + (0 if workload.single_step else OTHER_STEPS)
    return TrialTime(beside_s + (other_steps + timed_steps) * one_step_s, timed_steps * one_step_s)


def minutes(seconds: float) -> str:
    number = max(round(seconds / 60), 1)
    return f"{number} minute{'s' * (number != 1)}"
