"""Proves the gated delta rule: the output, and the gradients of q, k, v, the decay and beta.

At a reduced length the reference is the recurrence itself, token by token in a wider dtype, on one device. At the timed
length it is the rule in chunks in a wider dtype, whose states the ranks hand on one after the other: all rows of all
results are compared. Neither uses what the methods make of states.

Budgets are as in reduced_length.py, with the recurrence in the place of the math kernel. B batch, S tokens, P ranks, H
value heads, Hk heads of queries and keys, D and E sizes of a key and of a value head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench.attention.layouts import SequenceLayout, placed
from sp_bench.attention.merge import wide_dtype
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.kernels import DeltaKernel, chunked
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import SequenceParallelAttention
from sp_bench.oracle import identities
from sp_bench.oracle.reduced_length import TENSORS, Errors, all_reduce, reference_dtype, require
from sp_bench.oracle.timed_length import NUM_ROWS, Draw, Step, turn

RESULTS = (*TENSORS, "dg", "dbeta")
SPAN = 4.0  # decays of a whole sequence take so much of the logarithm of a state, on the average over heads


def tame(inputs: Sequence[Tensor], seq_len: int) -> list[Tensor]:
    """q, k, v, g, beta and dout of these normal values: keys and queries of norm 1, decays and betas with which a state
    still has of the first token at the last, as the proofs need. g is wide."""
    q, k, v, g, beta, dout = inputs
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    most = min(1.0, SPAN * k.shape[-1] / seq_len)  # a beta of 1 overwrites 1/D of a state with each token
    g = g.to(wide_dtype(g)).abs() * (-SPAN / seq_len)
    return [q, k, v, g, (most * beta.to(wide_dtype(beta)).sigmoid()).to(beta.dtype), dout]


def random_inputs(shape: AttentionShape, device: torch.device, seed: int) -> list[Tensor]:
    """The inputs (`AttentionShape.sizes`) of whole sequences, equal on every rank and machine."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(size, generator=generator) for size in shape.sizes(shape.seq_len))
    return tame([x.to(device, getattr(torch, shape.dtype)) for x in drawn], shape.seq_len)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The output by the definition (`kernels.DeltaKernel`), one token after the other."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    state, outs = q.new_zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3]), []
    for token in range(v.shape[1]):
        state = g[:, token, :, None, None].exp() * state
        held = torch.einsum("bhde,bhd->bhe", state, k[:, token])
        update = beta[:, token, :, None] * (v[:, token] - held)
        state = state + k[:, token].unsqueeze(-1) * update.unsqueeze(-2)
        outs.append(torch.einsum("bhde,bhd->bhe", state, q[:, token]) * k.shape[3] ** -0.5)
    return torch.stack(outs, dim=1)


def results(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """q, k, v, g, beta, dout -> output, dq, dk, dv, dg, dbeta."""
    *read, dout = inputs
    leaves = [x.clone().requires_grad_() for x in read]
    out = attend(*leaves)
    if out.shape != dout.shape:
        raise Incorrect(f"output has shape {tuple(out.shape)}, but its gradient has shape {tuple(dout.shape)}")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.to(want.dtype) - want).norm() / want.norm())


def _budget(inputs: Sequence[Tensor], want: Sequence[Tensor]) -> Errors:
    """2 x (error of the recurrence that accumulates in fp32 and rounds its results to the trial's dtype + eps). fp64
    has no wider dtype: its error is that of fp32, scaled by the ratio of their eps."""
    dtype = inputs[0].dtype
    narrow, eps = torch.float32 if dtype == torch.float64 else dtype, torch.finfo(dtype).eps
    scale = eps / torch.finfo(narrow).eps
    low = [x.to(narrow) for x in results(recurrence, [x.float() for x in inputs])]
    return {n: 2 * (scale * _relative(x, y) + eps) for n, x, y in zip(RESULTS, low, want, strict=True)}


def check_attention(
    attention: SequenceParallelAttention,
    kernel: Any,
    kernel_name: str,
    shape: AttentionShape,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int,
) -> dict[str, Any]:
    """Prove `attention`, which was opened for `shape` on `mesh`, on the ranks of each sequence. Returns row columns.

    Raises:
        Incorrect: the kernel or the method is above its budget.
    """
    inputs = random_inputs(shape, device, seed)
    want = results(recurrence, [x.to(reference_dtype(inputs[0].dtype, device)) for x in inputs])
    budget = _budget(inputs, want)
    of_kernel: DeltaKernel = kernel
    alone = results(lambda *read: of_kernel.attend(*read, state=None, scale=shape.head_dim**-0.5)[0], inputs)
    kernel_errors = {n: _relative(x, y) for n, x, y in zip(RESULTS, alone, want, strict=True)}
    require(kernel_errors, budget, f"kernel {kernel_name} on one device")
    held = attention.layout.global_positions(mesh.get_rank() % attention.layout.sp_size, shape.seq_len)
    mine, wanted = ([x[:, held] for x in of_all] for of_all in (inputs, want))
    errors = _errors(results(attention.attend, mine), wanted, mesh)
    require(errors, budget, f"method on {attention.layout.sp_size} ranks")
    return {
        "correctness_seq_len": shape.seq_len,
        **{f"rel_error_{name}": error for name, error in errors.items()},
        "error_budget": {name: budget[name] for name in TENSORS},
        "kernel_rel_error": {name: kernel_errors[name] for name in TENSORS},
    }


class Proof:
    """Proves steps of one attention, as `timed_length.Proof` does, in all rows.

    Inputs of a step are this rank's q, k, v, g, beta and, if there is a backward, dout; its results are those of
    RESULTS, or the output alone.
    """

    def __init__(
        self, layout: SequenceLayout, shape: AttentionShape, mesh: DeviceMesh, draw: Draw, budget: Errors
    ) -> None:
        self._layout, self._shape, self._mesh = layout, shape, mesh
        self._budget = {name: budget.get(name, max(budget.values())) for name in RESULTS}
        generator = torch.Generator().manual_seed(draw.seed * 1_000_003 + draw.replicate)
        rows = torch.randperm(shape.seq_len // layout.sp_size, generator=generator)
        self._mine = rows[: -(-NUM_ROWS // layout.sp_size)].to(mesh.device_type)

    def check_turned(self, step: Step, eager: Step, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Prove a step that has run on `inputs` before, on the same inputs turned; it reads them in place. Returns row
        columns.

        Raises:
            Incorrect: an error is above its budget. Raised on every rank.
        """
        turn([x for x in inputs if x.dim() == 4])
        for x in inputs:
            if x.dim() == 3:  # a decay or a beta of another sign would be no such thing
                x.copy_(x.roll(1, dims=1))
        found = list(step())
        errors = self.check_results(found, inputs, f"all rows at seq_len={self._shape.seq_len}")
        columns: dict[str, Any] = {"sampled_rel_error": errors.pop("output"), "sampled_grad_error": errors or None}
        if len(found) > 1:
            columns["identity_error"] = _identities(found, inputs, self._mesh)
        return columns

    def sampled(self, results: Sequence[Tensor]) -> list[Tensor]:
        """This rank's share of sampled rows of all that a step returned."""
        return [x.index_select(1, self._mine) for x in results]

    def check_sampled(self, shares: Sequence[Tensor], inputs: Sequence[Tensor], what: Prose) -> Errors:
        """Check what `sampled` gives of a step on `inputs`. Returns the errors of TENSORS.

        Raises:
            Incorrect: an error is above its budget. Raised on every rank.
        """
        return self._check(shares, self.sampled(self._wanted(shares, inputs)), what)

    def check_results(self, results: Sequence[Tensor], inputs: Sequence[Tensor], what: Prose) -> Errors:
        """The same of all rows.

        Raises:
            Incorrect: an error is above its budget. Raised on every rank.
        """
        return self._check(results, self._wanted(results, inputs), what)

    def _wanted(self, found: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return _of_runs(inputs, self._layout, self._shape, self._mesh, backward=len(found) > 1)

    def _check(self, found: Sequence[Tensor], wanted: Sequence[Tensor], what: Prose) -> Errors:
        errors = _errors(found, wanted, self._mesh)
        require(errors, self._budget, what)
        return {name: error for name, error in errors.items() if name in TENSORS}


def _of_runs(
    inputs: Sequence[Tensor], layout: SequenceLayout, shape: AttentionShape, mesh: DeviceMesh, *, backward: bool
) -> list[Tensor]:
    """What `results` gives of whole sequences, this rank's part: in chunks, in a wider dtype. The ranks compute one run
    of tokens after the other, on the state that the one before leaves; and so back, on the gradient of the state that
    it leaves."""
    wide = reference_dtype(inputs[0].dtype, inputs[0].device)
    sizes = (shape.batch_size, shape.num_heads, shape.head_dim, shape.value_dim)
    handed = torch.zeros(sizes, dtype=wide, device=inputs[0].device)
    me = mesh.get_rank() % layout.sp_size
    runs = sorted(
        (run.start, rank, slice(place, place + len(run)))
        for rank in range(layout.sp_size)
        for place, run in placed(layout.runs(rank, shape.seq_len))
    )
    mine: dict[int, tuple[list[Tensor], Tensor, Tensor]] = {}  # what a run reads, its output and the state after it
    for start, rank, rows in runs:
        if rank == me:
            read = [x[:, rows].to(wide).requires_grad_() for x in inputs[:5]]
            read.append(handed.clone().requires_grad_())
            mine[start] = read, *chunked.attend(*read, scale=shape.head_dim**-0.5)
        after = mine[start][2].detach().clone() if rank == me else torch.zeros_like(handed)
        handed = all_reduce(after, mesh)
    found = {start: [out.detach()] for start, (_, out, _) in mine.items()}
    handed = torch.zeros_like(handed)
    for start, rank, rows in reversed(runs) if backward else ():
        before = torch.zeros_like(handed)
        if rank == me:
            read, *made = mine.pop(start)
            *gradients, before = torch.autograd.grad(made, read, (inputs[5][:, rows].to(wide), handed))
            found[start] += gradients
        handed = all_reduce(before.clone(), mesh)
    return [torch.cat(parts, dim=1) for parts in zip(*found.values(), strict=True)]


def _identities(found: Sequence[Tensor], inputs: Sequence[Tensor], mesh: DeviceMesh) -> Errors:
    """The output is linear in q and in v: sum <q,dq> = sum <out,dout> = sum <v,dv>, over all tokens and heads. Returns
    the differences, over the root sum of squares of their terms.

    Raises:
        Incorrect: one is above its budget.
    """
    (q, _, v, *_, dout), (out, dq, _, dv, *_) = inputs, found
    terms = [(x.double() * y.double()).sum(-1) for x, y in ((out, dout), (q, dq), (v, dv))]
    sums = torch.stack([torch.stack([x.sum(), x.square().sum()]) for x in terms])
    (total, squares), *others = all_reduce(sums, mesh)
    quotients = {
        name: float((total - other).abs() / (squares + more).sqrt())
        for name, (other, more) in zip(("q_dq", "v_dv"), others, strict=True)
    }
    limits = {name: identities.budget(name, q.dtype) for name in quotients}
    for name, quotient in quotients.items():
        if not quotient <= limits[name]:
            raise Incorrect(f"identity {name} does not hold: {quotient:.2e} of its terms, budget {limits[name]:.2e}")
    return quotients


def _errors(got: Sequence[Tensor], want: Sequence[Tensor], mesh: DeviceMesh) -> Errors:
    """Relative L2 error of each tensor over whole sequences, from each rank's part; equal on every rank."""
    squares = [
        torch.stack([(g.to(w.dtype) - w).double().square().sum(), w.double().square().sum()])
        for g, w in zip(got, want, strict=True)
    ]
    of_all = all_reduce(torch.stack(squares), mesh)
    return {name: float((error / size).sqrt()) for name, (error, size) in zip(RESULTS, of_all, strict=False)}
