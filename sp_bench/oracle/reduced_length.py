"""Proves a method right before it is timed: its output and all three gradients, on the ranks that will be timed.

Errors are relative L2 against the `math` kernel in a wider dtype, on one device. The budget of each tensor is
2 x (error of the `math` kernel in the trial's dtype + eps of that dtype). The trial's own kernel on one device must
meet the budget as well. It does not define the budget, because a kernel that returns zeros would then pass.

What it finds belongs to the code, the options and the machine: one trial's proof holds for others of the same.

B batch, S tokens, P ranks, H heads, D head size, which of values, outputs and their gradients may be another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import kernels
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.attention.masked import of_shape
from sp_bench.attention.merge import wide_dtype
from sp_bench.config.documents import spans
from sp_bench.config.prose import Prose
from sp_bench.config.shape import AttentionShape
from sp_bench.kernels import Attention, Kernel
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import SequenceParallelAttention
from sp_bench.oracle.latents import error_of_up, of_latents

TENSORS = ("output", "dq", "dk", "dv")
PERTURBED = ("repeat_difference", "outside_difference", "inside_difference")  # columns
Errors = dict[str, float]


def reference_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The wider dtype that results in `dtype` are compared with: fp32 for half precision on GPUs, where fp64 would be
    slow, and fp64 otherwise."""
    return torch.float32 if device.type == "cuda" and dtype.itemsize == 2 else torch.float64


def random_inputs(shape: AttentionShape, device: torch.device, seed: int) -> list[Tensor]:
    """The inputs (`AttentionShape.sizes`) of whole sequences, in the shape's dtype. They are drawn on the CPU, so that
    they are equal on every rank and machine."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size, generator=generator) for size in shape.sizes(shape.seq_len)]
    if shape.kv_lora_rank is not None:
        drawn[2] *= shape.kv_lora_rank**-0.5  # keys and values are then as large as elsewhere
    return [x.to(device, getattr(torch, shape.dtype)) for x in drawn]


def at_positions(inputs: Sequence[Tensor], positions: Sequence[int], shape: AttentionShape) -> list[Tensor]:
    """The inputs at these tokens. Up-projections have none."""
    of_tokens = [shape.kv_lora_rank is None or index != 2 for index in range(len(inputs))]
    return [x[:, positions] if has else x for x, has in zip(inputs, of_tokens, strict=True)]


def random_sinks(shape: AttentionShape, device: torch.device, seed: int) -> Tensor | None:
    """A sink of each query head [Hq], in the shape's dtype, equal on every rank; None: the shape has none."""
    if not shape.sinks:
        return None
    drawn = torch.randn(shape.num_heads, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, getattr(torch, shape.dtype))


def _run_kernel(kernel: Attention, inputs: Sequence[Tensor], shape: AttentionShape) -> list[Tensor]:
    """output, dq, dk and dv of whole sequences, computed on this device alone."""
    if shape.kv_lora_rank is not None:
        plain = replace(shape, kv_lora_rank=None)
        return of_latents(lambda qkv_dout: _run_kernel(kernel, qkv_dout, plain), inputs)
    q, k, v, dout = inputs
    scale = shape.head_dim**-0.5
    out, lse = kernel.forward(q, k, v, causal=shape.causal, scale=scale)
    return [out, *kernel.backward(dout, q, k, v, out, lse, causal=shape.causal, scale=scale)]


def _run_reference(inputs: Sequence[Tensor], shape: AttentionShape) -> list[Tensor]:
    """The same of the `math` kernel, which knows nothing of packing or windows here."""
    if shape.window is not None:
        return _run_each_query(kernels.get(kernels.REFERENCE), inputs, shape)
    return _run_each(kernels.get(kernels.REFERENCE), inputs, shape)


def _run_with_sinks(inputs: Sequence[Tensor], sinks: Tensor, shape: AttentionShape) -> list[Tensor]:
    """output, dq, dk, dv and the sinks' gradient, by the definition and by torch's own differentiation: a sink is the
    score of a further key of each query, and what it weighs is left out."""
    *qkv, dout = inputs
    q, k, v, scores_of_sinks = leaves = [x.clone().requires_grad_() for x in (*qkv, sinks)]
    group = shape.num_heads // shape.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * shape.head_dim**-0.5
    hidden = torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool, device=q.device)
    for place, keys in enumerate(_seen_by_each(shape)):
        hidden[place, keys] = False
    scores = scores.masked_fill(hidden, float("-inf"))
    of_sinks = scores_of_sinks[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, of_sinks], dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _seen_by_each(shape: AttentionShape) -> Iterator[slice]:
    """The keys that each query sees: of its own document, up to itself, and the last `window` of them."""
    for whole in spans(shape.documents or (shape.seq_len,)):
        for place in whole:
            yield slice(max(whole.start, place + 1 - (shape.window or shape.seq_len)), place + 1)


def _run_each_query(kernel: Attention, inputs: Sequence[Tensor], shape: AttentionShape) -> list[Tensor]:
    """The same with each query computed by itself, over the keys that it sees."""
    q, k, v, dout = inputs
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    sums = [torch.zeros_like(x, dtype=wide_dtype(x)) for x in (k, v)]
    for place, seen in enumerate(_seen_by_each(shape)):
        row = slice(place, place + 1)
        at, options = (q[:, row], k[:, seen], v[:, seen]), {"causal": False, "scale": shape.head_dim**-0.5}
        out[:, row], lse = kernel.forward(*at, **options)
        dq[:, row], *shares = kernel.backward(dout[:, row], *at, out[:, row], lse, **options)
        for total, share in zip(sums, shares, strict=True):
            total[:, seen] += share
    return [out, dq, *(total.to(q.dtype) for total in sums)]


def _run_each(kernel: Attention, inputs: Sequence[Tensor], shape: AttentionShape) -> list[Tensor]:
    """The same with each packed document computed by itself."""
    if not shape.documents:
        return _run_kernel(kernel, inputs, shape)
    alone = [_run_kernel(kernel, [x[:, of.start : of.stop] for x in inputs], shape) for of in spans(shape.documents)]
    return [torch.cat(parts, dim=1) for parts in zip(*alone, strict=True)]


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.to(want.dtype) - want).norm() / want.norm())


def _budget(inputs: Sequence[Tensor], want: Sequence[Tensor], shape: AttentionShape) -> Errors:
    """The budget of each tensor: 2 x (error of the `math` kernel in the trial's dtype + eps).

    fp64 has no wider dtype to compare with. Its error is taken as that of fp32, scaled by the ratio of their eps.
    """
    dtype = inputs[0].dtype
    narrow = torch.float32 if dtype == torch.float64 else dtype
    scale, eps = torch.finfo(dtype).eps / torch.finfo(narrow).eps, torch.finfo(dtype).eps
    low = _run_reference([x.to(narrow) for x in inputs], shape)
    return {n: 2 * (scale * _relative(x, y) + eps) for n, x, y in zip(TENSORS, low, want, strict=True)}


def require(errors: Errors, budget: Errors, what: Prose) -> None:
    """
    Raises:
        Incorrect: an error is above its budget, or not a number; the message begins with `what`.
    """
    for name, error in errors.items():
        if not error <= budget[name]:  # also true for NaN
            raise Incorrect(f"{what}: relative error of {name} is {error:.2e}, budget {budget[name]:.2e}")


def check_attention(
    attention: SequenceParallelAttention,
    kernel: Kernel,
    kernel_name: str,
    shape: AttentionShape,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int,
) -> dict[str, Any]:
    """Prove `attention`, which was opened for `shape` on `mesh`, on the ranks of each sequence. Returns row columns.

    Raises:
        Incorrect: the kernel or the method is above its budget, or the ranks exchanged nothing.
    """
    dtype = getattr(torch, shape.dtype)
    inputs = random_inputs(shape, device, seed)
    wide = [x.to(reference_dtype(dtype, device)) for x in inputs]
    want = _run_reference(wide, shape)
    budget = _budget(inputs, want, shape)
    if shape.window is not None or kernels.packs(kernel_name):
        alone = _run_kernel(of_shape(kernel, shape), inputs, shape)
    else:  # whole sequences; or packs, which only a library's own code for this kernel takes
        alone = _run_each(kernel, inputs, shape)
    kernel_errors = {n: _relative(x, y) for n, x, y in zip(TENSORS, alone, want, strict=True)}
    require(kernel_errors, budget, f"kernel {kernel_name} on one device")

    sp_size = attention.layout.sp_size
    positions = attention.layout.global_positions(mesh.get_rank() % sp_size, shape.seq_len)
    of_sinks: dict[str, float] = {}
    if (sinks := random_sinks(shape, device, seed)) is not None:
        # the kernel is alone above: sinks are merged outside of it, and add less error than they take weight from keys
        *want, want_sinks = _run_with_sinks(wide, sinks.to(wide[0].dtype), shape)
        got_sinks = _sink_gradients(attention, [x[:, positions] for x in inputs], sinks, mesh)
        of_sinks = {"dsinks": _relative(got_sinks, want_sinks)}
        require(of_sinks, {"dsinks": max(budget.values())}, f"method on {sp_size} ranks")
        attention = attention.with_sinks(sinks)
    mine = at_positions(inputs, positions, shape)
    got = _run_method(attention, mine)
    per_token = got[:-1] if shape.kv_lora_rank is not None else got
    wanted = want[: len(per_token)]
    errors = _sharded_errors(per_token, [x[:, positions] for x in wanted], wanted, mesh)
    if shape.kv_lora_rank is not None:
        errors["dv"] = error_of_up(all_reduce(got[-1].to(want[-1].dtype), mesh), want[-1], shape)
    require(errors, budget, f"method on {sp_size} ranks")
    perturbed: dict[str, Errors] = {}
    if shape.documents:
        perturbed = check_perturbation(attention, mine, positions, shape.documents, got, mesh)
    if shape.window is not None:
        perturbed = _worse(check_window(attention, mine, positions, shape, got, mesh), perturbed)
    if not perturbed:  # in a pack the last rank may rightly see nothing of the first token
        changed = 1 if shape.kv_lora_rank is not None else 2
        _require_sharded(attention, mine[:3], changed, positions, got[0], mesh)
    return perturbed | {
        "correctness_seq_len": shape.seq_len,
        **{f"rel_error_{name}": error for name, error in (errors | of_sinks).items()},
        "error_budget": budget,
        "kernel_rel_error": kernel_errors,
    }


def _run_method(attention: SequenceParallelAttention, inputs: Sequence[Tensor]) -> list[Tensor]:
    """This rank's q, k, v, dout -> its output, dq, dk, dv; [B,S/P,H,D] each."""
    *qkv, dout = inputs
    leaves = [x.clone().requires_grad_() for x in qkv]
    q, k, v = leaves
    out = attention(q, k, v)
    if out.shape != dout.shape:
        raise Incorrect(f"output has shape {tuple(out.shape)}, but its gradient has shape {tuple(dout.shape)}")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _sink_gradients(
    attention: SequenceParallelAttention, inputs: Sequence[Tensor], sinks: Tensor, mesh: DeviceMesh
) -> Tensor:
    """The gradient of the sinks [Hq], summed over the ranks of the sequence."""
    q, k, v, dout = inputs
    leaf = sinks.clone().requires_grad_()
    (share,) = torch.autograd.grad(attention.with_sinks(leaf)(q, k, v), [leaf], dout)
    return all_reduce(share.to(wide_dtype(share)), mesh)


def all_reduce(tensor: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` in place over the ranks of one sequence, first along the ring axis, then along ulysses."""
    for axis in ("ring", "ulysses"):
        dist.all_reduce(tensor, op, group=mesh.get_group(axis))
    return tensor


def _sharded_errors(got: Sequence[Tensor], mine: Sequence[Tensor], whole: Sequence[Tensor], mesh: DeviceMesh) -> Errors:
    """Relative L2 error of each tensor over whole sequences; the same numbers on every rank.

    got, mine: this rank's results and the reference's values for its tokens. whole: the reference's for all tokens.
    """
    squares = torch.stack([(g.to(w.dtype) - w).double().square().sum() for g, w in zip(got, mine, strict=True)])
    norms = [float(w.double().norm()) for w in whole]
    totals = all_reduce(squares, mesh).sqrt().tolist()
    return {name: total / norm for name, total, norm in zip(TENSORS, totals, norms, strict=False)}


def check_perturbation(
    attention: SequenceParallelAttention,
    inputs: Sequence[Tensor],
    positions: Sequence[int],
    documents: Sequence[int],
    got: Sequence[Tensor],
    mesh: DeviceMesh,
) -> dict[str, Errors]:
    """Change one document: the results of all others must stay as they are. This needs no reference. Returns row
    columns, as `_check_changed`.

    inputs: this rank's q, k, v and dout, at the global `positions`; got: the method's output, dq, dk and dv of them.
    The longest document is changed, which lies on most ranks.

    Raises:
        Incorrect: more changed outside, or less inside. Raised on every rank.
    """
    changed = max(spans(documents), key=len)
    inside = _at(positions, changed, inputs[0])
    other = [torch.where(inside[:, None, None], x.roll(1, dims=-1) + 1, x) for x in inputs]
    outside: Prose = "of other documents"
    within: Prose = "its own {name}"
    return _check_changed(
        attention, inputs, Changed("document", other, [~inside] * 4, [inside] * 4, outside, within), got, mesh
    )


def check_window(
    attention: SequenceParallelAttention,
    inputs: Sequence[Tensor],
    positions: Sequence[int],
    shape: AttentionShape,
    got: Sequence[Tensor],
    mesh: DeviceMesh,
) -> dict[str, Errors]:
    """Change one key and its value, at the end of a shard. The output and dq of the tokens that see it may change, and
    those of the last of them must. dk and dv may change of the keys that these tokens see, and must of some.

    The changed key is large, so that it counts beside as many others as a window has. Arguments, columns and errors as
    in `check_perturbation`.
    """
    window = shape.window
    assert window is not None
    key = _changed_key(attention.layout, shape, window)
    q, k, v, dout = inputs
    at = _at(positions, range(key, key + 1), q)[:, None, None]
    other = [q, *(torch.where(at, 8 * x.roll(1, dims=-1) + 1, x) for x in (k, v)), dout]
    seeing = _at(positions, range(key, key + window), q)
    last = _at(positions, range(key + window - 1, key + window), q)
    whole = next(whole for whole in spans(shape.documents or (shape.seq_len,)) if key in whole)
    seen = _at(positions, range(max(key - window + 1, whole.start), key + window), q)
    outside: Prose = "of tokens outside the window"
    within: Prose = "{name} at the window's edge"
    changed = Changed("key", other, [~seeing, ~seeing, ~seen, ~seen], [last, last, seen, seen], outside, within)
    return _check_changed(attention, inputs, changed, got, mesh)


def _changed_key(layout: SequenceLayout, shape: AttentionShape, window: int) -> int:
    """The last of a run of neighbours, whose window ends in its own document: that of the first rank that has one. Or
    the last key of the longest document that one of its tokens does not see."""
    wholes = list(spans(shape.documents or (shape.seq_len,)))
    runs = [run for rank in range(layout.sp_size) for run in layout.runs(rank, shape.seq_len)]
    ends = [run[-1] if run.step == 1 else shape.seq_len // 2 for run in runs]
    inside = (end for end in ends for whole in wholes if end in whole and end + window in whole)
    return next(inside, max(wholes, key=len).stop - 1 - window)


def _worse(found: Mapping[str, Errors], others: Mapping[str, Errors]) -> dict[str, Errors]:
    """For each column and tensor, the one of two proofs that proves less: the largest difference outside and between
    equal runs, and the smallest inside."""
    return {
        column: {
            name: (min if column == PERTURBED[-1] else max)(error, others.get(column, of_column)[name])
            for name, error in of_column.items()
        }
        for column, of_column in found.items()
    }


class Changed(NamedTuple):
    """Inputs of which a part was changed. Tokens are those of this rank, as masks for output, dq, dk and dv."""

    what: Prose  # was changed
    inputs: Sequence[Tensor]  # q, k, v and dout
    outside: Sequence[Tensor]  # tokens that must stay as they are
    inside: Sequence[Tensor]  # tokens of which one or more must change
    outside_words: Prose
    inside_words: Prose


def _at(positions: Sequence[int], tokens: range, like: Tensor) -> Tensor:
    """Which of the global `positions` are among `tokens`."""
    return torch.tensor([position in tokens for position in positions], device=like.device)


def _check_changed(
    attention: SequenceParallelAttention,
    inputs: Sequence[Tensor],
    changed: Changed,
    got: Sequence[Tensor],
    mesh: DeviceMesh,
) -> dict[str, Errors]:
    """Returns row columns: the largest difference of an element of each tensor, between equal runs, outside and inside.

    Outside may differ by up to twice what equal runs differ by, because another two may differ by more; that is 0 in a
    kernel that sums in one order. Inside must differ by over 100 times as much. Differences are compared as parts of
    the element, or of the tensor's root mean square where the element is smaller: a last bit that rounds otherwise is
    as large a part of any element, and in absolute terms larger in a few large ones, which equal runs need not hit.
    Kernels that add up in any order often give equal bits, so two equal runs may hide it: where more changed outside,
    up to 16 tell. If these show that a gradient is added up in any order, any element of it may differ by a rounding.

    Raises:
        Incorrect: more changed outside, or less inside. Raised on every rank.
    """
    everywhere = [torch.ones_like(each) for each in changed.outside]
    squares = all_reduce(torch.stack([x.double().square().mean() for x in got]), mesh) / attention.layout.sp_size
    sizes = [x.double().abs().clamp(min=rms) for x, rms in zip(got, squares.sqrt().tolist(), strict=True)]

    def differences(run: Sequence[Tensor], at: Sequence[Tensor]) -> Tensor:
        """The largest of each tensor over all ranks, and the largest as a part of the element, [2,4]."""
        each = [(x - g).double() for x, g in zip(run, got, strict=True)]
        parts = [x / size for x, size in zip(each, sizes, strict=True)]
        mine = [torch.stack([_largest(x[:, rows]) for x, rows in zip(of, at, strict=True)]) for of in (each, parts)]
        mine = torch.stack(mine)
        return all_reduce(mine, mesh, dist.ReduceOp.MAX)

    other = _run_method(attention, changed.inputs)
    outside, within = differences(other, changed.outside), differences(other, changed.inside)
    runs, noise = 0, torch.zeros_like(outside)
    while runs < 2 or (runs < 16 and not bool((outside[1] <= 2 * noise[1]).all())):
        runs, noise = runs + 1, noise.maximum(differences(_run_method(attention, inputs), everywhere))
    absolute, parts = zip(noise.tolist(), outside.tolist(), within.tolist(), strict=True)
    one_rounding = torch.finfo(got[0].dtype).eps
    for name, repeated, out, into in zip(TENSORS, *parts, strict=True):
        rounded = one_rounding if repeated and name != TENSORS[0] else 0.0
        if not out <= max(2 * repeated, rounded):
            raise Incorrect(
                f"perturbed {changed.what}: {name} {changed.outside_words} changes by {out:.2e} of an element, and "
                f"{runs} equal runs differ by {repeated:.2e}"
            )
        if not into > max(100 * repeated, 2 * rounded):
            raise Incorrect(
                f"perturbed {changed.what}: {changed.inside_words.format(name=name)} changes by {into:.2e} of an "
                f"element, and {runs} equal runs differ by {repeated:.2e}"
            )
    by_column = zip(PERTURBED, absolute, strict=True)
    return {column: dict(zip(TENSORS, values, strict=True)) for column, values in by_column}


def _largest(difference: Tensor) -> Tensor:
    """The largest absolute element; infinite where one is not a number, since the maximum over ranks may ignore it."""
    if not difference.numel():
        return difference.new_zeros((), dtype=torch.float64)
    return difference.abs().max().nan_to_num(nan=float("inf"))


def _require_sharded(
    attention: SequenceParallelAttention,
    inputs: Sequence[Tensor],
    changed: int,
    positions: Sequence[int],
    out: Tensor,
    mesh: DeviceMesh,
) -> None:
    """Change the value of the first token, which rank 0 holds, or its latent: input number `changed`. The output of the
    last rank must change too; otherwise it did not see the other ranks' tokens."""
    probing = [x.clone() for x in inputs]
    if 0 in positions:
        probing[changed][:, positions.index(0)] += 1
    with torch.no_grad():
        q, k, v = probing
        probed = attention(q, k, v)
    sp_size = attention.layout.sp_size
    is_last = mesh.get_rank() % sp_size == sp_size - 1
    reached = torch.tensor(int(is_last and not torch.equal(probed, out)), device=out.device)
    if not all_reduce(reached, mesh, dist.ReduceOp.MAX).item():
        raise Incorrect(
            f"a change to the first token does not reach the output of rank {sp_size - 1}: nothing was exchanged"
        )
