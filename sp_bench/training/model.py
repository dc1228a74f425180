"""A Llama/Qwen3-style decoder over one rank's tokens. It calls whatever attention it is given.

B sequences, s local tokens of each, Hq query and Hkv key/value heads, D head size, h hidden size, V vocabulary. No
tensor here has the global length: a rank knows only its own tokens and their global positions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sp_bench.attention.autograd import Kept
from sp_bench.config.model import ModelConfig
from sp_bench.measure import ledger
from sp_bench.training.model_code import EAGER, ModelCode, Rotation
from sp_bench.training.offload import Offload
from sp_bench.training.rotary import rotation
from sp_bench.training.tiled_mlp import Mlp, in_tiles

# an `Attend`: q [B,s,Hq,D], k and v [B,s,Hkv,D] -> [B,s,Hq,D]; of latents that of attention/latent.py; in a layer of
# kind delta that of attention/delta.py
AttentionCall = Callable[..., Tensor]
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # last hidden states [B,s,h], output matrix [V,h] -> losses


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, attention: AttentionCall) -> None:
        super().__init__()
        self.attention = attention
        self.head_dim = config.head_dim
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.q = nn.Linear(hidden, q_size, bias=config.qkv_bias)
        self.k = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.v = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.out = nn.Linear(q_size, hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def inputs(self, x: Tensor, rope: Rotation, code: ModelCode) -> tuple[Tensor, ...]:
        """Normalised x [B,s,h] -> q [B,s,Hq,D], k and v [B,s,Hkv,D]."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = code.norm(q, self.q_norm), code.norm(k, self.k_norm)
        return *code.rotate_both(q, k, rope), v

    def projected(self, attended: Tensor, code: ModelCode) -> Tensor:
        """[B,s,Hq,D] -> [B,s,h]."""
        return self.out(attended.flatten(-2))


class LatentAttention(nn.Module):
    """Latents (MLA) as in DeepSeek-V2-Lite, arXiv 2405.04434, section 2.1: keys and values come of one small latent a
    token, and queries of the hidden state. RoPE turns the last elements of each query, and the latent's that end every
    key."""

    sinks = None

    def __init__(self, config: ModelConfig, attention: AttentionCall) -> None:
        super().__init__()
        assert config.kv_lora_rank is not None
        assert config.qk_rope_head_dim is not None
        self.attention = attention
        self.heads, self.head_dim, self.rope_dim = config.num_heads, config.head_dim, config.qk_rope_head_dim
        hidden, rank, value_dim = config.hidden_size, config.kv_lora_rank, config.v_head_dim or config.head_dim
        self.q = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.down = nn.Linear(hidden, rank + self.rope_dim, bias=False)
        self.latent_norm = nn.RMSNorm(rank, config.norm_eps)
        self.up = nn.Linear(rank, self.heads * (self.head_dim - self.rope_dim + value_dim), bias=False)
        self.out = nn.Linear(self.heads * value_dim, hidden, bias=False)

    def inputs(self, x: Tensor, rope: Rotation, code: ModelCode) -> tuple[Tensor, ...]:
        """Normalised x [B,s,h] -> q [B,s,H,D], latents [B,s,1,C+R] and both up-projections [C,H,D-R+E]. Letters as in
        attention/latent.py."""
        q, latent = self.q(x).unflatten(-1, (self.heads, -1)), self.down(x).unsqueeze(2)
        own, turned = q.split([self.head_dim - self.rope_dim, self.rope_dim], dim=-1)
        compressed, of_keys = latent.split([latent.shape[-1] - self.rope_dim, self.rope_dim], dim=-1)
        turned, of_keys = code.rotate_both(turned, of_keys, rope)
        latent = torch.cat((code.norm(compressed, self.latent_norm), of_keys), dim=-1)
        up = self.up.weight.unflatten(0, (self.heads, -1)).permute(2, 0, 1)  # [H*(D-R+E),C] -> [C,H,D-R+E]
        return torch.cat((own, turned), dim=-1), latent, up

    def projected(self, attended: Tensor, code: ModelCode) -> Tensor:
        """[B,s,H,E] -> [B,s,h]."""
        return self.out(attended.flatten(-2))


class DeltaAttention(nn.Module):
    """The gated delta rule as in Gated DeltaNet, arXiv 2412.06464: keys and queries of norm 1, and a norm after it. Its
    short convolutions and its gate on the output are left out."""

    sinks = None

    def __init__(self, config: ModelConfig, attention: AttentionCall) -> None:
        super().__init__()
        assert config.delta_heads is not None
        assert config.delta_kv_heads is not None
        assert config.delta_head_dim is not None
        self.attention = attention
        self.head_dim, heads, hidden = config.delta_head_dim, config.delta_heads, config.hidden_size
        q_size, v_size = config.delta_kv_heads * self.head_dim, heads * self.head_dim
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.q = nn.Linear(hidden, q_size, bias=False)
        self.k = nn.Linear(hidden, q_size, bias=False)
        self.v = nn.Linear(hidden, v_size, bias=False)
        self.decay = nn.Linear(hidden, heads)
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.out_norm = nn.RMSNorm(self.head_dim, config.norm_eps)
        self.out = nn.Linear(v_size, hidden, bias=False)

    def inputs(self, x: Tensor, rope: Rotation, code: ModelCode) -> tuple[Tensor, ...]:
        """Normalised x [B,s,h] -> q, k [B,s,Hk,D], v [B,s,H,D], g and beta [B,s,H]. g, the logarithm of the decay, is
        in fp32 (fp64)."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        decay, beta = self.decay(x), self.beta(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        q, k = (F.normalize(y.to(wide), dim=-1).to(y.dtype) for y in (q, k))
        g = -self.log_rate.to(wide).exp() * F.softplus(decay.to(wide))
        return q, k, v, g, beta.to(wide).sigmoid().to(beta.dtype)

    def projected(self, attended: Tensor, code: ModelCode) -> Tensor:
        """[B,s,H,D] -> [B,s,h]."""
        return self.out(code.norm(attended, self.out_norm).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU, arXiv 2002.05202."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch's `checkpoint`: what the second run of a layer sends is counted as phase recompute."""
    return nullcontext(), ledger.phase("recompute")


def again(part: Callable[..., Any], *inputs: Any) -> Any:
    """`part(*inputs)`. Of what it computes only the inputs and the results are kept; it runs again in the backward,
    until it has what the backward needs."""
    return checkpoint(part, *inputs, use_reentrant=False, context_fn=recompute_contexts, preserve_rng_state=False)


class Keeping(NamedTuple):
    """What a layer keeps from its forward for its backward."""

    checkpointing: str = "none"  # workload.activation_checkpointing
    mlp_tile_tokens: int | None = None  # workload.mlp_tile_tokens
    offload: Offload | None = None  # workload.checkpoint_offload


_AROUND_DOWN = "_before", "_hidden", "_swiglu", "_hidden_of"
_IN_FP8 = "_attention_normed", "_inputs", "_mlp", "_gate_and_up", "_down"


class Block(nn.Module):
    """One decoder layer: a half before its attention, the attention, and a half after it. `kind` is that of
    `ModelConfig.kinds`, and `keeping` says what it keeps for the backward."""

    def __init__(
        self, config: ModelConfig, kind: str, attention: AttentionCall, keeping: Keeping, code: ModelCode
    ) -> None:
        super().__init__()
        self.checkpointing, self.mlp_tile_tokens, self.offload = keeping
        self.code = code
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        softmax = SelfAttention if config.kv_lora_rank is None else LatentAttention
        self.attention = (DeltaAttention if kind == "delta" else softmax)(config, attention)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)
        # The product with `down` is in none of them: a layer that is recomputed can stop before it. In FP8 it cannot,
        # and what rounds the factors of a product is compiled with what makes them; but not with a norm, whose backward
        # goes through a row at a time: what it transposes on the way it would store one byte at a time.
        parts = ("_normed", *(_IN_FP8 if code.rounds_factors else _AROUND_DOWN))
        for name in parts:
            setattr(self, name, code.part(getattr(self, name)))

    def forward(self, x: Tensor, rope: Rotation) -> Tensor:
        # Checkpoints are inside the module that FSDP wraps. So the layer's parameters are still gathered when it is
        # computed again.
        if self.checkpointing == "none":
            return self._whole(x, rope)
        if self.checkpointing == "full":
            return again(self._whole, x, rope)
        if self.checkpointing == "selective_output":
            # q, k and v are made again where the attention is called again, which takes its output from `Kept`
            kept = Kept(self.offload.pack, self.offload.unpack) if self.offload else Kept()
            attended = again(self._attended, x, rope, kept)
        else:
            attended = self._attend(*again(self._before, x, rope))
        if self.checkpointing != "selective_mlp":
            return again(self._after, x, attended)
        # The projections stand between two checkpoints: their results are kept, and so is what they are made from.
        x, normed = again(self._normed, x, attended)
        return x + again(self._down, *self._gate_and_up(normed))

    def _whole(self, x: Tensor, rope: Rotation) -> Tensor:
        return self._after(x, self._attended(x, rope))

    def _in_tiles(self, x: Tensor) -> Tensor:
        """The residual stream after the attention [B,s,h] -> the layer's output [B,s,h]."""
        assert self.mlp_tile_tokens is not None
        mlp, norm = self.feed_forward, self.feed_forward_norm

        def parameters() -> tuple[Tensor, ...]:
            return norm.weight, mlp.gate.weight, mlp.up.weight, mlp.down.weight

        return in_tiles(x, Mlp(self._hidden_of, parameters), self.mlp_tile_tokens)

    def _attended(self, x: Tensor, rope: Rotation, *kept: Kept) -> Tensor:
        return self._attend(*self._before(x, rope), *kept)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *kept: Any) -> Tensor:
        """q [B,s,Hq,D], k and v [B,s,Hkv,D] -> [B,s,Hq,D]. In the place of k and v there are latents and up-projections
        if the model has them; in the place of `kept` a layer of kind delta has g and beta."""
        if (sinks := self.attention.sinks) is None:
            return self.attention.attention(q, k, v, *kept)
        return self.attention.attention(q, k, v, *(kept or (None,)), sinks)

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [B,s,h] and the attention's output [B,s,Hq,D] -> the layer's output [B,s,h]."""
        if self.mlp_tile_tokens:
            return self._in_tiles(self._projected(x, attended))
        if self.code.rounds_factors:
            x, normed = self._normed(x, attended)
            return x + self._mlp(normed)
        x, hidden = self._hidden(x, attended)
        return x + self.feed_forward.down(hidden)

    def _mlp(self, normed: Tensor) -> Tensor:
        return Block._down(self, *Block._gate_and_up(self, normed))

    def _gate_and_up(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        return self.feed_forward.gate(normed), self.feed_forward.up(normed)

    def _down(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.feed_forward.down(self._swiglu(gate, up))

    def _before(self, x: Tensor, rope: Rotation) -> tuple[Tensor, ...]:
        """x [B,s,h] -> what its attention takes."""
        return self._inputs(self._attention_normed(x), rope)

    def _attention_normed(self, x: Tensor) -> Tensor:
        return self.code.norm(x, self.attention_norm)

    def _inputs(self, normed: Tensor, rope: Rotation) -> tuple[Tensor, ...]:
        return self.attention.inputs(normed, rope, self.code)

    def _hidden(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after the attention [B,s,h], and what the MLP's last product takes."""
        x = self._projected(x, attended)
        return x, Block._hidden_of(self, x)

    def _hidden_of(self, x: Tensor) -> Tensor:
        normed = self.code.norm(x, self.feed_forward_norm)
        return self.code.swiglu(*Block._gate_and_up(self, normed))

    def _normed(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after the attention [B,s,h], and normalised for the MLP."""
        x = self._projected(x, attended)
        return x, self.code.norm(x, self.feed_forward_norm)

    def _projected(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after the attention [B,s,h]."""
        return x + self.attention.projected(attended, self.code)

    def _swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.code.swiglu(gate, up)


EVERYTHING = Keeping()
LOG_RATE = -5.0


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm and head. The head is the embedding if `config.tie_embeddings`. `attention`
    is that of all layers, or one for each."""

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionCall | Sequence[AttentionCall],
        keeping: Keeping = EVERYTHING,
        code: ModelCode = EAGER,
    ) -> None:
        super().__init__()
        self.config, self.code, self.offload = config, code, keeping.offload
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        each = attention if isinstance(attention, Sequence) else [attention] * config.num_layers
        self.blocks = nn.ModuleList(
            Block(config, kind, each[index], keeping, code) for index, kind in enumerate(config.kinds)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, loss: Loss | None = None) -> Any:
        """tokens [B,s] and their global positions [s] -> logits [B,s,V], or the result of `loss`.

        `loss` gets the last hidden states and the output matrix. It runs in here, inside the module that FSDP wraps,
        where the matrix is whole.
        """
        x = self.embedding(tokens)
        wide = torch.promote_types(x.dtype, torch.float32)
        rope = rotation(positions, self.config, wide)
        for index, block in enumerate(self.blocks):
            with self.offload.layer(index, block, *rope) if self.offload else nullcontext():
                x = block(x, rope)
        x = self.code.norm(x, self.norm)
        if loss is not None:
            return loss(x, self.embedding.weight if self.head is None else self.head.weight)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)


@torch.no_grad()
def initialise(model: nn.Module, seed: int, device: torch.device | None = None) -> None:
    """Fill every parameter from `seed`, with the same values for any sharding. They are drawn on `device`, which draws
    other numbers than a CPU does, or where the parameter is.

    Each parameter is drawn whole, one at a time. Matrices have standard deviation 1/sqrt(columns): projections then
    keep the scale of their input at every model size, so that attention depends on positions even in a tiny model. Norm
    weights are 1, biases 0, and sinks have standard deviation 1, as scores have about. The rates at which states decay
    are e^LOG_RATE, so that they reach over hundreds of tokens.
    """
    for index, (name, parameter) in enumerate(model.named_parameters()):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device or parameter.device)
        fill(whole, name, index, seed)
        if isinstance(parameter, DTensor):
            # Without a source rank nothing is sent: each rank cuts its own shard.
            shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(whole)


@torch.no_grad()
def fill(whole: Tensor, name: str, index: int, seed: int) -> None:
    """Fill `whole` with the initial values of the parameter `name`, the `index`-th of the decoder."""
    if whole.ndim == 1 and not name.endswith("sinks"):
        whole.fill_(0.0 if name.endswith("bias") else LOG_RATE if name.endswith("log_rate") else 1.0)
        return
    generator = torch.Generator(whole.device).manual_seed(seed * 1_000_003 + index)
    whole.normal_(0.0, 1.0 if whole.ndim == 1 else whole.shape[-1] ** -0.5, generator=generator)
