"""Proves whole training steps at the timed length and full depth, where no reference fits.

Under a causal mask a token's loss depends on the tokens before it alone. So the tokens' losses of the first step, which
has the initial weights, must be those of the same engine on the same text cut short:

- at the reduced length, at which the step has been proven against one process. A fault of long sequences shows there.
- where ranks share a sequence, also at nearly the timed length, unless a step takes minutes (`workload.single_step`).
  The ranks' shards then end at other tokens, so wrong positions, labels or tokens at a shard's edge show, whichever
  rank they are on.

A pack is cut where the text is: its documents are those of the timed length, but for the last one. Windows are those of
the timed length; one that would hide nothing is shorter where steps are compared with one process.

In half precision the reduced length is run in fp32 too: rounding is what the two runs differ by, at full depth.

At the reduced length further steps follow on the same text and weights. They must equal the first, so what is proven of
it holds for later ones.

In timed steps the loss is finite, the gradient is not zero, and the optimizer changes the weights of every rank.

The runs of the text cut short (`run_shorter`) belong to the code, the options and the machine: one trial's hold for
others of the same. What is compared with them, and all that is said of timed steps, belongs to this execution.

m micro-batches a step; D data-parallel ranks, each with B sequences of a micro-batch; S tokens of a sequence; P ranks
share a sequence.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sp_bench import engines
from sp_bench.config.documents import cut
from sp_bench.config.prose import Prose
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.flags import MAX_FALL_BUDGET
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.measure.incorrect import CannotTell, Incorrect
from sp_bench.measure.timing import Schedule, release_memory
from sp_bench.oracle import full_depth
from sp_bench.oracle.full_depth import Fall, FullDepth
from sp_bench.oracle.training_step import (
    CHUNK,
    TOLERANCES,
    full_precision,
    labelled,
    length_multiple,
    proof_seq_len,
    require,
    require_finite,
)
from sp_bench.training.train import StepResult, Tick, is_labelled, layout_at, padded_seq_len, stored_dtype

# Of a run in half precision, over what it is off the same run in fp32. Right runs reach 0.9 and 1.2; the worst token
# is the worst of many more at the timed length.
LOSS_FACTOR, WORST_FACTOR = 2.0, 4.0
MAX_ROUNDING = 4  # eps of the dtype
STILL_STEPS = 4  # on one text while the optimizer stands still
SAME_NORM = 0.01  # relative; kernels add gradients in any order
MAX_FLOAT8_ROUNDING = torch.finfo(torch.float8_e4m3fn).eps / 2  # where the layers' products are in FP8
# What a value may change by from one step to the next, relative to the largest of all, and so many times what it
# changes by at the reduced length. Of 653 random right settings the loss reached 0.73 of that, the norm 0.76.
MAX_CHANGES = {"losses": (0.02, 3.0), "gradient norms": (0.2, 5.0)}
# Results are sure to differ where the loss changes by so many eps of the weights. Fewer of them may be rounded away in
# half precision, or in the mean over a longer text.
RESOLVED = 100


class CutShort(TrialConfig):
    """The trial whose text ends early."""

    def documents(self, seq_len: int) -> tuple[int, ...]:
        return cut(super().documents(self.seq_len), seq_len)

    def window(self, seq_len: int) -> int | None:
        """That of the timed length; None: it hides nothing of a text that is so short."""
        window = super().window(self.seq_len)
        return None if window is None or window >= self._longest(seq_len) else window

    def labelled(self, seq_len: int) -> list[range]:
        """Those of the timed length; where all of them are masked, as if the text had been as short from the start."""
        tokens = [range(of.start, min(of.stop, seq_len)) for of in super().labelled(self.seq_len)]
        return [each for each in tokens if each] or super().labelled(seq_len)


class Narrow(CutShort):
    """The same where a window of the timed length would hide nothing: it is shorter by as much as the text is, so that
    layers with a window differ from those without."""

    def window(self, seq_len: int) -> int | None:
        return super().window(seq_len) or TrialConfig.window(self, seq_len)


class Run(NamedTuple):
    """The first step of the engine on a text of `seq_len` tokens."""

    seq_len: int
    losses: Tensor  # [m*D*B,S], fp64, nats; 0 without a label
    labelled: Tensor  # [S], bool: the tokens that have a label
    grad_norm: float


class Errors(NamedTuple):
    """How far the losses of a run's tokens are from those of another, over their root mean square."""

    loss: float
    worst: float  # of any token
    token: int  # its position


class Shorter(NamedTuple):
    """The text cut short, and what runs in the trial's dtype may differ by."""

    runs: Sequence[Run]  # of `shorter_lengths`
    loss_budget: float
    worst_budget: float
    columns: Mapping[str, Any] = {}  # of the row
    line: Sequence[tuple[float, float]] = ()  # loss and gradient norm of the first steps, at the reduced length in fp32


def run_shorter(config: TrialConfig, sequences: Tensor, mesh: DeviceMesh, device: torch.device) -> Shorter:
    """Take the first step on `sequences` [m*D*B,S+1] cut short. Every rank of the world calls it. In fp32 some more
    steps are taken there (`full_depth`). Trials of fp32 and fp64 prove the fall of the loss at the longest length too.

    Raises:
        Incorrect: half precision is further off fp32 than rounding explains, or what `_rehearse` says.
    """
    config = CutShort(**vars(config))
    cut = [sequences[:, : length + 1] for length in shorter_lengths(config)]
    is_exact = config.dtype in TOLERANCES
    twin = config if is_exact else float32_twin(config)[0]
    with full_precision():
        narrow, padded_len = Narrow(**vars(twin)), padded_seq_len(twin, cut[0].shape[1] - 1)
        exact, fall, sizes, columns, line = _rehearse(narrow, cut[0], mesh, device)
        if narrow.window(padded_len) != twin.window(padded_len):
            (exact,) = _runs(twin, cut[0], mesh, device)
        if is_exact:
            tolerance = TOLERANCES[config.dtype]
            require_same(_runs(config, cut[0], mesh, device, STILL_STEPS), tolerance)
            longer = cut[1:] or [sequences] * (exact.seq_len < config.seq_len and not config.workload.single_step)
            runs = [exact]
            for text in longer:
                _, run, _, other = _watched(config, text, mesh, device, updates=0, sizes=sizes)
                runs, fall = [*runs, run], max(fall, other, key=lambda each: each.error / each.budget)
                full_depth.require_fall(other, _where(config, run))
            return Shorter(runs, tolerance, tolerance, columns | fall.columns(), line)
    still = _runs(config, cut[0], mesh, device, STILL_STEPS)
    runs = [still[0], *(_runs(config, text, mesh, device)[0] for text in cut[1:])]
    rounding = errors_of(runs[0], exact)
    in_float8 = config.workload.linear_dtype != "model"
    unit = torch.finfo(getattr(torch, config.dtype)).eps
    if not rounding.loss <= (limit := MAX_FLOAT8_ROUNDING if in_float8 else MAX_ROUNDING * unit):
        raise Incorrect(
            f"losses at seq_len={exact.seq_len} in {config.dtype} differ from those in float32 by {rounding.loss:.3g} "
            f"(relative), budget {limit:.3g}"
        )
    require_same(still, LOSS_FACTOR * rounding.loss)
    return Shorter(runs, LOSS_FACTOR * rounding.loss, WORST_FACTOR * rounding.worst, columns | fall.columns(), line)


def _where(config: TrialConfig, run: Run) -> Prose:
    return f"with all {config.model.num_layers} layers at seq_len={run.seq_len}"


def _rehearse(
    twin: TrialConfig, sequences: Tensor, mesh: DeviceMesh, device: torch.device
) -> tuple[Run, Fall, Mapping[str, float], dict[str, Any], list[tuple[float, float]]]:
    """The first step of `twin`, which is the trial in fp32 or fp64; how its loss falls after some updates; the sizes of
    its first gradients (`FullDepth`); row columns; and its losses and gradient norms.

    Raises:
        Incorrect: an update is wrong, a parameter has no gradient, or the loss does not fall as the gradients say.
    """
    depth, run, results, fall = _watched(twin, sequences, mesh, device)
    losses = full_depth.check_losses(twin, labelled(twin, sequences), run.losses, run.labelled, device)
    found = losses | depth.findings(results)
    require(found, f"{_where(twin, run)}: ")
    full_depth.require_fall(fall, _where(twin, run))
    line = [(float(result.loss), float(result.grad_norm)) for result in results[: depth.num_steps - 2]]
    require_resolution(twin, line)
    columns = {"full_loss_error": found["loss"].error, "full_update_error": found["update"].column()}
    return run, fall, depth.sizes[0], columns, line


def shorter_lengths(config: TrialConfig) -> list[int]:
    """The reduced length, and the longest at which every shard ends at another token: half a shard less than the timed
    length. Both need as many padded tokens as the timed length does. Where labels are masked the reduced length may
    have none that is compared, so the longer one is there on one rank too, and has 3 of 4 labels or more."""
    lengths, masked = [proof_seq_len(config)], config.workload.masked_label_share > 0
    if (config.sp_size > 1 or masked) and not config.workload.single_step:
        multiple = length_multiple(config)
        less = config.seq_len // (2 * config.sp_size)
        longer = config.seq_len - (min(less, config.num_labels(config.seq_len) // 4) if masked else less)
        lengths.append(longer - (longer - config.seq_len) % multiple)
    return [length for length in dict.fromkeys(lengths) if length > 1]


def require_resolution(config: TrialConfig, line: Sequence[tuple[float, float]]) -> None:
    """line: loss and gradient norm of steps whose updates are right, all on one text.

    Raises:
        CannotTell: all are equal, since no update is large enough to show in the weights.
    """
    if len(set(line)) == 1:
        raise CannotTell(_unresolved(config, f"the losses of {len(line)} steps are equal"))


def _unresolved(config: TrialConfig, found: Prose) -> Prose:
    workload, eps = config.workload, torch.finfo(stored_dtype(config.dtype)).eps
    size = config.model.hidden_size**-0.5  # of weights as they are drawn
    needed = max(10 * eps * size, 10 * (workload.learning_rate or 0.0))
    return (
        f"the updates are too small to tell steps apart: with workload.learning_rate={workload.learning_rate:g} and "
        f"workload.max_grad_norm={workload.max_grad_norm} {found}; use a workload.learning_rate of {needed:.1g} or "
        "more, and a workload.max_grad_norm of 1e-3 or more"
    )


def _watched(
    config: TrialConfig, sequences: Tensor, mesh: DeviceMesh, device: torch.device, **options: Any
) -> tuple[FullDepth, Run, list[StepResult], Fall]:
    """What watched the steps on `sequences`, the first step, all steps' results, and how the loss falls between the
    last two; nearer by, if it does not fall as it must or its budget can tell nothing. options: of FullDepth."""
    depth = FullDepth(config, **options)
    run, results, fall = _moved(config, sequences, depth, mesh, device)
    if not fall.error <= fall.budget <= MAX_FALL_BUDGET:  # the same on every rank
        closer = FullDepth(config, **options, distance=full_depth.FALL / full_depth.NEARER)
        fall = full_depth.nearer(fall, _moved(config, sequences, closer, mesh, device)[2])
    return depth, run, results, fall


def _moved(
    config: TrialConfig, sequences: Tensor, depth: FullDepth, mesh: DeviceMesh, device: torch.device
) -> tuple[Run, list[StepResult], Fall]:
    engine, seq_len = engines.get(config.engine.name), sequences.shape[1] - 1
    # The last two steps read another text, so that what is left of the steps before would show.
    other = sequences.roll(seq_len // 2, dims=1) if depth.num_steps > 2 else sequences
    texts = [sequences] * (depth.num_steps - 2) + [other] * 2
    with depth.hooked():
        results = engine.run(config, texts, mesh, device, lambda: None, token_losses=len(texts), watch=depth.watch)
    require_finite(config, results)
    runs = [first_step(config, results[index], seq_len, mesh) for index in (0, -2, -1)]
    release_memory(device)
    return runs[0], results, depth.fall(*(run.losses[:, run.labelled] for run in runs[1:]))


def _runs(
    config: TrialConfig, sequences: Tensor, mesh: DeviceMesh, device: torch.device, num_steps: int = 1
) -> list[Run]:
    """The first step on `sequences`, and further ones, in which the weights are as they were."""
    hook = register_optimizer_step_pre_hook(full_depth.stand_still)
    try:
        texts = [sequences] * num_steps
        run = engines.get(config.engine.name).run
        results = run(config, texts, mesh, device, lambda: None, token_losses=num_steps)
    finally:
        hook.remove()
    runs = [first_step(config, result, sequences.shape[1] - 1, mesh) for result in results]
    release_memory(device)
    return runs


def require_same(runs: Sequence[Run], budget: float) -> None:
    """
    Raises:
        Incorrect: a step on the text and the weights of the first one has other losses or another gradient norm.
    """
    first, *others = runs
    for step, run in enumerate(others, 2):
        error, of_norm = errors_of(run, first).loss, abs(run.grad_norm / (first.grad_norm or math.inf) - 1)
        for what, found, limit in (("losses", error, budget), ("gradient norm", of_norm, SAME_NORM)):
            if not found <= limit:
                raise Incorrect(
                    f"the {what} of step {step} at seq_len={run.seq_len} differ from step 1 by {found:.3g} (relative), "
                    f"budget {limit:.3g}, although text and weights are the same"
                )


def first_step(config: TrialConfig, result: StepResult, seq_len: int, mesh: DeviceMesh) -> Run:
    """The losses of all ranks' tokens, from the result of a first step.

    Raises:
        Incorrect: the engine gives no token's loss, or reports another loss than their mean.
    """
    if result.token_losses is None:
        raise Incorrect(f"engine {config.engine.name} gives no loss of a token: nothing proves its losses")
    padded_len = padded_seq_len(config, seq_len)
    layout = layout_at(config, padded_len)
    data_rank, sequence_rank = divmod(mesh.get_rank(), layout.sp_size)
    unlabelled = engines.get(config.engine.name).UNLABELLED
    num_tokens = seq_len - unlabelled
    positions = torch.tensor(layout.global_positions(sequence_rank, padded_len))
    labelled = is_labelled(config, seq_len, padded_len, unlabelled=unlabelled)[:num_tokens]
    mine = (positions < num_tokens).nonzero().flatten()
    mine = mine[labelled[positions[mine]]]
    # [m,D,B,S]: in this order the sequences of all ranks and micro-batches are one batch
    sizes = (config.workload.num_micro_batches, mesh.size() // layout.sp_size, config.batch_size)
    losses = torch.zeros(*sizes, num_tokens, dtype=torch.float64, device=result.token_losses.device)
    got = result.token_losses.double().unflatten(0, (sizes[0], sizes[2]))
    losses.select(1, data_rank)[..., positions[mine].to(losses.device)] = got[..., mine.to(losses.device)]
    dist.all_reduce(losses)
    mean, said = float(losses.sum() / (math.prod(sizes) * labelled.sum())), float(result.loss)
    if not abs(said - mean) <= 1e-3 * abs(mean):
        raise Incorrect(
            f"the loss of the first step at seq_len={seq_len} is {said:.6g}, and its tokens' mean {mean:.6g}"
        )
    return Run(seq_len, losses.flatten(0, 2), labelled.to(losses.device), float(result.grad_norm))


def _shared(run: Run, other: Run) -> Tensor:
    """The tokens that have a label in both."""
    length = min(len(run.labelled), len(other.labelled))
    return (run.labelled[:length] & other.labelled[:length]).nonzero().flatten()


def errors_of(run: Run, other: Run) -> Errors:
    """Over the tokens that have a label in both."""
    tokens = _shared(run, other)
    want = other.losses[:, tokens]
    off = run.losses[:, tokens] - want
    worst, size = off.abs().amax(0).max(0), float(want.square().mean().sqrt())
    return Errors(float(off.norm() / want.norm()), float(worst.values) / size, int(tokens[worst.indices]))


def check_first_step(first: Run, shorter: Shorter) -> dict[str, Any]:
    """Compare the first step at the timed length with those on the text cut short. Returns row columns.

    Raises:
        Incorrect: a loss differs too much, or no token has a label in both; the message is the same on every rank.
    """
    compared = [run for run in shorter.runs if len(_shared(first, run))]
    if not compared:
        lengths = ", ".join(str(run.seq_len) for run in shorter.runs)
        raise Incorrect(
            f"no token has a label both at seq_len={first.seq_len} and at {lengths}: nothing proves its losses; use a "
            "larger seq_len, or a smaller workload.masked_label_share"
        )
    found = [errors_of(first, run) for run in compared]
    for run, errors in zip(compared, found, strict=True):
        differ: Prose = f"at seq_len={first.seq_len} differ from those at seq_len={run.seq_len}"
        shared: Prose = f"the first {run.losses.shape[1]} tokens"
        worst: Prose = f"token {errors.token}"
        for what, error, budget in (
            (shared, errors.loss, shorter.loss_budget),
            (worst, errors.worst, shorter.worst_budget),
        ):
            if not error <= budget:
                raise Incorrect(
                    f"the losses of {what} {differ} by {error:.3g} (relative), budget {budget:.3g}, although both "
                    "texts begin with the same tokens"
                )
    return {
        **shorter.columns,
        "timed_loss_error": max(each.loss for each in found),
        "timed_max_loss_error": max(each.worst for each in found),
    }


def check_timed_steps(results: Sequence[StepResult]) -> dict[str, list[float]]:
    """Row columns: the loss and the gradient norm of each timed step.

    Raises:
        Incorrect: a value is infinite or not a number, or a gradient is zero.
    """
    loss, grad_norm = [float(result.loss) for result in results], [float(result.grad_norm) for result in results]
    for step, values in enumerate(zip(loss, grad_norm, strict=True)):
        if not all(map(math.isfinite, values)):
            raise Incorrect(f"step {step}: loss {values[0]} and gradient norm {values[1]} must be finite")
        if values[1] <= 0:
            raise Incorrect(f"step {step}: the gradient norm is {values[1]}: there was no backward")
    return {"loss": loss, "grad_norm": grad_norm}


def check_line(results: Sequence[StepResult], line: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Compare what loss and gradient norm change by from each step to the next with what they change by at the reduced
    length (`Shorter.line`): all steps train on one text. How far they go over many steps depends on the length, so that
    is compared with nothing. Returns a row column.

    Raises:
        Incorrect: a step is other than the one before it.
    """
    reported = zip(*((float(result.loss), float(result.grad_norm)) for result in results), strict=True)
    found: list[float] = []
    for (what, (least, times)), values, short in zip(
        MAX_CHANGES.items(), reported, zip(*line, strict=True), strict=True
    ):
        budget = least + times * max(_changes(short))
        found.append(max(_changes(values), default=0.0))
        if not found[-1] <= budget:
            raise Incorrect(
                f"the {what} of the steps on one text are {', '.join(f'{value:.4g}' for value in values)}: they change "
                f"by {found[-1]:.3g} of the largest from one step to the next, budget {budget:.3g}"
            )
    return {"line_error": found[0]}


def _changes(values: Sequence[float]) -> list[float]:
    """From each value to the next, relative to the largest."""
    return [abs(after - before) / max(values) for before, after in pairwise(values)]


def require_new_results(
    config: TrialConfig, loss: Sequence[float], grad_norm: Sequence[float], line: Sequence[tuple[float, float]]
) -> None:
    """line: of the steps at the reduced length (`Shorter.line`); empty: there were none.

    Raises:
        Incorrect: all timed steps have the same values, although the weights changed.
        CannotTell: the same, and at the reduced length the loss changes by so little that rounding explains it.
    """
    if len(loss) == 1 or len(set(zip(loss, grad_norm, strict=True))) > 1:
        return
    equal: Prose = f"all {len(loss)} timed steps have loss {loss[0]} and gradient norm {grad_norm[0]}"
    eps = torch.finfo(stored_dtype(config.dtype)).eps
    if line and max(abs(each / line[0][0] - 1) for each, _ in line) < RESOLVED * eps:
        raise CannotTell(_unresolved(config, equal))
    raise Incorrect(f"{equal}: one was repeated")


class Weights:
    """What the optimizers of this rank update, as sums of elements: before the timed steps and after them.

    They are read outside the timed window. Without warm-up steps, those before are read at the first update, in the
    first timed step.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._tensors: dict[int, Tensor] = {}  # by their ids
        self._before: dict[int, float] = {}
        self._after: dict[int, float] = {}
        self._num_ticks = 0

    @contextmanager
    def watched(self, tick: Tick) -> Iterator[Tick]:
        """Yields what the engine is to call instead of `tick`."""
        hook = register_optimizer_step_pre_hook(self._before_update)

        def ticking() -> bool | None:
            if self._num_ticks == self._schedule.workload.warmup_steps and self._tensors:
                hook.remove()
                self._before = self._sums()
            is_last = tick()
            if self._num_ticks == self._schedule.last_timed:
                self._after = self._sums()
            self._num_ticks += 1
            return is_last

        try:
            yield ticking
        finally:
            hook.remove()
            self._tensors.clear()

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for tensor in (each for group in optimizer.param_groups for each in group["params"]):
            if id(tensor) not in self._tensors:
                self._tensors[id(tensor)] = tensor
                self._before[id(tensor)] = _sum(tensor)

    def _sums(self) -> dict[int, float]:
        return {key: _sum(tensor) for key, tensor in self._tensors.items()}

    def require_changed(self) -> None:
        """
        Raises:
            Incorrect: all weights of a rank are as they were before the timed steps. Raised on every rank.
        """
        frozen: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(frozen, self._before == self._after)
        if any(frozen):
            ranks = ", ".join(str(rank) for rank, is_frozen in enumerate(frozen) if is_frozen)
            raise Incorrect(f"the optimizer changed no weight of ranks {ranks} in the timed steps")


def _sum(tensor: Tensor) -> float:
    """The sum of this rank's elements, in fp64."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    chunks = local.detach().flatten().split(CHUNK)
    return float(torch.stack([chunk.sum(dtype=torch.float64) for chunk in chunks]).sum())
