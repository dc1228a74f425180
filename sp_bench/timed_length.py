"""What is proven at the timed length, where nobody holds the whole sequence and no reference fits: what hangs on a
sample of query rows. Overflowing indices and wrong strides hide at such lengths.

With a dout that is zero but for those rows, their output, dq of all rows (zero elsewhere) and dk and dv of *all* keys
follow from the rows and each rank's own keys and values.

B batch, n sampled rows, s local tokens, Hq and Hkv heads, g = Hq/Hkv, D head size.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench.config import AttentionShape
from sp_bench.correctness import TENSORS, Errors, all_reduce, reference_dtype, require
from sp_bench.merging import wide_dtype

NUM_ROWS = 64
Step = Callable[[], Sequence[Tensor]]  # gives output, or output, dq, dk, dv, of inputs where they lie


def check_rows(
    step: Step,
    inputs: Sequence[Tensor],
    positions: Sequence[int],
    shape: AttentionShape,
    mesh: DeviceMesh,
    seed: int,
    budget: Errors,
) -> Errors:
    """Relative L2 of one more step's results, against a wider dtype's attention of sampled rows over all ranks' KV.

    `inputs`: this rank's q, k, v and dout, which `step` reads; dout is thinned out for it, then restored. The rows go
    to every rank, each computes them against its own keys, and the parts are merged by log-sum-exp: nothing of the
    sequence's length is gathered.

    Raises:
        Incorrect: an error is over its budget; on every rank.
    """
    q, k, v, dout = inputs
    sampled = torch.randperm(shape.seq_len, generator=torch.Generator().manual_seed(seed))[:NUM_ROWS].sort().values
    row_of = {position: row for row, position in enumerate(sampled.tolist())}
    mine = [index for index, position in enumerate(positions) if position in row_of]
    dense = dout.clone()
    dout.zero_()
    dout[:, mine] = dense[:, mine]
    out, *gradients = step()
    known = [q, out, dout, *gradients[:1]]
    rows = torch.zeros(
        *(len(known), shape.batch_size, len(sampled), shape.num_heads, shape.head_dim),
        dtype=reference_dtype(q.dtype, q.device),
        device=q.device,
    )
    rows[:, :, [row_of[positions[index]] for index in mine]] = torch.stack([x[:, mine] for x in known]).to(rows.dtype)
    dout.copy_(dense)
    queries, got, dout_rows, *got_dq = all_reduce(rows, mesh)

    key_positions = torch.tensor(positions, device=q.device)
    hidden = key_positions[None, :] > sampled.to(q.device)[:, None] if shape.causal else None  # [n, s]
    want, lse = _attention(queries, k, v, hidden, mesh)
    errors: Errors = {"output": float((got - want).norm() / want.norm())}
    if gradients:
        gradients[0][:, mine] = 0  # compared below, by rows; the others had no loss
        want_dq = torch.zeros_like(queries)
        squares = queries.new_zeros(5, dtype=torch.float64)  # of stray dq; of error and reference of dk; and of dv
        squares[0] = torch.linalg.vector_norm(gradients[0], dtype=wide_dtype(q)).double() ** 2
        for head, dq, *dkv in _gradients(queries, dout_rows, want, lse, k, v, hidden):
            want_dq[:, :, _group(head, q, k)] = dq
            for place, (got_part, part) in enumerate(zip(gradients[1:], dkv, strict=True)):
                error = got_part[:, :, head].to(part.dtype) - part
                squares[1 + 2 * place] += error.double().square().sum()
                squares[2 + 2 * place] += part.double().square().sum()
        stray, *of_dkv = all_reduce(squares, mesh).sqrt().tolist()
        all_reduce(want_dq, mesh)
        errors["dq"] = float(
            torch.hypot((got_dq[0] - want_dq).norm().cpu(), torch.tensor(stray)) / want_dq.norm().cpu()
        )
        errors["dk"], errors["dv"] = of_dkv[0] / of_dkv[1], of_dkv[2] / of_dkv[3]
    require(errors, budget, f"sampled rows at seq_len={shape.seq_len}")
    return errors


def check_replay(replay: Step, eager: Step, inputs: Sequence[Tensor], budget: Errors, mesh: DeviceMesh) -> Errors:
    """Hold a replayed step's results against those of the same step launched call by call. The `inputs` that both read
    are turned round first: what a replay does not compute anew is of the old ones. The largest relative L2 of any rank.

    Raises:
        Incorrect: an error is over its budget; on every rank.
    """
    for x in inputs:
        x.copy_(x.flip(1))
    pairs = zip(replay(), eager(), strict=True)  # a replay's results lie where no eager step writes
    largest = torch.stack([_norm(got - want) / _norm(want) for got, want in pairs])
    largest = largest.nan_to_num(nan=float("inf"))  # a maximum over ranks may lose a NaN
    found = all_reduce(largest, mesh, dist.ReduceOp.MAX).tolist()
    errors: Errors = dict(zip(TENSORS, found, strict=False))
    require(errors, budget, "replayed step against an eager one")
    return errors


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor))


def _group(head: int, q: Tensor, k: Tensor) -> slice:
    """The query heads that read a KV head."""
    size = q.shape[2] // k.shape[2]
    return slice(head * size, (head + 1) * size)


def _scores(queries: Tensor, k: Tensor, head: int, hidden: Tensor | None) -> Tensor:
    """[B,g,n,s] of the query heads of one KV head: one at a time bounds them."""
    q = queries[:, :, _group(head, queries, k)]
    scores = torch.einsum("bngd,bsd->bgns", q, k[:, :, head].to(q.dtype)) * q.shape[-1] ** -0.5
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def _attention(queries: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """queries [B,n,Hq,D] against all ranks' k, v [B,s,Hkv,D] -> out [B,n,Hq,D], lse [B,Hq,n]."""
    outs, lses = [], []
    for head in range(k.shape[2]):
        scores = _scores(queries, k, head, hidden)
        lse = scores.logsumexp(-1)  # -inf without visible keys on this rank
        weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
        outs.append(torch.einsum("bgns,bsd->bngd", weights, v[:, :, head].to(scores.dtype)))
        lses.append(lse)
    part_out, part_lse = torch.cat(outs, dim=2), torch.cat(lses, dim=1)
    # softmax over all ranks' keys: rescale each part by its denominator
    top = all_reduce(part_lse.clone(), mesh, dist.ReduceOp.MAX)
    weight = (part_lse - top).exp()
    total = all_reduce(weight.clone(), mesh)
    share = (weight / total).transpose(1, 2).unsqueeze(-1)  # [B,Hq,n] -> [B,n,Hq,1]
    return all_reduce(part_out * share, mesh), top + total.log()


def _gradients(
    queries: Tensor, dout: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Of the rows' loss, for each KV head: this rank's share of dq [B,n,g,D], and dk and dv [B,s,D] of its keys."""
    delta = (dout * out).sum(-1).transpose(1, 2)  # [B,n,Hq] -> [B,Hq,n]
    for head in range(k.shape[2]):
        group = _group(head, queries, k)
        weights = (_scores(queries, k, head, hidden) - lse[:, group].unsqueeze(-1)).exp()
        dv = torch.einsum("bgns,bngd->bsd", weights, dout[:, :, group])
        dweights = torch.einsum("bngd,bsd->bgns", dout[:, :, group], v[:, :, head].to(dout.dtype))
        dscores = weights * (dweights - delta[:, group].unsqueeze(-1)) * queries.shape[-1] ** -0.5
        dq = torch.einsum("bgns,bsd->bngd", dscores, k[:, :, head].to(dout.dtype))
        dk = torch.einsum("bgns,bngd->bsd", dscores, queries[:, :, group])
        yield head, dq, dk, dv
