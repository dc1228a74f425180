"""From the ranks' measurements to the columns of one row: every reduction over ranks and steps is here."""

import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from sp_bench.config import TrialConfig
from sp_bench.costs import Traffic
from sp_bench.hardware import peak_flops
from sp_bench.ledger import Counts
from sp_bench.measure import Measurement
from sp_bench.workloads import Incorrect

MIN_WINDOW_MS = 200.0  # shorter windows are within the noise of the clocks and the scheduler
MAX_CLOCK_MISMATCH = 0.02  # sum of step times against the wall clock of the window


def assemble(
    config: TrialConfig, measurements: Sequence[Measurement], device_name: str | None, *, own: bool
) -> dict[str, Any]:
    """Row columns from all ranks' measurements, in rank order. `own`: predicted bytes must equal counted ones.

    Raises:
        Incorrect: bytes differ from the closed form, or a rate above the device's peak.
    """
    first = measurements[0]
    per_rank = {
        name: _all_or_none([getattr(m, name) for m in measurements])
        for name in (
            *("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes"),
            *("device_used_bytes", "allocator_retries"),
        )
    }
    row = first.columns | per_rank | _times(config, measurements) | _communication(measurements, own=own)
    for name in ("peak_allocated_bytes", "peak_host_bytes"):
        row[f"max_{name}"] = max(per_rank[name] or [], default=None)
    return row | _utilisation(config, row, device_name)


def _all_or_none(values: Sequence[Any]) -> list[Any] | None:
    return None if None in values else list(values)


def _times(config: TrialConfig, measurements: Sequence[Measurement]) -> dict[str, Any]:
    rank_step_ms = [m.step_ms for m in measurements]
    step_ms = [max(step) for step in zip(*rank_step_ms, strict=True)]
    median_ms = statistics.median(step_ms)
    dp_size = config.dp_replicate_size * config.dp_shard_size
    tokens_per_s = 1e3 * config.batch_size * config.seq_len * dp_size / median_ms
    flags = []
    if min(m.window_ms for m in measurements) < MIN_WINDOW_MS:
        flags.append("short_window")
    if any(abs(sum(m.step_ms) - m.window_ms) > MAX_CLOCK_MISMATCH * m.window_ms for m in measurements):
        flags.append("clock_mismatch")
    return {
        "rank_step_ms": rank_step_ms,
        "step_ms": step_ms,
        "window_ms": [m.window_ms for m in measurements],
        "median_step_ms": median_ms,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / config.world_size,
        "flags": flags,
    }


def _communication(measurements: Sequence[Measurement], *, own: bool) -> dict[str, Any]:
    predicted = measurements[0].predicted
    if own:
        for rank, m in enumerate(measurements):
            _require_equal(rank, m.counts, predicted)
    counted = max((m.counts for m in measurements), key=_total_counted)
    keys = sorted(counted.keys() | predicted.keys())
    return {
        "comm_predicted_bytes": float(sum(predicted.values(), Fraction(0))),
        "comm_counted_bytes": float(_total_counted(counted)),
        "comm": [
            {
                "phase": phase,
                "op": op,
                "calls": counted.get((phase, op), (0, 0))[0],
                "predicted_bytes": None if phase == "other" else float(predicted.get((phase, op), 0)),
                "counted_bytes": float(counted.get((phase, op), (0, 0))[1]),
            }
            for phase, op in keys
        ],
    }


def _total_counted(counts: Counts) -> Fraction:
    """`other` (gradient clipping and the like) differs by torch version and is outside the comparison."""
    return sum((size for (phase, _), (_, size) in counts.items() if phase != "other"), Fraction(0))


def _require_equal(rank: int, counts: Counts, predicted: Traffic) -> None:
    sent: Mapping[tuple[str, str], Fraction] = {
        key: size for key, (_, size) in counts.items() if size and key[0] != "other"
    }
    wrong = []
    for key in sorted(sent.keys() | predicted.keys()):
        counted, expected = sent.get(key, Fraction(0)), predicted.get(key, Fraction(0))
        if counted != expected:
            wrong.append(f"{' '.join(key)}: counted {float(counted):.1f}, predicted {float(expected):.1f}")
    if wrong:
        raise Incorrect(f"bytes sent by rank {rank} differ from the closed form: {'; '.join(wrong)}")


def _utilisation(config: TrialConfig, row: Mapping[str, Any], device_name: str | None) -> dict[str, Any]:
    seconds = row["median_step_ms"] / 1e3
    rate = row["hardware_flops"] / seconds
    peak = peak_flops(device_name, config.dtype) if device_name else None
    if peak and rate / config.world_size > peak:
        raise Incorrect(
            f"{rate / config.world_size / 1e12:.0f} TFLOP/s a device is above its peak of {peak / 1e12:.0f}: "
            "the step did not do the work"
        )
    return {
        "mfu": row["model_flops"] / seconds / config.world_size / peak if peak else None,
        "hfu": rate / config.world_size / peak if peak else None,
        "attention_flops_per_s": rate if config.workload.name == "attention" else None,
    }
