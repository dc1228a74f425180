"""Attention alone on random q, k and v: exchange and kernel, and nothing else. Forward, or forward and backward."""

from functools import partial

from sp_bench import kernels, methods
from sp_bench.costs import attention as attention_costs
from sp_bench.measure.cuda_graph import Replay, as_launched
from sp_bench.measure.ledger import PHASES
from sp_bench.measure.timing import Measurement, measure
from sp_bench.oracle import reduced_length
from sp_bench.oracle.timed_length import check_replay, check_rows
from sp_bench.workloads import Job, arms
from sp_bench.workloads.step import attention_step, local_inputs


def run(job: Job) -> Measurement:
    config, mesh, device = job.config, job.mesh, job.device
    method, kernel = methods.get(config.method.name), kernels.get(config.kernel.name)
    job.enter_phase("correctness")
    layout = method.layout(config.method, config.sp_size)
    reduced = config.attention_shape(layout.padded(min(config.workload.correctness_seq_len, config.seq_len)))
    with method.open(config.method, kernel, reduced, mesh) as attention:
        columns = reduced_length.check_attention(
            attention, kernel, config.kernel.name, reduced, mesh, device, config.seed
        )

    shape = config.attention_shape(config.seq_len)
    positions = layout.global_positions(mesh.get_rank() % config.sp_size, config.seq_len)
    inputs = local_inputs(shape, len(positions), device, config.seed * config.world_size + mesh.get_rank())
    backward = config.workload.pass_kind == "forward_backward"
    step = partial(attention_step, inputs, backward=backward)

    with method.open(config.method, kernel, shape, mesh) as attention:
        eager = partial(step, attention)
        timed = as_launched(eager, config.workload)
        measurement = measure(timed, config.workload, device, job.enter_phase, counted=eager)
        if isinstance(timed, Replay):
            measurement.peak_allocated_bytes = timed.peak_allocated_bytes
            columns["replay_rel_error"] = check_replay(timed, eager, inputs, columns["error_budget"], mesh)
        errors = check_rows(
            timed, inputs if backward else inputs[:3], positions, shape, mesh, config.seed, columns["error_budget"]
        )
        del timed  # a recorded step holds its memory, which the arms need
    if config.workload.attribution and method.IMPLEMENTATION == "sp_bench" and config.sp_size > 1:
        opened = partial(method.open, config.method, shape=shape, mesh=mesh)
        measurement.arms_ms = arms.arms(opened, kernel, step, config.workload, device)
    forward_flops = attention_costs.attention_forward_flops(shape)
    if method.traffic is None:
        measurement.unpredicted = PHASES
    else:
        predicted = method.traffic(config.method, shape, config.sp_size)
        measurement.predicted = {key: value for key, value in predicted.items() if backward or key[0] == "forward"}
    measurement.columns = columns | {
        "sampled_rel_error": errors.pop("output"),
        "sampled_grad_error": errors or None,
        "model_flops": forward_flops * (3.0 if backward else 1.0),
        "hardware_flops": forward_flops * float(1 + attention_costs.FLASH_BACKWARD if backward else 1),
    }
    return measurement
