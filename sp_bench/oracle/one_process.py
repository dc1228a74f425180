"""The reference of a training trial: the same training on one process, without sharding or sequence parallelism.

Its decoder, its loss and its updates are the oracle's own (`decoder`, `update`), so what the engines' code has wrong is
not wrong here too. It knows nothing of packing: each document is a sequence of its own.

m micro-batches a step; D data-parallel ranks, each with B sequences of a micro-batch; S tokens of a sequence.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.config.documents import spans
from sp_bench.config.trial import TrialConfig
from sp_bench.oracle import decoder, quantised
from sp_bench.oracle.update import FORMULAS, MOMENTS, PARAMETER
from sp_bench.training import text, train
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.training.model import fill


def broadcast_steps(
    config: TrialConfig,
    batches: Sequence[Tensor],
    compute_dtype: torch.dtype,
    device: torch.device,
    of_steps: Sequence[TrialConfig] | None = None,
) -> Tensor:
    """Loss (nats) and gradient norm of each step [num_steps,2], in fp64. Batches may have several lengths. of_steps:
    the trial of each of them, where documents differ.

    Rank 0 computes them and sends them to all. Every rank of the world calls this.
    """
    found = torch.zeros(len(batches), 2, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        for row, result in zip(found, run_steps(config, batches, compute_dtype, device, of_steps), strict=True):
            row.copy_(torch.stack([result.loss, result.grad_norm]))
    dist.broadcast(found, 0)
    return found


class Gradients(NamedTuple):
    """What one process computes up to the update."""

    token_losses: Tensor  # [m*D*B,S], nats
    of: dict[str, Tensor]  # each parameter's whole gradient before clipping, in `train.stored_dtype`


def gradients(
    config: TrialConfig, sequences: Tensor, compute_dtypes: Sequence[torch.dtype], device: torch.device
) -> list[Gradients]:
    """The first step on `sequences` [m*D*B,S+1], without its update, from the same weights in each of
    `compute_dtypes`. In the trial's own dtype products of layers are in FP8, where the trial's are."""
    weights = initial(config, decoder.shapes(config.model), device)
    return [of_weights(config, weights, sequences.to(device), dtype) for dtype in compute_dtypes]


def initial(config: TrialConfig, shapes: decoder.Shapes, device: torch.device) -> dict[str, Tensor]:
    """The initial values of these parameters, in `train.stored_dtype`."""
    indices = {name: index for index, name in enumerate(decoder.shapes(config.model))}
    stored = train.stored_dtype(config.dtype)
    weights = {name: torch.empty(shape, dtype=stored, device=device) for name, shape in shapes.items()}
    for name, whole in weights.items():
        fill(whole, name, indices[name], config.seed)
    return weights


class OneProcess:
    """Takes steps. `compute_dtype`: of activations and gradients; weights are kept and updated in
    `train.stored_dtype`."""

    def __init__(self, config: TrialConfig, compute_dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._compute_dtype = config, compute_dtype
        self.weights = initial(config, decoder.shapes(config.model), device)
        assert config.workload.optimizer is not None
        zeros = MOMENTS[config.workload.optimizer]
        self._moments = {n: {key: torch.zeros_like(w) for key in zeros} for n, w in self.weights.items()}
        self._num_steps = 0

    def step(self, sequences: Tensor, config: TrialConfig | None = None) -> train.StepResult:
        """One optimizer step on `sequences` [m*D*B,S+1]. config: of the step, if its documents are others."""
        config = config or self._config
        token_losses, of = of_weights(config, self.weights, sequences, self._compute_dtype)
        norm = torch.stack([gradient.double().square().sum() for gradient in of.values()]).sum().sqrt()
        limit = self._config.workload.max_grad_norm or math.inf
        self._num_steps += 1
        for name, gradient in of.items():
            self._update(name, gradient.double() * (limit / (norm + 1e-6)).clamp(max=1))
        return train.StepResult(token_losses.sum() / num_labels(config, sequences), norm, token_losses)

    def _update(self, name: str, gradient: Tensor) -> None:
        """gradient: clipped, in fp64."""
        workload, state = self._config.workload, {PARAMETER: self.weights[name]} | self._moments[name]
        assert workload.optimizer is not None
        before = {key: tensor.double() for key, tensor in state.items()}
        after = FORMULAS[workload.optimizer](self._num_steps, workload.learning_rate, gradient, before)
        for key, moved in after.items():
            state[key].copy_(moved.value)


def run_steps(
    config: TrialConfig,
    batches: Sequence[Tensor],
    compute_dtype: torch.dtype,
    device: torch.device,
    of_steps: Sequence[TrialConfig] | None = None,
) -> list[train.StepResult]:
    """Take a step on each of `batches` [m*D*B,S+1]. of_steps: as in `broadcast_steps`."""
    alone = OneProcess(config, compute_dtype, device)
    steps = zip(batches, of_steps or [config] * len(batches), strict=True)
    return [alone.step(sequences.to(device), each) for sequences, each in steps]


def num_labels(config: TrialConfig, sequences: Tensor) -> int:
    """The number of labels of all `sequences` [m*D*B,S+1]."""
    documents = (document for sequence in sequences for _, document in _documents(config, sequence))
    return sum(int((_labels(config, document) != IGNORED).sum()) for document in documents)


def _labels(config: TrialConfig, document: Tensor) -> Tensor:
    """What a model has to predict at each but the last of a document's tokens [n+1] -> [n]."""
    labels = text.labels_of(document[1:])
    labels[: int(config.workload.masked_label_share * len(labels))] = IGNORED
    return labels


def of_weights(
    config: TrialConfig, weights: decoder.Weights, sequences: Tensor, compute_dtype: torch.dtype
) -> Gradients:
    """Forward and backward of `sequences` [m*D*B,S+1], one document at a time, so that memory does not grow with the
    number of ranks or micro-batches. A token without a label has the loss 0."""
    divisor, window = num_labels(config, sequences), _window(config, sequences.shape[1] - 1)
    product = quantised.product(config, compute_dtype, sequences.shape[1] - 1)
    casts = quantised.casts_weights(config, compute_dtype)
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    wide = torch.promote_types(compute_dtype, torch.float32)
    token_losses = torch.zeros(sequences[:, 1:].shape, dtype=wide, device=sequences.device)
    for sequence, sequence_losses in zip(sequences, token_losses, strict=True):
        for start, document in _documents(config, sequence):
            # The cast is part of the graph, as in FSDP's mixed precision: gradients arrive at the stored weights.
            narrow = {
                name: leaf.to(compute_dtype) if casts or not in_layer(name, leaf) else leaf
                for name, leaf in leaves.items()
            }
            tokens, labels = text.tokens_of(document)[:-1], _labels(config, document)
            losses = decoder.token_losses(config.model, narrow, tokens, labels, window, product)
            (losses.sum() / divisor).backward()
            sequence_losses[start : start + len(labels)] = losses.detach()
    return Gradients(token_losses, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})


def in_layer(name: str, parameter: Tensor) -> bool:
    """Whether it is a matrix of a layer."""
    return name.startswith("blocks.") and parameter.ndim == 2


def _window(config: TrialConfig, seq_len: int) -> int | None:
    """The window of layers that have one: that of the padded length, which ranks compute."""
    return config.window(train.padded_seq_len(config, seq_len))


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
    model = config.model
    tokens, labels = sequences[:, :-1].to(device), sequences[:, 1:].to(device)
    seq_len = tokens.shape[1]
    wholes = [slice(of.start, of.stop) for of in spans(config.documents(seq_len) or (seq_len,))]
    shapes = decoder.shapes(model)
    outside = initial(config, {n: shape for n, shape in shapes.items() if not n.startswith("blocks.")}, device)
    states = outside["embedding.weight"][tokens]
    for index in range(model.num_layers):
        module = f"blocks.{index}."
        drawn = initial(config, {n: shape for n, shape in shapes.items() if n.startswith(module)}, device)
        weights, window = decoder.within(drawn, module), decoder.window_of(model, index, _window(config, seq_len))
        for state in states:  # [S,h]
            for of in wholes:
                state[of] = decoder.layer(model, weights, state[of], window)
    found = (decoder.losses(model, outside, *each) for each in zip(states, labels, strict=True))
    return torch.stack(list(found))
