"""A full training step of a decoder: forward, loss, backward, gradient synchronisation and optimizer.

m micro-batches a step; D data-parallel ranks, each with B sequences of a micro-batch; S tokens of a sequence.
"""

import gc
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from sp_bench import engines, kernels
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.attention import Traffic
from sp_bench.costs.training import offloaded_inputs_bytes, train_step_traffic
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.record import of_all_ranks
from sp_bench.measure.timing import Clock, Measurement, Schedule, allocated_bytes, num_steps, release_memory
from sp_bench.methods import closed_forms
from sp_bench.oracle import delta, float8, recorded, reduced_length, timed_step, training_step
from sp_bench.oracle.first_gradient import FirstGradient
from sp_bench.oracle.last_update import LastUpdate
from sp_bench.oracle.timed_length import Draw, Proof, budget_at
from sp_bench.oracle.timed_step import Shorter
from sp_bench.training import limit, text, train
from sp_bench.training.limit import Limit
from sp_bench.training.model_code import compiling
from sp_bench.training.offload import HostMemory, host_memory, release_page_locked
from sp_bench.workloads import Job
from sp_bench.workloads.step import attention_step, local_inputs


def run(job: Job) -> Measurement:
    with host_memory() as memory:
        return _run(job, memory)


def _run(job: Job, memory: HostMemory) -> Measurement:
    job.enter_phase("correctness")
    compile_s = [compiling.seconds]  # spent until here and until each tick
    config, engine = job.config, engines.get(job.config.engine.name)
    sequences = text.sequences(0, config.num_sequences, config.seq_len)
    proven = prove(job, sequences)
    release_memory(job.device)
    gc.freeze()  # what the libraries have loaded, whether this trial proved or not: each collection would look at all
    if config.workload.single_step and config.workload.warmup_steps == 0:
        warm_up(job, memory)
    leftover = allocated_bytes(job.device)
    schedule = Schedule(config.workload)
    clock = Clock(schedule, job.device, job.enter_phase, job.trace_to)
    watched = Watched(timed_step.Weights(schedule), LastUpdate(config, schedule), FirstGradient(job.device))

    def tick() -> bool:
        compile_s.append(compiling.seconds)
        return clock.tick()

    with ExitStack() as watching:
        ticking = tick
        for each in watched if job.proves else watched[:1]:
            ticking = watching.enter_context(each.watched(ticking))
        texts = [sequences] * num_steps(config.workload)
        results = engine.run(config, texts, job.mesh, job.device, ticking, token_losses=1)
    measurement = clock.measurement
    measurement.leftover_bytes = leftover
    timed = results[config.workload.warmup_steps : schedule.last_timed]
    with job.checking("timed_steps"):
        of_steps = check_steps(job, results, timed, watched, proven.shorter)
    reached = None
    if not config.workload.single_step:
        earlier = Limit(*job.proof["limits"][job.mesh.get_rank()]) if job.proof else None
        reached = limit.measured(config, job.device, earlier)
        measurement.limit_ms = reached.ms
    recomputes = config.workload.activation_checkpointing != "none"
    if recomputes and measurement.part_ms is not None and not measurement.part_ms["recompute"]:
        measurement.part_ms = None  # the engine does not tell it from the backward
    predict(measurement, job)
    if job.proves and job.proof is None:
        measurement.proof = {
            "columns": proven.columns,
            "budgets": proven.budgets,
            "shorter": proven.shorter and recorded.recorded(proven.shorter),
            "gradients": of_all_ranks(watched.first_gradient.sketches),
            "grad_norm": float(results[0].grad_norm),
            "limits": of_all_ranks(reached),
        }
    measurement.columns = {
        **proven.columns,
        **proven.sampled,
        **of_steps,
        "compile_s": compile_seconds(config, schedule.last_timed, compile_s),
        "check_s": job.check_s,
        "optimizer_ms": _optimizer_ms(timed),
        "pinned_host_bytes": pinned_host_bytes(config, memory),
    }
    return measurement


class Proven(NamedTuple):
    """What is proven before steps are timed."""

    columns: dict[str, Any]
    sampled: dict[str, Any]  # columns of the timed length
    budgets: list[reduced_length.Errors]  # of each kind of attention at the timed length
    shorter: Shorter | None  # what the first timed step is compared with


def prove(job: Job, sequences: Tensor) -> Proven:
    """Prove the attention and the step of `sequences` [m*D*B,S+1]. The timed length is always proven; the rest is taken
    from `job.proof`, if it has one.

    Raises:
        Incorrect: an error is above its budget.
    """
    if not job.proves:
        return Proven({}, {}, [], None)
    if job.proof:
        columns, budgets = dict(job.proof["columns"]), job.proof["budgets"]
    else:
        with job.checking("attention"):
            columns, budgets = prove_attention(job)
    with job.checking("timed_attention"):
        sampled = check_timed_length(job, budgets)
    if job.proof:
        shorter = job.proof["shorter"] and recorded.restored(job.proof["shorter"], job.device)
    else:
        of_step, shorter = prove_step(job, sequences)
        columns |= of_step
    return Proven(columns, sampled, budgets, shorter)


class Watched(NamedTuple):
    """What is watched while steps are timed; of one real rank the weights alone."""

    weights: timed_step.Weights
    last_update: LastUpdate
    first_gradient: FirstGradient


def check_steps(
    job: Job,
    results: Sequence[train.StepResult],
    timed: Sequence[train.StepResult],
    watched: Watched,
    shorter: Shorter | None,
) -> dict[str, Any]:
    """Check what all steps computed; `timed` are those of `results` that were timed. Returns row columns.

    Raises:
        Incorrect: an error is above its budget.
    """
    config = job.config
    steps = timed_step.check_timed_steps(timed)
    watched.weights.require_changed()
    if not job.proves:  # the loss is of a part of the tokens, under weights that no peer has changed
        return {}
    # before what compares, since it says more plainly what is wrong
    timed_step.require_new_results(config, **steps, line=shorter.line if shorter else ())
    columns: dict[str, Any] = {}
    if shorter is not None:
        first = timed_step.first_step(config, results[0], config.seq_len, job.mesh)
        columns = timed_step.check_first_step(first, shorter)
        columns |= timed_step.check_line(results, shorter.line)
    if job.proof:
        repeated = watched.first_gradient.compared(config, float(results[0].grad_norm), job.proof)
        training_step.require({"gradient": repeated})
        columns["repeated_gradient_error"] = repeated.error
    found = watched.last_update.findings()
    training_step.require(found)
    return {**columns, "last_update_error": found["update"].column(), **steps}


def predict(measurement: Measurement, job: Job) -> None:
    """Note what a step's bytes and work must be, by closed forms, and which phases' bytes have none."""
    config, rank = job.config, job.mesh.get_rank()
    padded_len = train.padded_seq_len(config, config.seq_len)
    measurement.predicted = predicted_traffic(config, padded_len, rank)
    measurement.expected = closed_forms.expected_work(config, padded_len, rank)
    measurement.unpredicted = train.unpredicted_phases(config, engines.get(config.engine.name).UNPREDICTED)


def _optimizer_ms(timed: list[train.StepResult]) -> float | None:
    """The median over the timed steps; None: the device does it, or another engine's library."""
    ms = [result.optimizer_ms for result in timed if result.optimizer_ms is not None]
    return statistics.median(ms) if ms else None


def pinned_host_bytes(config: TrialConfig, memory: HostMemory) -> int | None:
    """Pinned host memory of this rank for checkpoints; None if they stay on the device.

    Raises:
        Incorrect: the layers' inputs would not fit it, so they stayed on the device.
    """
    if not config.workload.checkpoint_offload:
        return None
    if memory.num_bytes < (needed := offloaded_inputs_bytes(config)):
        raise Incorrect(
            f"offloaded checkpoints took {memory.num_bytes:,} bytes of host memory; the layers' inputs alone have "
            f"{needed:,.0f}"
        )
    return memory.num_bytes


def compile_seconds(config: TrialConfig, last_timed: int | None, until: list[float]) -> float | None:
    """Seconds that torch.compile took before the timed steps; None: nothing is compiled. last_timed: the step that ends
    them. until: seconds of this process before the proof, before each step and after the last.

    Raises:
        RuntimeError: it compiled in a timed step.
    """
    if config.workload.model_code != "compiled":
        return None
    before, *until = until
    start = config.workload.warmup_steps
    assert last_timed is not None, "there were no timed steps"
    if (late := until[last_timed] - until[start]) > 0:
        raise RuntimeError(
            f"torch.compile compiled for {late:.1f} s in the timed steps; use more than workload.warmup_steps={start}"
        )
    return until[start] - before


def warm_up(job: Job, memory: HostMemory) -> None:
    """One step of one layer of each kind of the model, at the timed shapes: what its first use compiles, loads or
    connects is there before the one timed step. So is the host memory for all layers, whose first layer says how much
    it is."""
    job.enter_phase("warmup")
    offloads, num_layers = job.config.workload.checkpoint_offload, job.config.model.num_layers
    config = replace(job.config, model=job.config.model.shorter(2 if offloads else 1))
    sequences = text.sequences(0, config.num_sequences, config.seq_len)
    engines.get(config.engine.name).run(config, [sequences], job.mesh, job.device, lambda: None, token_losses=0)
    release_memory(job.device)
    release_page_locked(job.device)
    if offloads:
        memory.require(num_layers - 1, memory.layer_bytes, job.device)


def prove_attention(job: Job) -> tuple[dict[str, Any], list[reduced_length.Errors]]:
    """Prove the method's output and gradients on random inputs at the reduced length. Returns row columns, and the
    budget of each kind of attention at the timed length.

    Raises:
        Incorrect: an error is above its budget.
    """
    config, found = job.config, []
    padded_len = train.padded_seq_len(config, training_step.proof_seq_len(config))
    for kind in config.kinds:
        shape, name = config.attention_shape(padded_len, kind), config.kernel_of(kind)
        check = delta.check_attention if shape.gated_delta else reduced_length.check_attention
        with train.open_attention(config, padded_len, job.mesh, kind) as attention:
            found.append(check(attention, kernels.get(name), name, shape, job.mesh, job.device, config.seed))
    columns = largest(found)
    if config.engine.facts.decoder == "transformers":  # the perturbed attention was not that of the model that trains
        columns = {name: each for name, each in columns.items() if name not in reduced_length.PERTURBED}
    return columns, [budget_at(each, config) for each in found]


def prove_step(job: Job, sequences: Tensor) -> tuple[dict[str, Any], Shorter | None]:
    """Prove a training step of few layers at the reduced length, and the first steps of the whole model on `sequences`
    [m*D*B,S+1] cut short. Returns row columns, and what the first timed step is compared with; None with
    `workload.fit`, where its losses are of no attention.

    Raises:
        Incorrect: an error is above its budget.
    """
    config = job.config
    # the proof's steps are several, of an optimizer as it comes
    warmup_steps = max(config.workload.warmup_steps, 1)
    several = replace(config.workload, fit=False, single_step=False, warmup_steps=warmup_steps)
    with job.checking("few_layers"):
        columns = training_step.prove(replace(config, workload=several), job.mesh, job.device)
        release_memory(job.device)
        if config.workload.linear_dtype != "model":
            columns |= float8.prove(replace(config, workload=several), job.mesh, job.device)
            release_memory(job.device)
    if config.workload.fit:
        return columns, None
    with job.checking("all_layers"):
        shorter = timed_step.run_shorter(config, sequences, job.mesh, job.device)
    return {**columns, **shorter.columns}, shorter


def check_timed_length(job: Job, budgets: Sequence[reduced_length.Errors]) -> dict[str, Any]:
    """Prove the attention at the timed length on random inputs, unless most of it is left out. Returns row columns.

    budgets: of each kind of attention.

    Raises:
        Incorrect: an error is above its budget.
    """
    config = job.config
    if config.workload.fit:
        return {}
    padded_len, found = train.padded_seq_len(config, config.seq_len), []
    for kind, budget in zip(config.kinds, budgets, strict=True):
        timed = config.attention_shape(padded_len, kind)
        sinks = reduced_length.random_sinks(timed, job.device, config.seed)
        with train.open_attention(config, timed.seq_len, job.mesh, kind) as attention:
            seed = config.seed * config.world_size + job.mesh.get_rank()
            inputs = local_inputs(timed, timed.seq_len // config.sp_size, job.device, seed)
            step, draw = partial(attention_step, inputs, attention, sinks=sinks), Draw(config.seed, job.replicate)
            step()  # whose results must not come again for other inputs
            at = attention.layout, timed, job.mesh, draw, budget
            proof = delta.Proof(*at) if timed.gated_delta else Proof(*at, sinks)
            found.append(proof.check_turned(step, step, inputs))
    return largest(found)


def largest(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of the proofs of all kinds of attention: the largest of each number, errors and budgets alike."""
    columns: dict[str, Any] = {}
    for name, value in (item for each in found for item in each.items()):
        known = columns.get(name)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            columns[name] = {key: max(value.get(key, 0), known.get(key, 0)) for key in (*known, *value)}
        else:
            columns[name] = value if known is None or value is None else max(known, value)
    return columns


def predicted_traffic(config: TrialConfig, padded_len: int, rank: int) -> Traffic:
    """Bytes that `rank` sends in one step. Under a window the ranks of a ring send different numbers, and those of a
    chain of states; only `fsdp2` has them."""
    engine = engines.get(config.engine.name)
    if config.kinds.keys() <= {"full"}:
        return engine.traffic(config, padded_len)
    return train_step_traffic(config, closed_forms.attention_traffic(config, padded_len, rank) or {})
