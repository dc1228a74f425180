"""The decoder of the reference, in plain torch. It shares no code with `training.model`, of which it is the check:
RoPE, RMSNorm, grouped queries, the gated delta rule, SwiGLU and the loss are written once more, each in another way
where there is one.

One document of n tokens at a time, which begins at position 0. h hidden size, H query and Hkv KV heads, D head size.
Weights are tensors by the names that our decoder gives them. Norms, rotations, attention and losses are computed in
fp32 (fp64 for fp64 weights), and rounded to the weights' dtype.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from sp_bench.config.model import ModelConfig

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [n,K], w [N,K], bias [N] -> [n,N]
Weights = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


def kind_of(model: ModelConfig, index: int) -> str:
    """The kind of a layer's attention: the pattern of `model.layers` begins anew after each of its ends."""
    pattern = (model.layers or "full").split("+")
    return pattern[index % len(pattern)]


def layer_shapes(model: ModelConfig, index: int) -> Shapes:
    """The shape of each parameter of a layer, in the order of our decoder."""
    hidden, width, head = model.hidden_size, model.intermediate_size, model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (hidden,)}
    mlp = {"gate.weight": (width, hidden), "up.weight": (width, hidden), "down.weight": (hidden, width)}
    after = {"feed_forward_norm.weight": (hidden,)} | {f"feed_forward.{name}": mlp[name] for name in mlp}
    if kind_of(model, index) == "delta":
        states, keys, size = model.delta_heads or 0, model.delta_kv_heads or 0, model.delta_head_dim or 0
        shapes |= {"attention.log_rate": (states,)}
        shapes |= {f"attention.{name}.weight": (keys * size, hidden) for name in "qk"}
        shapes |= {"attention.v.weight": (states * size, hidden)}
        shapes |= {"attention.decay.weight": (states, hidden), "attention.decay.bias": (states,)}
        shapes |= {"attention.beta.weight": (states, hidden), "attention.out_norm.weight": (size,)}
        return shapes | {"attention.out.weight": (hidden, states * size)} | after
    if model.kv_lora_rank is not None:
        rank, turned, value = model.kv_lora_rank, model.qk_rope_head_dim or 0, model.v_head_dim or head
        shapes |= {"attention.q.weight": (model.num_heads * head, hidden)}
        shapes |= {"attention.down.weight": (rank + turned, hidden), "attention.latent_norm.weight": (rank,)}
        shapes |= {"attention.up.weight": (model.num_heads * (head - turned + value), rank)}
        return shapes | {"attention.out.weight": (hidden, model.num_heads * value)} | after
    if model.sinks:
        shapes["attention.sinks"] = (model.num_heads,)
    for name, heads in (("q", model.num_heads), ("k", model.num_kv_heads), ("v", model.num_kv_heads)):
        shapes[f"attention.{name}.weight"] = (heads * head, hidden)
        if model.qkv_bias:
            shapes[f"attention.{name}.bias"] = (heads * head,)
    shapes["attention.out.weight"] = (hidden, model.num_heads * head)
    if model.qk_norm:
        shapes |= {"attention.q_norm.weight": (head,), "attention.k_norm.weight": (head,)}
    return shapes | after


def shapes(model: ModelConfig) -> Shapes:
    """The shape of each parameter, in the order of our decoder."""
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (model.vocab_size, model.hidden_size)}
    for index in range(model.num_layers):
        found |= {f"blocks.{index}.{name}": shape for name, shape in layer_shapes(model, index).items()}
    found["norm.weight"] = (model.hidden_size,)
    return found if model.tie_embeddings else found | {"head.weight": (model.vocab_size, model.hidden_size)}


def within(weights: Weights, module: str) -> dict[str, Tensor]:
    """The weights of a module, by their names in it."""
    return {name.removeprefix(module): weight for name, weight in weights.items() if name.startswith(module)}


def token_losses(
    model: ModelConfig,
    weights: Weights,
    tokens: Tensor,
    labels: Tensor,
    window: int | None = None,
    product: Product = linear,
) -> Tensor:
    """tokens, labels [n] -> the loss of each token [n] in nats; 0 where the label is negative. `window`: tokens that
    one sees in layers of that kind. `product`: what multiplies the layers' matrices."""
    x = weights["embedding.weight"][tokens]
    for index in range(model.num_layers):
        x = layer(model, within(weights, f"blocks.{index}."), x, window_of(model, index, window), product)
    return losses(model, weights, x, labels)


def window_of(model: ModelConfig, index: int, window: int | None) -> int | None:
    """`window`, if the layer is of that kind."""
    return window if kind_of(model, index) == "window" else None


def layer(model: ModelConfig, weights: Weights, x: Tensor, window: int | None, product: Product = linear) -> Tensor:
    """The residual stream [n,h] before a layer -> after it. Each token sees the last `window` ones; None: all."""
    normed = _rms_norm(x, weights["attention_norm.weight"], model.norm_eps)
    attend = _with_states if "attention.log_rate" in weights else _with_keys
    attend = _with_latents if "attention.up.weight" in weights else attend
    attended = attend(model, weights, normed, window, product)
    x = x + product(attended.flatten(1), weights["attention.out.weight"], None)
    normed = _rms_norm(x, weights["feed_forward_norm.weight"], model.norm_eps)
    gate, up = (product(normed, weights[f"feed_forward.{name}.weight"], None) for name in ("gate", "up"))
    return x + product(_wide(gate).mul(_wide(gate).sigmoid()).to(up) * up, weights["feed_forward.down.weight"], None)


def _with_keys(model: ModelConfig, weights: Weights, normed: Tensor, window: int | None, product: Product) -> Tensor:
    """Softmax attention: normed [n,h] -> [n,H,D]."""
    q, k, v = (
        product(normed, weights[f"attention.{name}.weight"], weights.get(f"attention.{name}.bias")).view(
            len(normed), -1, model.head_dim
        )
        for name in "qkv"
    )
    if model.qk_norm:
        q, k = (_rms_norm(y, weights[f"attention.{n}_norm.weight"], model.norm_eps) for n, y in (("q", q), ("k", k)))
    return _attention(_turned(q, model), _turned(k, model), v, window, weights.get("attention.sinks"))


def _with_latents(model: ModelConfig, weights: Weights, normed: Tensor, window: int | None, product: Product) -> Tensor:
    """Softmax attention whose keys and values are made of latents: normed [n,h] -> [n,H,E]. A head of the
    up-projections makes the keys' own elements, and then the values. The last elements of a key are of all heads."""
    number, heads, turned = len(normed), model.num_heads, model.qk_rope_head_dim or 0
    q = product(normed, weights["attention.q.weight"], None).view(number, heads, -1)
    latents = product(normed, weights["attention.down.weight"], None)
    compressed = _rms_norm(latents[:, :-turned], weights["attention.latent_norm.weight"], model.norm_eps)
    made = product(compressed, weights["attention.up.weight"], None).view(number, heads, -1)
    own = model.head_dim - turned
    q = torch.cat((q[..., :own], _turned(q[..., own:], model)), dim=-1)
    of_all = _turned(latents[:, None, -turned:], model).repeat(1, heads, 1)
    k = torch.cat((made[..., :own], of_all), dim=-1)
    return _attention(q, k, made[..., own:], window, None)


def _with_states(model: ModelConfig, weights: Weights, normed: Tensor, window: int | None, product: Product) -> Tensor:
    """The gated delta rule, one token after the other: normed [n,h] -> [n,H,D]. H/Hk heads of states read one head of
    queries and keys. What travels between functions is rounded to the weights' dtype, as where ranks send it."""
    size, eps = model.delta_head_dim or 0, 1e-12
    q, k, v = (product(normed, weights[f"attention.{name}.weight"], None).view(len(normed), -1, size) for name in "qkv")
    q, k = ((_wide(y) / _wide(y).square().sum(-1, keepdim=True).sqrt().clamp(min=eps)).to(y) for y in (q, k))
    beta = _wide(product(normed, weights["attention.beta.weight"], None)).sigmoid().to(normed)
    slowness = _wide(product(normed, weights["attention.decay.weight"], weights["attention.decay.bias"]))
    kept = (-_wide(weights["attention.log_rate"]).exp() * (1 + slowness.exp()).log()).exp()  # of a state, by a token
    q, k = (_wide(y).repeat_interleave(v.shape[1] // y.shape[1], dim=1) for y in (q, k))
    state, outs = _wide(v).new_zeros(v.shape[1], size, size), []
    for token in range(len(normed)):
        state = kept[token, :, None, None] * state
        of_key = (state * k[token, :, :, None]).sum(1)
        written = _wide(beta[token])[:, None] * (_wide(v[token]) - of_key)
        state = state + k[token, :, :, None] * written[:, None, :]
        outs.append((state * q[token, :, :, None]).sum(1) / size**0.5)
    return _rms_norm(torch.stack(outs).to(v), weights["attention.out_norm.weight"], model.norm_eps)


def losses(model: ModelConfig, weights: Weights, x: Tensor, labels: Tensor) -> Tensor:
    """The residual stream [n,h] after all layers, labels [n] -> as `token_losses`."""
    matrix = weights["embedding.weight" if model.tie_embeddings else "head.weight"]
    logits = _wide(linear(_rms_norm(x, weights["norm.weight"], model.norm_eps), matrix))
    of_label = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels < 0, 0.0, logits.logsumexp(1) - of_label)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis."""
    wide = _wide(x)
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x)


def _turned(x: Tensor, model: ModelConfig) -> Tensor:
    """RoPE of x [n,H,D]: elements i and i + D/2 are a complex number, which is turned by its pair's angle a token."""
    pairs = [turn_per_token(model, pair) for pair in range(x.shape[-1] // 2)]
    places, speeds = (torch.tensor(each, dtype=torch.float64, device=x.device) for each in (range(len(x)), pairs))
    angles = torch.outer(places, speeds)[:, None]  # [n,1,D/2]
    turns = torch.polar(torch.full_like(angles, _length(model)), angles)
    halves = _wide(x).split(x.shape[-1] // 2, dim=-1)
    turned = torch.complex(*halves) * turns.to(torch.promote_types(_wide(x).dtype, torch.cfloat))
    return torch.cat((turned.real, turned.imag), dim=-1).to(x)


def turn_per_token(model: ModelConfig, pair: int) -> float:
    """The angle by which a token turns a pair of elements, as Llama 3.1's code and YaRN (arXiv 2309.00071) have it."""
    theta, half, length, factor = (
        model.rope_theta,
        (model.qk_rope_head_dim or model.head_dim) // 2,
        model.rope_original_seq_len,
        model.rope_factor,
    )
    turn = theta ** (-pair / half)
    if length is None or factor is None:
        return turn
    if model.rope_scaling == "llama3":
        wavelength = 2 * math.pi / turn
        if wavelength < length / 4:
            return turn
        if wavelength > length:
            return turn / factor
        smooth = (length / wavelength - 1) / (4 - 1)
        return (1 - smooth) * turn / factor + smooth * turn
    low, high = (half * math.log(length / (2 * math.pi * beta)) / math.log(theta) for beta in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * half - 1)
    ramp = min(max((pair - low) / max(high - low, 0.001), 0), 1)
    return ramp * turn / factor + (1 - ramp) * turn


def _length(model: ModelConfig) -> float:
    """The factor by which YaRN scales q and k."""
    return 1 + math.log(model.rope_factor) / 10 if model.rope_scaling == "yarn" and model.rope_factor else 1.0


def _attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """Causal: q [n,H,D], k and v [n,Hkv,D], sinks [H] -> [n,H,D]. Query heads h*H/Hkv and those after it read KV head
    h. A token sees the last `window` ones, itself among them. A sink is the score of one more key, whose value is 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", _wide(q), _wide(k)) / q.shape[-1] ** 0.5
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(-window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, _wide(sinks)[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(q)].to(v)
    return torch.einsum("hqk,khd->qhd", _wide(weights), _wide(v)).to(q)
