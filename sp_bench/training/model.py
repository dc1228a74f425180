"""A Llama/Qwen3-style decoder over one rank's tokens. It calls whatever attention it is given.

B sequences, s local tokens of each, Hq query and Hkv key/value heads, D head size, h hidden size, V vocabulary. No
tensor here has the global length: a rank knows only its own tokens and their global positions.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sp_bench.config.trial import ModelConfig
from sp_bench.measure import ledger

AttentionCall = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B,s,Hq,D], k and v [B,s,Hkv,D] -> [B,s,Hq,D]
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # last hidden states [B,s,h], output matrix [V,h] -> losses
Rotation = tuple[Tensor, Tensor]  # cos and sin, [s,1,D/2]


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """RoPE's cos and sin at global `positions` [s], in `dtype`. Source: arXiv 2104.09864."""
    # Angles are computed in fp64: at position 1e6 an fp32 angle is wrong by up to 0.06 rad.
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None, None] * theta**-exponent
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rotation) -> Tensor:
    """x [B,s,H,D] with each pair of elements (i, i + D/2) rotated. Computed in the dtype of `rope`, returned in x's."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, attention: AttentionCall) -> None:
        super().__init__()
        self.attention = attention
        self.head_dim = config.head_dim
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q = nn.Linear(hidden, q_size, bias=config.qkv_bias)
        self.k = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.v = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.out = nn.Linear(q_size, hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: Rotation) -> Tensor:
        # [B,s,h] -> [B,s,H,D] each, and back
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        return self.out(self.attention(q, k, v).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU, arXiv 2002.05202."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch's `checkpoint`: what the second run of a layer sends is counted as phase recompute."""
    return nullcontext(), ledger.phase("recompute")


class Block(nn.Module):
    """One decoder layer. With `recompute` it keeps only its input, and runs its forward again in the backward."""

    def __init__(self, config: ModelConfig, attention: AttentionCall, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = SelfAttention(config, attention)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rope: Rotation) -> Tensor:
        # The checkpoint is inside the module that FSDP wraps. So the layer's parameters are still gathered when it is
        # computed again.
        if self.recompute:
            return checkpoint(self._compute, x, rope, use_reentrant=False, context_fn=recompute_contexts)  # pyright: ignore[reportReturnType]
        return self._compute(x, rope)

    def _compute(self, x: Tensor, rope: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm and head. The head is the embedding if `config.tie_embeddings`."""

    def __init__(self, config: ModelConfig, attention: AttentionCall, *, recompute: bool) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, attention, recompute) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, loss: Loss | None = None) -> Any:
        """tokens [B,s] and their global positions [s] -> logits [B,s,V], or the result of `loss`.

        `loss` gets the last hidden states and the output matrix. It runs in here, inside the module that FSDP wraps,
        where the matrix is whole.
        """
        x = self.embedding(tokens)
        wide = torch.promote_types(x.dtype, torch.float32)
        rope = rotation(positions, self.config.head_dim, self.config.rope_theta, wide)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x)
        if loss is not None:
            return loss(x, self.embedding.weight if self.head is None else self.head.weight)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter from `seed`, with the same values for any sharding.

    Each parameter is drawn whole, one at a time. Matrices have standard deviation 1/sqrt(columns): projections then
    keep the scale of their input at every model size, so that attention depends on positions even in a tiny model. Norm
    weights are 1, biases 0.
    """
    for index, (name, parameter) in enumerate(model.named_parameters()):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        fill(whole, name, index, seed)
        if isinstance(parameter, DTensor):
            # Without a source rank nothing is sent: each rank cuts its own shard.
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


@torch.no_grad()
def fill(whole: Tensor, name: str, index: int, seed: int) -> None:
    """Fill `whole` with the initial values of the parameter `name`, the `index`-th of the decoder."""
    if whole.ndim == 1:
        whole.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    generator = torch.Generator(whole.device).manual_seed(seed * 1_000_003 + index)
    whole.normal_(0.0, whole.shape[-1] ** -0.5, generator=generator)
