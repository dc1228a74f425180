"""Proves a method right before it is timed: its output and all three gradients, on the ranks that will be timed.

Errors are relative L2 against the `math` kernel in a wider dtype, on one device. The budget of each tensor is
2 x (error of the `math` kernel in the trial's dtype + eps of that dtype). The trial's own kernel on one device must
meet the budget as well. It does not define the budget, because a kernel that returns zeros would then pass.

What it finds belongs to the code, the options and the machine: one trial's proof holds for others of the same.

B batch, S tokens, P ranks, H heads, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import kernels
from sp_bench.attention.packed import of_shape
from sp_bench.config.documents import spans
from sp_bench.config.prose import Prose
from sp_bench.config.trial import AttentionShape
from sp_bench.kernels import Attention, Kernel
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import SequenceParallelAttention

TENSORS = ("output", "dq", "dk", "dv")
PERTURBED = ("repeat_difference", "outside_difference", "inside_difference")  # columns
Errors = dict[str, float]


def reference_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The wider dtype that results in `dtype` are compared with: fp32 for half precision on GPUs, where fp64 would be
    slow, and fp64 otherwise."""
    return torch.float32 if device.type == "cuda" and dtype.itemsize == 2 else torch.float64


def random_inputs(shape: AttentionShape, device: torch.device, seed: int) -> list[Tensor]:
    """q, k, v and dout [B,S,H,D] of whole sequences, in the shape's dtype. They are drawn on the CPU, so that they are
    equal on every rank and machine."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads):
        x = torch.randn(shape.batch_size, shape.seq_len, heads, shape.head_dim, generator=generator)
        drawn.append(x.to(device, getattr(torch, shape.dtype)))
    return drawn


def _run_kernel(kernel: Attention, inputs: Sequence[Tensor], shape: AttentionShape) -> list[Tensor]:
    """output, dq, dk and dv of whole sequences, computed on this device alone."""
    q, k, v, dout = inputs
    scale = shape.head_dim**-0.5
    out, lse = kernel.forward(q, k, v, causal=shape.causal, scale=scale)
    return [out, *kernel.backward(dout, q, k, v, out, lse, causal=shape.causal, scale=scale)]


def _run_reference(inputs: Sequence[Tensor], shape: AttentionShape) -> list[Tensor]:
    """The same of the `math` kernel, which knows nothing of packing here."""
    return _run_each(kernels.get(kernels.REFERENCE), inputs, shape)


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
    if kernels.packs(kernel_name):
        alone = _run_kernel(of_shape(kernel, shape), inputs, shape)
    else:  # whole sequences; or packs, which only a library's own code for this kernel takes
        alone = _run_each(kernel, inputs, shape)
    kernel_errors = {n: _relative(x, y) for n, x, y in zip(TENSORS, alone, want, strict=True)}
    require(kernel_errors, budget, f"kernel {kernel_name} on one device")

    sp_size = attention.layout.sp_size
    positions = attention.layout.global_positions(mesh.get_rank() % sp_size, shape.seq_len)
    got = _run_method(attention, [x[:, positions] for x in inputs])
    errors = _sharded_errors(got, [x[:, positions] for x in want], want, mesh)
    require(errors, budget, f"method on {sp_size} ranks")
    mine = [x[:, positions] for x in inputs]
    perturbed = {}
    if shape.documents:
        perturbed = check_perturbation(attention, mine, positions, shape.documents, got, mesh)
    else:  # in a pack the last rank may rightly see nothing of the first token
        _require_sharded(attention, mine[:3], positions, got[0], mesh)
    return perturbed | {
        "correctness_seq_len": shape.seq_len,
        **{f"rel_error_{name}": error for name, error in errors.items()},
        "error_budget": budget,
        "kernel_rel_error": kernel_errors,
    }


def _run_method(attention: SequenceParallelAttention, inputs: Sequence[Tensor]) -> list[Tensor]:
    """This rank's q, k, v, dout -> its output, dq, dk, dv; [B,S/P,H,D] each."""
    *qkv, dout = inputs
    leaves = [x.clone().requires_grad_() for x in qkv]
    q, k, v = leaves
    out = attention(q, k, v)
    if out.shape != leaves[0].shape:
        raise Incorrect(f"output has shape {tuple(out.shape)}, but its queries have shape {tuple(leaves[0].shape)}")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


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
    return {name: total / norm for name, total, norm in zip(TENSORS, totals, norms, strict=True)}


def check_perturbation(
    attention: SequenceParallelAttention,
    inputs: Sequence[Tensor],
    positions: Sequence[int],
    documents: Sequence[int],
    got: Sequence[Tensor],
    mesh: DeviceMesh,
) -> dict[str, Errors]:
    """Change one document: the results of all others must stay as they are. This needs no reference. Returns row
    columns: the largest difference of an element of each tensor, between equal runs, outside and inside.

    inputs: this rank's q, k, v and dout, at the global `positions`; got: the method's output, dq, dk and dv of them.
    The longest document is changed, which lies on most ranks. Outside may differ by up to twice what equal runs
    differ by, because another two may differ by more; that is 0 in a kernel that sums in one order. Inside must differ
    by over 100 times as much. Differences are compared as parts of the element, or of the tensor's root mean square
    where the element is smaller: a last bit that rounds otherwise is as large a part of any element, and in absolute
    terms larger in a few large ones, which equal runs need not hit. Kernels that add up in any order often give equal
    bits, so two equal runs may hide it: where more changed outside, up to 16 tell.

    Raises:
        Incorrect: more changed outside, or less inside. Raised on every rank.
    """
    changed = max(spans(documents), key=len)
    inside = torch.tensor([position in changed for position in positions], device=inputs[0].device)
    everywhere = torch.ones_like(inside)
    squares = all_reduce(torch.stack([x.double().square().mean() for x in got]), mesh) / attention.layout.sp_size
    sizes = [x.double().abs().clamp(min=rms) for x, rms in zip(got, squares.sqrt().tolist(), strict=True)]

    def differences(run: Sequence[Tensor], at: Tensor) -> Tensor:
        """The largest of each tensor over all ranks, and the largest as a part of the element, [2,4]."""
        each = [(x - g).double() for x, g in zip(run, got, strict=True)]
        parts = [x / size for x, size in zip(each, sizes, strict=True)]
        mine = torch.stack([torch.stack([_largest(x[:, at]) for x in of]) for of in (each, parts)])
        return all_reduce(mine, mesh, dist.ReduceOp.MAX)

    other = _run_method(attention, [torch.where(inside[:, None, None], x.roll(1, dims=-1) + 1, x) for x in inputs])
    outside, within = differences(other, ~inside), differences(other, inside)
    runs, noise = 0, torch.zeros_like(outside)
    while runs < 2 or (runs < 16 and not bool((outside[1] <= 2 * noise[1]).all())):
        runs, noise = runs + 1, noise.maximum(differences(_run_method(attention, inputs), everywhere))
    absolute, parts = zip(noise.tolist(), outside.tolist(), within.tolist(), strict=True)
    for name, repeated, out, into in zip(TENSORS, *parts, strict=True):
        if not out <= 2 * repeated:
            raise Incorrect(
                f"perturbed document: {name} of other documents changes by {out:.2e} of an element, and {runs} equal "
                f"runs differ by {repeated:.2e}"
            )
        if not into > 100 * repeated:
            raise Incorrect(
                f"perturbed document: its own {name} changes by {into:.2e} of an element, and {runs} equal runs differ "
                f"by {repeated:.2e}"
            )
    by_column = zip(PERTURBED, absolute, strict=True)
    return {column: dict(zip(TENSORS, values, strict=True)) for column, values in by_column}


def _largest(difference: Tensor) -> Tensor:
    """The largest absolute element; infinite where one is not a number, since the maximum over ranks may ignore it."""
    if not difference.numel():
        return difference.new_zeros((), dtype=torch.float64)
    return difference.abs().max().nan_to_num(nan=float("inf"))


def _require_sharded(
    attention: SequenceParallelAttention, qkv: Sequence[Tensor], positions: Sequence[int], out: Tensor, mesh: DeviceMesh
) -> None:
    """Change the value of the first token, which rank 0 holds. The output of the last rank must change too; otherwise
    it did not see the other ranks' tokens."""
    q, k, v = (x.clone() for x in qkv)
    if 0 in positions:
        v[:, positions.index(0)] += 1
    with torch.no_grad():
        probed = attention(q, k, v)
    sp_size = attention.layout.sp_size
    is_last = mesh.get_rank() % sp_size == sp_size - 1
    changed = torch.tensor(int(is_last and not torch.equal(probed, out)), device=out.device)
    if not all_reduce(changed, mesh, dist.ReduceOp.MAX).item():
        raise Incorrect(
            f"a change to the first token does not reach the output of rank {sp_size - 1}: nothing was exchanged"
        )
