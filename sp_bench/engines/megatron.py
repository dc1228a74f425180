"""Megatron-Core's GPT model with its context parallelism, its data parallelism and its distributed optimizer.

In bfloat16 its layers are TransformerEngine's, and context_parallel_size and cp_comm_type are sp_size and the variant
of the method `transformer_engine`. TransformerEngine multiplies float32 matrices in TF32. So where a step is proven in
float32, the layers are Megatron-Core's own modules, on torch, and a method of ours stands in for the attention: model,
wiring, data parallelism and optimizer are still Megatron's.

Parameters and their gradients are whole on every rank; gradients are reduce-scattered, each rank updates its part in
float32, and the parameters are gathered. The loop is ours, of Megatron's own calls in its order: zero the gradients'
buffer, forward and backward of each micro-batch (`no_sync` but for the last), `finish_grad_sync`, `optimizer.step`.
Its process groups stay in the process, for the next training with as many ranks a sequence.

B sequences of a micro-batch; s local tokens; H heads of D elements; P ranks share a sequence.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from sp_bench import methods
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import training as training_costs
from sp_bench.costs.attention import Traffic
from sp_bench.measure import ledger
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import transformer_engine
from sp_bench.training import train
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.training.model import fill
from sp_bench.training.train import Batch, Part, StepResult, Tick, Watch

# Its buckets decide while it runs when parameters and gradients travel, and its checkpointing runs a layer again inside
# the backward, where nothing tells the two apart.
UNPREDICTED = ("forward", "recompute", "backward", "parameters", "gradients", "optimizer")
UNLABELLED = 0

# Checkpointing -> Megatron's words. "mlp" is an MLP whole, with its norm where TransformerEngine's layers have it, so
# "layernorm" would find no norm left. "core_attn", the modules of "selective" if none are named, runs attention twice.
_RECOMPUTATION: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}
# What a layer calls -> by which checkpointing it runs twice a micro-batch.
_RUN_AGAIN = {"self_attention.core_attention": ("full",), "mlp": ("full", "selective")}
_BACKENDS = {"flash_attn": "flash", "cudnn": "fused"}  # our kernel -> Megatron's attention_backend
# workload.linear_dtype -> TransformerEngine's recipe and format in Megatron's words. DelayedScaling is left
# out: it takes the scale of an earlier step, and 1 in the first, and the proof refuses a stale scale.
_FLOAT8: Mapping[str, Mapping[str, str]] = {
    "model": {},
    "float8_tensorwise": {"fp8_recipe": "tensorwise", "fp8": "hybrid"},  # Float8CurrentScaling
    "float8_blockwise": {"fp8_recipe": "blockwise", "fp8": "e4m3"},  # Float8BlockScaling
}
_NAMES = {  # our decoder's name of a module -> Megatron's
    "embedding": "embedding.word_embeddings",
    "norm": "decoder.final_layernorm",
    "head": "output_layer",
    "attention.q": "self_attention.linear_qkv",
    "attention.k": "self_attention.linear_qkv",
    "attention.v": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "feed_forward.gate": "mlp.linear_fc1",
    "feed_forward.up": "mlp.linear_fc1",
    "feed_forward.down": "mlp.linear_fc2",
}
# TransformerEngine's layers hold the norm before a product, and its weight, in the module of the product.
_NORMS = {"attention_norm": "input_layernorm.weight", "feed_forward_norm": "pre_mlp_layernorm.weight"}
_FUSED_NORMS = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_weight",
    "feed_forward_norm": "mlp.linear_fc1.layer_norm_weight",
}


def traffic(config: TrialConfig, padded_len: int) -> Traffic:
    attention = train.attention_traffic(config, padded_len)
    return {
        key: size
        for key, size in training_costs.unsharded_traffic(config, attention).items()
        if key[0] not in UNPREDICTED
    }


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
    seq_len = train.padded_seq_len(config, texts[0].shape[1] - 1)
    with _environment(), _opened(config, seq_len, mesh) as attention:
        _initialise_groups(config)
        layout = methods.layout_of(config)
        positions = torch.tensor(layout.global_positions(mesh.get_rank() % config.sp_size, seq_len), device=device)
        model = build(config, seq_len, positions, attention)
        training = _start(config, model, device, watch)
        batches = train.shard_batches(config, texts, layout, mesh, device)
        return train.run_steps(training.step, batches, tick)


class Place(NamedTuple):
    """Where Megatron keeps a parameter of our decoder."""

    name: str  # of Megatron's parameter
    rows: Tensor | None  # those of its dimension 0 that are ours, in our order; None: all


def places(model: ModelConfig, *, fused_norms: bool) -> dict[str, Place]:
    """By our decoder's names. Megatron has the rows of q, k and v in one matrix: of each KV head its query heads, its
    key head and its value head. Gate and up are one matrix too, one below the other."""
    per_group, size = model.num_heads // model.num_kv_heads, model.head_dim
    groups = torch.arange(model.num_kv_heads)[:, None] * (per_group + 2) * size
    up = torch.arange(model.intermediate_size) + model.intermediate_size
    rows = {
        "attention.q": (groups + torch.arange(per_group * size)).flatten(),
        "attention.k": (groups + per_group * size + torch.arange(size)).flatten(),
        "attention.v": (groups + (per_group + 1) * size + torch.arange(size)).flatten(),
        "feed_forward.gate": torch.arange(model.intermediate_size),
        "feed_forward.up": up,
    }
    norms, found = _FUSED_NORMS if fused_norms else _NORMS, {}
    for index in range(model.num_layers):
        for ours in training_costs.block_shapes(model):
            module, kind = ours.rsplit(".", 1)
            theirs = norms.get(module) or f"{_NAMES[module]}.{kind}"
            found[f"blocks.{index}.{ours}"] = Place(f"decoder.layers.{index}.{theirs}", rows.get(module))
    for ours in training_costs.root_shapes(model):
        module, kind = ours.rsplit(".", 1)
        found[ours] = Place(f"{_NAMES[module]}.{kind}", None)
    return found


@torch.no_grad()
def initialise(config: TrialConfig, built: nn.Module) -> None:
    """Give Megatron's model the initial values of our decoder."""
    theirs, where = dict(built.named_parameters()), places(config.model, fused_norms=_on_transformer_engine(config))
    order = train.build_decoder(config.model, lambda q, k, v: q, config.dtype).named_parameters()
    for index, (ours, parameter) in enumerate(order):
        target, rows = theirs[where[ours].name], where[ours].rows
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=target.device)
        fill(whole, ours, index, config.seed)
        if rows is None:
            target.copy_(whole)
        else:
            target[rows.to(target.device)] = whole.to(target.dtype)
    assert (left := theirs.keys() - {place.name for place in where.values()}) == set(), f"our decoder has no {left}"


def _on_transformer_engine(config: TrialConfig) -> bool:
    return config.dtype != "float32"


@contextmanager
def _opened(config: TrialConfig, seq_len: int, mesh: DeviceMesh) -> Iterator[Any]:
    """Our method that stands in for the attention, or None: it is TransformerEngine's."""
    with nullcontext() if _on_transformer_engine(config) else train.open_attention(config, seq_len, mesh) as attention:
        yield attention


@contextmanager
def _environment() -> Iterator[None]:
    """Restores the environment, into which Megatron writes TransformerEngine's backend, and forgets its cached RoPE."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # pyright: ignore[reportMissingImports]
        RotaryEmbedding,
    )

    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        RotaryEmbedding.forward.cache_clear()


def _initialise_groups(config: TrialConfig, *, dynamic: bool = False) -> None:
    """Megatron's process groups: P adjacent ranks share a sequence. dynamic: groups of 2, 4 ... ranks as well."""
    from megatron.core import parallel_state, tensor_parallel  # pyright: ignore[reportMissingImports]

    if parallel_state.model_parallel_is_initialized():
        known = parallel_state.get_context_parallel_world_size(), bool(parallel_state._HYBRID_DP_CP_GROUPS)
        if known == (config.sp_size, dynamic and config.world_size > 2):  # two ranks have no group but that of all
            return
        parallel_state.destroy_model_parallel()
        parallel_state._HYBRID_DP_CP_GROUPS.clear()
    parallel_state.initialize_model_parallel(
        context_parallel_size=config.sp_size, hybrid_context_parallel=dynamic, create_gloo_process_groups=False
    )
    if config.hardware.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(config.seed)  # its checkpointing keeps and restores them


def _transformer_config(config: TrialConfig) -> Any:
    """The trial's model as Megatron's TransformerConfig, with the fusions that TransformerEngine has."""
    from megatron.core.transformer import TransformerConfig  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.enums import AttnBackend  # pyright: ignore[reportMissingImports]

    model, fused = config.model, _on_transformer_engine(config)
    own = dict(_RECOMPUTATION[config.workload.activation_checkpointing or "none"])
    if fused:
        own |= {"attention_backend": AttnBackend[_BACKENDS[config.kernel.name]]}
        own |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
        if config.sp_size > 1:
            own["cp_comm_type"] = config.method.variant
        own |= _FLOAT8[config.workload.linear_dtype]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.intermediate_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=model.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        qk_layernorm=model.qk_norm,
        context_parallel_size=config.sp_size,
        bf16=config.dtype == "bfloat16",
        params_dtype=getattr(torch, config.dtype),
        perform_initialization=False,
        use_cpu_initialization=config.hardware.device == "cpu",
        calculate_per_token_loss=True,  # so that gradients are summed and not averaged
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=False,  # for the head it needs Apex
        **own,
    )


def build(config: TrialConfig, seq_len: int, positions: Tensor | None, attention: Any) -> nn.Module:
    """Megatron's GPT model with our decoder's initial values, for tokens at these global `positions` [s]; None: where
    Megatron cuts them."""
    from megatron.core.models.gpt import GPTModel  # pyright: ignore[reportMissingImports]
    from megatron.core.models.gpt import gpt_layer_specs as specs  # pyright: ignore[reportMissingImports]

    model = config.model
    if attention is None:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
    else:
        spec = specs.get_gpt_layer_local_spec(qk_layernorm=model.qk_norm, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = _stand_in(attention)
    built = GPTModel(
        config=_transformer_config(config),
        transformer_layer_spec=spec,
        vocab_size=model.vocab_size,
        max_sequence_length=seq_len,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
    )
    if attention is not None and positions is not None:
        # Megatron's own rotary embedding is cut head and tail, which our method's layout may not be
        angles = torch.outer(positions.float(), built.rotary_pos_emb.inv_freq.to(positions.device))
        angles = torch.cat((angles, angles), -1)[:, None, None, :]  # [s,D] -> [s,1,1,D]
        built.rotary_pos_emb.forward = lambda *_, **__: angles
    if attention is None:
        _require_asked_for(config, built)
        for layer in built.decoder.layers:
            layer.self_attention.core_attention.forward = _tagged(layer.self_attention.core_attention.forward)
    initialise(config, built)
    return built.train()


def _require_asked_for(config: TrialConfig, built: Any) -> None:
    """
    Raises:
        Incorrect: the attention of a layer sends by another cp_comm_type than the method's variant, or over another
            number of ranks than sp_size.
    """
    if config.sp_size == 1:
        return
    for index, layer in enumerate(built.decoder.layers):
        attention = layer.self_attention.core_attention
        num_ranks = 1 if attention.cp_group is None else dist.get_world_size(attention.cp_group)
        if (attention.cp_comm_type, num_ranks) != (config.method.variant, config.sp_size):
            raise Incorrect(
                f"method.variant={config.method.variant}, sp_size={config.sp_size}: TransformerEngine's attention in "
                f"layer {index} has cp_comm_type={attention.cp_comm_type} over {num_ranks} ranks"
            )


def _stand_in(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> type[nn.Module]:
    """A class of Megatron's core attention that calls a method of ours."""

    class CoreAttention(nn.Module):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            # [s,B,H,D] -> [B,s,H,D]
            out = attention(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
            return out.transpose(0, 1).flatten(2)  # [B,s,H,D] -> [s,B,H*D]

    return CoreAttention


def _tagged(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` of a core attention, whose collectives the ledger counts as attention."""

    def tagged(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with ledger.attention():
            out = forward(query, key, value, *args, **kwargs)
        transformer_engine._mark_backward(out, query, key, value)
        return out

    return tagged


def _counted(built: Any) -> dict[str, list[int]]:
    """How often the attention and the MLP of each layer have run their forward, from now on."""
    layers = built.decoder.layers
    calls = {part: [0] * len(layers) for part in _RUN_AGAIN}

    def count(part: str, index: int, *_: Any) -> None:
        calls[part][index] += 1

    for part in calls:
        for index, layer in enumerate(layers):
            layer.get_submodule(part).register_forward_pre_hook(partial(count, part, index))
    return calls


def _start(config: TrialConfig, built: nn.Module, device: torch.device, watch: Watch | None) -> "Training":
    """Megatron's data parallelism around the model, and its distributed optimizer."""
    from megatron.core.distributed import (  # pyright: ignore[reportMissingImports]
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # pyright: ignore[reportMissingImports]

    workload = config.workload
    shards = workload.optimizer == "adamw"  # SGD, which proves batches of drawn documents, has no distributed optimizer
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=shards,
        use_distributed_optimizer=shards,
    )
    model = DistributedDataParallel(built.config, settings, built)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam" if shards else "sgd",
            lr=workload.learning_rate,
            weight_decay=train.WEIGHT_DECAY if shards else 0.0,
            adam_beta1=train.BETAS[0],
            adam_beta2=train.BETAS[1],
            adam_eps=train.EPS,
            sgd_momentum=train.MOMENTUM,
            bf16=config.dtype == "bfloat16",
            params_dtype=getattr(torch, config.dtype),
            clip_grad=workload.max_grad_norm or 0.0,
            use_distributed_optimizer=shards,
            overlap_param_gather=shards,
        ),
        [model],
        config_overrides={},  # one group: all parameters decay alike
        use_gloo_process_groups=False,
    )
    return Training(config, model, optimizer, device, watch, _counted(built))


@dataclass(frozen=True)
class Training:
    """Megatron's model with its optimizer."""

    config: TrialConfig
    model: Any
    optimizer: Any
    device: torch.device
    watch: Watch | None
    calls: Mapping[str, list[int]]  # part of a layer -> of each layer, how often it ran its forward in this step

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """One optimizer step on the micro-batches of this rank. Every rank of the world calls it."""
        self.begin()
        num_valid_tokens = sum(batch.num_valid_tokens for batch in batches)
        parts = []
        with ExitStack() as unsynchronised:
            if len(batches) > 1:
                unsynchronised.enter_context(self.model.no_sync())
            parts = [self._accumulate(batch, num_valid_tokens) for batch in batches[:-1]]
        parts.append(self._accumulate(batches[-1], num_valid_tokens))
        losses = torch.cat(parts)
        return self.end(losses.sum() / num_valid_tokens, losses, len(batches))

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model.set_is_first_microbatch()  # TransformerEngine rounds its weights to FP8 anew, once a step

    def end(self, loss: Tensor, losses: Tensor | None, num_micro_batches: int) -> StepResult:
        """After the backward of the last one. loss: this rank's part."""
        with ledger.phase("backward"):
            self.model.finish_grad_sync()
        self._require_recomputed(num_micro_batches)
        with ledger.phase("loss"):
            dist.all_reduce(loss)
        if self.watch is not None:
            self.watch(self._parts())
        with ledger.phase("optimizer"):
            _, norm, _ = self.optimizer.step()
        return StepResult(loss, torch.as_tensor(norm, device=self.device), losses)

    def _require_recomputed(self, num_micro_batches: int) -> None:
        """
        Raises:
            Incorrect: attentions or MLPs ran more or less often than `workload.activation_checkpointing` says. Neither
                bytes nor products of this engine tell.
        """
        checkpointing = self.config.workload.activation_checkpointing
        for part, calls in self.calls.items():
            wanted = num_micro_batches * (1 + (checkpointing in _RUN_AGAIN[part]))
            if any(each != wanted for each in calls):
                raise Incorrect(
                    f"workload.activation_checkpointing={checkpointing}: with {num_micro_batches} micro-batches {part} "
                    f"of each layer runs its forward {wanted} times, and they ran {calls} times"
                )
            calls[:] = [0] * len(calls)

    def _accumulate(self, batch: Batch, num_valid_tokens: int) -> Tensor:
        """Forward and backward of one micro-batch. Returns the loss of each of its tokens [B,s], in nats."""
        labelled = batch.labels != IGNORED
        positions = batch.positions.expand_as(batch.tokens)
        losses = self.model(batch.tokens, positions, None, labels=batch.labels.clamp_min(0)) * labelled
        with ledger.phase("backward"):
            (losses.sum() / num_valid_tokens).backward()
        return losses.detach()

    def _parts(self) -> Iterator[Part]:
        """The gradients by our decoder's names, each gathered. Every rank of the world iterates over all of them.

        A rank updates a stretch of each flat parameter of Megatron's, and a parameter of ours may be rows of one.
        """
        (optimizer,) = self.optimizer.chained_optimizers
        updated = _updated(optimizer)
        theirs = dict(self.model.module.named_parameters())
        fused_norms = _on_transformer_engine(self.config)
        for name, place in places(self.config.model, fused_norms=fused_norms).items():
            parameter = theirs[place.name]
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self.device)
            start, end = 0, 0
            if parameter in updated:
                stretch = optimizer._get_model_param_range_map(parameter)["param"]
                start, end = stretch.start, stretch.end
                whole[start:end] = parameter.main_grad.flatten()[start:end]
            mine = whole[start:end].clone()
            dist.all_reduce(whole)
            whole, target = whole.view(parameter.shape), updated.get(parameter, parameter)
            if place.rows is None:
                yield Part(name, whole, mine, target, 0)
            else:
                rows = place.rows.to(self.device)
                index = _within(rows, prod(parameter.shape[1:]), start, end)
                yield Part(name, whole[rows], mine[index], target, index)


def _within(rows: Tensor, row_size: int, start: int, end: int) -> Tensor:
    """Where the elements of these rows are in the stretch [start,end) of a flat matrix, counted from `start`."""
    flat = (rows[:, None] * row_size + torch.arange(row_size, device=rows.device)).flatten()
    return flat[(flat >= start) & (flat < end)] - start


def _updated(optimizer: Any) -> Mapping[nn.Parameter, Tensor]:
    """Parameter -> the flat tensor that the inner optimizer updates, for parameters of which this rank updates a
    part."""
    pairs = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    return {
        parameter: shard
        for models, shards in pairs
        for model_group, shard_group in zip(models, shards, strict=True)
        for parameter, shard in zip(model_group, shard_group, strict=True)
    }
