"""The gated delta rule in plain torch: chunks of tokens one after the other, the tokens of a chunk at once.

Source: Gated DeltaNet, arXiv 2412.06464, with the WY form of arXiv 2406.06484. It accumulates in fp32 (fp64 for fp64).
B batch, n tokens, c tokens of a chunk, Hk heads of queries and keys, H of values, D and E sizes of a key and of a value
head.
"""

from typing import TYPE_CHECKING

from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape

if TYPE_CHECKING:
    from torch import Tensor

CUDA_KERNELS = None  # plain matmuls
CHUNK = 64


def unsupported_reason(shape: AttentionShape, device: str) -> Prose | None:
    return None


def attend(
    q: "Tensor", k: "Tensor", v: "Tensor", g: "Tensor", beta: "Tensor", state: "Tensor | None", *, scale: float
) -> "tuple[Tensor, Tensor]":
    import torch
    from torch.nn.functional import pad

    dtype, tokens, heads = v.dtype, q.shape[1], v.shape[2]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    # [B,n,H,.] -> [B,H,n/c,c,.] in the wide dtype. Padded tokens change no state: no decay, no key, no value
    lacking = -tokens % CHUNK
    q, k, v, g, beta = (
        pad(x.to(wide).transpose(1, 2), (0, 0, 0, lacking)).unflatten(2, (-1, CHUNK))
        for x in (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1))
    )
    g = g.cumsum(-2)
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device)
    decay = (g - g.transpose(-1, -2)).masked_fill(ones.triu(1), float("-inf")).exp()  # [.,c,c] of key j until query i
    within = (k * beta @ k.transpose(-1, -2) * decay).tril(-1)  # what a token's update takes from later ones
    # (I + within)^-1, applied: updates of a chunk without what the state before it holds, and what that takes away
    own, taken = torch.linalg.solve_triangular(
        within, torch.cat([v * beta, k * beta * g.exp()], dim=-1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, queries = scale * (q @ k.transpose(-1, -2)) * decay, scale * q * g.exp()
    last = g[..., -1:, :]
    keys = (k * (last - g).exp()).transpose(-1, -2)
    now = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    outs = []
    for chunk in range(q.shape[2]):
        update = own[:, :, chunk] - taken[:, :, chunk] @ now
        outs.append(queries[:, :, chunk] @ now + scores[:, :, chunk] @ update)
        now = last[:, :, chunk].exp() * now + keys[:, :, chunk] @ update
    return torch.cat(outs, dim=2)[:, :, :tokens].transpose(1, 2).to(dtype), now
