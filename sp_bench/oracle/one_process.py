"""The reference of a training trial: the same training on one process, without sharding or sequence parallelism.

It knows nothing of packing: each document is a sequence of its own.

m micro-batches a step; D data-parallel ranks, each with B sequences of a micro-batch; S tokens of a sequence.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from sp_bench import kernels
from sp_bench.attention.autograd import differentiable
from sp_bench.config.documents import spans
from sp_bench.config.trial import TrialConfig
from sp_bench.training import cross_entropy, train
from sp_bench.training.model import AttentionCall, Decoder, fill, initialise, rotation


def broadcast_steps(
    config: TrialConfig, batches: Sequence[Tensor], compute_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Loss (nats) and gradient norm of each step [num_steps,2], and each token's loss [num_steps,m*D*B,S], in fp64.

    Rank 0 computes them and sends them to all. Every rank of the world calls this.
    """
    num_sequences, seq_len = batches[0].shape[0], batches[0].shape[1] - 1
    packed = torch.zeros(len(batches), 2 + num_sequences * seq_len, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        for row, result in zip(packed, run_steps(config, batches, compute_dtype, device), strict=True):
            assert result.token_losses is not None  # `step` always gives them
            row.copy_(torch.cat([result.loss[None], result.grad_norm[None], result.token_losses.flatten()]))
    dist.broadcast(packed, 0)
    return packed[:, :2], packed[:, 2:].view(-1, num_sequences, seq_len)


class Gradients(NamedTuple):
    """What one process computes up to the update."""

    token_losses: Tensor  # [m*D*B,S], nats
    of: dict[str, Tensor]  # each parameter's whole gradient before clipping, in `train.stored_dtype`


def gradients(
    config: TrialConfig, sequences: Tensor, compute_dtypes: Sequence[torch.dtype], device: torch.device
) -> list[Gradients]:
    """The first step on `sequences` [m*D*B,S+1], without its update, from the same weights in each of
    `compute_dtypes`."""
    decoder, found = _initialised(config, device), []
    for dtype in compute_dtypes:
        token_losses = _accumulate(config, decoder, sequences.to(device), dtype)
        found.append(Gradients(token_losses, {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}))
        decoder.zero_grad(set_to_none=True)
    return found


def run_steps(
    config: TrialConfig, batches: Sequence[Tensor], compute_dtype: torch.dtype, device: torch.device
) -> list[train.StepResult]:
    """Take a step on each of `batches` [m*D*B,S+1], with the `math` kernel as attention.

    compute_dtype: of activations and gradients; parameters are kept and updated in `train.stored_dtype`.
    """
    decoder = _initialised(config, device)
    optimizer = train.make_optimizer(decoder.parameters(), config.workload)
    return [step(config, decoder, optimizer, sequences.to(device), compute_dtype) for sequences in batches]


def _initialised(config: TrialConfig, device: torch.device) -> Decoder:
    decoder = train.build_decoder(config.model, _attention(config), config.dtype)
    decoder.to_empty(device=device)
    initialise(decoder, config.seed)
    return decoder


def _attention(config: TrialConfig) -> AttentionCall:
    return differentiable(
        kernels.get(kernels.REFERENCE), causal=config.workload.causal, scale=config.model.head_dim**-0.5
    )


def step(
    config: TrialConfig,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    sequences: Tensor,
    compute_dtype: torch.dtype,
) -> train.StepResult:
    """One optimizer step on `sequences` [m*D*B,S+1]."""
    token_losses = _accumulate(config, decoder, sequences, compute_dtype)
    loss = token_losses.sum() / num_labels(config, sequences)
    norm = train.update([*decoder.parameters()], optimizer, config.workload.max_grad_norm)
    return train.StepResult(loss, norm, token_losses)


def num_labels(config: TrialConfig, sequences: Tensor) -> int:
    """The number of labels of all `sequences` [m*D*B,S+1]."""
    return sequences.shape[0] * config.num_labels(sequences.shape[1] - 1)


def _accumulate(config: TrialConfig, decoder: Decoder, sequences: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Forward and backward of `sequences` [m*D*B,S+1], one document at a time, so that memory does not grow with the
    number of ranks or micro-batches. Returns each token's loss [m*D*B,S], in nats, 0 without a label; adds to the
    parameters' gradients."""
    token_losses = torch.zeros(sequences[:, 1:].shape, dtype=cross_entropy.wide(compute_dtype), device=sequences.device)
    for sequence, sequence_losses in zip(sequences, token_losses, strict=True):
        for start, document in _documents(config, sequence):
            # The cast is part of the graph, as in FSDP's mixed precision: gradients arrive at the stored parameters.
            parameters = {name: p.to(compute_dtype) for name, p in decoder.named_parameters()}
            inputs, labels = document[None, :-1], document[None, 1:].clone()
            labels[:, : int(config.workload.masked_label_share * labels.shape[1])] = cross_entropy.IGNORED
            positions = torch.arange(inputs.shape[1], device=inputs.device)
            losses = cross_entropy.of_tokens(functional_call(decoder, parameters, (inputs, positions)), labels)
            (losses.sum() / num_labels(config, sequences)).backward()
            sequence_losses[start : start + labels.shape[1]] = losses.detach()[0]
    return token_losses


def _documents(config: TrialConfig, sequence: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Where each document of `sequence` [S+1] begins, and its tokens. Without packing it is all of them; the last token
    of a pack is of a document that is not there."""
    lengths = config.documents(len(sequence) - 1) or (len(sequence),)
    return ((whole.start, sequence[whole.start : whole.stop]) for whole in spans(lengths))


@torch.no_grad()
def token_losses(config: TrialConfig, sequences: Tensor, device: torch.device) -> Tensor:
    """The loss of every token [m*D*B,S] with the initial weights, in `train.stored_dtype`, in nats. Its label is the
    next token of the sequence, whether or not the trial gives it one.

    Each layer draws its weights when its turn comes, so that a model fits of which one layer does.
    """
    decoder = train.build_decoder(config.model, _attention(config), config.dtype)
    indices = {name: index for index, (name, _) in enumerate(decoder.named_parameters())}

    def drawn(module: nn.Module, within: str) -> dict[str, Tensor]:
        weights = {name: torch.empty_like(p, device=device) for name, p in module.named_parameters()}
        for name, whole in weights.items():
            fill(whole, within + name, indices[within + name], config.seed)
        return weights

    inputs, labels = sequences[:, :-1].to(device), sequences[:, 1:].to(device)
    seq_len, stored = inputs.shape[1], train.stored_dtype(config.dtype)
    wholes = [slice(of.start, of.stop) for of in spans(config.documents(seq_len) or (seq_len,))]
    positions = [torch.arange(of.stop - of.start, device=device) for of in wholes]
    ropes = [rotation(each, config.model.head_dim, config.model.rope_theta, stored) for each in positions]
    embedding = drawn(decoder.embedding, "embedding.")["weight"]
    states = functional.embedding(inputs, embedding)
    for index, block in enumerate(decoder.blocks):
        weights = drawn(block, f"blocks.{index}.")
        for state in states.split(1):  # [1,S,h]
            for of, rope in zip(wholes, ropes, strict=True):
                state[:, of] = functional_call(block, weights, (state[:, of], rope))
    norm = drawn(decoder.norm, "norm.")
    head = embedding if decoder.head is None else drawn(decoder.head, "head.")["weight"]
    losses = torch.empty(labels.shape, dtype=stored, device=device)
    for row, state in enumerate(states.split(1)):
        logits = functional.linear(functional_call(decoder.norm, norm, (state,)), head)
        losses[row] = cross_entropy.of_tokens(logits, labels[row : row + 1])[0]
    return losses
