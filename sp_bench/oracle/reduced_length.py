"""A method is proven right before it is timed: output and all three gradients, on the ranks that will be timed.

Budget of each tensor: 2 x (error of the `math` kernel run in the trial's dtype on one device + eps of that dtype). The
trial's own kernel on one device must meet it as well: a budget taken from that kernel would pass one that returns
zeros. Errors are relative L2 against a wider dtype.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sp_bench import kernels
from sp_bench.config.trial import AttentionShape
from sp_bench.kernels import Kernel
from sp_bench.measure.incorrect import Incorrect
from sp_bench.methods import SequenceParallelAttention

TENSORS = ("output", "dq", "dk", "dv")
Errors = dict[str, float]


def reference_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """fp32 for half precision on GPUs, where fp64 would be slow; fp64 elsewhere."""
    return torch.float32 if device.type == "cuda" and dtype.itemsize == 2 else torch.float64


def random_inputs(shape: AttentionShape, device: torch.device, seed: int) -> list[Tensor]:
    """q, k, v, dout of a whole sequence in the shape's dtype; drawn on CPU, so that they are equal on every rank and
    machine."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads):
        x = torch.randn(shape.batch_size, shape.seq_len, heads, shape.head_dim, generator=generator)
        drawn.append(x.to(device, getattr(torch, shape.dtype)))
    return drawn


def _run_kernel(kernel: Kernel, inputs: Sequence[Tensor], shape: AttentionShape) -> list[Tensor]:
    """output, dq, dk, dv of the whole sequence on this device."""
    q, k, v, dout = inputs
    scale = shape.head_dim**-0.5
    out, lse = kernel.forward(q, k, v, causal=shape.causal, scale=scale)
    return [out, *kernel.backward(dout, q, k, v, out, lse, causal=shape.causal, scale=scale)]


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.to(want.dtype) - want).norm() / want.norm())


def _budget(inputs: Sequence[Tensor], want: Sequence[Tensor], shape: AttentionShape) -> Errors:
    """2 x (error of the `math` kernel in the trial's dtype + eps) of each tensor.

    fp64 has no wider reference: there the error is that of fp32, scaled by the ratio of their eps.
    """
    dtype = inputs[0].dtype
    narrow = torch.float32 if dtype == torch.float64 else dtype
    scale, eps = torch.finfo(dtype).eps / torch.finfo(narrow).eps, torch.finfo(dtype).eps
    low = _run_kernel(kernels.get("math"), [x.to(narrow) for x in inputs], shape)
    return {n: 2 * (scale * _relative(x, y) + eps) for n, x, y in zip(TENSORS, low, want, strict=True)}


def require(errors: Errors, budget: Errors, what: str) -> None:
    for name, error in errors.items():
        if not error <= budget[name]:  # a NaN is not within any budget
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
    """Prove `attention`, opened for `shape` on `mesh`, on the ranks of each sequence. Returns row columns.

    Raises:
        Incorrect: the kernel or the method is over its budget, or the sequence is not really sharded.
    """
    dtype = getattr(torch, shape.dtype)
    inputs = random_inputs(shape, device, seed)
    wide = [x.to(reference_dtype(dtype, device)) for x in inputs]
    want = _run_kernel(kernels.get("math"), wide, shape)
    budget = _budget(inputs, want, shape)
    alone = _run_kernel(kernel, inputs, shape)
    kernel_errors = {n: _relative(x, y) for n, x, y in zip(TENSORS, alone, want, strict=True)}
    require(kernel_errors, budget, f"kernel {kernel_name} on one device")

    sp_size = attention.layout.sp_size
    positions = attention.layout.global_positions(mesh.get_rank() % sp_size, shape.seq_len)
    got = _run_method(attention, [x[:, positions] for x in inputs])
    errors = _sharded_errors(got, [x[:, positions] for x in want], want, mesh)
    require(errors, budget, f"method on {sp_size} ranks")
    _require_sharded(attention, [x[:, positions] for x in inputs[:3]], positions, got[0], mesh)
    return {
        "correctness_seq_len": shape.seq_len,
        **{f"rel_error_{name}": error for name, error in errors.items()},
        "error_budget": budget,
        "kernel_rel_error": kernel_errors,
    }


def _run_method(attention: SequenceParallelAttention, inputs: Sequence[Tensor]) -> list[Tensor]:
    *qkv, dout = inputs
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attention(*leaves)
    if out.shape != leaves[0].shape:
        raise Incorrect(f"output has shape {tuple(out.shape)}, its queries {tuple(leaves[0].shape)}")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def all_reduce(tensor: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce over the ranks of one sequence, one axis after the other."""
    for axis in ("ring", "ulysses"):
        dist.all_reduce(tensor, op, group=mesh.get_group(axis))
    return tensor


def _sharded_errors(got: Sequence[Tensor], mine: Sequence[Tensor], whole: Sequence[Tensor], mesh: DeviceMesh) -> Errors:
    """Relative L2 over the gathered sequence; the same figure on every rank."""
    squares = torch.stack([(g.to(w.dtype) - w).double().square().sum() for g, w in zip(got, mine, strict=True)])
    norms = [float(w.double().norm()) for w in whole]
    totals = all_reduce(squares, mesh).sqrt().tolist()
    return {name: total / norm for name, total, norm in zip(TENSORS, totals, norms, strict=True)}


def _require_sharded(
    attention: SequenceParallelAttention, qkv: Sequence[Tensor], positions: Sequence[int], out: Tensor, mesh: DeviceMesh
) -> None:
    """A change to the first token, which rank 0 holds, must reach the last rank's output: nobody computed alone."""
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
