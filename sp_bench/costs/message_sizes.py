"""The messages of the collective workload: which sizes, how they are cut, and the line through their times. No torch.

A message is measured in *bytes one rank sends off-rank*, for each primitive alike: what the ledger counts and what the
closed forms of `costs` predict. P ranks. send_recv passes one tensor on; all_to_all sends P-1 of its P slices and keeps
one; all_gather sends its one slice to P-1 others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from sp_bench.config.trial import MIN_MESSAGE_BYTES, TrialConfig
from sp_bench.costs.attention import Traffic

# What is measured for a method is the primitive that moves its attention tensors; the ledger's name for each.
OPS: Mapping[str, str] = {"ulysses": "all_to_all", "ring": "send", "all_gather": "all_gather"}
GRAIN_BYTES = 256  # slices are multiples of this, as real ones are (a head of 128 in bfloat16): none is misaligned


def unsupported_reason(config: TrialConfig) -> str | None:
    """Why the collective workload has no primitive to measure for this trial, naming what would work, or None."""
    method = config.method
    if method.name not in OPS:
        names = "ulysses (all_to_all), ring (send_recv) or all_gather (all_gather)"
        return f"workload collective measures one primitive, and method={method.name} has no one; use method={names}"
    if config.sp_size < 2:
        return f"sp_size={config.sp_size}: one rank sends nothing off-rank; use sp_size=2 or more"
    return None


def transport_name(primitive: str, exchange: str | None) -> str:
    """What a row calls a primitive: with what moves it, unless that is the group's collectives."""
    return f"{primitive} by copy engines" if exchange == "copy_engines" else primitive


@dataclass(frozen=True)
class MessageSize:
    """One size of one primitive: `num_sent` slices of `slice_bytes` leave a rank."""

    num_sent: int
    slice_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes one rank sends off-rank."""
        return self.num_sent * self.slice_bytes


def message_sizes(config: TrialConfig) -> list[MessageSize]:
    """The sizes of the curve, smallest first: 64 KiB and then 4 times as many up to `max_message_bytes`, each cut into
    whole slices, so that up to P-1 times GRAIN_BYTES of it are left out."""
    num_sent = 1 if config.method.name == "ring" else config.sp_size - 1
    sizes, wanted = [], MIN_MESSAGE_BYTES
    while wanted <= (config.workload.max_message_bytes or 0):
        grains = max(1, wanted // (num_sent * GRAIN_BYTES))
        sizes.append(MessageSize(num_sent, grains * GRAIN_BYTES))
        wanted *= 4
    return sizes


def traffic(config: TrialConfig, size: MessageSize) -> Traffic:
    """Bytes one rank sends off-rank in one step."""
    return {("forward", OPS[config.method.name]): Fraction(size.sent_bytes)}


@dataclass(frozen=True)
class Line:
    """ms = latency + bytes / bandwidth. None: the curve cannot tell."""

    latency_us: float | None
    bandwidth_bytes_per_s: float | None


def fit_line(sizes_bytes: Sequence[float], times_ms: Sequence[float]) -> Line:
    """Least squares of the *relative* residuals, so that a size of microseconds counts as much as one of milliseconds.

    Neither number can be negative. A line that begins below zero is fitted again through the origin, and its latency is
    None; times that do not grow with the size give neither.
    """
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_ms, float)
    slope, start = np.polyfit(sizes, times, 1, w=1 / times)
    if slope <= 0:
        return Line(None, None)
    if start <= 0:
        return Line(None, float(1e3 * ((sizes / times) ** 2).sum() / (sizes / times).sum()))
    return Line(float(1e3 * start), float(1e3 / slope))
