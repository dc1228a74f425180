"""Bytes counted from the collectives that one step really issued, by phase and op, and the work that it computed.

`Ledger` is a dispatch mode: it sees every operation of the process, backward included; work.py counts what they
compute. Of collectives, payload that leaves the rank is
counted (a rank's own slice is not), as numel * element_size, never storage. An op without a size rule is an error, so
that nothing goes uncounted.

Code that issues traffic says what it is for: `phase(...)` around the parts of a step, `attention()` around the
sequence-parallel collectives, because FSDP issues the same ops. Untagged traffic of the forward and backward is FSDP's.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._library.custom_ops import OPDEFS
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_bench.costs.links import far_share
from sp_bench.kernels import Kernel
from sp_bench.measure.step_parts import PhaseTimes
from sp_bench.measure.work import Work

PHASES = ("forward", "recompute", "backward", "parameters", "gradients", "optimizer", "loss", "other")
Counts = Mapping[tuple[str, str], tuple[int, Fraction]]  # (phase, op) -> calls, bytes this rank sent off-rank

# Process-wide and not thread-local: autograd runs a CUDA backward in a thread of its own.
_current: dict[str, Any] = {"phase": "forward", "attention": False, "op": None}
_active: list["Ledger"] = []
_NOTHING = nullcontext()
CPU = torch.device("cpu")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Attribute the collectives inside to `name`, one of PHASES."""
    if name not in PHASES:
        raise ValueError(f"phase {name!r}; use one of {', '.join(PHASES)}")
    before = _current["phase"]
    _current["phase"] = name
    try:
        with ExitStack() as timed:
            for book in _active:
                timed.enter_context(book.phase_times.inside(name))
            yield
    finally:
        _current["phase"] = before


@contextmanager
def attention() -> Iterator[None]:
    """Mark the collectives inside as sequence-parallel attention traffic."""
    before = _current["attention"]
    _current["attention"] = True
    try:
        yield
    finally:
        _current["attention"] = before


@contextmanager
def counted_as(op: str) -> Iterator[None]:
    """Count the collectives inside as `op`: what they amount to, where torch calls them something else."""
    before = _current["op"]
    _current["op"] = op
    try:
        yield
    finally:
        _current["op"] = before


def mark_backward_as_attention(*results: Tensor) -> None:
    """Mark the collectives that the autograd function behind each result issues in its backward as attention traffic,
    for functions of libraries, which do not say so themselves. A result without gradients is left alone."""
    for result in results:
        if result.grad_fn is not None:
            mark_node_as_attention(result.grad_fn)


def mark_node_as_attention(node: Node) -> None:
    """The same for an autograd function that is not the last behind a result."""
    node.register_prehook(lambda grads: _current.update(attention=True))
    node.register_hook(lambda *grads: _current.update(attention=False))


def count(op: str, off_rank_bytes: int) -> None:
    """Tell the active ledger, if there is one, of a message that no collective of torch carries."""
    for book in _active:
        book.add(op, Fraction(off_rank_bytes))


def is_counting() -> bool:
    """Whether a ledger counts what is sent."""
    return bool(_active)


def issued(op: str, off_rank_bytes: Fraction, far_bytes: Fraction) -> str:
    """Count a collective of a group that torch's dispatcher does not see. Returns what it counts as."""
    op = _current["op"] or op
    for book in _active:
        book.add(op, off_rank_bytes, far_bytes)
    return op


def _attribution(op: str) -> str:
    # No engine shards its parameters by all-to-alls, and a library's autograd functions do not say what they are for.
    name = _current["phase"]
    if name in ("forward", "recompute", "backward") and not _current["attention"] and op != "all_to_all":
        return "parameters" if op in ("all_gather", "broadcast") else "gradients"
    return name


def payload(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _total(tensors: Any) -> int:
    """Bytes of a tensor or of nested lists of tensors."""
    if isinstance(tensors, Tensor):
        return payload(tensors)
    return sum(_total(t) for t in tensors)


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group among an op's arguments: a boxed one in c10d, a name in _c10d_functional."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, dist.ProcessGroup):
            return value
    name = next(value for value in reversed(args) if isinstance(value, str))
    return _resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def _others(args: tuple[Any, ...]) -> Fraction:
    size = _group(args).size()
    return Fraction(size - 1, size)


def _all_to_all_single(source: Tensor, splits: list[int], args: tuple[Any, ...]) -> Fraction:
    group = _group(args)
    if not splits:
        return payload(source) * _others(args)
    row = payload(source) // max(sum(splits), 1)
    return Fraction(row * (sum(splits) - splits[group.rank()]))


def _slices_of_others(slices: list[Tensor], args: tuple[Any, ...]) -> Fraction:
    """The bytes of a list with one tensor per rank, of any sizes."""
    return Fraction(_total(slices) - payload(slices[_group(args).rank()]))


# (op name, bytes sent off-rank); `a` are the call's positional arguments
RULES: Mapping[str, tuple[str, Callable[[tuple[Any, ...]], Fraction]]] = {
    "c10d::send": ("send", lambda a: Fraction(0 if a[2] == _group(a).rank() else _total(a[0]))),
    "c10d::recv_": ("recv", lambda a: Fraction(0)),
    "c10d::recv_any_source_": ("recv", lambda a: Fraction(0)),
    "c10d::barrier": ("barrier", lambda a: Fraction(0)),
    "c10d::alltoall_base_": ("all_to_all", lambda a: _all_to_all_single(a[1], a[4], a)),
    "c10d::alltoall_": ("all_to_all", lambda a: _slices_of_others(a[1], a)),
    "c10d::_allgather_base_": ("all_gather", lambda a: _total(a[0]) * _others(a)),
    "c10d::allgather_": ("all_gather", lambda a: Fraction(_total(a[1]) * (_group(a).size() - 1))),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", lambda a: _total(a[0]) * _others(a)),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", lambda a: _total(a[1]) * _others(a)),
    "c10d::reduce_scatter_": ("reduce_scatter", lambda a: sum((_slices_of_others(s, a) for s in a[1]), Fraction())),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", lambda a: _total(a[1]) * _others(a)),
    "c10d::scatter_": ("scatter", lambda a: _total(a[1]) * _others(a)),  # only the root has tensors to send
    "c10d::allreduce_": ("all_reduce", lambda a: 2 * _total(a[0]) * _others(a)),
    "c10d::allreduce_coalesced_": ("all_reduce", lambda a: 2 * _total(a[0]) * _others(a)),
    # A broadcast tree sends the payload on at most once a rank; the root sends it once.
    "c10d::broadcast_": ("broadcast", lambda a: _total(a[0]) * _others(a)),
    "_c10d_functional::all_reduce": ("all_reduce", lambda a: 2 * _total(a[0]) * _others(a)),
    "_c10d_functional::all_reduce_": ("all_reduce", lambda a: 2 * _total(a[0]) * _others(a)),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", lambda a: 2 * _total(a[0]) * _others(a)),
    # Functional gathers take the small tensor: (P-1)/P of the large one is (P-1) times the small one.
    "_c10d_functional::all_gather_into_tensor": ("all_gather", lambda a: Fraction(_total(a[0]) * (a[1] - 1))),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", lambda a: Fraction(_total(a[0]) * (a[1] - 1))),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", lambda a: _total(a[0]) * _others(a)),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", lambda a: _total(a[0]) * _others(a)),
    "_c10d_functional::all_to_all_single": ("all_to_all", lambda a: _all_to_all_single(a[0], a[2], a)),
    "_c10d_functional::broadcast": ("broadcast", lambda a: _total(a[0]) * _others(a)),
    "_c10d_functional::wait_tensor": ("wait", lambda a: Fraction(0)),
    "_c10d_functional::_wrap_tensor_autograd": ("wait", lambda a: Fraction(0)),  # torch 2.13: a view that waits on use
}
# All-to-alls whose parts may differ in size -> bytes for each rank of the group; empty: they are equal
_PARTS: Mapping[str, Callable[[tuple[Any, ...]], list[int]]] = {
    "c10d::alltoall_base_": lambda a: split_bytes(a[1], a[4]),
    "c10d::alltoall_": lambda a: [payload(part) for part in a[1]],
    "_c10d_functional::all_to_all_single": lambda a: split_bytes(a[0], a[2]),
}
_WITHOUT_TRAFFIC = ("recv", "wait")  # the other side of a send, and waiting for any: not calls of their own


def split_bytes(source: Tensor, splits: list[int]) -> list[int]:
    row = payload(source) // max(sum(splits), 1)
    return [row * split for split in splits]


def _far_bytes(name: str, op: str, args: tuple[Any, ...], sent: Fraction, ranks_per_node: int) -> Fraction:
    """The part of what a collective sent that went to ranks of other nodes."""
    if ranks_per_node in (0, dist.get_world_size()):
        return Fraction(0)
    group = _group(args)
    members, place = dist.get_process_group_ranks(group), group.rank()
    if parts := _PARTS[name](args) if name in _PARTS else []:
        own = members[place] // ranks_per_node
        far = [size for member, size in zip(members, parts, strict=True) if member // ranks_per_node != own]
        return Fraction(sum(far))
    if op == "send":
        return sent * (members[args[2]] // ranks_per_node != members[place] // ranks_per_node)
    return sent * far_share(op, members, place, ranks_per_node)


def leave_uncompiled() -> None:
    """Keep torch.compile from compiling the ledger itself, which it would where it is called from compiled code."""
    Ledger.__torch_dispatch__ = torch.compiler.disable(Ledger.__torch_dispatch__)  # pyright: ignore[reportAttributeAccessIssue]


class CountedKernel:
    """A kernel that tells the active ledger of each call."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.CUDA_KERNELS = kernel, kernel.CUDA_KERNELS
        self.unsupported_reason = kernel.unsupported_reason

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **mask: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        with _kernel_call("forward", q, k, v, causal, **mask):
            return self.kernel.forward(q, k, v, causal=causal, scale=scale, **mask)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        **mask: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _kernel_call("backward", q, k, v, causal, **mask):
            return self.kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=scale, **mask)


def delta_call(pass_kind: str, q: Tensor, k: Tensor, v: Tensor) -> AbstractContextManager[object]:
    """Tell the active ledgers of a call of a kernel of the gated delta rule, which runs inside."""
    if not _active:
        return _NOTHING
    calls = ExitStack()
    for book in _active:
        calls.enter_context(book.work.delta_call(pass_kind, q, k, v))
    return calls


def _kernel_call(
    pass_kind: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, **mask: Any
) -> AbstractContextManager[object]:
    if not _active:
        return _NOTHING  # in timed steps: they must not wait for the host
    calls = ExitStack()
    for book in _active:
        calls.enter_context(book.work.kernel_call(pass_kind, q, k, v, causal, **mask))
    return calls


class Ledger(TorchDispatchMode):
    """Counts while entered; read `counts` and `work` afterwards.

    Raises (from inside the step):
        NotImplementedError: a collective without a size rule.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch's whole compiler first, which takes each rank seconds

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled runs compiled in the counted step too; the collectives are outside of it

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.phase_times = PhaseTimes(device)
        self._calls: dict[tuple[str, str], int] = {}
        self._bytes: dict[tuple[str, str], Fraction] = {}
        self._far_bytes: dict[tuple[str, str], Fraction] = {}
        self._ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # 0: all ranks are on one
        self.work = Work()

    def __enter__(self) -> "Ledger":
        _active.append(self)
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self.work.see_update(optimizer))
        self._step = self.phase_times.inside("step")
        self._step.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)
        self._hook.remove()
        super().__exit__(*error)
        self._step.__exit__(None, None, None)

    @property
    def counts(self) -> Counts:
        return {key: (self._calls[key], self._bytes[key]) for key in sorted(self._calls)}

    @property
    def between_nodes(self) -> dict[tuple[str, str], Fraction]:
        """(phase, op) -> bytes that this rank sent to ranks of other nodes."""
        return {key: size for key, size in sorted(self._far_bytes.items()) if size}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        tensor = sys.modules.get("torch.distributed.tensor")  # importing it costs each rank seconds
        if tensor is not None and any(issubclass(t, tensor.DTensor) for t in types):
            return NotImplemented  # DTensor first turns itself into the plain collectives that we count
        if any(t.__module__.startswith("torchao.") for t in types):
            return NotImplemented  # and so does FP8: into plain products of its elements
        namespace = func.namespace
        if namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self._record(f"{namespace}::{func._opname}", self._positional(func, args, kwargs or {}))
        else:
            self.work.see(func, args)
        if func._schema.name in OPDEFS:
            return self._look_inside(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look_inside(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a library's custom operator, written in Python, with this mode on: while it handles an op it is off, and
        what the operator sends would go uncounted."""
        device = next((a.device.type for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)), "cpu")
        backend = torch._C._parse_dispatch_key(torch._C._dispatch_key_for_device(device))
        assert backend is not None
        super().__enter__()
        try:
            return func.redispatch(
                torch._C.DispatchKeySet(backend), *args, **kwargs
            )  # past this mode, or it came again
        finally:
            super().__exit__(None, None, None)

    @staticmethod
    def _positional(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        rest = func._schema.arguments[len(args) :]
        return args + tuple(kwargs.get(argument.name, argument.default_value) for argument in rest)

    def _record(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in RULES:
            raise NotImplementedError(f"the ledger has no size rule for {name}; add one to sp_bench/measure/ledger.py")
        op, size = RULES[name]
        if op not in _WITHOUT_TRAFFIC and not getattr(_group(args), "counts_itself", False):
            op, sent = _current["op"] or op, size(args)
            self.add(op, sent, _far_bytes(name, op, args, sent, self._ranks_per_node) if sent else sent)

    def add(self, op: str, size: Fraction, far: Fraction = Fraction(0)) -> None:
        """`far`: the part of the bytes that goes to other nodes."""
        key = (_attribution(op), op)
        self._calls[key] = self._calls.get(key, 0) + 1
        self._bytes[key] = self._bytes.get(key, Fraction(0)) + size
        self._far_bytes[key] = self._far_bytes.get(key, Fraction(0)) + far
