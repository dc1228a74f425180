"""Megatron-Core's dynamic context parallelism (`hybrid_context_parallel`) on batches of drawn documents.

Its scheduler places each document on a group of 1, 2, 4 ... ranks, its schedule runs one document after the other, its
functions cut a document and find the group, and TransformerEngine's attention changes to that group (p2p). Its data
loader, which sends texts between ranks, is left out: each rank has all texts.

In float32 a ring of ours, cut as Megatron cuts, stands in for the attention (engines/megatron.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import methods
from sp_bench.config.documents import MULTIPLE, spans
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.placing import Passes, Placed
from sp_bench.engines import megatron
from sp_bench.measure.incorrect import Incorrect
from sp_bench.training import train
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.training.text import tokens_of
from sp_bench.training.train import DrawnBatch, StepResult, Tick

Groups = Sequence[Sequence[Sequence[int]]]  # one after the other, of each rank its documents in their order


def passes(config: TrialConfig, lengths: Sequence[int]) -> Passes:
    """Which ranks compute which documents of a batch, by Megatron's scheduler.

    Raises:
        Incorrect: as `_scheduled`.
    """
    return _passes(_scheduled(config, lengths), lengths)


def run_batches(
    config: TrialConfig, batches: Sequence[DrawnBatch], mesh: DeviceMesh, device: torch.device, tick: Tick
) -> list[StepResult]:
    """Train on a batch a step."""
    whole = replace(config.of_documents((config.seq_len,), 1), method=MethodConfig("single"))
    with megatron._environment(), ExitStack() as opened:
        megatron._initialise_groups(whole, dynamic=True)
        of_ours = None if megatron._on_transformer_engine(config) else _Ours(config, opened)
        model: Any = megatron.build(whole, config.seq_len, None, of_ours)
        model.config.hybrid_context_parallel = True
        model.config.max_seqlen_per_dp_cp_rank = _held_tokens(config)
        training = megatron._start(whole, model, device, None)
        model.config.no_sync_func = training.model.no_sync
        step = _Step(training, of_ours)
        steps = [(_scheduled(config, each.lengths), _samples(each, device)) for each in batches]
        return train.run_steps(step, steps, tick)


def _scheduled(config: TrialConfig, lengths: Sequence[int]) -> Groups:
    """Which documents each rank computes, by Megatron's scheduler.

    Raises:
        Incorrect: it places a document on ranks that are none of Megatron's groups.
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import (  # pyright: ignore[reportMissingImports]
        BalancedCPScheduler,
    )

    scheduler = BalancedCPScheduler(_held_tokens(config), cast(Any, SimpleNamespace(size=lambda: config.world_size)))
    _, groups = scheduler.get_groups_and_subsamples([*enumerate(lengths)], None)
    for each in {each for of_pass in _passes(groups, lengths) for each in of_pass if each}:
        if each.first_rank % each.num_ranks:
            raise Incorrect(
                f"Megatron's scheduler places a document of {each.documents[0]} tokens on {each.num_ranks} ranks from "
                f"rank {each.first_rank} on, and its groups begin at multiples of {each.num_ranks}"
            )
    return groups


def _passes(groups: Groups, lengths: Sequence[int]) -> Passes:
    found = []
    for of_ranks in groups:
        for of_pass in zip_longest(*of_ranks):
            places = {i: (of_pass.index(i), of_pass.count(i)) for i in of_pass if i is not None}
            found.append([None if i is None else Placed((lengths[i],), *places[i]) for i in of_pass])
    return found


def _held_tokens(config: TrialConfig) -> int:
    return -(-config.seq_len // config.sp_size)


def _samples(batch: DrawnBatch, device: torch.device) -> list[dict[str, Tensor]]:
    """Documents as Megatron's loader hands them on, each [1,n]. The last token of one has no label."""
    found = []
    for span in spans(batch.lengths):
        tokens = tokens_of(batch.text[:, span.start : span.stop]).to(device)
        labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)), dim=1)
        positions = torch.arange(len(span), device=device)[None]
        bounds = torch.tensor([0, len(span)], dtype=torch.int32, device=device)
        found.append({"tokens": tokens, "labels": labels, "position_ids": positions, "cu_seqlens": bounds})
    return found


class _Ours:
    """Attention of ours by the length of a document and the size of its group; the one that is `current` computes."""

    def __init__(self, config: TrialConfig, opened: ExitStack) -> None:
        self._config, self._opened = config, opened
        self._known: dict[tuple[int, int], Callable[..., Tensor]] = {}
        self.current: Callable[..., Tensor] | None = None
        sizes = [2**n for n in range(config.world_size.bit_length())]
        # All ranks make each mesh, at once
        self._meshes = {size: methods.mesh_of(self._on(MULTIPLE, size)) for size in sizes}

    def _on(self, length: int, num_ranks: int) -> TrialConfig:
        """The step over documents of so many tokens, each over so many ranks."""
        cut = replace(self._config.method, layout="zigzag")  # as Megatron cuts a document
        return replace(self._config.of_documents((length,), num_ranks), method=cut)

    def change(self, length: int, num_ranks: int) -> None:
        key = (length, num_ranks)
        if key not in self._known:
            opening = train.open_attention(self._on(length, num_ranks), length, self._meshes[num_ranks])
            self._known[key] = self._opened.enter_context(opening)
        self.current = self._known[key]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.current is not None
        return self.current(q, k, v)


class _Step:
    """One optimizer step on the documents of a batch."""

    def __init__(self, training: megatron.Training, of_ours: _Ours | None) -> None:
        self._training, self._of_ours = training, of_ours
        self._num_labels = 0

    def __call__(self, batch: tuple[Groups, Sequence[dict[str, Tensor]]]) -> StepResult:
        from megatron.core.pipeline_parallel.schedules import (  # pyright: ignore[reportMissingImports]
            forward_backward_no_pipelining,
        )

        groups, samples = batch
        self._num_labels = sum(sample["tokens"].shape[1] - 1 for sample in samples)
        self._training.begin()
        losses = forward_backward_no_pipelining(
            forward_step_func=self._forward,
            data_iterator=iter([([dict(sample) for sample in samples], groups)]),
            model=self._training.model,
            num_microbatches=1,  # it takes the documents one by one
            seq_length=None,
            micro_batch_size=1,
        )
        loss = torch.stack(losses).sum()
        return self._training.end(loss, None, len(losses))

    def _forward(self, samples: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """The losses of this rank's part of a document, and what becomes of them."""
        from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
        from megatron.core.packed_seq_params import PackedSeqParams  # pyright: ignore[reportMissingImports]
        from megatron.core.utils import get_batch_on_this_cp_rank  # pyright: ignore[reportMissingImports]

        sample: Any = next(samples)
        length, num_ranks = sample["tokens"].shape[1], int(sample["local_cp_size"])
        if self._of_ours is not None:
            self._of_ours.change(length, num_ranks)
        part = get_batch_on_this_cp_rank(
            sample,
            is_hybrid_cp=True,
            hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
        )
        packed = PackedSeqParams(
            qkv_format="sbhd",
            max_seqlen_q=length,
            max_seqlen_kv=length,
            local_cp_size=num_ranks,
            cp_group=part.get("hybrid_cp_group"),
        )
        labels = part["labels"]
        losses = model(part["tokens"], part["position_ids"], None, labels=labels.clamp_min(0), packed_seq_params=packed)
        if self._of_ours is None:
            _require_group(model.module, num_ranks)
        return losses * (labels != IGNORED), self._loss

    def _loss(self, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = losses.sum() / self._num_labels
        return loss, torch.tensor(losses.numel()), loss.detach()


def _require_group(model: Any, num_ranks: int) -> None:
    """
    Raises:
        Incorrect: the attention of a layer did not change to a group of so many ranks.
    """
    for index, layer in enumerate(model.decoder.layers):
        group = layer.self_attention.core_attention.cp_group
        if (found := 1 if group is None else dist.get_world_size(group)) != num_ranks:
            raise Incorrect(
                f"a document is on {num_ranks} ranks, and the attention of layer {index} computed over {found}"
            )
