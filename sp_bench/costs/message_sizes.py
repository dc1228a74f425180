"""The messages of the collective workload: their sizes, how they are cut, and the line through their times.

The size of a message is the number of bytes that one rank sends off-rank, for every primitive: as the ledger counts and
as the closed forms predict. With P ranks, send_recv passes one tensor on; all_to_all sends P-1 of its P slices and
keeps one; all_gather sends its one slice to P-1 others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import MIN_MESSAGE_BYTES
from sp_bench.costs.attention import Traffic

# For a method the primitive that moves its attention tensors is measured: method -> the ledger's name of the primitive.
OPS: Mapping[str, str] = {"ulysses": "all_to_all", "ring": "send", "all_gather": "all_gather"}
GRAIN_BYTES = 256  # slices are multiples of it, so that they are aligned as real ones: a head of 128 in bfloat16


def unsupported_reason(config: TrialConfig) -> Prose | None:
    """Why the collective workload has no primitive to measure for this trial, naming what would work, or None."""
    method = config.method
    if method.name not in OPS:
        names: Prose = "ulysses (all_to_all), ring (send_recv) or all_gather (all_gather)"
        return f"workload collective has no primitive to measure for method={method.name}; use method={names}"
    if config.sp_size < 2:
        return f"sp_size={config.sp_size}: one rank sends nothing off-rank; use sp_size=2 or more"
    return None


def transport_name(primitive: str, exchange: str | None) -> Prose:
    """A primitive in words, with what moves it unless that is the group's collectives."""
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
    """The sizes of the curve, smallest first: 64 KiB, and each next one 4 times as large, up to `max_message_bytes`.

    Each is rounded down to whole slices, by less than (P-1) * GRAIN_BYTES.
    """
    num_sent = 1 if config.method.name == "ring" else config.sp_size - 1
    sizes, wanted = [], MIN_MESSAGE_BYTES
    while wanted <= (config.workload.max_message_bytes or 0):
        grains = max(1, wanted // (num_sent * GRAIN_BYTES))
        sizes.append(MessageSize(num_sent, grains * GRAIN_BYTES))
        wanted *= 4
    return sizes


def traffic(config: TrialConfig, size: MessageSize) -> Traffic:
    """Bytes one rank sends off-rank in one step of this size."""
    return {("forward", OPS[config.method.name]): Fraction(size.sent_bytes)}


@dataclass(frozen=True)
class Line:
    """time = latency + bytes / bandwidth. A field is None if the times do not determine it."""

    latency_us: float | None
    bandwidth_bytes_per_s: float | None


def fit_line(sizes_bytes: Sequence[float], times_ms: Sequence[float]) -> Line:
    """Fit `Line` to times (ms) over sizes (bytes), by least squares of the *relative* residuals: a message of
    microseconds counts as much as one of milliseconds.

    Neither number can be negative. If the latency would be, the line is fitted again through the origin, and its
    latency is None. If times do not grow with the size, both are None.
    """
    import numpy as np  # takes as long as all else that a plan imports of ours

    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_ms, float)
    slope, start = np.polyfit(sizes, times, 1, w=1 / times)
    if slope <= 0:
        return Line(None, None)
    if start <= 0:
        return Line(None, float(1e3 * ((sizes / times) ** 2).sum() / (sizes / times).sum()))
    return Line(float(1e3 * start), float(1e3 / slope))
