"""What published figures are of, and how the same is read from a cell of ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sp_bench.report.cells import Cell
from sp_bench.report.time_parts import kernel_alone

Read = Callable[[Cell, Sequence[Cell]], float | None]


@dataclass(frozen=True)
class Metric:
    """`read` takes it from a measured cell and all cells."""

    title: str  # with its unit
    read: Read


def _tokens_per_s(*, per_rank: bool) -> Read:
    return lambda cell, _: cell.rate(cell.median_step_ms, per_rank=per_rank) if cell.median_step_ms else None


def _attention_tflops(cell: Cell, _: Sequence[Cell]) -> float | None:
    return cell.attention_tflops(cell.median_step_ms) if cell.median_step_ms else None


def _model_tflops(cell: Cell, _: Sequence[Cell]) -> float | None:
    flops, ms, size = cell.middle("model_flops"), cell.median_step_ms, cell.asked["world_size"]
    return flops / ms / size / 1e9 if flops is not None and ms and size else None


def _step_s(cell: Cell, _: Sequence[Cell]) -> float | None:
    return cell.median_step_ms / 1e3 if cell.median_step_ms else None


def _memory_gb(cell: Cell, _: Sequence[Cell]) -> float | None:
    on_device = cell.memory_column == "max_peak_allocated_bytes" and cell.median_memory_bytes is not None
    return (cell.median_memory_bytes or 0.0) / 1e9 if on_device else None


def _percent_of_kernel(cell: Cell, every: Sequence[Cell]) -> float | None:
    alone = kernel_alone(cell, every)
    known = alone is not None and alone.median_step_ms and cell.median_step_ms
    return 100 * (alone.median_step_ms or 0.0) / (cell.median_step_ms or 1.0) if alone and known else None


def _largest(column: str) -> Read:
    return lambda cell, _: cell.largest(column)


LONGEST = "max_seq_len"
METRICS: Mapping[str, Metric] = {
    "tokens_per_s": Metric("tokens/s", _tokens_per_s(per_rank=False)),
    "tokens_per_s_per_gpu": Metric("tokens/s/GPU", _tokens_per_s(per_rank=True)),
    "attention_tflops_per_gpu": Metric("attention TFLOP/s/GPU", _attention_tflops),
    "model_tflops_per_gpu": Metric("model TFLOP/s/GPU", _model_tflops),
    "step_s": Metric("step, s", _step_s),
    "peak_memory_gb": Metric("peak GB/GPU", _memory_gb),
    "percent_of_kernel": Metric("% of the kernel alone", _percent_of_kernel),
    "mean_nll_difference": Metric("mean NLL difference, nats", _largest("mean_nll_difference")),
    "max_nll_difference": Metric("largest NLL difference, nats", _largest("max_nll_difference")),
    LONGEST: Metric("longest seq_len, tokens", lambda cell, _: cell.asked["seq_len"]),
}
