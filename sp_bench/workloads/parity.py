"""Training parity: a small model is trained, and each step is compared with the same training on one process.

The warm-up and timed steps themselves are compared, by loss and gradient norm. The optimizer must be SGD: under AdamW,
gradients of a wrong scale would train just as well.

Products in FP8 (`workload.linear_dtype`) train otherwise than bf16, also on one process. So the reference is one
process in bf16, and the control, one process that rounds to FP8 by plain casts, says how far a right run may be.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from sp_bench import engines
from sp_bench.config.method import MethodConfig
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.measure.incorrect import CannotTell, Incorrect
from sp_bench.measure.timing import Clock, Measurement, Schedule, allocated_bytes, num_steps, release_memory
from sp_bench.oracle import one_process
from sp_bench.oracle.timed_step import check_timed_steps
from sp_bench.oracle.training_step import labelled
from sp_bench.training import text, train
from sp_bench.training.model_code import compiling
from sp_bench.training.offload import HostMemory, host_memory
from sp_bench.workloads import Job
from sp_bench.workloads.train_step import compile_seconds, pinned_host_bytes, predict

NLL_TOLERANCE = 1e-5  # nats a token
GRAD_NORM_TOLERANCE = 1e-5  # relative
# Of what rounding makes of the reference itself, which grows from step to step: added to both. Right runs reached 7.
NOISE_FACTOR = 10
# Of the control's largest difference of the loss in any step: where in the text roundings show is chance. The gradient
# norm is not judged: of a step whose loss leaps it is chance too.
FLOAT8_FACTOR = 2
MINIMUM_FALL = 0.5  # nats that the loss must fall: agreement says nothing about a model that does not learn


class Mark(NamedTuple):
    """Where a rank stands before its first step, and after each."""

    compile_s: float  # until here, in this process
    compiled: int  # how often
    reserved_bytes: int | None  # by torch's allocator; None: CPU


def run(job: Job) -> Measurement:
    trials = [job.config] * (num_steps(job.config.workload) - 1)
    measurement, marks = trained(job, trials, _train)
    measurement.columns["compile_s"] = compile_seconds(job.config, len(marks) - 3, [each.compile_s for each in marks])
    return measurement


def _train(
    job: Job, trials: Sequence[TrialConfig], texts: Sequence[torch.Tensor], tick: train.Tick
) -> list[train.StepResult]:
    engine = engines.get(job.config.engine.name)
    return engine.run(job.config, texts, job.mesh, job.device, tick, token_losses=0)


# (job, trial of each step, text of each step, tick) -> what each step computed
Train = Callable[[Job, Sequence[TrialConfig], Sequence[torch.Tensor], train.Tick], list[train.StepResult]]


def trained(job: Job, trials: Sequence[TrialConfig], train_steps: Train) -> tuple[Measurement, list[Mark]]:
    """Train as these trials, a step of each, and compare each with one process. Then the step whose bytes are counted,
    of the last one. Returns a mark before the proof, before the first step and after each.

    Raises:
        Incorrect, CannotTell: as of `compare` and `require_fall`.
    """
    with host_memory() as memory:
        return _trained(job, trials, train_steps, memory)


def texts(trials: Sequence[TrialConfig]) -> list[torch.Tensor]:
    """The sequences [m*D*B,S+1] of a step of each of these trials."""
    numbers = [trial.num_sequences for trial in trials]
    firsts = itertools.accumulate(numbers, initial=0)
    steps = zip(firsts, numbers, trials, strict=False)
    return [text.sequences(first, number, trial.seq_len) for first, number, trial in steps]


def _trained(
    job: Job, trials: Sequence[TrialConfig], train_steps: Train, memory: HostMemory
) -> tuple[Measurement, list[Mark]]:
    config = job.config
    job.enter_phase("correctness")
    num_compared = len(trials)  # all but the ledger's step
    trials = [*trials, trials[-1]]
    sequences = texts(trials)
    expected, again = reference(config, sequences[:num_compared], job.device)
    release_memory(job.device)
    leftover = allocated_bytes(job.device)
    clock = Clock(Schedule(config.workload), job.device, job.enter_phase, job.trace_to)
    marks = [mark(job.device)]

    def tick() -> bool:
        marks.append(mark(job.device))
        return clock.tick()

    results = train_steps(job, trials, sequences, tick)
    measurement = clock.measurement
    measurement.leftover_bytes = leftover
    got = reported(results[:num_compared])
    steps = check_timed_steps(results[:num_compared])
    compared = compare(got, expected, again, in_float8=config.workload.linear_dtype != "model")
    require_fall(expected)
    predict(measurement, job)
    measurement.columns = {
        **compared,
        **steps,
        "pinned_host_bytes": pinned_host_bytes(config, memory),
    }
    return measurement, marks


def mark(device: torch.device) -> Mark:
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    return Mark(compiling.seconds, compiling.times, reserved)


def reference(
    config: TrialConfig,
    texts: Sequence[torch.Tensor],
    device: torch.device,
    of_steps: Sequence[TrialConfig] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradient norm [num_steps, 2] of the same training on one process, without FP8; and `again`, of
    `compare`. Every rank of the world calls it. of_steps: the trial of each step, where documents differ."""
    batches = [labelled(config, sequences) for sequences in texts]
    if config.workload.linear_dtype != "model":
        control = replace(config, method=MethodConfig("single"), sp_size=1)
        without = replace(control, dtype="float32", workload=replace(control.workload, linear_dtype="model"))
        computed = getattr(torch, config.dtype)
        expected, *again = (one_process.broadcast_steps(each, batches, computed, device) for each in (without, control))
        return expected, again
    dtype = train.stored_dtype(config.dtype)
    reordered = [sequences.flip(0) for sequences in batches]
    ways = ((batches, dtype), (reordered, dtype), (batches, torch.float64))
    expected, *again = (one_process.broadcast_steps(config, *each, device, of_steps) for each in ways)
    return expected, again


def reported(results: Sequence[train.StepResult]) -> torch.Tensor:
    """Loss and gradient norm of each step [num_steps, 2], in fp64."""
    return torch.stack([torch.stack((each.loss, each.grad_norm)) for each in results]).double()


def require_fall(expected: torch.Tensor) -> None:
    """expected: loss and gradient norm of each step of the reference [num_steps, 2].

    Raises:
        CannotTell: its loss fell by less than MINIMUM_FALL.
    """
    fall = float(expected[0, 0] - expected[-1, 0])
    if not fall >= MINIMUM_FALL:
        raise CannotTell(
            f"the loss fell by {fall:.3g} nats over {len(expected)} steps, less than {MINIMUM_FALL}: agreement would "
            "prove nothing; use more steps, or another workload.learning_rate"
        )


def compare(
    got: torch.Tensor,
    expected: torch.Tensor,
    again: Sequence[torch.Tensor],
    where: Prose = "",
    *,
    rounding: float = 0.0,
    in_float8: bool = False,
) -> dict[str, float]:
    """Compare loss and gradient norm of each step [num_steps, 2] with those of the reference. Returns row columns:
    differences of the loss in nats, and of gradient norms relative to the reference.

    again: the same training on one process, with its sums in another order and in fp64. What rounding has made of them,
    up to a step, it may make of other ranks' sums too. rounding: added to both tolerances. in_float8: `again`
    is the control alone; a step's loss may differ by FLOAT8_FACTOR times the control's largest difference in any step,
    and its gradient norm is not judged.

    Raises:
        Incorrect: a step differs by more than the tolerances.
    """
    differences = _differences(got, expected)
    noise = torch.stack([_differences(other, expected) for other in again]).amax(0)
    tolerances = torch.tensor([NLL_TOLERANCE, GRAD_NORM_TOLERANCE]).to(noise) + rounding
    budgets = tolerances + NOISE_FACTOR * noise.cummax(0).values
    if in_float8:
        budgets[:, 0], budgets[:, 1] = FLOAT8_FACTOR * noise[:, 0].max(), torch.inf
    nll_difference, norm_difference = differences.T
    for step, (found, allowed) in enumerate(zip(differences.tolist(), budgets.tolist(), strict=True)):
        if not all(each <= budget for each, budget in zip(found, allowed, strict=True)):
            raise Incorrect(
                f"step {step} {where}differs from one process: NLL by {found[0]:.3g} nats (allowed {allowed[0]:.2g}), "
                f"gradient norm by {found[1]:.3g} relative (allowed {allowed[1]:.2g})"
            )
    columns = {
        "max_nll_difference": float(nll_difference.max()),
        "mean_nll_difference": float(nll_difference.mean()),
        "max_grad_norm_difference": float(norm_difference.max()),
    }
    return columns | ({"control_nll_difference": float(noise[:, 0].max())} if in_float8 else {})


def _differences(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Errors [num_steps, 2]: of the loss in nats, and of the gradient norm relative to the expected one."""
    return (got - expected).abs() / torch.stack([torch.ones_like(expected[:, 1]), expected[:, 1]], dim=1)
