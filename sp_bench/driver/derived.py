"""Columns that follow from what the ranks measured and from what was asked for.

The driver computes them, once. Ranks hand over samples, and no number that is made of them.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sp_bench import hardware, methods
from sp_bench.attention.layouts import causal_pairs_of_ranks
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import AUTO, TRAINING
from sp_bench.costs import memory, message_sizes
from sp_bench.costs import training as training_costs
from sp_bench.costs.attention import Traffic
from sp_bench.costs.flags import (
    flags_of_devices,
    flags_of_full_depth,
    flags_of_leftover,
    flags_of_loss,
    flags_of_memory,
)
from sp_bench.costs.flops import projections, step_flops
from sp_bench.costs.step_flags import flags_of_times
from sp_bench.engines import requirements
from sp_bench.methods import closed_forms, real_rank
from sp_bench.rows.schema import COLUMNS

HOST_BOUND_SHARE = 0.9  # of a step: what the host may take to issue it
MIN_WINDOW_MS = 200.0  # shorter windows are within the noise of the clocks and the scheduler
MAX_CLOCK_MISMATCH = 0.02  # of a rank's window: how far the sum of its steps may be off without a flag

TIMES = tuple(column.name for column in COLUMNS if column.is_time)
DERIVED = tuple(column.name for column in COLUMNS if column.source == "derived")
Columns = dict[str, Any]
Record = Mapping[str, Any]  # what rank 0 handed over, by column


def derived(config: TrialConfig, padded_len: int | None, record: Record, device_name: str | None) -> Columns:
    """The columns DERIVED; None where the workload or the device has no such thing.

    padded_len: tokens of a sequence that were computed; None: the workload has no tokens.
    device_name: of the GPUs; None: the trial ran on CPUs.
    """
    times = _times(config, record)
    row: Columns = dict.fromkeys(DERIVED) | times | _memory(record)
    if not config.workload.stages:  # of whose steps none stands for the others
        row |= _attribution(record, times["median_step_ms"])
    if config.workload.name == "collective":
        line = message_sizes.fit_line(
            *zip(*((size["message_bytes"], size["ms"]) for size in record["curve"]), strict=True)
        )
        row |= {"latency_us": line.latency_us, "bandwidth_bytes_per_s": line.bandwidth_bytes_per_s}
    elif config.workload.name != "stream":
        row |= step_flops(config, padded_len or config.seq_len)
        row |= _utilisation(config, row, record.get("limit_ms"), device_name)
    row |= of_documents(config)
    row["comm_predicted_bytes"] = predicted_bytes(config, padded_len)
    row["internode_predicted_bytes"] = internode_predicted_bytes(config, padded_len)
    if memory.unmodelled_reason(config) is None:
        row["predicted_peak_bytes"] = round(memory.peak(config).bytes)
    return row | {"flags": _flags(config, row, record)}


def of_documents(config: TrialConfig) -> Columns:
    """The columns that a pack determines, before anything runs; none without packing."""
    if config.workload.name == "stream" or not (lengths := config.documents(config.seq_len)):
        return {}
    layout = methods.layout_of(config)
    shape = config.attention_shape(config.seq_len)
    pairs = causal_pairs_of_ranks(layout, shape.documents, shape.window)
    return {
        "num_documents": len(lengths),
        "longest_document": max(lengths),
        "median_document": float(statistics.median(lengths)),
        "flops_imbalance": max(pairs) / statistics.mean(pairs),
    }


def _times(config: TrialConfig, record: Record) -> Columns:
    step_ms = [max(step) for step in zip(*record["rank_step_ms"], strict=True)]
    row: Columns = {"step_ms": step_ms, "median_step_ms": statistics.median(step_ms)}
    if config.workload.timed_steps == AUTO:
        row["timed_steps"] = len(step_ms)
    if config.workload.name == "collective":
        return row  # messages are not tokens
    if config.stages:
        num_sequences = [stage.num_sequences for stage in config.of_stages]
        row["stage_times"] = training_costs.stage_times(config.stages, num_sequences, step_ms)
    if config.workload.stages is not None:  # no step stands for the others
        return row
    tokens = config.num_sequences * config.seq_len
    tokens_per_s = 1e3 * tokens / row["median_step_ms"]
    return row | {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / config.world_size,
        "window_tokens_per_s": 1e3 * tokens * len(step_ms) / max(record["window_ms"]),
    }


def _attribution(record: Record, median_ms: float) -> Columns:
    if record.get("compute_only_step_ms") is None:
        return {}
    compute_only_ms = statistics.median(record["compute_only_step_ms"])
    exposed_ms = median_ms - compute_only_ms
    comm_only = record.get("comm_only_step_ms")
    return {
        "imbalance_ms": compute_only_ms - statistics.mean(record["compute_only_rank_ms"]),
        "exposed_comm_ms": exposed_ms,
        "overlap_efficiency": comm_only and 1 - exposed_ms / statistics.median(comm_only),
    }


def _memory(record: Record) -> Columns:
    columns = ("peak_allocated_bytes", "peak_host_bytes")
    return {f"max_{name}": max(record[name]) for name in columns if record.get(name) is not None}


def _utilisation(
    config: TrialConfig, row: Columns, limit_ms: Sequence[float] | None, device_name: str | None
) -> Columns:
    seconds = row["median_step_ms"] / 1e3
    found: Columns = {"share_of_limit": limit_ms and max(limit_ms) / row["median_step_ms"]}
    if config.workload.name == "attention":
        found["attention_flops_per_s"] = (row["hardware_flops"] - projections(config)) / seconds
    if device_name and (peak := hardware.peak_flops(device_name, config.dtype)):
        of_all = seconds * config.world_size * peak
        found |= {"mfu": row["model_flops"] / of_all, "hfu": row["hardware_flops"] / of_all}
    if config.workload.linear_dtype != "model" and (peak := hardware.peak_flops(device_name or "", "float8")):
        found["float8_mfu"] = row["model_flops"] / (seconds * config.world_size * peak)
    return found


def predicted_bytes(config: TrialConfig, padded_len: int | None) -> float | None:
    """The closed form of what one rank sends off-rank in a step; None: the method or the engine has none."""
    traffic = _predicted_traffic(config, padded_len)
    return None if traffic is None else float(sum(traffic.values()))


def internode_predicted_bytes(config: TrialConfig, padded_len: int | None) -> list[float] | None:
    """The closed form of what each rank sends to other nodes in a step; None: one node, or there is no such form."""
    traffic = _predicted_traffic(config, padded_len)
    if config.num_nodes == 1 or traffic is None:
        return None
    ranks = range(config.world_size) if (place := real_rank.real_place(config)) is None else [place]
    far = [closed_forms.between_nodes(config, traffic, rank) for rank in ranks]
    return [float(size) for size in far if size is not None] if None not in far else None


def _predicted_traffic(config: TrialConfig, padded_len: int | None) -> Traffic | None:
    if config.workload.name == "collective":
        traffic = message_sizes.traffic(config, message_sizes.message_sizes(config)[-1])
    elif (
        traffic := closed_forms.attention_traffic(config, padded_len or config.seq_len, real_rank.real_place(config))
    ) is None:
        return None
    elif config.workload.name in TRAINING:
        traffic = requirements.traffic(config, padded_len or config.seq_len, traffic)
    elif config.workload.pass_kind == "forward":
        traffic = {key: size for key, size in traffic.items() if key[0] == "forward"}
    return traffic


def _flags(config: TrialConfig, row: Columns, record: Record) -> list[str]:
    """Doubts about the times, where the row has any, about memory and loss, and what the ranks flagged themselves."""
    flags = _flags_of_clocks(config, row, record) if config.is_timed else []
    flags += ["single_step"] if config.workload.single_step else []
    flags += ["fit"] if config.workload.fit else []
    flags += ["shared_gpu"] if config.hardware.ranks_per_gpu > 1 else []
    flags += ["lower_bound"] if real_rank.is_lower_bound(config) else []
    memory = (record.get(name) for name in ("device_used_bytes", "allocator_retries"))
    of_device = config.hardware.device_memory_gib
    flags += flags_of_memory(of_device and of_device * config.hardware.ranks_per_gpu, *memory)
    flags += flags_of_leftover(record.get("leftover_bytes"), record.get("peak_allocated_bytes"))
    flags += flags_of_loss(record.get("loss") or [], record.get("stage_ends") or [])
    computes = config.workload.name != "collective"
    uncounted = record.get("counted_attention_flops") is None and not record.get("kernel_launches")
    flags += ["kernel_uncounted"] if computes and uncounted else []
    flags += flags_of_full_depth(record)
    flags += ["mean_of_means"] if training_costs.takes_mean_of_means(config) else []
    return [*flags, *(record.get("flags") or [])]


def _flags_of_clocks(config: TrialConfig, row: Columns, record: Record) -> list[str]:
    flags = []
    if min(record["window_ms"]) < MIN_WINDOW_MS:
        flags.append("short_window")
    ranks = zip(record["rank_step_ms"], record["window_ms"], strict=True)
    if any(abs(sum(step_ms) - window_ms) > MAX_CLOCK_MISMATCH * window_ms for step_ms, window_ms in ranks):
        flags.append("clock_mismatch")
    flags += flags_of_times(row["step_ms"], record["window_ms"], record.get("stage_ends") or [])
    if config.hardware.device == "cuda":
        flags += flags_of_devices(record.get("device_state"), record.get("limit_ms"))
    issued_ms = record.get("host_step_ms") or [0.0]
    if config.workload.name == "attention" and max(issued_ms) > HOST_BOUND_SHARE * row["median_step_ms"]:
        flags.append("host_bound")
    return flags
