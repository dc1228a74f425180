"""One full training step: sharded parameters, loss over the ranks' tokens, optimizer.

B sequences of a data-parallel rank, S valid and S' padded global tokens of each, s = S'/P local tokens, V vocabulary.
Every rank holds a part of one big loss, so gradients are summed over all ranks, never averaged.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from sp_bench import kernels, ledger, methods
from sp_bench.config import ModelConfig, TrialConfig, WorkloadConfig
from sp_bench.layouts import SequenceLayout
from sp_bench.model import AttentionCall, Decoder, initialise

IGNORED = -100  # label of a padded token


class StepResult(NamedTuple):
    loss: Tensor  # mean over the world's valid tokens, nats
    grad_norm: Tensor  # of the whole gradient, before clipping
    token_losses: Tensor  # [B,s], nats; this rank's tokens, 0 where padded


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step."""

    tokens: Tensor  # [B,s]
    labels: Tensor  # [B,s], IGNORED where padded
    positions: Tensor  # [s], global
    num_valid_tokens: int  # of all ranks


def num_sequences(config: TrialConfig) -> int:
    """Sequences of one step over all data-parallel ranks."""
    return config.batch_size * config.dp_replicate_size * config.dp_shard_size


def padded_seq_len(config: TrialConfig, seq_len: int) -> int:
    return methods.get(config.method.name).layout(config.method, config.sp_size).padded(seq_len)


def open_attention(
    config: TrialConfig, seq_len: int, mesh: DeviceMesh
) -> AbstractContextManager[methods.SequenceParallelAttention]:
    """The trial's method for `seq_len` (padded) tokens."""
    shape, kernel = config.attention_shape(seq_len), kernels.get(config.kernel.name)
    return methods.get(config.method.name).open(config.method, kernel, shape, mesh)


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
    """This rank's share of `sequences` [D*B,S+1], the text of all data-parallel ranks."""
    num_sequences, seq_len = sequences.shape[0], sequences.shape[1] - 1
    padded_len = layout.padded(seq_len)
    tokens, labels = (local_part(x, layout, mesh) for x in shift_and_pad(sequences, padded_len))
    positions = torch.tensor(layout.global_positions(mesh.get_rank() % layout.sp_size, padded_len))
    return Batch(tokens.to(device), labels.to(device), positions.to(device), num_sequences * seq_len)


def build_decoder(model: ModelConfig, attention: AttentionCall, dtype: str, *, recompute: bool = False) -> Decoder:
    """The decoder without memory for its parameters, which are kept in fp32 (fp64 when the trial is fp64)."""
    with torch.device("meta"):
        return Decoder(model, attention, recompute=recompute).to(stored_dtype(dtype))


def stored_dtype(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


@cache  # a mesh has communicators of its own, which take device memory: one for the proof and the timed steps
def sharding_mesh(mesh: DeviceMesh, num_replicas: int) -> DeviceMesh:
    """The job's ranks as dp_replicate x fsdp, or fsdp alone. Its communicators are not the attention's, so that
    prefetched parameters and sequence-parallel exchanges can overlap."""
    names = ("dp_replicate", "fsdp")
    both = DeviceMesh(mesh.device_type, mesh.mesh.reshape(num_replicas, -1), mesh_dim_names=names)
    return both if num_replicas > 1 else both["fsdp"]


def shard(decoder: Decoder, config: TrialConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard parameters over dp_shard, ring and ulysses, replicate them over dp_replicate, and initialise them.

    One FSDP group a layer and one for the rest (embedding, last norm, head).
    """
    fsdp_mesh = sharding_mesh(mesh, config.dp_replicate_size)
    stored = stored_dtype(config.dtype)
    policy = MixedPrecisionPolicy(getattr(torch, config.dtype), reduce_dtype=stored, cast_forward_inputs=False)
    for block in decoder.blocks:
        fully_shard(block, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(decoder, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # FSDP averages by default; our losses are parts of one sum
            module.set_force_sum_reduction_for_comms(True)  # else NCCL multiplies by 1 in a premul-sum of its own
    decoder.to_empty(device=device)
    initialise(decoder, config.seed)


def make_optimizer(decoder: torch.nn.Module, workload: WorkloadConfig) -> torch.optim.Optimizer:
    assert workload.learning_rate is not None
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(decoder.parameters(), lr=workload.learning_rate)
    return torch.optim.SGD(decoder.parameters(), lr=workload.learning_rate, momentum=0.9)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """NLL in nats of each token, 0 where padded: logits [B,s,V], labels [B,s] -> [B,s], in fp32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none").view_as(labels)


@dataclass(frozen=True)
class Training:
    """A sharded decoder with its optimizer."""

    decoder: Decoder
    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None

    def step(self, batch: Batch) -> StepResult:
        """Forward, backward with gradient synchronisation, and update. Every rank of the world calls it."""
        losses = token_losses(self.decoder(batch.tokens, batch.positions), batch.labels)
        loss = losses.sum() / batch.num_valid_tokens
        with ledger.phase("backward"):
            loss.backward()
        loss = loss.detach()
        with ledger.phase("loss"):
            dist.all_reduce(loss)
        return StepResult(loss, update(self.decoder, self.optimizer, self.max_grad_norm), losses.detach())


def start(config: TrialConfig, attention: AttentionCall, mesh: DeviceMesh, device: torch.device) -> Training:
    """The trial's decoder at step 0, sharded over the job's mesh."""
    recompute = config.workload.activation_checkpointing == "full"
    decoder = build_decoder(config.model, attention, config.dtype, recompute=recompute)
    shard(decoder, config, mesh, device)
    return Training(decoder, make_optimizer(decoder, config.workload), config.workload.max_grad_norm)


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
