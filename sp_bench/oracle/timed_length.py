"""What is proven at the timed length, where nobody holds the whole sequence and no reference fits: what hangs on a
sample of query rows. Overflowing indices and wrong strides hide at such lengths.

With a dout that is zero but for those rows, their output, dq of all rows (zero elsewhere) and dk and dv of *all* keys,
which the last row sees, follow from the rows and each rank's own keys and values.

B batch, n sampled rows, s local tokens, Hq and Hkv heads, g = Hq/Hkv, D head size.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench.attention.merge import wide_dtype
from sp_bench.config.trial import AttentionShape
from sp_bench.oracle.reduced_length import TENSORS, Errors, all_reduce, reference_dtype, require

NUM_ROWS = 64
LATE_CYCLES = 2**24  # of a device's clock, about 10 ms
LOSS_SCALE = 256  # a power of two, as fp16 is trained with: what late keys get would be subnormal there
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
    """Errors of one more step's results, against a wider dtype's attention of sampled rows over all ranks' KV.

    `inputs`: this rank's q, k, v and, if there is a backward, dout, which `step` reads; dout is thinned out for it,
    then restored. The rows go to every rank, each computes them against its own keys, and the parts are merged by
    log-sum-exp: nothing of the sequence's length is gathered. An error is the root mean square over tokens of their
    relative L2: early tokens have larger values, and would hide all others in one norm.

    Raises:
        Incorrect: an error is over its budget; on every rank.
    """
    q, k, v, *loss = inputs
    sampled = _sample(shape.seq_len, seed)
    row_of = {position: row for row, position in enumerate(sampled.tolist())}
    mine = [index for index, position in enumerate(positions) if position in row_of]
    dense = [x.to("cpu", copy=True) for x in loss]  # beside the step's own peak a device may have no room
    for dout, whole in zip(loss, dense, strict=True):
        dout.zero_()
        dout[:, mine] = LOSS_SCALE * whole[:, mine].to(dout.device)
    out, *gradients = _in_flight(step, mesh, late=seed % mesh.size()) if q.is_cuda else step()
    known = [q, out, *loss, *gradients[:1]]
    rows = torch.zeros(
        *(len(known), shape.batch_size, len(sampled), shape.num_heads, shape.head_dim),
        dtype=reference_dtype(q.dtype, q.device),
        device=q.device,
    )
    rows[:, :, [row_of[positions[index]] for index in mine]] = torch.stack([x[:, mine] for x in known]).to(rows.dtype)
    for dout, whole in zip(loss, dense, strict=True):
        dout.copy_(whole)
    queries, got, *backward = all_reduce(rows, mesh)

    key_positions = torch.tensor(positions, device=q.device)
    hidden = key_positions[None, :] > sampled.to(q.device)[:, None] if shape.causal else None  # [n, s]
    want, lse = _attention(queries, k, v, hidden, mesh)
    errors: Errors = {"output": float(_relative_squares(got, want).mean().sqrt())}
    if gradients:
        dout_rows, got_dq = backward
        gradients[0][:, mine] = 0  # these are compared as rows; the others had no loss
        wanted = _gradients(queries, dout_rows, want, lse, k, v, hidden)
        errors |= _gradient_errors(gradients, got_dq, wanted, mesh)
    require(errors, budget, f"sampled rows at seq_len={shape.seq_len}")
    return errors


def _in_flight(step: Step, mesh: DeviceMesh, late: int) -> Sequence[Tensor]:
    """The last of three steps issued one behind the other, as timed ones are, with one rank late: where a buffer is
    written before a peer, a stream or an earlier step has read it, that shows here and not on idle devices."""
    if mesh.get_rank() == late:
        torch.cuda._sleep(LATE_CYCLES)
    for _ in range(2):
        step()
    return step()


def _gradient_errors(
    gradients: Sequence[Tensor], got_dq: Tensor, wanted: Iterator[tuple[int, Tensor, Tensor, Tensor]], mesh: DeviceMesh
) -> Errors:
    """`gradients`: this rank's dq without the sampled rows, which are `got_dq` [B,n,Hq,D], then dk and dv.
    `wanted`: what `_gradients` gives."""
    stray_dq, got_dk, got_dv = gradients
    want_dq = torch.zeros_like(got_dq)
    squares = got_dq.new_zeros(2, 2, *got_dk.shape[:2], dtype=torch.float64)  # dk, dv; error, want; of each token
    for head, dq, *dkv in wanted:
        want_dq[:, :, _group(head, got_dq, got_dk)] = dq
        for of_tensor, got, want in zip(squares, (got_dk, got_dv), dkv, strict=True):
            error = got[:, :, head].to(want.dtype) - want
            of_tensor += torch.stack([error, want]).double().square().sum(-1)
    stray = torch.linalg.vector_norm(stray_dq, dtype=wide_dtype(stray_dq)).double() ** 2
    num_tokens = stray.new_full((), squares[0, 0].numel())
    sums = torch.stack([*(squares[:, 0] / squares[:, 1]).sum((1, 2)), stray, num_tokens])
    of_dk, of_dv, strays, tokens = all_reduce(sums, mesh).tolist()
    all_reduce(want_dq, mesh)
    of_dq = float(_relative_squares(got_dq, want_dq).mean()) + strays / float(want_dq.double().square().sum())
    return {"dq": of_dq**0.5, "dk": (of_dk / tokens) ** 0.5, "dv": (of_dv / tokens) ** 0.5}


def _sample(seq_len: int, seed: int) -> Tensor:
    """Positions in order: the last, which sees all keys, and others at random; not the first, whose dq is zero."""
    others = torch.randperm(max(seq_len - 2, 0), generator=torch.Generator().manual_seed(seed))[: NUM_ROWS - 1] + 1
    return torch.cat([others.sort().values, torch.tensor([seq_len - 1])])


def _relative_squares(got: Tensor, want: Tensor) -> Tensor:
    """[B,n]: |got - want|^2 / |want|^2 of each row, over heads and head size."""
    error, size = ((x.double().square().sum((2, 3))) for x in (got - want, want))
    return error / size


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
