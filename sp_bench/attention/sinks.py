"""Learnable sinks, one for each query head: a score beside a query's scores in the softmax, which has no value.

A sink is one more part of the keys, with lse = sink and value 0. So it is merged into a finished output by log-sum-exp:
once, after a ring has merged its blocks, and by heads where ranks exchange heads. A kernel's backward that gets the
merged output and lse then gives the right dq, dk and dv. Source: gpt-oss, arXiv 2508.10925, section 2.2.

B batch, n queries, H query heads, D head size.
"""

import torch
from torch import Tensor


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out [B,n,H,D] and lse [B,H,n] over keys and sinks [H]; as they are without sinks."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = (lse - total).exp().transpose(1, 2).unsqueeze(-1)  # [B,H,n] -> [B,n,H,1]
    return (out * share).to(out.dtype), total


def sink_gradients(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """This rank's share of the gradient, [H] in the dtype of `sinks`: of its queries, or of its heads. `out` and `lse`
    are those of `merge_sinks`. The sum over the ranks of a sequence is the gradient.

    A sink's weight w takes from all others: its gradient is -sum w <dout, out>.
    """
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)  # [B,n,H] -> [B,H,n]
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)
