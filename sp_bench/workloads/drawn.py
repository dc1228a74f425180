"""Batches of drawn documents under a policy (`workload.policy`): which ranks share one changes from pass to pass.

Each step is compared with the same training on one process, as in `parity`. In half precision the same steps are
taken in fp32 first, and compared as tightly; then those in half precision may be off by what rounding makes of one
process in the same dtype, which would hide whole bugs.

A pass is one forward and backward of a pack of documents on a group of ranks. A rank that is idle in a pass computes
tokens without labels, since FSDP gathers parameters on all ranks. Communicators are made once, for each size of groups.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import engines, methods
from sp_bench.attention import meshes
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config import streams
from sp_bench.config.documents import MULTIPLE, spans
from sp_bench.config.shape import EXACT
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import placing
from sp_bench.costs.placing import Placed
from sp_bench.engines import fsdp2, megatron_groups
from sp_bench.engines.float32_twin import float32_twin
from sp_bench.engines.fsdp2 import Pass
from sp_bench.measure.timing import Clock, Measurement, Schedule, allocated_bytes, num_steps, release_memory
from sp_bench.oracle import one_process, training_step
from sp_bench.oracle.timed_step import check_timed_steps
from sp_bench.training import text, train
from sp_bench.training.train import StepResult, Tick
from sp_bench.workloads import Job, parity
from sp_bench.workloads.parity import Mark

COUNTED = ("forward", "recompute", "backward", "loss", "parameters", "gradients")  # phases without a closed form


class Stream(NamedTuple):
    """The batches of a trial: of each its documents, its text [1,S+1], and what each rank computes of it, by passes."""

    batches: Sequence[Sequence[int]]
    texts: Sequence[Tensor]
    plans: Sequence[Sequence[Sequence[Placed | None]]]


def trained(job: Job) -> tuple[Measurement, list[Mark]]:
    """Train on the batches, and compare each with one process. Then the step whose bytes are counted. Returns a mark
    before the first step and after each.

    Raises:
        Incorrect, CannotTell: as of `parity.compare` and `parity.require_fall`.
    """
    config = job.config
    job.enter_phase("correctness")
    stream = of_trial(config)
    texts, wholes = stream.texts[:-1], [config.of_documents(lengths, 1) for lengths in stream.batches[:-1]]
    is_exact = config.dtype in EXACT
    twin = config if is_exact else float32_twin(config)[0]
    expected, again = parity.reference(twin, texts, job.device, wholes)
    parity.require_fall(expected)
    columns, rounding = {}, 0.0
    if not is_exact:
        half = getattr(torch, config.dtype)
        with training_step.full_precision():
            results = _train(replace(job, config=twin), stream, lambda: None)[:-1]
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

    results = _train(job, stream, tick)[:-1]
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
        "batches": [_described(config, *each) for each in zip(stream.batches[:-1], stream.plans, strict=False)],
    }
    return measurement, marks


def of_trial(config: TrialConfig) -> Stream:
    """The last batch is the one whose bytes are counted."""
    batches = [*islice(streams.of_trial(config), num_steps(config.workload))]
    texts = [_unlabelled_end(text.sequences(step, 1, sum(lengths))) for step, lengths in enumerate(batches)]
    return Stream(batches, texts, [_plan(config, lengths) for lengths in batches])


def _plan(config: TrialConfig, lengths: Sequence[int]) -> Sequence[Sequence[Placed | None]]:
    if config.engine.name == "megatron":
        return megatron_groups.passes(megatron_groups.scheduled(config, lengths), lengths)
    return placing.of_trial(config, lengths)


def _train(job: Job, stream: Stream, tick: Tick) -> list[StepResult]:
    if job.config.engine.name == "megatron":
        return megatron_groups.run_batches(job.config, stream.batches, stream.texts, job.device, tick)
    with opened(job, stream) as steps:
        return fsdp2.run_passes(job.config, steps, job.mesh, job.device, tick)


@contextmanager
def opened(job: Job, stream: Stream) -> Iterator[list[list[Pass]]]:
    """This rank's passes of each batch."""
    with ExitStack() as layers:
        passes = _Passes(job, layers)
        yield [passes.of_batch(*each) for each in zip(*stream, strict=True)]


def _described(config: TrialConfig, lengths: Sequence[int], plan: Sequence[Sequence[Placed | None]]) -> dict[str, Any]:
    return {
        "documents": len(lengths),
        "longest": max(lengths),
        "passes": len(plan),
        "groups": sorted({each.num_ranks for of_ranks in plan for each in of_ranks if each}),
        "imbalance": placing.imbalance(config, plan),
    }


def _unlabelled_end(sequences: Tensor) -> Tensor:
    """Sequences [n,S+1] whose last token is no label: it is of no document."""
    return torch.cat((sequences[:, :-1], ~sequences[:, -1:]), dim=1)


class _Passes:
    """This rank's passes. Attention is opened once for the documents of a pack on a size of groups."""

    def __init__(self, job: Job, opened: ExitStack) -> None:
        self._job, self._opened = job, opened
        self._rank = job.mesh.get_rank()
        self._layers: dict[tuple[tuple[int, ...], int], Sequence[methods.SequenceParallelAttention]] = {}
        self._meshes: dict[int, DeviceMesh] = {}
        size = 1
        while size <= job.config.world_size:
            config = replace(job.config, sp_size=size, dp_shard_size=job.config.world_size // size)
            self._meshes[size] = meshes.of_trial(config, _layout(config))
            size *= 2

    def of_batch(
        self, lengths: Sequence[int], sequences: Tensor, plan: Sequence[Sequence[Placed | None]]
    ) -> list[Pass]:
        """The passes of a batch, whose documents lie in `sequences` [1,S+1] one after the other."""
        where: dict[int, list[int]] = defaultdict(list)  # the first tokens of documents of so many tokens
        for span in spans(lengths):
            where[len(span)].append(span.start)
        found = []
        for of_ranks in plan:
            texts = {
                each: torch.cat([sequences[:, where[n].pop() :][:, :n] for n in each.documents], dim=1)
                for each in dict.fromkeys(filter(None, of_ranks))
            }
            found.append(self._pass(of_ranks, texts))
        return found

    def _pass(self, of_ranks: Sequence[Placed | None], texts: Mapping[Placed, Tensor]) -> Pass:
        """texts: the tokens [1,n] of each pack of the pass."""
        mine = of_ranks[self._rank] or Placed((MULTIPLE,), self._rank, 1)
        tokens = texts.get(mine, torch.zeros(1, MULTIPLE, dtype=torch.int64))
        labels = tokens if mine in texts else ~tokens
        config = self._job.config.of_documents(mine.documents, mine.num_ranks)
        key = (mine.documents, mine.num_ranks)
        mesh = self._meshes[mine.num_ranks]
        if key not in self._layers:
            opening = train.open_layers(config, train.padded_seq_len(config, config.seq_len), mesh)
            self._layers[key] = self._opened.enter_context(opening)
        layers = self._layers[key]
        # the other groups have texts of their own lengths: here all rows are this group's
        rows = torch.cat((tokens[:, :1], labels[:, 1:], ~tokens[:, :1]), dim=1).expand(config.dp_shard_size, -1)
        batch = train.shard_batch(rows, config, layers[0].layout, mesh, self._job.device)
        num_labels = sum(length - 1 for each in texts for length in each.documents)
        return Pass(layers, replace(batch, num_valid_tokens=num_labels))


def _layout(config: TrialConfig) -> SequenceLayout:
    return methods.get(config.method.name).layout(config.method, config.sp_size)
