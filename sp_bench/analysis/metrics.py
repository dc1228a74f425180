"""The numbers of a cell. Each is computed here and nowhere else, for figures, tables, cards and findings. None:
unknown, or not measured by such a cell."""

from statistics import median

from sp_bench.analysis.cells import Cell, listed
from sp_bench.formats import GIB


def tokens_per_s(cell: Cell) -> float | None:
    """tokens/s of all ranks at the median step time. Rates come from median times, never from means of rates."""
    ms = cell.median_step_ms
    return 1e3 * cell.tokens_per_step / ms if ms and cell.tokens_per_step is not None else None


def tokens_per_s_per_gpu(cell: Cell) -> float | None:
    return _per_gpu(cell, tokens_per_s(cell))


def attention_tflops(cell: Cell) -> float | None:
    """TFLOP/s of one device in attention alone, of what ran. Of the gated delta rule by the model's FLOPs: a kernel
    that passes states has twice the values."""
    is_delta = cell.asked["attention_kind"] == "gated_delta"
    ms, flops = cell.median_step_ms, cell.middle("model_flops") if is_delta else cell.attention_flops_per_step
    return _tera(_per_gpu(cell, flops / ms if ms and flops is not None else None))


def model_tflops(cell: Cell) -> float | None:
    """TFLOP/s of one device in a training step, by the model's FLOPs."""
    ms, flops = cell.median_step_ms, cell.middle("model_flops")
    return _tera(_per_gpu(cell, flops / ms if ms and flops else None))


def tflops(cell: Cell) -> float | None:
    """TFLOP/s of one device: the model's in a training step on GPUs, else those of attention."""
    trains = cell.asked["workload"] == "train_step" and cell.processor == "GPU"
    return found if (found := attention_tflops(cell)) is not None or not trains else model_tflops(cell)


def work(cell: Cell) -> float | None:
    """Executed FLOPs over the model's; above 1 if something is computed twice."""
    ran, of_model = cell.middle("hardware_flops"), cell.middle("model_flops")
    return ran / of_model if ran and of_model else None


def mj_per_token(cell: Cell) -> float | None:
    """Energy of all devices for one token, in mJ; None where NVML did not resolve the window."""
    known = [listed(row["energy_j"]) for row in cell.measured]
    steps = [sum(joules) for joules in known if joules and None not in joules]
    return 1e3 * median(steps) / cell.tokens_per_step if steps and cell.tokens_per_step else None


def memory_gib(cell: Cell) -> float | None:
    """Peak memory of the rank that needs most: allocated on a device, or host memory on a CPU
    (`cell.memory_column`)."""
    return median(cell.memory_bytes) / GIB if cell.memory_bytes else None


def reserved_gib(cell: Cell) -> float | None:
    """Peak memory reserved by torch's allocator, on the rank that needs most."""
    return _of_largest_rank(cell, "peak_reserved_bytes")


def in_use_gib(cell: Cell) -> float | None:
    """Memory in use on the whole device after the timed steps."""
    return _of_largest_rank(cell, "device_used_bytes")


def host_gib(cell: Cell) -> float | None:
    """Host memory of the largest process of a cell on devices. On a CPU see `memory_gib`."""
    held = cell.largest("max_peak_host_bytes") if cell.memory_column != "max_peak_host_bytes" else None
    return None if held is None else held / GIB


def sent_gib(cell: Cell) -> float | None:
    """Counted GiB that one rank sends off-rank in a step; None if it sends nothing."""
    sent = cell.communication.counted_bytes
    return sent / GIB if sent else None


def wire_gib(cell: Cell) -> float | None:
    """GiB that one rank sends in a step, by NVLink's counters."""
    sent = cell.middle("comm_wire_bytes")
    return None if sent is None else sent / GIB


def nearest_error(cell: Cell) -> tuple[float, str] | None:
    """(error over budget, tensor) of the error that is nearest to its budget."""
    shares = [(error / budget, name) for name, (error, budget) in cell.errors.items() if budget]
    return max(shares, key=lambda each: each[0], default=None)


def _per_gpu(cell: Cell, of_all: float | None) -> float | None:
    ranks = cell.asked["world_size"]
    return of_all / ranks if of_all is not None and ranks else None


def _tera(flops_per_ms: float | None) -> float | None:
    return None if flops_per_ms is None else flops_per_ms / 1e9


def _of_largest_rank(cell: Cell, column: str) -> float | None:
    """GiB on the rank that needs most; the median over the replicates."""
    known = [max(values) for row in cell.measured if (values := [v for v in listed(row[column]) if v is not None])]
    return median(known) / GIB if known else None
