"""Stages of one training: the length of its sequences changes while one process trains one model with one optimizer.

In fp32 and fp64 each step of each stage is compared with the same training on one process, as in `parity`.

In half precision stages are proven as training steps of their length are (`train_step`), and what changes between them
is proven too:

- in fp32, with few layers and shorter lengths in the same ratio, the first steps of every stage are those of one
  process: the optimizer goes on.
- at the timed lengths, before a stage begins, a step is taken on its first text at the length of the stage before, and
  the weights stand still. Under a causal mask the tokens that both texts have must have the same losses: those of a
  training whose length has not changed.

All other steps are timed, the first of a stage too: what it takes to change the length, to compile anew and to find
memory is in its time. No proof has a layer compute at the length of a later stage.
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

from sp_bench import engines, methods
from sp_bench.config.prose import Prose
from sp_bench.config.trial import EXACT, PROVABLE_TOKENS, TrialConfig
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.record import of_all_ranks
from sp_bench.measure.timing import Clock, Measurement, Schedule, allocated_bytes, release_memory
from sp_bench.oracle import timed_step, training_step
from sp_bench.oracle.full_depth import is_judged
from sp_bench.oracle.last_update import LastUpdate
from sp_bench.oracle.timed_step import Shorter
from sp_bench.training import text, train
from sp_bench.training.offload import HostMemory, host_memory
from sp_bench.training.train import StepResult
from sp_bench.workloads import Job, drawn, parity, train_step
from sp_bench.workloads.parity import Mark

REHEARSED_STEPS = 2  # of each stage: the second shows whether the optimizer went on in the first

Spans = list[tuple[Mark, Mark]]  # before and after each stage


def run(job: Job) -> Measurement:
    stages = job.config.stages
    if job.config.workload.policy is not None:
        measurement, marks = drawn.trained(job)
        of_stages = [*itertools.pairwise(marks[:-1])]  # the last step is the one whose bytes are counted
    elif job.config.dtype in EXACT:
        measurement, marks = parity.trained(job, [seq_len for seq_len, steps in stages for _ in range(steps)])
        ends = [*itertools.accumulate((steps for _, steps in stages), initial=1)]  # the first mark is of the proof
        of_stages = [(marks[start], marks[end]) for start, end in itertools.pairwise(ends)]
    else:
        with host_memory() as memory:
            measurement, of_stages = _trained(job, memory)
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
    texts = _texts(config, [seq_len for seq_len, steps in stages for _ in range(steps)] + [config.seq_len])
    starts = [*itertools.accumulate((steps for _, steps in stages), initial=0)][:-1]  # steps before each stage
    columns, shorter = _prove(job, texts[0])
    release_memory(job.device)
    gc.freeze()  # as in train_step
    leftover = allocated_bytes(job.device)
    still: list[int] = []  # places in `texts` of the steps between stages
    for (before, _), start in zip(stages, starts[1:], strict=False):
        still.append(start + len(still))
        texts.insert(still[-1], _lengthened(texts[still[-1]], before))
    schedule = Schedule(config.workload)
    clock = Clock(schedule, job.device, job.enter_phase, job.trace_to, [steps for _, steps in stages])
    weights, last_update = timed_step.Weights(schedule), LastUpdate(config, schedule)
    marks: list[Mark] = []
    with ExitStack() as watching:
        ticking = watching.enter_context(weights.watched(clock.tick))
        ticking = watching.enter_context(last_update.watched(ticking))
        watching.enter_context(_standing_still(lambda: len(marks) - 1 in still))

        def tick() -> bool | None:
            marks.append(parity.mark(job.device))
            return clock.tick() if len(marks) - 2 in still else ticking()

        engine = engines.get(config.engine.name)
        results = engine.run(config, texts, job.mesh, job.device, tick, token_losses=len(texts))
    measurement = clock.measurement
    measurement.leftover_bytes = leftover
    trained = [result for place, result in enumerate(results[:-1]) if place not in still]
    steps = timed_step.check_timed_steps(trained)
    weights.require_changed()
    timed_step.require_new_results(config, **steps, line=shorter.line)
    found = last_update.findings()
    if is_judged(config):
        training_step.require(found)
    first = timed_step.first_step(config, results[0], stages[0][0], job.mesh)
    lengths = itertools.pairwise(seq_len for seq_len, _ in stages)
    met = [
        _meet(job, before, after, results[at], results[at + 1], shorter)
        for (before, after), at in zip(lengths, still, strict=True)
    ]
    padded_len = train.padded_seq_len(config, config.seq_len)
    measurement.predicted = train_step.predicted_traffic(config, padded_len, job.mesh.get_rank())
    measurement.expected = methods.expected_work(config, padded_len, job.mesh.get_rank())
    measurement.unpredicted = train.unpredicted_phases(config, engine.UNPREDICTED)
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


def _texts(config: TrialConfig, lengths: Sequence[int]) -> list[Tensor]:
    """The sequences [m*D*B,S+1] of steps of so many tokens each; no step reads what another has read, about."""
    number = config.num_sequences
    return [text.sequences(step * number, number, seq_len) for step, seq_len in enumerate(lengths)]


def _lengthened(sequences: Tensor, seq_len: int) -> Tensor:
    """Sequences [n,S+1] with `seq_len` tokens: cut, or begun again where they end."""
    times = -(-(seq_len + 1) // sequences.shape[1])
    return sequences.repeat(1, times)[:, : seq_len + 1]


def _prove(job: Job, sequences: Tensor) -> tuple[dict[str, Any], Shorter]:
    """Prove the training step of each stage, and the change between them. sequences: those of the first step. Returns
    row columns, and what the first step is compared with.

    Raises:
        Incorrect: an error is above its budget.
    """
    stages = [replace(job, config=job.config.at_stage(n)) for n in dict.fromkeys(n for n, _ in job.config.stages)]
    columns, budgets = train_step.prove_attention(stages[0])
    columns |= train_step.largest([train_step.check_timed_length(stage, budgets) for stage in stages])
    of_step, shorter = train_step.prove_step(stages[0], sequences)
    assert shorter is not None, "workload.fit is of train_step"
    return columns | of_step | _rehearse(job), shorter


def _rehearse(job: Job) -> dict[str, float]:
    """Take the first steps of every stage in fp32, with few layers and shorter lengths in the same ratio. Returns row
    columns.

    Raises:
        Incorrect: a step differs from one process.
    """
    lengths = [seq_len for seq_len, _ in job.config.stages]
    small = training_step.proof_config(job.config.at_stage(max(lengths)))
    assert small.workload.learning_rate is not None
    rate = max(small.workload.learning_rate, training_step.MIN_LEARNING_RATE)
    twin, _ = float32_twin(replace(small, workload=replace(small.workload, learning_rate=rate)))
    texts = _texts(twin, [n for seq_len in lengths for n in [_reduced(twin, seq_len)] * REHEARSED_STEPS])
    with training_step.full_precision():
        expected, again = parity.reference(twin, texts, job.device)
        engine = engines.get(twin.engine.name)
        results = engine.run(twin, texts, job.mesh, job.device, lambda: None, token_losses=0)
    training_step.require_finite(twin, results)
    release_memory(job.device)
    return parity.compare(parity.reported(results), expected, again, "of a rehearsal in float32 ")


def _reduced(config: TrialConfig, seq_len: int) -> int:
    """`seq_len` tokens as short as the reduced length is for the trial's, with as many padded tokens."""
    multiple = methods.get(config.method.name).layout(config.method, config.sp_size).multiple
    share = training_step.proof_seq_len(config) / config.seq_len
    short = max(round(seq_len * share), multiple, PROVABLE_TOKENS)
    return short + (seq_len - short) % multiple


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


def _meet(job: Job, before: int, after: int, still: StepResult, first: StepResult, shorter: Shorter) -> float:
    """Compare the first step of a stage of `after` tokens with one of `before` tokens, as the stage before had, on the
    same weights and tokens. Returns the relative L2 difference of the losses of the tokens that both have.

    Raises:
        Incorrect: it is above what rounding explains.
    """
    unbroken = timed_step.first_step(job.config.at_stage(before), still, before, job.mesh)
    changed = timed_step.first_step(job.config.at_stage(after), first, after, job.mesh)
    errors = timed_step.errors_of(changed, unbroken)
    worst: Prose = f"token {errors.token}"
    shared: Prose = f"the first {min(before, after)} tokens"
    for what, error, budget in (
        (shared, errors.loss, shorter.loss_budget),
        (worst, errors.worst, shorter.worst_budget),
    ):
        if not error <= budget:
            raise Incorrect(
                f"as the length changes from {before} to {after} tokens the losses of {what} change by {error:.3g} "
                f"(relative), budget {budget:.3g}, on the same weights"
            )
    return errors.loss
