"""Attention alone on random q, k and v: exchange and kernel, and nothing else. Forward, or forward and backward."""

from functools import partial
from typing import Any

from sp_bench import kernels, methods
from sp_bench.measure.cuda_graph import Replay, as_launched
from sp_bench.measure.ledger import PHASES
from sp_bench.measure.timing import Measurement, allocated_bytes, measure, release_memory
from sp_bench.oracle import reduced_length
from sp_bench.oracle.timed_length import Draw, check_attention
from sp_bench.workloads import Job, arms
from sp_bench.workloads.step import attention_step, local_inputs


def run(job: Job) -> Measurement:
    config, mesh, device = job.config, job.mesh, job.device
    method, kernel = methods.get(config.method.name), kernels.get(config.kernel.name)
    job.enter_phase("correctness")
    layout = method.layout(config.method, config.sp_size)
    columns: dict[str, Any] = {}
    if config.world == "ranks":  # one rank's values are wrong by design, and proven elsewhere
        reduced = config.attention_shape(layout.padded(min(config.workload.correctness_seq_len, config.seq_len)))
        with method.open(config.method, kernel, reduced, mesh) as attention:
            columns = reduced_length.check_attention(
                attention, kernel, config.kernel.name, reduced, mesh, device, config.seed
            )

    release_memory(device)
    leftover = allocated_bytes(device)
    shape = config.attention_shape(config.seq_len)
    local_len = shape.seq_len // config.sp_size
    inputs = local_inputs(shape, local_len, device, config.seed * config.world_size + mesh.get_rank())
    backward = config.workload.pass_kind == "forward_backward"
    step = partial(attention_step, inputs, backward=backward)

    with methods.open_counted(config.method, kernel, shape, mesh) as attention:
        eager = partial(step, attention)
        timed = as_launched(eager, config.workload)
        measurement = measure(timed, config.workload, device, job.enter_phase, job.trace_to, counted=eager)
        measurement.leftover_bytes = leftover
        if isinstance(timed, Replay):
            measurement.peak_allocated_bytes = timed.peak_allocated_bytes
        if config.world == "ranks":
            read, draw = inputs if backward else inputs[:3], Draw(config.seed, job.replicate)
            columns |= check_attention(timed, eager, read, attention.layout, shape, mesh, draw, columns["error_budget"])
        del timed  # a recorded step holds its memory, which the arms need
    if config.workload.attribution and method.IMPLEMENTATION == "sp_bench" and config.sp_size > 1:
        opened = partial(method.open, config.method, shape=shape, mesh=mesh)
        measurement.arms_ms = arms.arms(opened, kernel, step, config.workload, device)
    measurement.expected = methods.expected_work(config, config.seq_len, mesh.get_rank())
    predicted = methods.attention_traffic(config, config.seq_len)
    if predicted is None:
        measurement.unpredicted = PHASES
    else:
        measurement.predicted = {key: value for key, value in predicted.items() if backward or key[0] == "forward"}
    measurement.columns = columns
    return measurement
