"""Stages of one training: the length of its sequences changes while one process trains one model with one optimizer,
and with it the ranks that share a sequence, the micro-batches of a step and what is recomputed, where a stage has these
of its own.

In fp32 and fp64 each step of each stage is compared with the same training on one process, as in `parity`.

In half precision stages are proven as training steps of their length are (`train_step`), and what changes between them
is proven too:

- in fp32, with few layers and shorter lengths in the same ratio, the first steps of every stage are those of one
  process: the optimizer goes on.
- at the timed lengths, before a stage begins, a step is taken on its first text as a step of the stage before, and the
  weights stand still. Under a causal mask the tokens that both texts have must have the same losses: those of a
  training whose length has not changed.

All other steps are timed, the first of a stage too: what it takes to change the length, to compile anew and to find
memory is in its time. No proof has a layer compute at the length of a later stage.

Batches of drawn documents are in `drawn`.
"""

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sp_bench import methods
from sp_bench.config.prose import Prose
from sp_bench.config.shape import EXACT
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import PROVABLE_TOKENS
from sp_bench.engines import fsdp2, fsdp2_groups
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.engines.fsdp2 import Pass
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.record import of_all_ranks
from sp_bench.measure.timing import Clock, Measurement, Schedule, allocated_bytes, release_memory
from sp_bench.oracle import timed_step, training_step
from sp_bench.oracle.last_update import LastUpdate
from sp_bench.oracle.timed_step import Run, Shorter
from sp_bench.training import train
from sp_bench.training.offload import HostMemory, host_memory
from sp_bench.training.train import StepResult, Tick
from sp_bench.workloads import Job, arms, drawn, parity, train_step
from sp_bench.workloads.parity import Mark

REHEARSED_STEPS = 2  # of each stage: the second shows whether the optimizer went on in the first

Spans = list[tuple[Mark, Mark]]  # before and after each stage


def run(job: Job) -> Measurement:
    stages = job.config.stages
    if job.config.workload.policy is not None:
        measurement, marks = drawn.trained(job)
        of_stages = [*itertools.pairwise(marks[:-1])]  # the last step is the one whose bytes are counted
    elif job.config.dtype in EXACT:
        measurement, marks = parity.trained(job, _of_steps(job.config), _train)
        ends = [*itertools.accumulate((steps for _, steps in stages), initial=1)]  # the first mark is of the proof
        of_stages = [(marks[start], marks[end]) for start, end in itertools.pairwise(ends)]
    else:
        with host_memory() as memory:
            measurement, of_stages = _trained(job, memory)
    if arms.are_timed(job.config):
        measurement.arms_ms = {"compute_only": _compute_only(job)}
    measurement.energy_j = measurement.wire_bytes = None  # of steps of several lengths, and of those between stages
    measurement.columns["stage_ends"] = [
        {
            "seq_len": seq_len,
            "num_steps": steps,
            "reserved_bytes": max((n for n in of_all_ranks(after.reserved_bytes) if n is not None), default=None),
            "compiled": after.compiled - before.compiled,
            "compile_s": after.compile_s - before.compile_s,
        }
        for (seq_len, steps), (before, after) in zip(stages, of_stages, strict=True)
    ]
    return measurement


def _trained(job: Job, memory: HostMemory) -> tuple[Measurement, Spans]:
    """Prove the stages, train in half precision, and compare where they meet."""
    config, stages = job.config, job.config.stages
    job.enter_phase("correctness")
    trials = [*_of_steps(config), config.of_stages[-1]]  # of each step
    texts = parity.texts(trials)
    starts = [*itertools.accumulate((steps for _, steps in stages), initial=0)][:-1]  # steps before each stage
    columns, shorter = _prove(job, texts[0])
    release_memory(job.device)
    gc.freeze()  # as in train_step
    leftover = allocated_bytes(job.device)
    still: list[int] = []  # places in `texts` of the steps between stages
    for before, start in zip(config.of_stages, starts[1:], strict=False):
        place = start + len(still)
        still.append(place)
        texts.insert(place, _lengthened(texts[place], before))
        trials.insert(place, before)
    schedule = Schedule(config.workload, windows=[steps for _, steps in stages])
    clock = Clock(schedule, job.device, job.enter_phase, job.trace_to)
    weights, last_update = timed_step.Weights(schedule), LastUpdate(config, schedule)
    marks: list[Mark] = []
    with ExitStack() as watching:
        ticking = watching.enter_context(weights.watched(clock.tick))
        ticking = watching.enter_context(last_update.watched(ticking))
        watching.enter_context(_standing_still(lambda: len(marks) - 1 in still))

        def tick() -> bool | None:
            marks.append(parity.mark(job.device))
            return clock.tick() if len(marks) - 2 in still else ticking()

        results = _train(job, trials, texts, tick)
    measurement = clock.measurement
    measurement.leftover_bytes = leftover
    trained = [result for place, result in enumerate(results[:-1]) if place not in still]
    steps = timed_step.check_timed_steps(trained)
    weights.require_changed()
    timed_step.require_new_results(config, **steps, line=shorter.line)
    found = last_update.findings()
    training_step.require(found)
    first = timed_step.first_step(trials[0], results[0], trials[0].seq_len, job.mesh)
    met = [
        _meet(_first_step(job, trials, results, at), _first_step(job, trials, results, at + 1), shorter) for at in still
    ]
    train_step.predict(measurement, job)
    measurement.columns = {
        **columns,
        **timed_step.check_first_step(first, shorter),
        **steps,
        "stage_loss_errors": met,
        "last_update_error": found["update"].column(),
        "pinned_host_bytes": train_step.pinned_host_bytes(config, memory),
    }
    begins = [0, *(place + 1 for place in still)]
    ends = [*still, len(results) - 1]
    return measurement, [(marks[begin], marks[end]) for begin, end in zip(begins, ends, strict=True)]


def _of_steps(config: TrialConfig) -> list[TrialConfig]:
    """The train_step of each timed step."""
    stages = zip(config.of_stages, config.stages, strict=True)
    return [stage for stage, (_, steps) in stages for _ in range(steps)]


def _train(job: Job, trials: Sequence[TrialConfig], texts: Sequence[Tensor], tick: Tick) -> list[StepResult]:
    """A step on each text [m*D*B,S+1], as of the trial beside it. All trials are of one model and one optimizer, those
    of the last."""
    with _opened(job, trials, texts) as steps:
        return fsdp2.run_passes(trials[-1], steps, job.mesh, job.device, tick)


@contextmanager
def _opened(job: Job, trials: Sequence[TrialConfig], texts: Sequence[Tensor]) -> Iterator[list[list[Pass]]]:
    """This rank's micro-batches of each step. The attention is opened once for each length and number of ranks."""
    layers: dict[tuple[int, int], Sequence[methods.SequenceParallelAttention]] = {}
    steps = []
    with ExitStack() as opened:
        for trial, sequences in zip(trials, texts, strict=True):
            mesh, seq_len = methods.mesh_of(trial), sequences.shape[1] - 1
            key = (seq_len, trial.sp_size)
            if key not in layers:
                opening = train.open_layers(trial, train.padded_seq_len(trial, seq_len), mesh)
                layers[key] = opened.enter_context(opening)
            of_layers = layers[key]
            (batches,) = train.shard_batches(trial, [sequences], of_layers[0].layout, mesh, job.device)
            recomputes = trial.workload.activation_checkpointing
            steps.append([Pass(of_layers, batch, recomputes) for batch in batches])
        yield steps


def _compute_only(job: Job) -> list[float]:
    """ms of each of this rank's timed steps, taken once more without messages."""
    config = job.config
    if config.workload.policy is not None:
        opening = fsdp2_groups.opened(config, drawn.of_trial(config), job.mesh, job.device)
    else:
        trials = _of_steps(config)
        opening = _opened(job, trials, parity.texts(trials))
    release_memory(job.device)
    with opening as steps:
        return arms.compute_only(config, steps[: config.workload.most_timed_steps], job.mesh, job.device)


def _lengthened(sequences: Tensor, before: TrialConfig) -> Tensor:
    """Sequences [n,S+1] as the stage before has them, in number and length: cut, or begun again where they end."""
    number, num_tokens = before.num_sequences, before.seq_len + 1
    times = [-(-number // len(sequences)), -(-num_tokens // sequences.shape[1])]
    return sequences.repeat(*times)[:number, :num_tokens]


def _prove(job: Job, sequences: Tensor) -> tuple[dict[str, Any], Shorter]:
    """Prove the training step of each stage, and the change between them. sequences: those of the first step. Returns
    row columns, and what the first step is compared with.

    Raises:
        Incorrect: an error is above its budget.
    """
    jobs = [replace(job, config=stage, mesh=methods.mesh_of(stage)) for stage in job.config.of_stages]
    of_sizes = {each.config.sp_size: each for each in reversed(jobs)}  # the first of each size
    proven = {sp_size: train_step.prove_attention(each) for sp_size, each in of_sizes.items()}
    distinct = {(each.config.seq_len, each.config.sp_size): each for each in jobs}
    sampled = [train_step.check_timed_length(each, proven[size][1]) for (_, size), each in distinct.items()]
    of_step, shorter = train_step.prove_step(jobs[0], sequences)
    assert shorter is not None, "workload.fit is of train_step"
    columns = train_step.largest([*(columns for columns, _ in proven.values()), *sampled])
    return columns | of_step | _rehearse(job), shorter


def _rehearse(job: Job) -> dict[str, float]:
    """Take the first steps of every stage in fp32, with few layers and shorter lengths in the same ratio. Returns row
    columns.

    Raises:
        Incorrect: a step differs from one process.
    """
    trials = []
    longest = max(job.config.of_stages, key=lambda stage: stage.seq_len)
    share = training_step.proof_seq_len(longest) / longest.seq_len
    for stage in job.config.of_stages:
        small = training_step.proof_config(stage)
        assert small.workload.learning_rate is not None
        rate = max(small.workload.learning_rate, training_step.MIN_LEARNING_RATE)
        twin, _ = float32_twin(replace(small, workload=replace(small.workload, learning_rate=rate)))
        trials += [replace(twin, seq_len=_reduced(twin, share))] * REHEARSED_STEPS
    texts = parity.texts(trials)
    with training_step.full_precision():
        expected, again = parity.reference(trials[-1], texts, job.device)
        results = _train(job, trials, texts, lambda: None)
    training_step.require_finite(trials[-1], results)
    release_memory(job.device)
    return parity.compare(parity.reported(results), expected, again, "of a rehearsal in float32 ")


def _reduced(config: TrialConfig, share: float) -> int:
    """A length that is `share` of the trial's, with as many padded tokens."""
    multiple = methods.layout_of(config).multiple
    short = max(round(config.seq_len * share), multiple, PROVABLE_TOKENS)
    return short + (config.seq_len - short) % multiple


@contextmanager
def _standing_still(is_still: Callable[[], bool]) -> Iterator[None]:
    """In steps for which `is_still` returns True, optimizers get no gradient: they change neither parameters nor
    moments, nor count the step."""

    def before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_still():
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                parameter.grad = None

    hook = register_optimizer_step_pre_hook(before_update)
    try:
        yield
    finally:
        hook.remove()


def _first_step(job: Job, trials: Sequence[TrialConfig], results: Sequence[StepResult], at: int) -> Run:
    return timed_step.first_step(trials[at], results[at], trials[at].seq_len, job.mesh)


def _meet(unbroken: Run, changed: Run, shorter: Shorter) -> float:
    """Compare the first step of a stage with one as of the stage before, on the same weights and tokens. Returns the
    relative L2 difference of the losses of the tokens that both have.

    Raises:
        Incorrect: it is above what rounding explains.
    """
    number = min(len(unbroken.losses), len(changed.losses))  # of sequences
    errors = timed_step.errors_of(*(run._replace(losses=run.losses[:number]) for run in (changed, unbroken)))
    worst: Prose = f"token {errors.token}"
    shared: Prose = f"the first {min(unbroken.seq_len, changed.seq_len)} tokens"
    for what, error, budget in (
        (shared, errors.loss, shorter.loss_budget),
        (worst, errors.worst, shorter.worst_budget),
    ):
        if not error <= budget:
            raise Incorrect(
                f"as the length changes from {unbroken.seq_len} to {changed.seq_len} tokens the losses of {what} "
                f"change by {error:.3g} (relative), budget {budget:.3g}, on the same weights"
            )
    return errors.loss
