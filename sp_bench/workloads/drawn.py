"""Batches of drawn documents under a policy (`workload.policy`): which ranks share one changes from pass to pass.

Each step is compared with the same training on one process, as in `parity`. In half precision the same steps are
taken in fp32 first, and compared as tightly; then those in half precision may be off by what rounding makes of one
process in the same dtype, which would hide whole bugs.

How an engine trains on them is in engines/fsdp2_groups.py and megatron_groups.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sp_bench import engines
from sp_bench.config import streams
from sp_bench.config.shape import EXACT
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import placing
from sp_bench.engines import fsdp2_groups, megatron_groups
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.measure.timing import Clock, Measurement, Schedule, allocated_bytes, num_steps, release_memory
from sp_bench.oracle import one_process, training_step
from sp_bench.oracle.timed_step import check_timed_steps
from sp_bench.training import text
from sp_bench.training.train import DrawnBatch, StepResult, Tick
from sp_bench.workloads import Job, parity
from sp_bench.workloads.parity import Mark

COUNTED = ("forward", "recompute", "backward", "loss", "parameters", "gradients")  # phases without a closed form
GROUPS = {"fsdp2": fsdp2_groups, "megatron": megatron_groups}  # engine -> how it places documents and trains on them


def trained(job: Job) -> tuple[Measurement, list[Mark]]:
    """Train on the batches, and compare each with one process. Then the step whose bytes are counted. Returns a mark
    before the first step and after each.

    Raises:
        Incorrect, CannotTell: as of `parity.compare` and `parity.require_fall`.
    """
    config = job.config
    job.enter_phase("correctness")
    batches = of_trial(config)
    texts = [each.text for each in batches[:-1]]
    wholes = [config.of_documents(each.lengths, 1) for each in batches[:-1]]
    is_exact = config.dtype in EXACT
    twin = config if is_exact else float32_twin(config)[0]
    expected, again = parity.reference(twin, texts, job.device, wholes)
    parity.require_fall(expected)
    columns, rounding = {}, 0.0
    if not is_exact:
        half = getattr(torch, config.dtype)
        with training_step.full_precision():
            results = _train(replace(job, config=twin), batches, lambda: None)[:-1]
        columns = parity.compare(parity.reported(results), expected, again, "in float32 ")
        again = [one_process.broadcast_steps(config, texts, half, job.device, wholes)]
        rounding = torch.finfo(half).eps
    release_memory(job.device)
    leftover = allocated_bytes(job.device)
    clock = Clock(Schedule(config.workload), job.device, job.enter_phase, job.trace_to)
    marks: list[Mark] = []

    def tick() -> bool:
        marks.append(parity.mark(job.device))
        return clock.tick()

    results = _train(job, batches, tick)[:-1]
    measurement = clock.measurement
    measurement.leftover_bytes = leftover
    got = parity.reported(results)
    compared = parity.compare(got, expected, again, rounding=rounding)
    if not is_exact:
        of_loss, of_norm = (got / expected - 1).abs().amax(0).tolist()
        compared = columns | {"rel_error_loss": of_loss, "rel_error_grad_norm": of_norm}
    measurement.unpredicted = (*COUNTED, *engines.get(config.engine.name).UNPREDICTED)
    measurement.columns = {
        **compared,
        **check_timed_steps(results),
        "batches": [_described(config, each) for each in batches[:-1]],
    }
    return measurement, marks


def of_trial(config: TrialConfig) -> list[DrawnBatch]:
    """The last batch is the one whose bytes are counted."""
    passes, batches = GROUPS[config.engine.name].passes, []
    for step, lengths in enumerate(islice(streams.of_trial(config), num_steps(config.workload))):
        whole = _unlabelled_end(text.sequences(step, 1, sum(lengths)))
        batches.append(DrawnBatch(lengths, whole, passes(config, lengths)))
    return batches


def _train(job: Job, batches: Sequence[DrawnBatch], tick: Tick) -> list[StepResult]:
    return GROUPS[job.config.engine.name].run_batches(job.config, batches, job.mesh, job.device, tick)


def _described(config: TrialConfig, batch: DrawnBatch) -> dict[str, Any]:
    return {
        "documents": len(batch.lengths),
        "longest": max(batch.lengths),
        "passes": len(batch.passes),
        "groups": sorted({each.num_ranks for of_ranks in batch.passes for each in of_ranks if each}),
        "imbalance": placing.imbalance(config, batch.passes),
    }


def _unlabelled_end(sequences: Tensor) -> Tensor:
    """Sequences [n,S+1] whose last token is no label: it is of no document."""
    return torch.cat((sequences[:, :-1], ~sequences[:, -1:]), dim=1)
