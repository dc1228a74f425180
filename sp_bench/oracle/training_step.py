"""Proves a training step right before it is timed, at a reduced length and with few layers.

STEPS steps of the trial's own engine and optimizer must be right in three parts. One comparison of the new parameters
would not do: Adam divides a gradient by its own size, so that near zero a small error turns the update round.

(a) Each token's loss and each parameter's gradient before clipping, in the first step, are those of one process.
(b) The gradient that the optimizer receives is that of (a), clipped. The proof clips at half the first norm, so that
    clipping binds; a trial that does not clip does not clip here.
(c) What the optimizer makes of it, parameters and moments, is what its formula makes of it in fp64: of the gradient,
    parameters and moments that the optimizer itself had. So rounding does not add up from step to step, and it is the
    optimizer's own fp32 parameters that are read, not the copies that an engine computes with.

(b) and (c) read every element of a rank's part of a parameter up to SAMPLE of them, and evenly spread ones of a larger
part. So the proof makes no second copy of a model.

Of the text some labels are taken away, so that micro-batches, ranks and sequences have different numbers of them: an
engine that takes a mean of means is off.

What it finds belongs to the code, the options and the machine: one trial's proof holds for others of the same.

m micro-batches a step; D data-parallel ranks, each with B sequences of a micro-batch; S tokens of a sequence.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sp_bench import engines, methods
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.costs.training import FLOAT8_MULTIPLE, takes_mean_of_means
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.measure.incorrect import CannotTell, Incorrect
from sp_bench.measure.timing import release_memory
from sp_bench.oracle import one_process
from sp_bench.oracle.one_process import Gradients
from sp_bench.oracle.update import FORMULAS, MOMENTS, PARAMETER, ROUNDINGS
from sp_bench.training import text, train
from sp_bench.training.train import Part, StepResult

# The proof has the trial's heads, widths, ranks and layout, but fewer layers: a whole 8B model with its gradients does
# not fit on one device beside that device's own shards.
PROOF_LAYERS = 2
OFFLOADED_PROOF_LAYERS = 3  # the last layer's checkpoint never leaves the device, and two share the host memory
STEPS = 3
MIN_LEARNING_RATE = 1e-4  # of these steps: weight decay and the update of bf16 copies are below rounding at a lower one
DIVERGING_RATE = 0.1  # a larger one may move each weight by more than its size, and the losses to infinity
SAMPLE = 2**20  # elements of a rank's part of a parameter that are compared
# In budgets where products are in FP8: which way a mean over all of them is off is chance. A quarter of e4m3's own.
FLOAT8_EPS = torch.finfo(torch.float8_e4m3fn).eps / 4
CHUNK = 2**24  # elements that are widened to fp64 at a time
# Largest relative error of losses and norms against one process in the same dtype, and of a clipped gradient. For lower
# dtypes see `prove`.
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
# The same of a parameter's gradient. On an H200 fp32 gradients of 4B to 8B models were off by up to 4.4e-6 where tokens
# were computed in four parts; TF32 rounds to 5e-4.
GRADIENT_TOLERANCES = {"float64": 1e-10, "float32": 3e-5}


class Finding(NamedTuple):
    """An error, its budget, and the message if it is above."""

    error: float
    budget: float
    message: Prose
    parameter: str | None = None

    @property
    def excess(self) -> float:
        """The error over its budget; infinite if it is not a number."""
        ratio = self.error / self.budget if self.budget else math.inf if self.error else 0.0
        return math.inf if math.isnan(ratio) else ratio

    def column(self) -> dict[str, Any]:
        """For the row, whose numbers are finite: an error of a finding that fails nothing may be none."""
        error = self.error if math.isfinite(self.error) else sys.float_info.max
        return {"parameter": self.parameter, "error": error, "budget": self.budget}


KINDS = ("loss", "largest_loss", "gradient", "grad_norm", "received", "update")  # in the order of a step
Findings = dict[str, Finding]  # the worst of each kind
NOTHING = Finding(math.inf, 0.0, "the engine shows no gradient, and its optimizer takes no step")


class Budget(NamedTuple):
    """Largest relative errors of the first step against one process."""

    loss: float
    largest_loss: float
    grad_norm: float
    gradients: Mapping[str, float]  # by parameter


@dataclass(frozen=True)
class Expected:
    """The first step of one process, up to the update."""

    token_losses: Tensor  # [m*D*B,S], fp64, nats; 0 without a label
    num_labels: int
    grad_norm: float
    # Relative error of torch's norm of the same gradients in the dtype in which they are stored. An engine's norm is no
    # better, nor is what it clips with: over the 156M elements of an embedding fp32 sums on a CPU are off by 3e-5.
    norm_rounding: float
    gradients: Mapping[str, Tensor]  # on rank 0, whole; none on the other ranks


def prove(config: TrialConfig, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Prove the trial's training step. Returns row columns. Every rank of the world calls it.

    fp32 and fp64 are compared with the same dtype, and the budget is TOLERANCES. Lower dtypes are compared with fp32;
    the budgets are 2 x (error of one process in the trial's dtype + eps), as for attention. That is wide enough to hide
    whole bugs, so the same steps are then proven in fp32 too.

    Raises:
        Incorrect: an error is above its budget; the message is the same on every rank.
    """
    small = proof_config(config)
    batch = text.sequences(0, config.num_sequences, proof_seq_len(config))
    if engines.reads_unlabelled(config.engine.name) and not takes_mean_of_means(config):
        batch = text.unequally_labelled(batch, config.seed)
    expected, budget = _expect(small, batch, device)
    found = _take_steps(small, batch, expected, budget, mesh, device)
    require(found)
    columns = {
        "rel_error_loss": found["loss"].error,
        "max_error_loss": found["largest_loss"].error,
        "rel_error_grad_norm": found["grad_norm"].error,
        "grad_error": found["gradient"].column(),
        "update_error": found["update"].column(),
    }
    if config.dtype in TOLERANCES:
        return columns
    release_memory(device)
    twin, proven = float32_twin(small)
    with full_precision():
        tight = _with_rounding(_tight(budget.gradients, "float32"), expected.norm_rounding)
        again = _take_steps(twin, batch, expected, tight, mesh, device)
    require(again, f"in float32, method {twin.method.name}: ")
    return columns | {"fp32_proof": proven, "fp32_grad_error": again["gradient"].column()}


def require(found: Findings, where: Prose = "") -> None:
    """
    Raises:
        Incorrect: an error is above its budget, or not a number; the first of them.
    """
    for finding in found.values():
        if not finding.error <= finding.budget:
            raise Incorrect(where + finding.message)


def require_finite(config: TrialConfig, results: Sequence[StepResult]) -> None:
    """
    Raises:
        CannotTell: the first step has a loss, a later one has none, and the learning rate explains it. At a smaller
            rate that is for the proof to judge.
    """
    losses, rate = [float(result.loss) for result in results], config.workload.learning_rate
    assert rate is not None
    if rate > DIVERGING_RATE and math.isfinite(losses[0]) and not all(map(math.isfinite, losses)):
        step = next(step for step, loss in enumerate(losses, 1) if not math.isfinite(loss))
        raise CannotTell(
            f"training diverges: with workload.learning_rate={rate:g} the loss of step {step} is {losses[step - 1]}; "
            f"use a workload.learning_rate of {DIVERGING_RATE} or less"
        )


def proof_seq_len(config: TrialConfig) -> int:
    """The reduced length, made a little shorter so that it needs as many padded tokens as the timed length does."""
    multiple = length_multiple(config)
    reduced = min(config.workload.correctness_seq_len, config.seq_len)
    return reduced - (reduced - config.seq_len) % multiple or config.seq_len


def length_multiple(config: TrialConfig) -> int:
    """Sequences that differ by a multiple of so many tokens need as many padded tokens; in FP8 each rank has a length
    that its products can have."""
    multiple = methods.layout_of(config).multiple
    return math.lcm(multiple, FLOAT8_MULTIPLE.get(config.workload.linear_dtype, 1) * config.sp_size)


def proof_config(config: TrialConfig) -> TrialConfig:
    """`config` with fewer layers, but each kind of them, and with as many tiles of the loss and of MLPs as the timed
    length has, or more, or one a token."""
    workload = config.workload
    layers = OFFLOADED_PROOF_LAYERS if workload.checkpoint_offload else PROOF_LAYERS
    tiles = {
        name: max(tile * proof_seq_len(config) // config.seq_len, 1)
        for name in ("loss_tile_tokens", "mlp_tile_tokens")
        if (tile := getattr(workload, name)) is not None
    }
    return replace(config, model=config.model.shorter(layers), workload=replace(workload, **tiles))


def labelled(config: TrialConfig, sequences: Tensor) -> Tensor:
    """`sequences` [m*D*B,S+1] without the last tokens, for which the engine has no label. The reference is trained
    without them; under a causal mask they change nothing before them. The last token of a pack has no label anyway."""
    unlabelled = engines.get(config.engine.name).UNLABELLED if config.workload.packing == "none" else 0
    return sequences[:, : sequences.shape[1] - unlabelled]


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiplies fp32 matrices in fp32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _expect(config: TrialConfig, batch: Tensor, device: torch.device) -> tuple[Expected, Budget]:
    """What rank 0 computes alone, in fp32 (fp64 if the trial's dtype is), and the budgets of the trial's dtype."""
    sequences = labelled(config, batch)
    stored, computed = train.stored_dtype(config.dtype), getattr(torch, config.dtype)
    token_losses = torch.empty(sequences.shape[0], sequences.shape[1] - 1, dtype=torch.float64, device=device)
    num_labels = one_process.num_labels(config, sequences)
    gradients, said = {}, [None, None, 0.0]
    if dist.get_rank() == 0:
        with full_precision():
            wide, *low = one_process.gradients(config, sequences, list(dict.fromkeys((stored, computed))), device)
        token_losses.copy_(wide.token_losses)
        gradients = wide.of
        eps = torch.finfo(computed).eps if config.workload.linear_dtype == "model" else FLOAT8_EPS
        low_budget = partial(_low_budget, wide=wide, eps=eps, num_labels=num_labels)
        budget = low_budget(low[0]) if low else _tight(wide.of, config.dtype)
        norm = float(torch.nn.utils.get_total_norm(list(wide.of.values())))
        said = [_norm(wide), budget, abs(norm / _norm(wide) - 1)]
    dist.broadcast(token_losses, 0)
    dist.broadcast_object_list(said, 0)
    grad_norm, budget, norm_rounding = said
    assert grad_norm is not None
    assert budget is not None
    expected = Expected(token_losses, num_labels, grad_norm, norm_rounding, gradients)
    return expected, _with_rounding(budget, norm_rounding)


def _tight(parameters: Iterable[str], dtype: str) -> Budget:
    tolerance = TOLERANCES[dtype]
    return Budget(tolerance, tolerance, tolerance, dict.fromkeys(parameters, GRADIENT_TOLERANCES[dtype]))


def _with_rounding(budget: Budget, norm_rounding: float) -> Budget:
    return budget._replace(grad_norm=budget.grad_norm + 2 * norm_rounding)


def _low_budget(low: Gradients, wide: Gradients, eps: float, num_labels: int) -> Budget:
    """2 x (error of one process in a lower dtype + `eps` of that dtype)."""
    want = wide.token_losses.double()
    off = low.token_losses.double() - want
    return Budget(
        2 * (float(off.norm() / want.norm()) + eps),
        2 * (float(off.abs().max() / want.norm()) * math.sqrt(num_labels) + eps),
        2 * (abs(_norm(low) / _norm(wide) - 1) + eps),
        {name: 2 * (relative(gradient, wide.of[name]) + eps) for name, gradient in low.of.items()},
    )


def _norm(gradients: Gradients) -> float:
    return math.sqrt(sum(map(_square_sum, gradients.of.values())))


def relative(got: Tensor, want: Tensor) -> float:
    """Relative L2 error; 0 if both are zero."""
    error, size = _square_sum(got, want), _square_sum(want)
    return math.sqrt(error / size) if size else math.inf if error else 0.0


def _square_sum(x: Tensor, minus: Tensor | None = None) -> float:
    """The sum of the squares of x, or of x - minus, in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    others = x.flatten().split(CHUNK) if minus is None else minus.flatten().split(CHUNK)
    for chunk, other in zip(x.flatten().split(CHUNK), others, strict=True):
        total += (chunk.double() if minus is None else chunk.double() - other.double()).square().sum()
    return float(total)


def dot(x: Tensor, y: Tensor) -> float:
    """The sum of the products of the elements of two tensors, in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for a, b in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        total += (a.double() * b.double()).sum()
    return float(total)


def _take_steps(
    config: TrialConfig, batch: Tensor, expected: Expected, budget: Budget, mesh: DeviceMesh, device: torch.device
) -> Findings:
    """Take STEPS steps on `batch` with the config's method, engine and dtype. Returns the worst of each kind of error
    over all ranks; the same on every rank."""
    workload = config.workload
    assert workload.learning_rate is not None
    workload = replace(workload, learning_rate=max(workload.learning_rate, MIN_LEARNING_RATE))
    if workload.max_grad_norm is not None:
        workload = replace(workload, max_grad_norm=expected.grad_norm / 2)
    config = replace(config, workload=workload)
    observer = Observer(config, expected.gradients, budget.gradients)
    with observer.hooked():
        results = engines.get(config.engine.name).run(
            config, [batch] * STEPS, mesh, device, lambda: None, token_losses=STEPS, watch=observer.watch
        )
    require_finite(config, results)
    padded_len = train.padded_seq_len(config, batch.shape[1] - 1)
    mine = _compare_losses(config, results[0], padded_len, expected, budget, mesh) | observer.findings(results)
    return worst_of_ranks(mine, KINDS)


def worst_of_ranks(mine: Findings, kinds: Iterable[str]) -> Findings:
    """The worst finding of any rank, of each kind; the same on every rank. Every rank of the world calls it."""
    every: list[Findings] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {
        kind: max((each[kind] for each in every if kind in each), key=lambda found: found.excess, default=NOTHING)
        for kind in kinds
    }


def _compare_losses(
    config: TrialConfig, first: StepResult, padded_len: int, expected: Expected, budget: Budget, mesh: DeviceMesh
) -> Findings:
    """Compare the losses and the gradient norm that the engine reports of the first step."""
    assert first.token_losses is not None
    layout, want = train.layout_at(config, padded_len), expected.token_losses
    padded = F.pad(want, (0, padded_len - want.shape[1]))
    mine = torch.cat([train.local_part(part, layout, mesh) for part in train.micro_batches(config, padded)])
    mean, size = float(want.sum()) / expected.num_labels, float(want.norm()) / math.sqrt(expected.num_labels)
    off = first.token_losses.double() - mine
    square_sum = off.square().sum()
    dist.all_reduce(square_sum)
    errors = {
        # L2, or the error of their mean, which is what the engine reports as its loss
        "loss": max(float(square_sum.sqrt() / want.norm()), abs(float(first.loss) - mean) / size),
        "largest_loss": float(off.abs().max()) / size,
        "grad_norm": abs(float(first.grad_norm) / expected.grad_norm - 1),
    }
    names: Mapping[str, Prose] = {"loss": "loss", "largest_loss": "the loss of one token", "grad_norm": "grad_norm"}
    return {
        kind: Finding(error, allowed, _differs(f"{names[kind]} of step 1", "one process", error, allowed))
        for kind, error in errors.items()
        for allowed in [getattr(budget, kind)]
    }


def _differs(what: Prose, reference: Prose, error: float, budget: float) -> Prose:
    return f"{what} differs from {reference} by {error:.3g} (relative), budget {budget:.3g}"


@dataclass
class Sample:
    """Some elements of one parameter, in the tensor that this rank's optimizer updates."""

    name: str  # of the parameter
    updated: Tensor
    place: slice | Tensor  # in `updated`, flat
    gradient: Tensor  # before clipping
    received: Tensor  # the gradient as the optimizer gets it; fp64
    tensors: dict[str, Tensor]  # parameter and moments as the optimizer last left them; fp64
    num_updates: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """A copy of these elements of `updated`, or of a tensor of its shape, in fp64."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach().flatten()[self.place].to(torch.float64, copy=True)


class Observer:
    """Sees an engine's gradients before it clips them (`watch`), and what its optimizer makes of them (`hooked`).

    expected: each parameter's gradient in the first step, on rank 0; budgets: the relative errors that they may have.
    Without both, gradients are compared with nothing. sample: elements of a rank's part of a parameter that are read.
    """

    def __init__(
        self, config: TrialConfig, expected: Mapping[str, Tensor], budgets: Mapping[str, float], *, sample: int = SAMPLE
    ) -> None:
        self._workload, self._sample_size = config.workload, sample
        self._gradients, self._budgets = expected, budgets
        self._stored, self._computed = train.stored_dtype(config.dtype), getattr(torch, config.dtype)
        self._clip_tolerance = 0.0  # of the step, relative
        self._clip = 1.0  # what the gradients of a step are multiplied by
        self._samples: dict[str, Sample] = {}
        self._moves = False  # whether an update is large enough to show in what the model computes
        self._worst: Findings = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Looks at every step of every optimizer of this process."""
        hooks = (
            register_optimizer_step_pre_hook(self.before_update),
            register_optimizer_step_post_hook(self.after_update),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def watch(self, parts: Iterable[Part]) -> None:
        """The engine calls it in each optimizer step, before it clips."""
        square_sum = stored_square_sum = 0.0
        for part in parts:
            square_sum += _square_sum(part.whole)
            stored_square_sum += float(torch.linalg.vector_norm(part.whole)) ** 2
            place, step = _place(part, self._sample_size)
            gradient = part.local.flatten()[::step].clone()
            if part.name not in self._samples:
                self._compare_gradient(part)
                self._samples[part.name] = Sample(part.name, part.updated, place, gradient, gradient, {})
            else:
                self._samples[part.name].gradient = gradient
        norm = math.sqrt(square_sum)
        # An engine clips with a norm that it computes in the dtype in which gradients are stored (`Expected`).
        rounding = abs(math.sqrt(stored_square_sum) / norm - 1) if norm else 0.0
        self._clip_tolerance = TOLERANCES[str(self._stored).removeprefix("torch.")] + 2 * rounding
        if self._workload.max_grad_norm is not None:
            # torch and DeepSpeed add the same 1e-6
            self._clip = min(1.0, self._workload.max_grad_norm / (norm + 1e-6))

    def findings(self, results: Sequence[StepResult]) -> Findings:
        """The worst of each kind on this rank, after the last step, of which these are the engine's results."""
        first, second = (result.token_losses for result in results[:2])
        has_labels = first is not None and bool(first.any())  # on a rank without a label all losses are 0
        # Without budgets the rate is the trial's, which may be too small to show here; the fall of the loss tells then.
        shows = self._budgets and self._moves and has_labels
        if shows and first is not None and second is not None and torch.equal(first, second):
            same: Prose = (
                "the tokens' losses of steps 1 and 2 are equal: what the optimizer updates is not what the model has"
            )
            self._note("update", None, math.inf, 0, same)
        for name in self._budgets.keys() - self._samples.keys():
            self._note("gradient", name, math.inf, 0, f"the engine shows no gradient of {name}")
        for name, sample in self._samples.items():
            taken, wanted = sample.num_updates, len(results)
            if sample.gradient.numel() and taken != wanted:
                self._note("update", name, math.inf, 0, f"the optimizer took {taken} of {wanted} steps on {name}")
        return self._worst

    def _note(self, kind: str, parameter: str | None, error: float, budget: float, message: Prose) -> None:
        found = Finding(error, budget, message, parameter)
        if kind not in self._worst or found.excess > self._worst[kind].excess:
            self._worst[kind] = found

    def _compare_gradient(self, part: Part) -> None:
        if not self._gradients:  # not rank 0
            return
        want = self._gradients.get(part.name)
        error = math.inf if want is None or want.shape != part.whole.shape else relative(part.whole, want)
        budget = self._budgets.get(part.name, 0.0)
        what: Prose = f"the gradient of {part.name} in step 1, before clipping,"
        self._note("gradient", part.name, error, budget, _differs(what, "one process", error, budget))

    def before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for sample in self._updated_by(optimizer):
            step, name = sample.num_updates + 1, sample.name
            assert sample.updated.grad is not None
            sample.received = sample.of(sample.updated.grad)
            want = sample.gradient.to(sample.received) * self._clip
            error = float(((sample.received - want).abs() / want.abs().clamp_min(_tiny(self._stored))).max())
            what: Prose = f"the gradient of {name} that the optimizer gets in step {step}"
            message = _differs(what, "the clipped one", error, self._clip_tolerance)
            self._note("received", name, error, self._clip_tolerance, message)
            found = self._tensors(optimizer, sample)
            for key, left in sample.tensors.items():
                if key not in found or not torch.equal(found[key], left):
                    changed: Prose = f"between steps {step - 1} and {step} something changes {key} of {name}"
                    self._note("update", name, math.inf, 0, changed)
            if not sample.num_updates and (left := [key for key in found if key != PARAMETER and found[key].any()]):
                old: Prose = (
                    f"before its first step {type(optimizer).__name__} has {' and '.join(left)} of {name}, not zero"
                )
                self._note("update", name, math.inf, 0, old)
            sample.tensors = found

    def after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for sample in self._updated_by(optimizer):
            sample.num_updates += 1
            before, after = sample.tensors, self._tensors(optimizer, sample)
            for error, budget, message in compare_update(
                *(self._workload, self._stored, optimizer, sample.name, sample.updated.dtype, sample.num_updates),
                *(sample.received, before, after),
            ):
                self._note("update", sample.name, error, budget, message)
            change = after[PARAMETER].to(self._computed) != before[PARAMETER].to(self._computed)
            self._moves |= float(change.double().mean()) > 0.01
            sample.tensors = after

    def _updated_by(self, optimizer: torch.optim.Optimizer) -> list[Sample]:
        """The samples of this step of `optimizer`. DeepSpeed has it take one for each buffer."""
        given = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        return [s for s in self._samples.values() if s.gradient.numel() and id(s.updated) in given]

    def _tensors(self, optimizer: torch.optim.Optimizer, sample: Sample) -> dict[str, Tensor]:
        return {key: sample.of(tensor) for key, tensor in held(optimizer, sample.updated, self._workload).items()}


def held(optimizer: torch.optim.Optimizer, updated: Tensor, workload: WorkloadConfig) -> dict[str, Tensor]:
    """Parameter and moments, as far as the optimizer has them."""
    assert workload.optimizer is not None
    state = optimizer.state.get(updated, {})
    kept = {key: state[key] for key in MOMENTS[workload.optimizer] if state.get(key) is not None}
    return {PARAMETER: updated} | kept


def compare_update(
    workload: WorkloadConfig,
    stored: torch.dtype,
    optimizer: torch.optim.Optimizer,
    name: str,
    dtype: torch.dtype,
    step: int,
    received: Tensor,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> Iterator[tuple[float, float, str]]:
    """Errors, in roundings, of what the optimizer made of the gradient that it `received` in its step number `step`,
    with their budgets and messages.

    stored, dtype: in which parameters must be updated, and are. before, after: parameter and moments, in fp64.
    """
    assert workload.optimizer is not None
    assert workload.learning_rate is not None
    kind = type(optimizer).__name__
    # in fp64 the formula rounds as often as the optimizer does
    unit, budget = torch.finfo(stored).eps, ROUNDINGS * (2 if stored == torch.float64 else 1)
    before = dict.fromkeys(MOMENTS[workload.optimizer], torch.zeros_like(received)) | dict(before)
    predicted = FORMULAS[workload.optimizer](step, workload.learning_rate, received, before)
    if len(after) < len(predicted):
        lacking = " or ".join(sorted(predicted.keys() - after.keys()))
        same = torch.equal(after[PARAMETER], before[PARAMETER])
        done: Prose = f"leaves {name} as it was" if same else f"updates {name}, but is no {workload.optimizer}"
        unlike: Prose = f"{kind} {done} in step {step}, and keeps no {lacking}"
        yield math.inf, 0, unlike
    for key in after:
        want, scale = predicted[key]
        error = float(((after[key] - want).abs() / (unit * scale + _tiny(stored))).max())
        message: Prose = (
            f"{key} of {name} after step {step} is {error:.3g} roundings off what {workload.optimizer} with "
            f"lr={workload.learning_rate} makes of the gradient that {kind} got, allowed {budget}"
        )
        yield error, budget, message
    if dtype != stored:
        narrower: Prose = f"{kind} updates {name} in {dtype}, not in {stored}"
        yield math.inf, 0, narrower


def _place(part: Part, sample: int) -> tuple[slice | Tensor, int]:
    """Where in `part.updated`, flat, the elements are that are compared, `sample` or fewer, and their distance in
    `part.local`. It has no factor in common with a row's length, so that they are of all columns."""
    numel, row = part.local.numel(), part.whole.shape[-1]
    step = max(-(-numel // sample), 1)
    while step > 1 and math.gcd(step, row) > 1:
        step += 1
    if isinstance(part.offset, Tensor):
        return part.offset[::step], step
    return slice(part.offset, part.offset + numel, step), step


def _tiny(dtype: torch.dtype) -> float:
    """The smallest normal number: below it numbers have fewer digits."""
    return torch.finfo(dtype).tiny
