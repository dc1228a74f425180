"""A full training step of a decoder: forward, loss, backward, gradient synchronisation and optimizer.

m micro-batches a step; D data-parallel ranks, each with B sequences of a micro-batch; S tokens of a sequence.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from sp_bench import engines, kernels, methods
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.engines import Engine
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.timing import Clock, Measurement, num_steps, release_memory
from sp_bench.oracle import one_process, reduced_length
from sp_bench.oracle.timed_length import check_rows
from sp_bench.training import text, train
from sp_bench.workloads import Job
from sp_bench.workloads.step import attention_step, local_inputs

# The proof has the trial's heads, widths, ranks and layout, but fewer layers: a whole 8B model with its gradients does
# not fit on one device beside that device's own shards.
PROOF_LAYERS = 2
# Largest relative error against one process in the same dtype. For lower dtypes see `prove`.
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


@dataclass(frozen=True)
class Proof:
    """Relative errors of step 0 against one process, and their budgets."""

    loss: float  # L2 over the tokens' losses; their mean would hardly show wrong positions, which change each of them
    grad_norm: float
    loss_budget: float
    grad_norm_budget: float

    def check(self) -> None:
        """
        Raises:
            Incorrect: an error is above its budget, or not a number.
        """
        for name in ("loss", "grad_norm"):
            error, budget = getattr(self, name), getattr(self, f"{name}_budget")
            if not error <= budget:
                raise Incorrect(
                    f"{name} of step 0 differs from one process by {error:.3g} (relative), budget {budget:.3g}"
                )


def run(job: Job) -> Measurement:
    job.enter_phase("correctness")
    attention_columns = prove_attention(job)
    proof = prove(job)
    proof.check()
    release_memory(job.device)
    config, engine = job.config, engines.get(job.config.engine.name)
    padded_len = train.padded_seq_len(config, config.seq_len)
    texts = [text.sequences(0, config.num_sequences, config.seq_len)] * num_steps(config.workload)
    clock = Clock(config.workload, job.device, job.enter_phase)
    results = engine.run(config, texts, job.mesh, job.device, clock.tick, token_losses=False)
    measurement = clock.measurement
    timed = results[config.workload.warmup_steps :][: config.workload.timed_steps]
    loss, grad_norm = [float(result.loss) for result in timed], [float(result.grad_norm) for result in timed]
    require_finite(loss, grad_norm)
    measurement.predicted = engine.traffic(config, padded_len)
    measurement.unpredicted = train.unpredicted_phases(config, engine.UNPREDICTED)
    measurement.columns = attention_columns | {
        "padded_seq_len": padded_len,
        "rel_error_loss": proof.loss,
        "rel_error_grad_norm": proof.grad_norm,
        "loss": loss,
        "grad_norm": grad_norm,
        "model_flops": float(training_costs.model_flops(config)),
        "hardware_flops": float(training_costs.hardware_flops(config, padded_len)),
    }
    return measurement


def labelled(engine: Engine, sequences: Tensor) -> Tensor:
    """`sequences` [m*D*B,S+1] without the last tokens, for which the engine has no label. The reference is trained
    without them; under a causal mask they change nothing before them."""
    return sequences[:, : sequences.shape[1] - engine.UNLABELLED]


def require_finite(loss: list[float], grad_norm: list[float]) -> None:
    """
    Raises:
        Incorrect: a step's loss or gradient norm is infinite or not a number.
    """
    for step, values in enumerate(zip(loss, grad_norm, strict=True)):
        if not all(map(math.isfinite, values)):
            raise Incorrect(f"step {step}: loss {values[0]} and gradient norm {values[1]} must be finite")


def prove_attention(job: Job) -> dict[str, Any]:
    """Prove the method's output and gradients on random inputs: of all rows at the reduced length, and of sampled rows
    at the timed length. Returns row columns.

    Raises:
        Incorrect: an error is above its budget.
    """
    config = job.config
    shape = config.attention_shape(train.padded_seq_len(config, _proof_seq_len(config)))
    kernel = kernels.get(config.kernel.name)
    with train.open_attention(config, shape.seq_len, job.mesh) as attention:
        columns = reduced_length.check_attention(
            attention, kernel, config.kernel.name, shape, job.mesh, job.device, config.seed
        )
    timed = config.attention_shape(train.padded_seq_len(config, config.seq_len))
    with train.open_attention(config, timed.seq_len, job.mesh) as attention:
        positions = attention.layout.global_positions(job.mesh.get_rank() % config.sp_size, timed.seq_len)
        seed = config.seed * config.world_size + job.mesh.get_rank()
        inputs = local_inputs(timed, len(positions), job.device, seed)
        step, budget = partial(attention_step, inputs, attention), columns["error_budget"]
        errors = check_rows(step, inputs, positions, timed, job.mesh, config.seed, budget)
    return columns | {"sampled_rel_error": errors.pop("output"), "sampled_grad_error": errors}


def prove(job: Job) -> Proof:
    """Compare the tokens' losses and the gradient norm of step 0, at the reduced length, with one process.

    fp32 and fp64 are compared with the same dtype; the budget is TOLERANCES. Lower dtypes are compared with fp32; the
    budget is 2 x (error of one process in the trial's dtype + eps), as for attention.
    """
    config = proof_config(job.config)
    batch = text.sequences(0, config.num_sequences, _proof_seq_len(config))
    stored, computed = train.stored_dtype(config.dtype), getattr(torch, config.dtype)
    expected = [labelled(engines.get(config.engine.name), batch)]
    (scalars,), (losses,) = one_process.broadcast_steps(config, expected, stored, job.device)
    loss, grad_norm = _errors_on_mesh(job, config, batch, losses, scalars[1])
    if config.dtype in TOLERANCES:
        return Proof(loss, grad_norm, TOLERANCES[config.dtype], TOLERANCES[config.dtype])
    (low_scalars,), (low_losses,) = one_process.broadcast_steps(config, expected, computed, job.device)
    eps = torch.finfo(computed).eps
    loss_error = (low_losses - losses).norm() / losses.norm()
    grad_norm_error = (low_scalars[1] - scalars[1]).abs() / scalars[1]
    return Proof(loss, grad_norm, 2 * (float(loss_error) + eps), 2 * (float(grad_norm_error) + eps))


def _proof_seq_len(config: TrialConfig) -> int:
    """The reduced length, made a little shorter so that it needs as many padded tokens as the timed length does."""
    multiple = methods.get(config.method.name).layout(config.method, config.sp_size).multiple
    reduced = min(config.workload.correctness_seq_len, config.seq_len)
    return reduced - (reduced - config.seq_len) % multiple or config.seq_len


def proof_config(config: TrialConfig) -> TrialConfig:
    """`config` with PROOF_LAYERS layers, and with as many tiles of the loss as the timed length has."""
    model = replace(config.model, num_layers=min(PROOF_LAYERS, config.model.num_layers))
    if (tile := config.workload.loss_tile_tokens) is None:
        return replace(config, model=model)
    smaller = max(tile * _proof_seq_len(config) // config.seq_len, 1)
    return replace(config, model=model, workload=replace(config.workload, loss_tile_tokens=smaller))


def _errors_on_mesh(
    job: Job, config: TrialConfig, sequences: Tensor, expected_losses: Tensor, expected_norm: Tensor
) -> tuple[float, float]:
    """Take one step with the trial's method, engine and dtype. Returns the relative errors of the tokens' losses
    [m*D*B,S] and of the gradient norm; the same on every rank."""
    engine, layout = (
        engines.get(config.engine.name),
        methods.get(config.method.name).layout(config.method, config.sp_size),
    )
    (result,) = engine.run(config, [sequences], job.mesh, job.device, lambda: None, token_losses=True)
    assert result.token_losses is not None
    padded_len = train.padded_seq_len(config, _proof_seq_len(config))
    padded = F.pad(expected_losses, (0, padded_len - expected_losses.shape[1]))
    expected = torch.cat([train.local_part(part, layout, job.mesh) for part in train.micro_batches(config, padded)])
    squared_error = (result.token_losses.double() - expected).square().sum()
    dist.all_reduce(squared_error)
    norm_error = (result.grad_norm.double() - expected_norm).abs() / expected_norm
    return float(squared_error.sqrt() / expected_losses.norm()), float(norm_error)
