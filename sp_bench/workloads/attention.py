"""Attention alone on random q, k and v: exchange and kernel, and nothing else. Forward, or forward and backward."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from sp_bench import kernels, methods
from sp_bench.config.prose import Prose
from sp_bench.measure.cuda_graph import Replay, as_launched
from sp_bench.measure.ledger import PHASES
from sp_bench.measure.timing import Measurement, Schedule, allocated_bytes, measure, release_memory
from sp_bench.oracle import delta, reduced_length
from sp_bench.oracle.timed_length import (
    Draw,
    Looked,
    SampledRows,
    Step,
    budget_at,
    check_attention,
    check_looked,
    check_results,
)
from sp_bench.workloads import Job, arms
from sp_bench.workloads.step import attention_step, three_sets


class Turns:
    """Three steps, each on inputs of its own: two are taken in turn, so that none reads the inputs of the one before.
    The third is the last timed one, whose inputs no step has read. What a step returned stays until the next one."""

    def __init__(self, steps: Sequence[Step], schedule: Schedule) -> None:
        self._steps, self._schedule = steps, schedule
        self._taken = 0
        self.read = 0  # whose inputs the step before has read
        self.results: Sequence[Tensor] = ()  # of the step before

    def __call__(self) -> None:
        self.results = ()  # before the next ones take memory
        is_last_timed = self._taken + 1 == self._schedule.last_timed
        self.read = 2 if is_last_timed else self._taken % 2
        self._taken += 1
        self.results = self._steps[self.read]()

    @property
    def timed(self) -> int:
        """How many timed steps were taken."""
        return self._taken - self._schedule.workload.warmup_steps


def run(job: Job) -> Measurement:
    config, mesh, device = job.config, job.mesh, job.device
    method, kernel = methods.get(config.method.name), kernels.get(config.kernel.name)
    job.enter_phase("correctness")
    layout = method.layout(config.method, config.sp_size)
    proof = job.proof
    if proof is None and config.world == "ranks":  # one rank's values are wrong by design, and proven elsewhere
        reduced = config.attention_shape(layout.padded(min(config.workload.correctness_seq_len, config.seq_len)))
        check_reduced = delta.check_attention if reduced.gated_delta else reduced_length.check_attention
        with job.checking("attention"), methods.opened(config.method, kernel, reduced, mesh) as attention:
            proof = {
                "columns": check_reduced(attention, kernel, config.kernel.name, reduced, mesh, device, config.seed)
            }
    columns: dict[str, Any] = dict(proof["columns"]) if proof else {}

    release_memory(device)
    leftover = allocated_bytes(device)
    shape = config.attention_shape(config.seq_len)
    local_len = shape.seq_len // config.sp_size
    sets = three_sets(shape, local_len, device, config.seed * config.world_size + mesh.get_rank())
    inputs, backward = sets[0], config.workload.pass_kind == "forward_backward"
    sinks = reduced_length.random_sinks(shape, device, config.seed)
    step = partial(attention_step, inputs, backward=backward, sinks=sinks)

    with methods.open_counted(config.method, kernel, shape, mesh) as attention:
        eager = partial(step, attention)
        timed = as_launched(eager, config.workload)
        if isinstance(timed, Replay):  # a graph reads the inputs it was recorded with
            sets, steps = [inputs] * 3, [timed] * 3
        else:
            steps = [partial(attention_step, each, attention, backward=backward, sinks=sinks) for each in sets]
        schedule = Schedule(config.workload)
        turns = Turns(steps, schedule)
        read, draw = inputs if backward else inputs[:-1], Draw(config.seed, job.replicate)
        proves = config.world == "ranks"
        looks = proves and not shape.gated_delta
        budget = budget_at(columns, config) if proves else {}
        rows = SampledRows(attention.layout, shape, mesh, draw) if looks else None
        looked = Looked(rows, device, backward=backward) if rows else None
        looked_at: list[tuple[int, int]] = []

        def look() -> None:
            assert looked
            looked.keep(turns.results)
            looked_at.append((turns.timed, turns.read))

        def enter_phase(name: str) -> None:
            job.enter_phase(name)
            if name != "ledger":
                return
            results, turns.results = turns.results, ()
            if not proves:
                return
            with job.checking("timed_steps"):
                last: Prose = f"the last timed step at seq_len={shape.seq_len}"
                if shape.gated_delta:
                    columns["timed_rel_error"] = delta.check_results(results, sets[2], shape, mesh, budget, last)
                    return
                assert rows
                assert looked
                errors = check_results(results, sets[2][: len(read)], rows, budget, last, sinks)
                del results  # nothing of them is on the device while a further step runs
                ((number, index),) = looked_at
                drawn: Prose = f"timed step {number}, which was drawn, at seq_len={shape.seq_len}"
                others = check_looked(looked.tensors(), sets[index][: len(read)], rows, budget, drawn, sinks)
                columns["timed_rel_error"] = {tensor: max(errors[tensor], others[tensor]) for tensor in errors}

        measurement = measure(
            *(turns, schedule, device, enter_phase, job.trace_to), counted=eager, look=look if looks else None
        )
        measurement.leftover_bytes = leftover
        if isinstance(timed, Replay):
            measurement.peak_allocated_bytes = timed.peak_allocated_bytes
        if proves:
            with job.checking("timed_attention"):
                if shape.gated_delta:
                    columns |= delta.check_timed(timed, read, shape, mesh, budget)
                else:
                    columns |= check_attention(timed, eager, read, attention.layout, shape, mesh, draw, budget, sinks)
        del timed  # a recorded step holds its memory, which the arms need
    if config.workload.attribution and method.IMPLEMENTATION == "sp_bench" and config.sp_size > 1:
        opened = partial(methods.opened, config.method, shape=shape, mesh=mesh)
        measurement.arms_ms = arms.arms(opened, kernel, step, schedule, device)
    measurement.expected = methods.expected_work(config, config.seq_len, mesh.get_rank())
    predicted = methods.attention_traffic(config, config.seq_len, mesh.get_rank())
    if predicted is None:
        measurement.unpredicted = PHASES
    else:
        measurement.predicted = {key: value for key, value in predicted.items() if backward or key[0] == "forward"}
    measurement.columns = columns | {"check_s": job.check_s}
    measurement.proof = None if job.proof else proof
    return measurement
