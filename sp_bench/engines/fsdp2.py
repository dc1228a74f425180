"""Our decoder under torch's FSDP2: all ranks of a replica share its parameters, and gather them one layer at a time.

This is the reference engine: all bytes that it sends are predicted exactly, but for a few scalars (phase `other`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # of a public setter
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from sp_bench.attention import exchange
from sp_bench.config.engine import EngineConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.costs.attention import Traffic
from sp_bench.measure import ledger
from sp_bench.training import cross_entropy, float8, model_code, train
from sp_bench.training.model import AttentionCall, Block, Decoder, Keeping, initialise
from sp_bench.training.offload import Offload, page_locking
from sp_bench.training.train import Batch, Part, StepResult, Tick, Watch

UNPREDICTED = ()
UNLABELLED = 0


def traffic(config: TrialConfig, padded_len: int) -> Traffic:
    return training_costs.train_step_traffic(config, train.attention_traffic(config, padded_len))


def run(
    config: TrialConfig,
    texts: Sequence[Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    tick: Tick,
    *,
    token_losses: int,
    watch: Watch | None = None,
) -> list[StepResult]:
    padded_len = train.padded_seq_len(config, texts[0].shape[1] - 1)
    with train.open_layers(config, padded_len, mesh) as layers:
        training = start(config, layers, mesh, device, watch)
        if config.workload.single_step:
            train.make_moments(training.optimizer)
        batches = train.shard_batches(config, texts, layers[0].layout, mesh, device)
        return train.run_steps(training.step, batches, tick)


class Pass(NamedTuple):
    """A micro-batch that may differ from others in length and in the ranks that share a sequence."""

    layers: Sequence[AttentionCall]  # the attention of its layers
    batch: Batch  # this rank's part
    recomputes: str | None = None  # workload.activation_checkpointing of its step; None: that of the trial


def run_passes(
    config: TrialConfig,
    steps: Sequence[Sequence[Pass]],
    mesh: DeviceMesh,
    device: torch.device,
    tick: Tick,
) -> list[StepResult]:
    """As `run`, of steps with such micro-batches. All ranks have equally many, since each gathers parameters."""
    return train.run_steps(step_of_passes(config, steps[0][0], mesh, device), steps, tick)


def step_of_passes(
    config: TrialConfig, first: Pass, mesh: DeviceMesh, device: torch.device
) -> Callable[[Sequence[Pass]], StepResult]:
    """A training from its start, by a step on such micro-batches at each call. first: one of the first step."""
    training = start(config, first.layers, mesh, device)

    def step(passes: Sequence[Pass]) -> StepResult:
        if (recomputes := passes[0].recomputes) is not None:
            training.recompute(recomputes)
        return training.step([each.batch for each in passes], [each.layers for each in passes])

    return step


@cache  # the communicators of a mesh take device memory: the proof and the timed steps share one mesh
def sharding_mesh(mesh: DeviceMesh, num_replicas: int) -> DeviceMesh:
    """The job's ranks as a mesh dp_replicate x fsdp, or fsdp alone for one replica.

    It has communicators of its own, so that gathering parameters can overlap with the exchanges of the attention.
    """
    names = ("dp_replicate", "fsdp")
    both = DeviceMesh(mesh.device_type, mesh.mesh.reshape(num_replicas, -1), mesh_dim_names=names)
    return both if num_replicas > 1 else both["fsdp"]


def shard(decoder: Decoder, config: TrialConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard the parameters over dp_shard, ring and ulysses, replicate them over dp_replicate, and initialise them.

    Each layer is one FSDP group. Embedding, final norm and head are another one.
    """
    fsdp_mesh = sharding_mesh(mesh, config.dp_replicate_size)
    stored = train.stored_dtype(config.dtype)
    policy = MixedPrecisionPolicy(getattr(torch, config.dtype), reduce_dtype=stored, cast_forward_inputs=False)
    reshard = config.engine.reshard_after_forward is not False
    on_host = config.engine.optimizer_offload is not None
    where = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy()
    options: dict[str, Any] = {"mesh": fsdp_mesh, "mp_policy": policy, "offload_policy": where}
    for block in decoder.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(decoder, reshard_after_forward=False, **options)
    prefetch(list(decoder.blocks), config.engine)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # FSDP averages by default; our losses are parts of one sum
            module.set_force_sum_reduction_for_comms(True)  # otherwise NCCL would multiply by 1 before it sums
            if exchange.are_local():
                module.set_custom_all_gather(_LocalAllGather())
                module.set_custom_reduce_scatter(_LocalReduceScatter())
    if on_host:
        _to_host(decoder, device)
    else:
        decoder.to_empty(device=device)
    initialise(decoder, config.seed, device)


class _Allocating:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _LocalAllGather(_Allocating, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """[n] -> [P*n]: this rank's part P times. It lies in `output_tensor` already, at this rank's place."""
        parts, place = output_tensor.view(group.size(), -1), group.rank()
        parts[:place].copy_(input_tensor)
        parts[place + 1 :].copy_(input_tensor)


class _LocalReduceScatter(_Allocating, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """[P*n] -> [n]: this rank's own part, not summed."""
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def _to_host(decoder: Decoder, device: torch.device) -> None:
    """Give the parameters host memory, without values. On a GPU FSDP page-locks it, and as much is page-locked here for
    gradients: torch's allocator keeps that for the backward, where a refusal would look like that of a full device.

    Raises:
        MemoryError: it cannot be page-locked.
    """
    parts = [cast(DTensor, parameter.detach()).to_local() for parameter in decoder.parameters()]
    with page_locking(2 * sum(part.nbytes for part in parts), "engine.optimizer_offload=torch_adamw"):
        decoder.to_empty(device="cpu")
        if device.type == "cuda":
            _ = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]  # all at once


def prefetch(blocks: list[Any], engine: EngineConfig) -> None:
    """Let each layer's forward and backward start to gather the layers that come after it, where the trial says so."""
    for i, block in enumerate(blocks):
        if (depth := engine.forward_prefetch) is not None:
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
        if (depth := engine.backward_prefetch) is not None:
            block.set_modules_to_backward_prefetch(blocks[max(i - depth, 0) : i][::-1])


def local_shards(decoder: Decoder) -> dict[str, Parameter]:
    """This rank's part of each parameter, in the memory that FSDP trains on, by the parameter's name.

    The optimizer updates these plain tensors. Of 400 DTensors, a norm, clipping and an update take the host 40 ms more
    in each step, and 7 s more in the first, which asks how each operation is sharded (torch 2.13, one core).
    """
    return {
        name: Parameter(float8.master(cast(DTensor, parameter.detach()).to_local()))
        for name, parameter in decoder.named_parameters()
    }


class HostTime:
    """Measures the steps of an optimizer in host memory, which the host computes itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._started = 0.0
        self.ms = 0.0  # of the last step
        optimizer.register_step_pre_hook(self._start)
        optimizer.register_step_post_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.ms = 1e3 * (time.perf_counter() - self._started)


@dataclass(frozen=True)
class Training:
    """A sharded decoder with its optimizer."""

    decoder: Decoder
    mesh: DeviceMesh  # over its last axis parameters are sharded
    shards: dict[str, Parameter]  # `local_shards`, which the optimizer updates
    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None
    loss_tile_tokens: int | None
    reduces_each: bool  # gradients are reduced in each micro-batch, not in the last alone
    gathers_float8: bool
    watch: Watch | None
    on_host: "HostTime | None"  # of the optimizer, where it steps in host memory

    def attend(self, layers: Sequence[AttentionCall]) -> None:
        """Compute with these, one a layer, from now on."""
        for block, attention in zip(self.decoder.blocks, layers, strict=True):
            cast(Block, block).attention.attention = attention

    def recompute(self, checkpointing: str) -> None:
        """Keep and compute again as `workload.activation_checkpointing` says, from now on."""
        for block in self.decoder.blocks:
            cast(Block, block).checkpointing = checkpointing

    def step(self, batches: Sequence[Batch], layers: Sequence[Sequence[AttentionCall]] | None = None) -> StepResult:
        """One optimizer step on the micro-batches of this rank. Every rank of the world calls it. layers: the attention
        of each of them, where it differs. Where they differ in size, their tokens' losses are not in the result.

        Gradients are reduced in each micro-batch, and their shards are added up, unless `engine.reduce_gradients` says
        otherwise: to keep whole gradients until the last micro-batch takes the memory of a whole model.
        """
        num_valid_tokens = sum(batch.num_valid_tokens for batch in batches)
        parts = []
        for index, batch in enumerate(batches, 1):
            if not self.reduces_each:
                cast(FSDPModule, self.decoder).set_requires_gradient_sync(index == len(batches))
            if layers is not None:
                self.attend(layers[index - 1])
            parts.append(self._accumulate(batch, num_valid_tokens))
        alike = len({part.shape for part in parts}) == 1
        losses = torch.cat(parts if alike else [part.flatten() for part in parts])
        loss = losses.sum() / num_valid_tokens
        with ledger.phase("loss"):
            exchange.all_reduce(loss)
        if self.watch is not None:
            self.watch(self._parts())
        self._hand_over_gradients()
        norm = train.update(
            self.shards.values(), self.optimizer, self.max_grad_norm, mesh=self.mesh, on_host=self.on_host is not None
        )
        if self.gathers_float8:
            float8.scale_gathered(self.decoder)
        of_tokens = losses if alike else None
        return StepResult(loss, norm, of_tokens, None if self.on_host is None else self.on_host.ms)

    def _parts(self) -> Iterator[Part]:
        return (part._replace(updated=self.shards[part.name]) for part in train.parts(self.decoder))

    def _hand_over_gradients(self) -> None:
        """Give the optimizer's parameters the gradients of the decoder's, which have none then."""
        for name, parameter in self.decoder.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            self.shards[name].grad = None if gradient is None else cast(DTensor, gradient).to_local()

    def _accumulate(self, batch: Batch, num_valid_tokens: int) -> Tensor:
        """Forward and backward of one micro-batch. Returns the loss of each of its tokens [B,s], in nats."""
        loss, losses = self._forward(batch, num_valid_tokens)
        with ledger.phase("backward"):
            loss.backward()
        return losses.detach()

    def _forward(self, batch: Batch, num_valid_tokens: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the step's mean loss, and the loss of each token [B,s], in nats."""
        if self.loss_tile_tokens is None:
            losses = cross_entropy.of_tokens(self.decoder(batch.tokens, batch.positions), batch.labels)
            return losses.sum() / num_valid_tokens, losses
        tiled = partial(
            cross_entropy.tiled,
            labels=batch.labels,
            divisor=num_valid_tokens,
            tile_tokens=self.loss_tile_tokens,
            compiled=self.decoder.code.loss,
        )
        return self.decoder(batch.tokens, batch.positions, tiled)


def start(
    config: TrialConfig,
    attention: AttentionCall | Sequence[AttentionCall],
    mesh: DeviceMesh,
    device: torch.device,
    watch: Watch | None = None,
) -> Training:
    """The trial's decoder with its initial values, sharded over the job's mesh, and its optimizer. `attention` as in
    `Decoder`."""
    workload = config.workload
    offload = Offload(config.model.num_layers) if workload.checkpoint_offload else None
    keeping = Keeping(workload.activation_checkpointing or "none", workload.mlp_tile_tokens, offload)
    in_float8, gathers_float8 = workload.linear_dtype != "model", training_costs.gathers_float8(config)
    code = replace(model_code.named(workload.model_code, device), rounds_factors=in_float8)
    decoder = train.build_decoder(config.model, attention, config.dtype, keeping, code)
    if in_float8:
        float8.converted(decoder.blocks, config, gathers=gathers_float8)
    shard(decoder, config, mesh, device)
    if gathers_float8:
        float8.scale_gathered(decoder)
    shards = local_shards(decoder)
    optimizer = train.make_optimizer(shards.values(), workload)
    reduces_each = config.engine.reduce_gradients != "last_micro_batch"
    on_host = HostTime(optimizer) if config.engine.optimizer_offload else None
    return Training(
        *(decoder, sharding_mesh(mesh, config.dp_replicate_size), shards, optimizer),
        *(workload.max_grad_norm, workload.loss_tile_tokens, reduces_each, gathers_float8, watch, on_host),
    )
