"""What one step computes on one rank, counted: matrix products by their shapes, attention by the calls of its kernel,
parameters by what the optimizer updates. It must equal the closed form.

B batch, Sq queries, Sk keys, Hq and Hkv heads, D head size.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from sp_bench.config.documents import causal_pairs
from sp_bench.config.prose import Prose
from sp_bench.config.windows import Window, visible_pairs
from sp_bench.costs.attention import DELTA_BACKWARD, delta_flops, flash_backward
from sp_bench.costs.work import LOSS_OP, NORM_OP, SWIGLU_OP, ExpectedWork, KernelCalls
from sp_bench.kernels import LOOKS_LIKE_ATTENTION
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.memory_parts import MOMENTS, SHARDS

aten = torch.ops.aten
# matrix product -> where among its arguments the two factors begin; the one before them is what the product is added to
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1, aten.baddbmm_: 1}
PRODUCTS |= {aten._scaled_mm: 0}  # of FP8
SUMS = (aten.add, aten.add_)
EAGER_OPS = (SWIGLU_OP, NORM_OP, LOSS_OP)
PRODUCT_NAMES = {f"aten::{op.__name__}" for op in PRODUCTS}


@dataclass
class Work:
    """Counts of one step on one rank."""

    matmul_flops: Counter[str] = field(default_factory=Counter)  # dtype -> FLOPs outside the kernel
    calls: Counter[str] = field(default_factory=Counter)  # of the kernels: forward, backward
    delta_calls: Counter[str] = field(default_factory=Counter)  # of those that compute the gated delta rule
    attention_flops: int = 0  # of these calls: mask-exact, and `flash_backward` of the forward in the backward
    attention_dtypes: set[str] = field(default_factory=set)  # of q, k and v in these calls
    kernel_ops: Counter[str] = field(default_factory=Counter)  # op -> calls, inside the kernel
    delta_ops: Counter[str] = field(default_factory=Counter)  # the same inside that of the gated delta rule
    other_ops: Counter[str] = field(default_factory=Counter)  # outside kernels, of ops that look like attention
    eager_ops: Counter[str] = field(default_factory=Counter)  # op -> calls, of EAGER_OPS
    half_sums: int = 0  # of two matrices in half precision, as of gradients; activations have three dimensions or more
    updated_elements: int = 0  # of the parameters that the optimizer updates on this rank
    updated_by: set[str] = field(default_factory=set)  # the optimizers' classes and the devices of what they update
    update_bytes: Counter[str] = field(default_factory=Counter)  # on CUDA: of memory_parts.SHARDS and MOMENTS
    _inside: Counter[str] | None = None  # what counts the operations of the kernel that runs

    def see(self, op: Any, args: Sequence[Any]) -> None:
        """Count one operation of torch."""
        name = op._schema.name
        if self._inside is not None:
            self._inside[name] += 1
        elif re.search(LOOKS_LIKE_ATTENTION, name):
            self.other_ops[name] += 1
        elif name in EAGER_OPS:
            self.eager_ops[name] += 1
        elif (first := PRODUCTS.get(op.overloadpacket)) is not None:
            self._multiply(*args[first : first + 2])
        elif op.overloadpacket in SUMS:
            self.half_sums += all(isinstance(x, Tensor) and x.dim() == 2 and x.itemsize == 2 for x in args[:2])

    def _multiply(self, left: Tensor, right: Tensor) -> None:
        """Count a matrix product, unless it sums over nothing, as that of transformers' rotary tables: positions times
        frequencies, in fp32 whatever the model's dtype is."""
        batched = left.dim() == 3
        if batched and left.shape[2] == 1:
            return
        dtypes = sorted({_name(left.dtype), _name(right.dtype)})
        self.matmul_flops["+".join(dtypes)] += flop_registry[aten.bmm if batched else aten.mm](left, right)

    @contextmanager
    def kernel_call(
        self,
        pass_kind: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        documents: Sequence[int] = (),
        window: Window | None = None,
    ) -> Iterator[None]:
        """Count one call of the kernel, which runs inside. q [B,Sq,Hq,D]; k, v [B,Sk,Hkv,D]; causal means Sq == Sk.
        `documents` are the tokens of each that are packed, queries and keys alike; `window` is all of the mask."""
        batch, queries, heads, dim = q.shape
        if window is not None:
            parts = [(length, length) for length in documents] or [(queries, k.shape[1])]
            pairs = sum(visible_pairs(*part, window) for part in parts)
        elif causal:
            pairs = causal_pairs(documents or (queries,))
        else:
            pairs = sum(length * length for length in documents) if documents else queries * k.shape[1]
        forward = 2 * batch * pairs * heads * (dim + v.shape[-1])
        of_backward = int(forward * flash_backward(dim, v.shape[-1]))
        with self._call(self.kernel_ops, pass_kind, forward if pass_kind == "forward" else of_backward, q, k, v):
            yield

    @contextmanager
    def delta_call(self, pass_kind: str, q: Tensor, k: Tensor, v: Tensor) -> Iterator[None]:
        """The same of a kernel of the gated delta rule. q, k [B,n,Hk,D]; v [B,n,H,E]."""
        forward = delta_flops(v.shape[0] * v.shape[1], v.shape[2], k.shape[3], v.shape[3])
        self.delta_calls[pass_kind] += 1
        flops = forward * (1 if pass_kind == "forward" else DELTA_BACKWARD)
        with self._call(self.delta_ops, pass_kind, flops, q, k, v):
            yield

    @contextmanager
    def _call(self, ops: Counter[str], pass_kind: str, flops: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[None]:
        self.attention_flops += flops
        self.calls[pass_kind] += 1
        self.attention_dtypes |= {_name(x.dtype) for x in (q, k, v)}
        self._inside = ops
        try:
            yield
        finally:
            self._inside = None

    def see_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Count what a step of `optimizer` updates: this rank's parts of the parameters that have a gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    self.updated_elements += local.numel()
                    self.updated_by.add(f"{type(optimizer).__name__} on {local.device.type}")
                    self.update_bytes[SHARDS] += _cuda_bytes([parameter])
                    self.update_bytes[MOMENTS] += _cuda_bytes(optimizer.state[parameter].values())


def _cuda_bytes(values: Iterable[Any]) -> int:
    """Bytes of the CUDA tensors among `values`; of sharded ones, only this rank's parts."""
    local = (value.to_local() if hasattr(value, "to_local") else value for value in values)
    return sum(tensor.nbytes for tensor in local if isinstance(tensor, Tensor) and tensor.is_cuda)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def columns(dtype: str, counted: Sequence[Work], expected: Sequence[ExpectedWork]) -> dict[str, Any]:
    """Row columns of what all ranks counted, in rank order; null where nothing is expected.

    Raises:
        Incorrect: a step computed something else than expected.
    """
    first = expected[0]
    found: dict[str, Any] = dict.fromkeys(("counted_matmul_flops", "counted_attention_flops", "counted_parameters"))
    if first.matmul_flops is not None:
        products = sum((work.matmul_flops for work in counted), Counter[str]())
        _require_products(products, first.matmul_flops)
        found["counted_matmul_flops"] = float(products.total())
    if first.kernel_calls is not None:
        for rank, (work, wanted) in enumerate(zip(counted, expected, strict=True)):
            _require_calls(rank, dtype, work, wanted.kernel_calls)
        flops = sum(work.attention_flops for work in counted)
        if flops != first.attention_flops:
            raise Incorrect(f"FLOPs of attention: counted {flops:,} on all ranks, predicted {first.attention_flops:,}")
        found["counted_attention_flops"] = float(flops)
    _require_code(counted, first)
    if first.updated_elements is not None:
        updated = sum(work.updated_elements for work in counted)
        if updated != first.updated_elements:
            raise Incorrect(
                f"parameters: the optimizers updated {updated:,} elements on all ranks, predicted "
                f"{first.updated_elements:,}"
            )
        found["counted_parameters"] = updated
    return found


def _require_products(counted: Mapping[str, int], expected: Mapping[str, int]) -> None:
    if wrong := [name for name in sorted({*counted, *expected}) if counted.get(name, 0) != expected.get(name, 0)]:
        each: Prose = "; ".join(
            f"in {name} counted {counted.get(name, 0):,}, predicted {expected.get(name, 0):,}" for name in wrong
        )
        raise Incorrect(f"FLOPs of matrix products outside attention, on all ranks: {each}")


def _require_code(counted: Sequence[Work], expected: ExpectedWork) -> None:
    """
    Raises:
        Incorrect: a rank ran what the trial's model code replaces, or another optimizer, or one on another device, or
            summed gradients in half precision.
    """
    if again := {op: n for work in counted for op, n in work.eager_ops.items() if op in expected.replaced_ops}:
        replaced = " and ".join(expected.replaced_ops)
        raise Incorrect(f"workload.model_code replaces {replaced}, and in one step a rank ran {shown(again)}")
    others = {by for work in counted for by in work.updated_by} - {expected.updated_by}
    if expected.updated_by is not None and others:
        raise Incorrect(f"{expected.updated_by} was to update the parameters, and {', '.join(sorted(others))} did")
    most = max(work.half_sums for work in counted)
    if expected.half_sums is not None and most > expected.half_sums:
        raise Incorrect(
            f"gradients of matrices are to be summed in float32, and in one step a rank added two of them {most} times "
            f"in half precision; expected {expected.half_sums}"
        )


def _require_calls(rank: int, dtype: str, work: Work, expected: KernelCalls | None) -> None:
    calls = KernelCalls(work.calls["forward"], work.calls["backward"])
    if calls != expected:
        raise Incorrect(
            f"rank {rank} called the attention kernel {calls.forward} times forward and {calls.backward} backward; the "
            f"method's blocks make it {expected and expected.forward} and {expected and expected.backward}"
        )
    if others := sorted(work.attention_dtypes - {dtype}):
        raise Incorrect(f"rank {rank} called the attention kernel in {' and '.join(others)}, not in dtype={dtype}")
    if work.other_ops:
        raise Incorrect(f"rank {rank} computed attention outside the kernel: {shown(work.other_ops)}")


def shown(counts: Mapping[str, int]) -> Prose:
    """Names with their counts, for messages."""
    return ", ".join(f"{number} x {name}" for name, number in sorted(counts.items())) or "nothing"
