"""Batches of drawn documents under FSDP2.

A pass is one forward and backward of a pack of documents on a group of ranks. A rank that is idle in a pass computes
tokens without labels, since FSDP gathers parameters on all ranks. Communicators are made once, for each size of groups.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import methods
from sp_bench.config.documents import MULTIPLE, spans
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import placing
from sp_bench.costs.placing import Placed
from sp_bench.engines import fsdp2
from sp_bench.engines.fsdp2 import Pass
from sp_bench.training import train
from sp_bench.training.train import DrawnBatch, StepResult, Tick

passes = placing.of_trial


def run_batches(
    config: TrialConfig, batches: Sequence[DrawnBatch], mesh: DeviceMesh, device: torch.device, tick: Tick
) -> list[StepResult]:
    """Train on a batch a step."""
    with opened(config, batches, mesh, device) as steps:
        return fsdp2.run_passes(config, steps, mesh, device, tick)


@contextmanager
def opened(
    config: TrialConfig, batches: Sequence[DrawnBatch], mesh: DeviceMesh, device: torch.device
) -> Iterator[list[list[Pass]]]:
    """This rank's passes of each batch."""
    with ExitStack() as layers:
        of_rank = _Passes(config, mesh.get_rank(), device, layers)
        yield [of_rank.of_batch(each) for each in batches]


class _Passes:
    """This rank's passes. Attention is opened once for the documents of a pack on a size of groups."""

    def __init__(self, config: TrialConfig, rank: int, device: torch.device, opened: ExitStack) -> None:
        self._config, self._rank, self._device, self._opened = config, rank, device, opened
        self._layers: dict[tuple[tuple[int, ...], int], Sequence[methods.SequenceParallelAttention]] = {}
        sizes = [2**n for n in range(config.world_size.bit_length())]
        of_sizes = [replace(config, sp_size=size, dp_shard_size=config.world_size // size) for size in sizes]
        self._meshes = {each.sp_size: methods.mesh_of(each) for each in of_sizes}

    def of_batch(self, batch: DrawnBatch) -> list[Pass]:
        where: dict[int, list[int]] = defaultdict(list)  # the first tokens of documents of so many tokens
        for span in spans(batch.lengths):
            where[len(span)].append(span.start)
        found = []
        for of_ranks in batch.passes:
            texts = {
                each: torch.cat([batch.text[:, where[n].pop() :][:, :n] for n in each.documents], dim=1)
                for each in dict.fromkeys(filter(None, of_ranks))
            }
            found.append(self._pass(of_ranks, texts))
        return found

    def _pass(self, of_ranks: Sequence[Placed | None], texts: Mapping[Placed, Tensor]) -> Pass:
        """texts: the tokens [1,n] of each pack of the pass."""
        mine = of_ranks[self._rank] or Placed((MULTIPLE,), self._rank, 1)
        tokens = texts.get(mine, torch.zeros(1, MULTIPLE, dtype=torch.int64))
        labels = tokens if mine in texts else ~tokens
        config = self._config.of_documents(mine.documents, mine.num_ranks)
        key = (mine.documents, mine.num_ranks)
        mesh = self._meshes[mine.num_ranks]
        if key not in self._layers:
            opening = train.open_layers(config, train.padded_seq_len(config, config.seq_len), mesh)
            self._layers[key] = self._opened.enter_context(opening)
        layers = self._layers[key]
        # the other groups have texts of their own lengths: here all rows are this group's
        rows = torch.cat((tokens[:, :1], labels[:, 1:], ~tokens[:, :1]), dim=1).expand(config.dp_shard_size, -1)
        batch = train.shard_batch(rows, config, layers[0].layout, mesh, self._device)
        num_labels = sum(length - 1 for each in texts for length in each.documents)
        return Pass(layers, replace(batch, num_valid_tokens=num_labels))
