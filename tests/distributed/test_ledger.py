"""Counted bytes and calls of the kernel equal predicted ones, on real ranks (gloo and NCCL) and on torch's fake process
group up to P = 64."""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Case, mesh_of, on_meshes
from ranks import here, run, worlds
from test_methods import cases, method_configs
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from trials import trial

from sp_bench import kernels, methods
from sp_bench.attention.exchange import Collectives, _all_gather, _reduce_scatter
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.config.workload import WorkloadConfig
from sp_bench.costs import attention as attention_costs
from sp_bench.measure import ledger
from sp_bench.measure.ledger import Ledger
from sp_bench.methods import closed_forms


def counted(case: Case, mesh: DeviceMesh) -> dict[tuple[str, str], Fraction]:
    """Bytes that this rank sends in one forward and backward."""
    return {key: size for key, (_, size) in ledger_of(case, mesh).counts.items() if size}


def ledger_of(case: Case, mesh: DeviceMesh) -> Ledger:
    """What this rank does in one forward and backward."""
    shape, local = case.shape, case.shape.seq_len // mesh.size()
    sizes = [(shape.batch_size, local, *of_heads) for of_heads in shape.heads[:3]]
    dtype = getattr(torch, shape.dtype)
    q, k, v = (torch.ones(size, dtype=dtype, device=here(), requires_grad=True) for size in sizes)
    opened = methods.open_counted(case.method, kernels.get(case.kernel), shape, mesh)
    with opened as attention, Ledger() as book:
        out = attention(q, k, v)
        with ledger.phase("backward"):
            out.backward(torch.ones_like(out))
    return book


def check(case: Case, mesh: DeviceMesh) -> Ledger:
    book, size = ledger_of(case, mesh), mesh.size()
    sent = {key: sent for key, (_, sent) in book.counts.items() if sent}
    assert sent == closed_forms.traffic(case.method.name)(case.method, case.shape, size), str(case)
    calls = closed_forms.kernel_calls(case.method, case.shape, size, mesh.get_rank())
    if calls is not None:
        assert (book.work.calls["forward"], book.work.calls["backward"]) == calls, str(case)
    return book


def check_all(rank: int, sp_size: int) -> None:
    """As if each two ranks were on a node of their own. Of ranks that share the cores of a laptop one case in two: each
    method gets other heads, and a fake group has all of them."""
    os.environ["LOCAL_WORLD_SIZE"] = str(min(sp_size, 2))
    causal = [case for case in cases(sp_size) if case.shape.causal]
    for case, mesh in on_meshes(causal[:: 2 if sp_size in (4, 8) and here().type == "cpu" else 1]):
        far = sum(check(case, mesh).between_nodes.values())
        if sp_size % 2 == 0:
            alone = WorkloadConfig("attention", "forward_backward", True, 0, 1, 48)
            config = trial(case.method, sp_size, workload=alone, num_nodes=sp_size // 2)
            traffic = closed_forms.traffic(case.method.name)(case.method, case.shape, sp_size)
            assert far == closed_forms.between_nodes(config, traffic, rank), str(case)


EIGHT = pytest.param("gloo", 8, id="gloo-8", marks=pytest.mark.faults)  # many ranks without processes are below


@pytest.mark.parametrize(("backend", "sp_size"), [*worlds(gloo=(2, 3, 4), nccl=(2, 3, 4, 8)), EIGHT])
def test_counted_bytes_equal_predicted_ones_on_real_ranks(backend: str, sp_size: int) -> None:
    run(sp_size, check_all, sp_size, backend=backend)


@contextmanager
def fake_group(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("sp_size", "rank"), [(8, 7), (16, 5), (64, 63)])
def test_counted_bytes_equal_predicted_ones_with_many_ranks(sp_size: int, rank: int) -> None:
    tried: Counter[int] = Counter()
    with fake_group(sp_size, rank):
        for case, mesh in on_meshes(with_many_ranks(sp_size)):
            check(case, mesh)
            tried[case.shape.num_kv_heads] += 1
    assert len(tried) == 3
    assert min(tried.values()) >= 8


def with_many_ranks(sp_size: int) -> Iterator[Case]:
    """Each method with as many KV heads as query heads, with fewer and with one."""
    for method, kv_heads in itertools.product(method_configs(sp_size), (64, 8, 1)):
        shape = AttentionShape(1, 2 * sp_size, 64, kv_heads, 8, True, "bfloat16")
        if method.ulysses_degree in (None, 2, 8) and not (
            methods.get(method.name).unsupported_reason(method, "cpu_flash", shape, sp_size)
            or methods.get(method.name).layout(method, sp_size).unsupported_reason(shape.seq_len)
        ):
            yield Case(method, shape, "cpu_flash")


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.faults)])
def test_the_ranks_together_compute_each_visible_score_once(sp_size: int) -> None:
    """In any layout, with groups and chunks of heads, and with one token a rank."""
    computed: Counter[Case] = Counter()
    for rank in range(sp_size):
        with fake_group(sp_size, rank):
            for case, mesh in on_meshes(tiny_cases(sp_size)):
                computed[case] += check(case, mesh).work.attention_flops
    assert len(computed) > 20
    for case, flops in computed.items():
        forward = attention_costs.attention_forward_flops(case.shape)
        assert flops == forward + forward * attention_costs.FLASH_BACKWARD, str(case)


def tiny_cases(sp_size: int) -> Iterator[Case]:
    configs = [*method_configs(sp_size), *(MethodConfig("all_gather", "zigzag", head_stride=n) for n in (1, 3))]
    for method, (number, hkv), causal in itertools.product(configs, enumerate((8, 4, 1)), (True, False)):
        seq_len = sp_size * (1, 4)[(number + causal) % 2]  # each with either mask and with each number of heads
        own, shape = methods.get(method.name), AttentionShape(2, seq_len, 8, hkv, 4, causal, "float32")
        can_cut = own.layout(method, sp_size).unsupported_reason(seq_len) is None
        if can_cut and own.unsupported_reason(method, "math", shape, sp_size) is None:
            yield Case(method, shape)


@pytest.mark.parametrize(
    ("name", "ulysses_degree", "hops"), [("ring", None, 3), ("all_gather", None, 3), ("usp", 2, 1)]
)
def test_gradients_of_keys_and_values_take_twice_the_bytes_in_fp32(
    name: str, ulysses_degree: int | None, hops: int
) -> None:
    shape = AttentionShape(1, 64, 8, 4, 16, True, "bfloat16")
    elements = 64 // 4 * 2 * 4 * 16  # K and V of one rank's tokens
    sent = {}
    with fake_group(4, 1):
        for dtype in ("input", "float32"):
            case = Case(MethodConfig(name, "zigzag", None, ulysses_degree, dkv_dtype=dtype), shape, "cpu_flash")
            mesh = mesh_of(methods.get(name).layout(case.method, 4))
            check(case, mesh)
            sent[dtype] = counted(case, mesh)
    more = {key: size - sent["input"][key] for key, size in sent["float32"].items() if size != sent["input"][key]}
    assert more == {("backward", "reduce_scatter" if name == "all_gather" else "send"): hops * elements * (4 - 2)}


def test_an_op_without_a_size_rule_is_an_error() -> None:
    with fake_group(2, 0), Ledger(), pytest.raises(NotImplementedError, match="no size rule for c10d::gather_"):
        dist.gather(torch.ones(2), [torch.empty(2), torch.empty(2)])


def test_a_scalar_all_reduce_over_three_ranks_is_a_fraction() -> None:
    with fake_group(3, 0), Ledger() as book, ledger.phase("loss"):
        dist.all_reduce(torch.ones(()))
    assert book.counts == {("loss", "all_reduce"): (1, Fraction(16, 3))}


def test_what_a_rank_sends_to_itself_is_not_counted() -> None:
    with fake_group(2, 0), Ledger() as book, ledger.attention():
        for to in (0, 1):
            dist.isend(torch.ones(4), to)
    assert book.counts == {("forward", "send"): (2, 16)}


@pytest.mark.parametrize(
    ("size", "ops"), [(2, ["alltoall_base_", "alltoall_base_"]), (3, ["send", "recv_", "send", "recv_"])]
)
def test_two_ranks_swap_and_more_send_on_and_both_are_counted_as_sends(
    size: int, ops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch keeps memory for its send, and sends empty messages in an all-to-all of more."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # each rank is a node
    issued = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            issued.extend([func._opname] if func.namespace == "c10d" else [])
            return func(*args, **(kwargs or {}))

    with fake_group(size, 1), Seen(), Ledger() as book:
        Collectives(dist.group.WORLD).shift([torch.ones(4, 3), torch.ones(2, 1)]).wait_all()
        dist.all_to_all_single(torch.empty(size), torch.ones(size))  # what follows is counted as ever
    assert issued == [*ops, "alltoall_base_"]
    sent = {("forward", "send"): (2, 4 * 14), ("forward", "all_to_all"): (1, 4 * (size - 1))}
    assert book.counts == sent
    assert book.between_nodes == {key: num_bytes for key, (_, num_bytes) in sent.items()}


def test_of_a_list_of_tensors_only_the_slices_for_other_ranks_are_counted() -> None:
    slices = [torch.ones(size) for size in (1, 20, 300, 4000)]
    with fake_group(4, 1), Ledger() as book, ledger.attention():
        dist.all_to_all([torch.empty_like(t) for t in slices], slices)
        dist.reduce_scatter(torch.empty(20), slices)
        dist.all_gather([torch.empty(20) for _ in slices], torch.ones(20))
    assert book.counts == {
        ("forward", "all_to_all"): (1, 4 * (1 + 300 + 4000)),
        ("forward", "reduce_scatter"): (1, 4 * (1 + 300 + 4000)),
        ("forward", "all_gather"): (1, 4 * 3 * 20),
    }


def test_gathers_outside_attention_are_counted_as_parameters() -> None:
    with fake_group(4, 0), Ledger() as book:
        _all_gather(torch.empty(8), torch.ones(2))
        _reduce_scatter(torch.empty(2), torch.ones(8))
        with ledger.attention():
            _all_gather(torch.empty(8), torch.ones(2))
    assert {key: size for key, (_, size) in book.counts.items()} == {
        ("parameters", "all_gather"): 24,
        ("gradients", "reduce_scatter"): 24,
        ("forward", "all_gather"): 24,
    }


class Summed(torch.autograd.Function):
    """Like a library's function: it issues collectives in forward and backward, and does not say what they are for."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return Summed.backward(ctx, tensor)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def test_a_library_function_marked_as_attention_is_counted_so_in_its_own_backward_only() -> None:
    with fake_group(2, 0), Ledger() as book:
        leaf = torch.ones(2, requires_grad=True)
        with ledger.attention():
            marked = Summed.apply(leaf)
        ledger.mark_backward_as_attention(marked, torch.ones(1))
        with ledger.phase("backward"):
            Summed.apply(marked).sum().backward()
    assert {key: calls for key, (calls, _) in book.counts.items()} == {
        ("forward", "all_reduce"): 1,
        ("backward", "all_reduce"): 1,
        ("gradients", "all_reduce"): 2,  # the unmarked one, forward and backward
    }


@torch.library.custom_op("sp_bench_test::exchange", mutates_args=())
def exchange(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Like a library's operator: it is written in Python, and an active dispatch mode sees it as one call."""
    received = torch.empty_like(tensors[0])
    dist.all_to_all_single(received, tensors[0])
    return received


def test_collectives_inside_a_custom_operator_are_counted() -> None:
    with fake_group(4, 0), Ledger() as book, ledger.attention():
        assert exchange([torch.ones(8)]).shape == (8,)
        _all_gather(torch.empty(8), torch.ones(2))
    assert book.counts == {("forward", "all_gather"): (1, 24), ("forward", "all_to_all"): (1, 24)}


def test_messages_that_no_collective_carries_are_counted_as_collectives_are() -> None:
    ledger.count("send", 7)  # no ledger is active
    with Ledger() as book:
        with ledger.attention():
            ledger.count("send", 10)
            with ledger.phase("backward"):
                ledger.count("send", 20)
                ledger.count("all_to_all", 5)
            ledger.count("send", 1)
        ledger.count("all_gather", 3)  # outside attention: counted as FSDP's
    ledger.count("send", 7)
    assert book.counts == {
        ("backward", "all_to_all"): (1, 5),
        ("backward", "send"): (1, 20),
        ("forward", "send"): (2, 11),
        ("parameters", "all_gather"): (1, 3),
    }


def test_an_inner_ledger_counts_its_own_part_of_both_kinds_of_messages() -> None:
    with fake_group(2, 0), Ledger() as outer, ledger.attention():
        ledger.count("send", 1)
        with Ledger() as inner:
            ledger.count("send", 2)
            _all_gather(torch.empty(2), torch.ones(1))
    gathered = {("forward", "all_gather"): (1, 4)}
    assert inner.counts == gathered | {("forward", "send"): (1, 2)}
    assert outer.counts == gathered | {("forward", "send"): (2, 3)}


def test_a_step_that_fails_leaves_no_ledger_and_no_mark_behind() -> None:
    def failing_step() -> None:
        with ledger.phase("backward"), ledger.attention():
            raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"), Ledger() as book:
        failing_step()
    ledger.count("send", 1)
    assert book.counts == {}
    with Ledger() as later:
        ledger.count("send", 1)
    assert later.counts == {("gradients", "send"): (1, 1)}  # forward again, and untagged
