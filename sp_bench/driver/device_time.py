"""Estimates how long trials keep GPUs busy, so that `plan` shows whether a sweep fits the time one has. Pure.

46 of 51 committed GPU campaigns took half to twice as long as estimated. Shares of the peak differ by kernel and
length, and trials that compile take longer.
"""

from typing import NamedTuple

from sp_bench import hardware, methods
from sp_bench.config.trial import TRAINING, TrialConfig
from sp_bench.driver.derived import flops

# The share of the devices' peak that steps reach, for two purposes. The likely share estimates how long GPUs are
# needed. The best share refuses trials, and must refuse none that would have ended in time.
LIKELY_SHARE = 0.4  # the median of committed rows is 0.41 for attention and 0.52 for steps of fsdp2
BEST_SHARE = 0.6  # of a step of minutes, nearly all attention, on the fastest kernel here
# Seconds beside the steps, in fresh processes and in a warm group: about the medians of committed rows.
BESIDE_S = {"attention": (20, 3), "fsdp2": (40, 12), "other engines": (60, 36)}


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


class TrialTime(NamedTuple):
    """Likely seconds of a trial."""

    whole: float
    timed: float  # of its timed steps


def trial_time(config: TrialConfig, device_name: str | None) -> TrialTime | None:
    """None as for `step_s`."""
    workload = config.workload
    if (one_step_s := step_s(config, device_name, LIKELY_SHARE)) is None:
        return None
    timed_steps = workload.num_timed_steps(1e3 * one_step_s)
    # 3: the step that the ledger counts, the proof at the timed length, and the arms
    other_steps = workload.warmup_steps + (0 if workload.single_step else 3)
    kind = "attention" if workload.name == "attention" else config.engine.name
    fresh, warm = BESIDE_S.get(kind, BESIDE_S["other engines"])
    beside = warm if config.isolation == "group" else fresh
    return TrialTime(beside + (other_steps + timed_steps) * one_step_s, timed_steps * one_step_s)


def minutes(seconds: float) -> str:
    number = max(round(seconds / 60), 1)
    return f"{number} minute{'s' * (number != 1)}"
