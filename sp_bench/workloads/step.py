"""One step of attention alone, forward or forward and backward, on inputs that a rank draws where it is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_bench.config.trial import AttentionShape
from sp_bench.measure import ledger
from sp_bench.methods import SequenceParallelAttention


def local_inputs(shape: AttentionShape, local_len: int, device: torch.device, seed: int) -> list[Tensor]:
    """This rank's q, k, v, dout, drawn on the device: at the timed length nobody holds the whole sequence."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(
            shape.batch_size,
            local_len,
            heads,
            shape.head_dim,
            generator=generator,
            device=device,
            dtype=getattr(torch, shape.dtype),
        )
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    ]


def attention_step(
    inputs: Sequence[Tensor], attention: SequenceParallelAttention, *, backward: bool = True
) -> list[Tensor]:
    """output, or output, dq, dk, dv, of this rank's q, k, v and dout."""
    q, k, v, dout = inputs
    if not backward:
        with torch.no_grad():
            return [attention(q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    with ledger.phase("backward"):
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
