"""What our engines' training steps share: tokens and labels of a rank, the decoder, the loss, the update.

m micro-batches a step, B sequences of each on a data-parallel rank, S valid and S' padded global tokens of each,
s = S'/P local tokens, V vocabulary. Every rank and every micro-batch holds a part of one big loss, so gradients are
summed over all, never averaged.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from sp_bench import kernels, methods
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.config.trial import ModelConfig, TrialConfig, WorkloadConfig
from sp_bench.costs.attention import Traffic
from sp_bench.measure import ledger
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.training.model import AttentionCall, Decoder

T = TypeVar("T")


class StepResult(NamedTuple):
    loss: Tensor  # mean over the world's valid tokens, nats
    grad_norm: Tensor  # of the whole gradient, before clipping
    token_losses: Tensor | None  # [m*B,s], nats; this rank's tokens, 0 without a label; None: not asked for


@dataclass(frozen=True)
class Batch:
    """One rank's share of a micro-batch."""

    tokens: Tensor  # [B,s]
    labels: Tensor  # [B,s], IGNORED where padded
    positions: Tensor  # [s], global
    num_valid_tokens: int  # of all ranks


def micro_batches(config: TrialConfig, sequences: Tensor) -> list[Tensor]:
    """A step's values [m*D*B,...] of all sequences -> m x [D*B,...], in the order in which they are trained on."""
    return list(sequences.split(config.num_sequences // config.workload.num_micro_batches))


def padded_seq_len(config: TrialConfig, seq_len: int) -> int:
    return methods.get(config.method.name).layout(config.method, config.sp_size).padded(seq_len)


def open_attention(
    config: TrialConfig, seq_len: int, mesh: DeviceMesh
) -> AbstractContextManager[methods.SequenceParallelAttention]:
    """The trial's method for `seq_len` (padded) tokens."""
    shape, kernel = config.attention_shape(seq_len), kernels.get(config.kernel.name)
    return methods.get(config.method.name).open(config.method, kernel, shape, mesh)


def attention_traffic(config: TrialConfig, padded_len: int) -> Traffic:
    """Bytes one rank sends off-rank in one attention call, forward and backward."""
    shape = config.attention_shape(padded_len)
    return methods.get(config.method.name).traffic(config.method, shape, config.sp_size)


def shift_and_pad(sequences: Tensor, padded_len: int) -> tuple[Tensor, Tensor]:
    """Sequences [B,S+1] -> tokens and labels [B,S']. Shifted here, where a token's successor is at hand: after
    sharding it may live on another rank."""
    padding = padded_len - (sequences.shape[1] - 1)
    return F.pad(sequences[:, :-1], (0, padding)), F.pad(sequences[:, 1:], (0, padding), value=IGNORED)


def local_part(values: Tensor, layout: SequenceLayout, mesh: DeviceMesh) -> Tensor:
    """What this rank holds, [B,s], of `values` [D*B,S'] for all tokens of all D data-parallel ranks."""
    data_rank, sequence_rank = divmod(mesh.get_rank(), layout.sp_size)
    positions = layout.global_positions(sequence_rank, values.shape[1])
    return values.chunk(mesh.size() // layout.sp_size)[data_rank][:, positions]


def shard_batch(sequences: Tensor, layout: SequenceLayout, mesh: DeviceMesh, device: torch.device) -> Batch:
    """This rank's share of `sequences` [D*B,S+1], a micro-batch's text of all data-parallel ranks."""
    num_sequences, seq_len = sequences.shape[0], sequences.shape[1] - 1
    padded_len = layout.padded(seq_len)
    tokens, labels = (local_part(x, layout, mesh) for x in shift_and_pad(sequences, padded_len))
    positions = torch.tensor(layout.global_positions(mesh.get_rank() % layout.sp_size, padded_len))
    return Batch(tokens.to(device), labels.to(device), positions.to(device), num_sequences * seq_len)


def shard_batches(
    config: TrialConfig, texts: Sequence[Tensor], layout: SequenceLayout, mesh: DeviceMesh, device: torch.device
) -> list[list[Batch]]:
    """This rank's share of each step's text, by micro-batch. One that is trained on again is on the device once."""
    batches = {
        id(text): [shard_batch(part, layout, mesh, device) for part in micro_batches(config, text)]
        for text in {id(t): t for t in texts}.values()
    }
    return [batches[id(text)] for text in texts]


def build_decoder(model: ModelConfig, attention: AttentionCall, dtype: str, *, recompute: bool = False) -> Decoder:
    """The decoder without memory for its parameters, which are kept in fp32 (fp64 when the trial is fp64)."""
    with torch.device("meta"):
        return Decoder(model, attention, recompute=recompute).to(stored_dtype(dtype))


def stored_dtype(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


def make_optimizer(decoder: torch.nn.Module, workload: WorkloadConfig) -> torch.optim.Optimizer:
    assert workload.learning_rate is not None
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(decoder.parameters(), lr=workload.learning_rate)
    return torch.optim.SGD(decoder.parameters(), lr=workload.learning_rate, momentum=0.9)


def run_steps(step: Callable[[T], StepResult], batches: Iterable[T], tick: Callable[[], None]) -> list[StepResult]:
    """A step on each batch; `tick` before the first and after each, so that loading a batch is part of its step.
    Results stay on the device: reading one between the steps would synchronise."""
    results = []
    tick()
    for batch in batches:
        results.append(step(batch))
        tick()
    return results


def update(decoder: Decoder, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
    """Measure the gradient, clip it if asked, step; returns the norm before clipping."""
    gradients = [p.grad for p in decoder.parameters() if p.grad is not None]
    with ledger.phase("other"):
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(decoder.parameters(), max_grad_norm, norm)
    with ledger.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return norm
