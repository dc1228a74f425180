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
from sp_bench.methods import closed_forms
from sp_bench.oracle import delta, reduced_length, timed_length
from sp_bench.oracle.reduced_length import Errors
from sp_bench.oracle.timed_length import Draw, Kept, Step, budget_at
from sp_bench.workloads import Job, arms
from sp_bench.workloads.step import attention_step, three_sets

Proof = timed_length.Proof | delta.Proof


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


class Watch:
    """Proves the last timed step and one that is drawn, each on the inputs that it read."""

    def __init__(self, turns: Turns, sets: Sequence[Sequence[Tensor]], proof: Proof, like: Sequence[Tensor]) -> None:
        """sets: what each of the three steps reads. like: tensors of the sizes that a step returns."""
        self._turns, self._sets, self.proof = turns, sets, proof
        self._kept = Kept(proof.sampled(like))
        self._drawn = 0, 0  # number of the timed step, and of its inputs

    def look(self) -> None:
        """Keep the sampled rows of the step before, which was drawn."""
        self._kept.keep(self.proof.sampled(self._turns.results))
        self._drawn = self._turns.timed, self._turns.read

    def check(self, seq_len: int) -> Errors:
        """The larger errors of the two steps.

        Raises:
            Incorrect: one is above its budget.
        """
        results, self._turns.results = self._turns.results, ()
        last: Prose = f"the last timed step at seq_len={seq_len}"
        errors = self.proof.check_results(results, self._sets[2], last)
        del results  # nothing of them is on the device while a further step runs
        number, index = self._drawn
        drawn: Prose = f"timed step {number}, which was drawn, at seq_len={seq_len}"
        others = self.proof.check_sampled(self._kept.tensors(), self._sets[index], drawn)
        return {tensor: max(errors[tensor], others[tensor]) for tensor in errors}


def run(job: Job) -> Measurement:
    config, mesh, device = job.config, job.mesh, job.device
    kernel = kernels.get(config.kernel.name)
    shape, backward = config.attention_shape(config.seq_len), config.workload.pass_kind == "forward_backward"
    sinks = reduced_length.random_sinks(shape, device, config.seed)
    if shape.gated_delta:
        check_reduced, proof_of = delta.check_attention, delta.Proof
    else:
        check_reduced, proof_of = reduced_length.check_attention, partial(timed_length.Proof, sinks=sinks)
    job.enter_phase("correctness")
    proof = job.proof
    if proof is None and job.proves:
        reduced_len = min(config.workload.correctness_seq_len, config.seq_len)
        reduced = config.attention_shape(methods.layout_of(config).padded(reduced_len))
        with job.checking("attention"), methods.opened(config.method, kernel, reduced, mesh) as attention:
            proof = {
                "columns": check_reduced(attention, kernel, config.kernel.name, reduced, mesh, device, config.seed)
            }
    columns: dict[str, Any] = dict(proof["columns"]) if proof else {}

    release_memory(device)
    leftover = allocated_bytes(device)
    sets = three_sets(shape, shape.seq_len // config.sp_size, device, config.seed * config.world_size + mesh.get_rank())
    inputs = sets[0]
    step = partial(attention_step, inputs, backward=backward, sinks=sinks)

    with methods.open_counted(config.method, kernel, shape, mesh) as attention:
        eager = partial(step, attention)
        timed = as_launched(eager, config.workload)
        if isinstance(timed, Replay):  # a graph reads the inputs it was recorded with
            sets, steps = [inputs] * 3, [timed] * 3
        else:
            steps = [partial(attention_step, each, attention, backward=backward, sinks=sinks) for each in sets]
        schedule = Schedule(config.workload)
        turns, watch = Turns(steps, schedule), None
        *read, dout = inputs
        if job.proves:
            sets = [each if backward else each[:-1] for each in sets]
            draw, budget = Draw(config.seed, job.replicate), budget_at(columns, config)
            like = [dout, *read] if backward else [dout]
            watch = Watch(turns, sets, proof_of(attention.layout, shape, mesh, draw, budget), like)

        def enter_phase(name: str) -> None:
            job.enter_phase(name)
            if name == "ledger" and watch:
                with job.checking("timed_steps"):
                    columns["timed_rel_error"] = watch.check(shape.seq_len)
            turns.results = ()

        look = watch and watch.look
        measurement = measure(turns, schedule, device, enter_phase, job.trace_to, counted=eager, look=look)
        measurement.leftover_bytes = leftover
        if isinstance(timed, Replay):
            measurement.peak_allocated_bytes = timed.peak_allocated_bytes
        if watch:
            with job.checking("timed_attention"):
                columns |= watch.proof.check_turned(timed, eager, sets[0])
        del timed  # a recorded step holds its memory, which the arms need
    if arms.are_timed(config):
        opened = partial(methods.opened, config.method, shape=shape, mesh=mesh)
        measurement.arms_ms = arms.arms(opened, kernel, step, schedule, device)
    measurement.expected = closed_forms.expected_work(config, config.seq_len, mesh.get_rank())
    predicted = closed_forms.attention_traffic(config, config.seq_len, mesh.get_rank())
    if predicted is None:
        measurement.unpredicted = PHASES
    else:
        measurement.predicted = {key: value for key, value in predicted.items() if backward or key[0] == "forward"}
    measurement.columns = columns | {"check_s": job.check_s}
    measurement.proof = None if job.proof else proof
    return measurement
