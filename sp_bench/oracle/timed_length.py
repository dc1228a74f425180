"""Proves a method at the timed length. No rank holds the whole sequence there, and no reference for all of it fits.
Overflowing indices and wrong strides show at such lengths only.

The inputs are turned first, because a step could have kept its results of the old ones. Then a step must be right in a
sample of rows. Its dout is zero except in these rows. So they, with each rank's own keys and values, determine: the
output of the rows; dq of all tokens, which is zero elsewhere; and dk and dv of *all* keys, since the last row, which is
in the sample, sees them all. Each KV head must meet the budget by itself, and nearly so each row of the output and dq.
Last, all rows of another step must meet the identities of attention's results.

What it finds belongs to this execution: every trial checks it again.

B batch, n sampled rows, s local tokens, Hq and Hkv heads, g = Hq/Hkv, D head size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench.attention.layouts import SequenceLayout
from sp_bench.attention.merge import wide_dtype
from sp_bench.config.documents import spans
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.costs.flags import budget_of_timed
from sp_bench.oracle.identities import check_identities
from sp_bench.oracle.latents import error_of_up, keys_and_values
from sp_bench.oracle.reduced_length import TENSORS, Errors, all_reduce, reference_dtype, require

NUM_ROWS = 64  # of the sample; a few more where the ranks cannot own equally many
# What a row's error in one KV head may be, over the budget: by bytes of an element. Right ones reached 0.7 and 5.7, and
# an error of 3% in bf16 is 1.5. Of a row of fewer elements, such as 2, more times: the errors of few average less.
ROW_FACTORS, FEW_ELEMENTS = {2: 1.25, 4: 16.0, 8: 16.0}, 16
LATE_CYCLES = 2**24  # of a device's clock, about 10 ms
LOSS_SCALE = 256  # as in fp16 training, and a power of two: gradients of late keys would otherwise be subnormal in fp16
Step = Callable[[], Sequence[Tensor]]  # reads its inputs in place; returns output, or output, dq, dk, dv


class Draw(NamedTuple):
    """What the sampled rows are drawn from: each replicate draws others."""

    seed: int
    replicate: int


def budget_at(columns: Mapping[str, Any], config: TrialConfig) -> Errors:
    """The budget of each tensor at the timed length. columns: of the proof at the reduced length."""
    reduced_len = columns["correctness_seq_len"]
    return {
        name: budget_of_timed(budget, config.dtype, config.seq_len, reduced_len)
        for name, budget in columns["error_budget"].items()
    }


def turn(inputs: Sequence[Tensor]) -> None:
    """Move every value of this rank's inputs [B,s,H,D] to the next token, and change its sign, in place."""
    for x in inputs:
        x.copy_(x.roll(1, dims=1)).neg_()


class Kept:
    """A copy in host memory of what one step returned. `keep` copies without waiting: a result that is computed after
    the step's clock has stopped is missing from the copy."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        """like: tensors on the device, of the sizes that `keep` will get."""
        self._device = like[0].device
        self._kept = [torch.zeros(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for x in like]

    def keep(self, tensors: Sequence[Tensor]) -> None:
        for kept, x in zip(self._kept, tensors, strict=True):
            kept.copy_(x, non_blocking=True)

    def tensors(self) -> list[Tensor]:
        """What was kept, on the device, after that has been waited for."""
        return [kept.to(self._device) for kept in self._kept]


class Proof:
    """Proves steps of one attention: sampled rows against attention in a wider dtype over the keys of all ranks, and
    all rows by identities.

    Every rank gets the sampled rows and computes them against its own keys; the parts are merged by log-sum-exp. So
    nothing as long as the sequence is gathered. An error is the root mean square over tokens of each token's relative
    L2. One norm over all tokens would hide most of them, because early tokens have larger values.

    Inputs of a step are this rank's q, k, v and, if there is a backward, dout; its results are output, or output, dq,
    dk, dv.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        shape: AttentionShape,
        mesh: DeviceMesh,
        draw: Draw,
        budget: Errors,
        sinks: Tensor | None = None,
    ) -> None:
        self._shape, self._mesh, self._draw, self._budget, self._sinks = shape, mesh, draw, budget, sinks
        self._sampled = _sample(layout, shape.seq_len, draw, shape.documents, shape.window)
        self._positions = layout.global_positions(mesh.get_rank() % layout.sp_size, shape.seq_len)
        self._row_of = {position: row for row, position in enumerate(self._sampled.tolist())}
        mine = [index for index, position in enumerate(self._positions) if position in self._row_of]
        self._mine = torch.tensor(mine, dtype=torch.long, device=mesh.device_type)

    def check_turned(self, step: Step, eager: Step, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Prove a step that has run on `inputs` before, on the same inputs turned. Returns row columns.

        eager: `step` itself or, if `step` is a replay, what it replays, launched call by call. Both read their inputs
            in place.

        Raises:
            Incorrect: an error is above its budget. Raised on every rank.
        """
        turn(inputs)
        columns: dict[str, Any] = {}
        if step is not eager:
            columns["replay_rel_error"] = check_replay(step, eager, self._budget, self._mesh)
        errors, of_head = self.check_rows(step, inputs)
        columns["sampled_head_error"] = of_head
        columns |= {"sampled_rel_error": errors.pop("output"), "sampled_grad_error": errors or None}
        if len(inputs) == len(TENSORS):
            what: Prose = f"all rows at seq_len={self._shape.seq_len}"
            columns["identity_error"] = self._check_identities(inputs, step(), what)
        return columns

    def check_rows(self, step: Step, inputs: Sequence[Tensor]) -> tuple[Errors, Errors]:
        """Run one more step, and return the errors of its results, and those of the worst KV head.

        In dout all rows but the sampled ones are set to zero for this step. Afterwards it is drawn anew: of a copy
        there is perhaps no room on the device, and one to the host and back takes seconds.

        Raises:
            Incorrect: an error is above its budget. Raised on every rank.
        """
        (q, latent, up, *loss), mesh, draw = inputs, self._mesh, self._draw
        for dout in loss:
            sampled = LOSS_SCALE * dout[:, self._mine]
            dout.zero_()
            dout[:, self._mine] = sampled
        out, *gradients = _in_flight(step, mesh, late=sum(draw) % mesh.size()) if q.is_cuda else step()
        known = self._gathered(self._of([q, out, *loss, *gradients[:1]]))
        for dout in loss:
            seed = (draw.seed * 1_000_003 + draw.replicate) * mesh.size() + mesh.get_rank()
            dout.normal_(generator=torch.Generator(dout.device).manual_seed(seed))
        queries, got, *backward = known
        k, v, hidden, want, lse = self._reference(queries, latent, up)
        squares = {"output": _relative_squares(got, want, k.shape[2])}
        if gradients:
            dout_rows, got_dq = backward
            gradients[0][:, self._mine] = 0  # these rows of dq are compared as `got_dq`; all others must be zero
            wanted = _gradients(queries, dout_rows, want, lse, k, v, hidden)
            if self._shape.kv_lora_rank is not None:
                squares |= _latent_errors(gradients, got_dq, wanted, latent, up, self._shape, mesh)
            else:
                seen = torch.ones(k.shape[1], dtype=torch.bool, device=k.device) if hidden is None else ~hidden.all(0)
                squares |= _gradient_errors(gradients, got_dq, wanted, seen, mesh)
        return _require_all(squares, self._budget, q, f"sampled rows at seq_len={self._shape.seq_len}")

    def sampled(self, results: Sequence[Tensor]) -> list[Tensor]:
        """This rank's share of the sampled rows of a step's output and dq."""
        return self._of(results[:2])

    def check_sampled(self, shares: Sequence[Tensor], inputs: Sequence[Tensor], what: Prose) -> Errors:
        """Check what `sampled` gives of a step of all rows on `inputs`. Returns the errors.

        Raises:
            Incorrect: an error is above its budget. Raised on every rank.
        """
        (q, latent, up, *loss), (out, *of_dq) = inputs, shares
        queries, got, *backward = self._gathered([*self._of([q]), out, *self._of(loss), *of_dq])
        k, v, hidden, want, lse = self._reference(queries, latent, up)
        squares = {"output": _relative_squares(got, want, k.shape[2])}
        if of_dq:
            dout, got_dq = backward
            want_dq = torch.zeros_like(got_dq)
            for head, dq, *_ in _gradients(queries, dout, want, lse, k, v, hidden):
                want_dq[:, :, _group(head, got_dq, k)] = dq
            squares["dq"] = _relative_squares(got_dq, all_reduce(want_dq, self._mesh), k.shape[2])
        return _require_all(squares, self._budget, q, what)[0]

    def check_results(self, results: Sequence[Tensor], inputs: Sequence[Tensor], what: Prose) -> Errors:
        """The same of all that the step returned, with all identities: of dk and dv, which are of all rows, these alone
        tell.

        Raises:
            Incorrect: an error is above its budget. Raised on every rank.
        """
        errors = self.check_sampled(self.sampled(results), inputs, what)
        if len(results) > 1:
            self._check_identities(inputs, results, what)
        return errors

    def _check_identities(self, inputs: Sequence[Tensor], results: Sequence[Tensor], what: Prose) -> Errors:
        return check_identities(inputs, results, self._mesh, what, sinks=self._sinks is not None)

    def _of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's share of the sampled rows in its tensors [B,s,Hq,D]."""
        return [x.index_select(1, self._mine) for x in tensors]

    def _gathered(self, shares: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sampled rows of all ranks, in a wider dtype [B,n,Hq,D] each, from what `_of` gives. D may differ."""
        q, shape = shares[0], self._shape
        sizes = [x.shape[-1] for x in shares]
        rows = torch.zeros(
            *(shape.batch_size, len(self._sampled), shape.num_heads, sum(sizes)),
            dtype=reference_dtype(q.dtype, q.device),
            device=q.device,
        )
        places = [self._row_of[self._positions[index]] for index in self._mine.tolist()]
        rows[:, places] = torch.cat(list(shares), dim=-1).to(rows.dtype)
        return all_reduce(rows, self._mesh).split(sizes, dim=-1)

    def _reference(self, queries: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """k and v, or those that latents and up-projections give; what is hidden; output and log-sum-exp of the sampled
        `queries`."""
        if self._shape.kv_lora_rank is not None:
            k, v = keys_and_values(k, v, self._shape.head_dim)
        hidden = self._hidden(k.device)
        return k, v, hidden, *_attention(queries, k, v, hidden, self._mesh, self._sinks)

    def _hidden(self, device: torch.device) -> Tensor | None:
        """Which of this rank's keys a sampled row may not see [n,s]; None: it sees all."""
        if not self._shape.causal:
            return None
        keys, sampled = torch.tensor(self._positions, device=device), self._sampled.to(device)
        hidden = keys[None, :] > sampled[:, None]
        if self._shape.window is not None:
            hidden |= keys[None, :] <= sampled[:, None] - self._shape.window
        if lengths := self._shape.documents:
            document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
            hidden |= document[keys][None, :] != document[sampled][:, None]
        return hidden


def _require_all(squares: Mapping[str, Tensor], budget: Errors, q: Tensor, what: Prose) -> tuple[Errors, Errors]:
    """Check the relative errors of each tensor: over all, of each KV head, and of each row. Returns the first, and the
    largest of the second.

    squares: of output and dq as `_relative_squares` [B,n,Hkv]; of dk and dv its mean over tokens [Hkv].

    Raises:
        Incorrect: an error is above its budget. Raised on every rank.
    """
    heads = {name: each.flatten(0, -2).mean(0) if each.ndim > 1 else each for name, each in squares.items()}
    errors = {name: float(each.mean().sqrt()) for name, each in heads.items()}
    of_head = {name: float(each.max().sqrt()) for name, each in heads.items()}
    of_row = {name: float(each.max().sqrt()) for name, each in squares.items() if each.ndim > 1}
    require(errors, budget, what)
    require(of_head, budget, f"{what}, in one KV head")
    num_elements = q.shape[2] * q.shape[3] // len(heads["output"])  # of a row in one KV head
    factor = ROW_FACTORS[q.dtype.itemsize] * max(FEW_ELEMENTS / num_elements, 1.0) ** 0.5
    of_rows = {name: factor * budget[name] for name in of_row}
    require(of_row, of_rows, f"{what}, in one row and KV head")
    return errors, of_head


def _in_flight(step: Step, mesh: DeviceMesh, late: int) -> Sequence[Tensor]:
    """Issue three steps one behind the other, as timed steps are, with rank `late` of the world late. Returns the
    results of the last one.

    A buffer that is overwritten before a peer, a stream or an earlier step has read it shows here; on idle devices it
    would not.
    """
    if mesh.get_rank() == late:
        torch.cuda._sleep(LATE_CYCLES)
    for _ in range(2):
        step()
    return step()


def _gradient_errors(
    gradients: Sequence[Tensor],
    got_dq: Tensor,
    wanted: Iterator[tuple[int, Tensor, Tensor, Tensor]],
    seen: Tensor,
    mesh: DeviceMesh,
) -> dict[str, Tensor]:
    """The squares that `_require_all` takes, of dq, dk and dv; the same on every rank. What must be zero counts as a
    part of all that need not be.

    gradients: this rank's dq [B,s,Hq,D] with zeros in the sampled rows, and its dk and dv [B,s,Hkv,D].
    got_dq: the sampled rows of dq [B,n,Hq,D].
    wanted: what `_gradients` yields.
    seen: [s], this rank's keys that a sampled row sees. dk and dv of the others must be zero.
    """
    stray_dq, got_dk, got_dv = gradients
    want_dq = torch.zeros_like(got_dq)
    # [2,2,B,s,Hkv]: (dk, dv) x (error, reference), the sum of squares of each token and KV head
    squares = got_dq.new_zeros(2, 2, *got_dk.shape[:3])
    for head, dq, *dkv in wanted:
        want_dq[:, :, _group(head, got_dq, got_dk)] = dq
        for of_tensor, got, want in zip(squares, (got_dk, got_dv), dkv, strict=True):
            error = got[:, :, head].to(want.dtype) - want
            of_tensor[..., head] = torch.stack([error, want]).square().sum(-1)
    found = _query_errors(stray_dq, got_dq, all_reduce(want_dq, mesh), got_dk.shape[2], mesh)
    num_tokens = all_reduce(squares.new_full((), got_dk[:, seen, 0, 0].numel(), dtype=torch.float64), mesh)
    for name, (error, size) in zip(("dk", "dv"), squares.double(), strict=True):
        of_tokens = error[:, seen] / size[:, seen].mean(-1, keepdim=True)
        strays = all_reduce(error[:, ~seen].sum((0, 1)), mesh) / all_reduce(size.sum((0, 1)), mesh).mean()
        found[name] = all_reduce(of_tokens.sum((0, 1)), mesh) / num_tokens + strays
    return found


def _query_errors(
    stray_dq: Tensor, got_dq: Tensor, want_dq: Tensor, num_kv_heads: int, mesh: DeviceMesh
) -> dict[str, Tensor]:
    strays = all_reduce(_by_head(stray_dq, num_kv_heads).sum((0, 1)), mesh)
    strays /= _by_head(want_dq, num_kv_heads).sum((0, 1)).mean()
    return {"dq": _relative_squares(got_dq, want_dq, num_kv_heads) + strays}


def _latent_errors(
    gradients: Sequence[Tensor],
    got_dq: Tensor,
    wanted: Iterator[tuple[int, Tensor, Tensor, Tensor]],
    latent: Tensor,
    up: Tensor,
    shape: AttentionShape,
    mesh: DeviceMesh,
) -> dict[str, Tensor]:
    """As `_gradient_errors`, with the latents' gradient as dk, and the up-projections' as dv. The last row, which is
    sampled, sees all keys: no gradient must be zero.

    gradients: dq, the latents' gradient [B,s,1,C+R], and this rank's share of the up-projections' [C,H,D-R+E].
    """
    stray_dq, got, share = gradients
    rank, own = len(up), shape.head_dim - (shape.qk_rope_head_dim or 0)
    want_dq, want = torch.zeros_like(got_dq), torch.zeros_like(latent[:, :, 0], dtype=got_dq.dtype)
    want_up = torch.zeros_like(up, dtype=got_dq.dtype)
    for head, dq, dk, dv in wanted:
        want_dq[:, :, head : head + 1] = dq
        of_head = torch.cat([dk[..., :own], dv], dim=-1)
        want[..., :rank] += torch.einsum("bsd,cd->bsc", of_head, up[:, head].to(of_head.dtype))
        want[..., rank:] += dk[..., own:]
        want_up[:, head] = torch.einsum("bsc,bsd->cd", latent[:, :, 0, :rank].to(of_head.dtype), of_head)
    error, size = (x.double().square().sum(-1) for x in (got[:, :, 0].to(want.dtype) - want, want))
    sums = all_reduce(torch.stack([(error / size).sum(), size.new_tensor(size.numel())]), mesh)
    of_up = error_of_up(all_reduce(share.to(want_up.dtype), mesh), all_reduce(want_up, mesh), shape)
    found = _query_errors(stray_dq, got_dq, all_reduce(want_dq, mesh), shape.num_kv_heads, mesh)
    return found | {"dk": (sums[0] / sums[1])[None], "dv": sums.new_tensor([of_up**2])}


def _sample(
    layout: SequenceLayout, seq_len: int, draw: Draw, documents: Sequence[int] = (), window: int | None = None
) -> Tensor:
    """The sampled global positions [n], sorted; the same on every rank.

    The last token of each document is among them, since these see all keys. The first is not, since its dq is zero. Of
    the others each rank owns equally many, or all that it has, drawn at random. Under a window those at its edges are
    among them, too: where a rank's run begins, the first token of the run, the last one that sees the keys before it,
    and the first one that does not.
    """
    generator = torch.Generator().manual_seed(draw.seed * 1_000_003 + draw.replicate)
    wholes = list(spans(documents or (seq_len,)))
    sampled, of_documents = {whole[-1] for whole in wholes}, {whole[0] for whole in wholes}
    firsts = torch.tensor(sorted(of_documents))
    for rank in range(layout.sp_size):
        tokens = torch.tensor(layout.global_positions(rank, seq_len))
        tokens = tokens[(tokens < seq_len - 1) & ~torch.isin(tokens, firsts)]
        drawn = torch.randperm(len(tokens), generator=generator)[: -(-NUM_ROWS // layout.sp_size)]
        sampled.update(tokens[drawn].tolist())
        if window is not None:
            starts = [run.start for run in layout.runs(rank, seq_len)]
            edges = {start + ahead for start in starts for ahead in (0, window - 2, window - 1)}
            sampled.update(token for token in edges if token < seq_len and token not in of_documents)
    return torch.tensor(sorted(sampled))


def _relative_squares(got: Tensor, want: Tensor, num_kv_heads: int) -> Tensor:
    """got, want [B,n,H,D] -> |got - want|^2 of each row and KV head over the mean of |want|^2 over KV heads
    [B,n,Hkv]. So their mean over KV heads is that of the whole row, and no head is divided by next to nothing. Nor is a
    row whose terms cancel, as they may in a few elements: it counts as half as large as the median row at least."""
    size = _by_head(want, num_kv_heads).mean(-1, keepdim=True)
    size = size.maximum(size.median(dim=1, keepdim=True).values / 4)
    return _by_head(got - want, num_kv_heads) / size


def _by_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B,n,H,D] -> the sum of squares of each KV head [B,n,Hkv], in fp64."""
    heads = x.tensor_split(num_kv_heads, dim=2)
    norms = [torch.linalg.vector_norm(head, dim=(2, 3), dtype=wide_dtype(x)) for head in heads]
    return torch.stack(norms, dim=-1).double().square()


def check_replay(replay: Step, eager: Step, budget: Errors, mesh: DeviceMesh) -> Errors:
    """Compare the results of a replayed step with those of the same step launched call by call. Returns the largest
    relative L2 of any rank.

    Raises:
        Incorrect: an error is above its budget. Raised on every rank.
    """
    pairs = zip(replay(), eager(), strict=True)  # the eager step does not write into the memory of the replay's results
    largest = torch.stack([_norm(got - want) / _norm(want) for got, want in pairs])
    largest = largest.nan_to_num(nan=float("inf"))  # because the maximum over ranks may ignore a NaN
    found = all_reduce(largest, mesh, dist.ReduceOp.MAX).tolist()
    errors: Errors = dict(zip(TENSORS, found, strict=False))
    what: Prose = "replayed step against an eager one"
    require(errors, budget, what)
    return errors


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor))


def _group(head: int, q: Tensor, k: Tensor) -> slice:
    """The query heads that read KV head `head`."""
    size = q.shape[2] // k.shape[2]
    return slice(head * size, (head + 1) * size)


def _scores(queries: Tensor, k: Tensor, head: int, hidden: Tensor | None) -> Tensor:
    """The scores [B,g,n,s] of the query heads that read KV head `head`; one KV head at a time, to bound the memory."""
    q = queries[:, :, _group(head, queries, k)]
    scores = torch.einsum("bngd,bsd->bgns", q, k[:, :, head].to(q.dtype)) * q.shape[-1] ** -0.5
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def _attention(
    queries: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, mesh: DeviceMesh, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """queries [B,n,Hq,D] against all ranks' k, v [B,s,Hkv,D] and sinks [Hq] -> out [B,n,Hq,D], lse [B,Hq,n]."""
    outs, lses = [], []
    for head in range(k.shape[2]):
        scores = _scores(queries, k, head, hidden)
        lse = scores.logsumexp(-1)  # -inf without visible keys on this rank
        weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
        outs.append(torch.einsum("bgns,bsd->bngd", weights, v[:, :, head].to(scores.dtype)))
        lses.append(lse)
    part_out, part_lse = torch.cat(outs, dim=2), torch.cat(lses, dim=1)
    # softmax over the keys of all ranks: each rank's part is weighted by its share of the sum of denominators
    top = all_reduce(part_lse.clone(), mesh, dist.ReduceOp.MAX)
    weight = (part_lse - top).exp()
    total = all_reduce(weight.clone(), mesh)
    if sinks is not None:
        total += (sinks.to(total.dtype)[:, None] - top).exp()
    share = (weight / total).transpose(1, 2).unsqueeze(-1)  # [B,Hq,n] -> [B,n,Hq,1]
    return all_reduce(part_out * share, mesh), top + total.log()


def _gradients(
    queries: Tensor, dout: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yields for each KV head: its number, this rank's share of the rows' dq [B,n,g,D], and dk and dv [B,s,D] of this
    rank's keys."""
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
