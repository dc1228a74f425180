"""What the engines' training steps share: a rank's tokens and labels, the decoder, the optimizer, the update.

m micro-batches a step; D data-parallel ranks, each with B sequences of a micro-batch; S valid and S' padded global
tokens of a sequence; P ranks share a sequence; s = S'/P local tokens. Every rank and every micro-batch holds a part of
one loss, so gradients are summed over all of them and never averaged.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn import functional as F

from sp_bench import kernels, methods
from sp_bench.attention import exchange
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.costs.attention import Traffic
from sp_bench.costs.placing import Passes
from sp_bench.costs.training import attended_layers
from sp_bench.measure import ledger
from sp_bench.methods import closed_forms
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.training.model import EVERYTHING, AttentionCall, Decoder, Keeping
from sp_bench.training.model_code import EAGER, ModelCode
from sp_bench.training.text import labels_of, tokens_of

T = TypeVar("T")

# Of the optimizers of all engines, beside the learning rate of the config: torch's defaults.
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 1e-2  # AdamW
MOMENTUM = 0.9  # SGD


class StepResult(NamedTuple):
    """What one optimizer step computed; on the device, not yet read."""

    loss: Tensor  # nats, the mean over the tokens of all ranks that have a label
    grad_norm: Tensor  # of the whole gradient over all ranks, before clipping
    token_losses: (
        Tensor | None
    )  # [m*B,s], nats, of this rank's tokens; 0 without a label; None: not asked for, or a later step
    optimizer_ms: float | None = None  # of the host, where the optimizer steps in host memory and fsdp2 trains


class Part(NamedTuple):
    """The gradient of one parameter before clipping, and this rank's part of it."""

    name: str  # of the parameter in our decoder
    whole: Tensor  # summed over all ranks and micro-batches, and gathered
    local: Tensor  # of `whole`, what this rank updates
    updated: Tensor  # the tensor that the optimizer updates: a parameter, a shard, or a buffer of several
    offset: int | Tensor  # where in `updated`, flat, this rank's part begins; or where each of its elements is


Tick = Callable[[], bool | None]  # True: no further step is wanted
Watch = Callable[[Iterable[Part]], None]  # is shown the gradients of each optimizer step


@dataclass(frozen=True)
class Batch:
    """One rank's share of a micro-batch."""

    tokens: Tensor  # [B,s]
    labels: Tensor  # [B,s], IGNORED where padded or masked, and where the next token is of another document
    positions: Tensor  # [s], global positions of the tokens; in a pack, those in their documents
    num_valid_tokens: int  # that have a label, of all ranks together


class DrawnBatch(NamedTuple):
    """Documents that lie in a text one after the other, and which ranks compute which of them."""

    lengths: Sequence[int]  # of the documents, in tokens
    text: Tensor  # [1,S+1]
    passes: Passes


def micro_batches(config: TrialConfig, sequences: Tensor) -> list[Tensor]:
    """One step's values of all sequences [m*D*B,...] -> m micro-batches [D*B,...], in the order of training."""
    return list(sequences.split(config.num_sequences // config.workload.num_micro_batches))


def layout_at(config: TrialConfig, padded_len: int) -> SequenceLayout:
    """Which token of a sequence of `padded_len` tokens lives where."""
    layout = methods.layout_of(config)
    cuts_documents = layout.kind == "document_zigzag"
    return replace(layout, documents=config.documents(padded_len)) if cuts_documents else layout


def padded_seq_len(config: TrialConfig, seq_len: int) -> int:
    """The smallest length of at least `seq_len` tokens that the trial's layout can cut."""
    return methods.layout_of(config).padded(seq_len)


def open_attention(
    config: TrialConfig, seq_len: int, mesh: DeviceMesh, kind: str | None = None
) -> AbstractContextManager[methods.SequenceParallelAttention]:
    """The trial's method and kernel, opened for sequences of `seq_len` (padded) tokens and layers of a kind, as in
    `attention_shape`."""
    shape = config.attention_shape(seq_len, kind)
    method, kernel = config.method_of(kind or "full"), kernels.get(config.kernel_of(kind or "full"))
    return methods.open_counted(method, kernel, shape, mesh)


@contextmanager
def open_layers(
    config: TrialConfig, seq_len: int, mesh: DeviceMesh
) -> Iterator[Sequence[methods.SequenceParallelAttention]]:
    """The attention of each layer. With `workload.fit` it lacks the kernel's arithmetic in layers that do not compute
    their attention."""
    attended = attended_layers(config)
    with ExitStack() as opened:
        whole = {kind: opened.enter_context(open_attention(config, seq_len, mesh, kind)) for kind in config.kinds}
        without = {
            kind: opened.enter_context(
                methods.opened(config.method, NoKernel(torch.zeros), config.attention_shape(seq_len, kind), mesh)
            )
            for kind in (config.kinds if config.workload.fit else ())
        }
        yield [(whole if index in attended else without)[kind] for index, kind in enumerate(config.model.kinds)]


def attention_traffic(config: TrialConfig, padded_len: int) -> Traffic:
    """Bytes one rank sends off-rank in one attention call, forward and backward, in the mean over layers of several
    kinds; none of a method without a closed form."""
    return closed_forms.attention_traffic(config, padded_len) or {}


def unpredicted_phases(config: TrialConfig, of_engine: Sequence[str]) -> tuple[str, ...]:
    """Phases whose bytes are counted only: those of the engine, and those of a method without a closed form."""
    has_form = closed_forms.traffic(config.method.name) is not None
    return (*of_engine, *(() if has_form else ("forward", "recompute", "backward")))


def shift_and_pad(sequences: Tensor, padded_len: int) -> tuple[Tensor, Tensor]:
    """Sequences [B,S+1] -> tokens [B,S'] and labels [B,S'], IGNORED where the text has none.

    Labels are shifted here, before the sequences are cut: afterwards the successor of a token may live on another rank.
    """
    padding = padded_len - (sequences.shape[1] - 1)
    tokens, labels = tokens_of(sequences[:, :-1]), labels_of(sequences[:, 1:])
    return F.pad(tokens, (0, padding)), F.pad(labels, (0, padding), value=IGNORED)


def is_labelled(config: TrialConfig, seq_len: int, padded_len: int, *, unlabelled: int = 0) -> Tensor:
    """Which tokens of a sequence have a label: bool [S'].

    unlabelled: tokens at the end of a sequence whose successor the engine's loader drops (`Engine.UNLABELLED`). A
    sequence counts as so much shorter. A pack does not: a document ends with it, and its last token has no label.
    """
    found, known = torch.zeros(padded_len, dtype=torch.bool), seq_len - unlabelled
    for tokens in config.labelled(known if config.workload.packing == "none" else seq_len):
        found[tokens.start : min(tokens.stop, known)] = True
    return found


def document_positions(config: TrialConfig, padded_len: int) -> Tensor:
    """The position of each token of a sequence in its document [S']."""
    return torch.cat([torch.arange(length) for length in config.documents(padded_len) or (padded_len,)])


def local_part(values: Tensor, layout: SequenceLayout, mesh: DeviceMesh) -> Tensor:
    """`values` [D*B,S'] of all tokens of all data-parallel ranks -> those of this rank's tokens [B,s]."""
    data_rank, sequence_rank = divmod(mesh.get_rank(), layout.sp_size)
    positions = layout.global_positions(sequence_rank, values.shape[1])
    return values.chunk(mesh.size() // layout.sp_size)[data_rank][:, positions]


def shard_batch(
    sequences: Tensor, config: TrialConfig, layout: SequenceLayout, mesh: DeviceMesh, device: torch.device
) -> Batch:
    """This rank's share of one micro-batch; `sequences` [D*B,S+1] is its text for all data-parallel ranks."""
    seq_len = sequences.shape[1] - 1
    padded_len = layout.padded(seq_len)
    tokens, labels = shift_and_pad(sequences, padded_len)
    labels = labels.masked_fill(~is_labelled(config, seq_len, padded_len), IGNORED)
    num_labels = int((labels != IGNORED).sum())
    tokens, labels = (local_part(x, layout, mesh) for x in (tokens, labels))
    mine = layout.global_positions(mesh.get_rank() % layout.sp_size, padded_len)
    positions = document_positions(config, padded_len)[mine]
    return Batch(tokens.to(device), labels.to(device), positions.to(device), num_labels)


def shard_batches(
    config: TrialConfig, texts: Sequence[Tensor], layout: SequenceLayout, mesh: DeviceMesh, device: torch.device
) -> list[list[Batch]]:
    """This rank's share of the text of each step [m*D*B,S+1], cut into micro-batches. A text that several steps train
    on is on the device once."""
    batches = {
        id(text): [shard_batch(part, config, layout, mesh, device) for part in micro_batches(config, text)]
        for text in {id(t): t for t in texts}.values()
    }
    return [batches[id(text)] for text in texts]


def build_decoder(
    model: ModelConfig,
    attention: AttentionCall | Sequence[AttentionCall],
    dtype: str,
    keeping: Keeping = EVERYTHING,
    code: ModelCode = EAGER,
) -> Decoder:
    """The decoder on torch's meta device: its parameters have no memory yet. They are fp32 (fp64 if `dtype` is)."""
    with torch.device("meta"):
        return Decoder(model, attention, keeping, code).to(stored_dtype(dtype))


def stored_dtype(dtype: str) -> torch.dtype:
    """The dtype in which a trial of `dtype` keeps its parameters and reduces its gradients."""
    return torch.float64 if dtype == "float64" else torch.float32


def make_optimizer(parameters: Iterable[Parameter], workload: WorkloadConfig) -> torch.optim.Optimizer:
    assert workload.learning_rate is not None
    if workload.optimizer == "adamw":
        options = {"betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        return torch.optim.AdamW(parameters, lr=workload.learning_rate, fused=True, **options)
    return torch.optim.SGD(parameters, lr=workload.learning_rate, momentum=MOMENTUM)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its moments, which are zero. It would make them in its first step, after the peaks of forward
    and backward: a single step would then hold less than any later one. Its next step is its first all the same.

    One parameter has a gradient at a time: in host memory those of all would come beside what is page-locked for them.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # nothing moves: weight decay is a part of the rate
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        if "step" in (state := optimizer.state[parameter]):
            state["step"].zero_()


def parts(decoder: torch.nn.Module) -> Iterator[Part]:
    """The gradients of the decoder's parameters, gathered one at a time; zeros of a parameter that got none. Every rank
    of the world iterates over all of them."""
    for name, parameter in decoder.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(gradient, DTensor):
            yield Part(name, _gathered(gradient), gradient.to_local(), parameter, 0)
        else:
            yield Part(name, gradient, gradient, parameter, 0)


def _gathered(shards: DTensor) -> Tensor:
    """The whole tensor on the device of the mesh, where its shards may be in host memory. NCCL sends from devices."""
    mesh, local = shards.device_mesh, shards.to_local().to(shards.device_mesh.device_type)
    layout = {"shape": shards.shape, "stride": shards.stride()}
    return DTensor.from_local(local, mesh, shards.placements, run_check=False, **layout).full_tensor()


def run_steps(step: Callable[[T], StepResult], batches: Iterable[T], tick: Tick) -> list[StepResult]:
    """Take a step on each batch, until `tick` returns True. It is called before the first step and after each, so that
    loading a batch is part of its step. The results stay on the device, because reading one would make the host wait
    between the steps."""
    results = []
    tick()
    for batch in batches:
        results.append(step(batch))
        if tick():
            break
    return results


def _host_norm(shards: list[Tensor]) -> Tensor:
    """The norm of all elements of `shards`, which are in host memory, in their dtype.

    Each row is summed in its own dtype, and the rows in fp64. On a CPU torch sums all of a tensor in fp32: of 389
    million elements, an embedding of Qwen3-4B, the norm is 7% too small, and gradients would be clipped too little.
    All of it in fp64 takes 80 times as long.
    """
    rows = torch.cat([torch.linalg.vector_norm(shard, dim=-1).flatten() for shard in shards])
    return torch.linalg.vector_norm(rows, dtype=torch.float64).to(rows.dtype)


def _total_norm(gradients: list[Tensor], mesh: DeviceMesh | None, *, on_host: bool) -> Tensor:
    """The norm of all gradients over all ranks, on the device that computes them. mesh, on_host: as in `update`."""
    own = _host_norm(gradients) if on_host else torch.nn.utils.get_total_norm(gradients)
    if mesh is None:
        return own
    squares = own.square().to(mesh.device_type)  # NCCL sends from devices
    exchange.all_reduce(squares, mesh.get_group(mesh.ndim - 1))  # replicas have the same gradients
    return squares.sqrt()


def update(
    parameters: Collection[Parameter],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None,
    *,
    mesh: DeviceMesh | None = None,
    on_host: bool = False,
) -> Tensor:
    """Clip the gradient if `max_grad_norm` is given, and take the optimizer step. Returns the norm before clipping.

    mesh: over its last axis the gradient is sharded, and these are this rank's parts; None: they are whole.
    on_host: parameters, gradients and moments are in host memory.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    with ledger.phase("other"):
        norm = _total_norm(gradients, mesh, on_host=on_host)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    with ledger.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return norm
