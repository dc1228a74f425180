"""The two arms of a step, without messages and without kernels: all shapes stay; one arm has no traffic.

Also inputs that the timed step never has but a user may have: strided gradients, odd head sizes, fp16.
"""

import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from oracle import Case, on_meshes, relative_errors
from ranks import run
from test_gate import ULYSSES, ZIGZAG, trial
from test_methods import method_configs
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from trials import row

from sp_bench import kernels, methods
from sp_bench.attention import exchange
from sp_bench.attention.copy_engines import CopyEngines
from sp_bench.attention.exchange import Collectives, Message, Transport, local_copies
from sp_bench.attention.no_kernel import NoKernel
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.config.workload import WorkloadConfig
from sp_bench.measure import ledger
from sp_bench.measure.ledger import Ledger
from sp_bench.measure.timing import Schedule
from sp_bench.methods import closed_forms
from sp_bench.workloads.arms import arms

GQA = AttentionShape(2, 36, 12, 6, 8, True, "float64")


def messages(transport: Transport, tensor: Tensor) -> Iterator[Message]:
    """Every primitive, on [P, 4, 5]."""
    yield transport.all_to_all([tensor])
    yield transport.all_to_all([tensor, tensor[:, :1].contiguous()])
    yield transport.all_gather(tensor)
    yield transport.reduce_scatter(tensor)
    yield transport.shift([tensor])
    yield transport.shift([tensor, tensor[:1].float()])


def check_primitives(rank: int, size: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    mine = torch.full((size, 4, 5), float(rank))
    sent = [[t.shape for t in message.wait_all()] for message in messages(Collectives(group), mine)]
    for transport in (Collectives(group), CopyEngines(group)):
        with Ledger() as book, local_copies():
            copied = [message.wait_all() for message in messages(transport, mine)]
        assert book.counts == {}
        assert [[t.shape for t in received] for received in copied] == sent
        assert all((t == rank).all() for received in copied for t in received), "only what this rank itself sends"
    with Ledger() as book:
        Collectives(group).shift([mine]).wait()
    assert book.counts, "afterwards messages travel again"


def step(case: Case, kernel: kernels.Kernel, mesh: DeviceMesh) -> tuple[list[Tensor], list[Tensor]]:
    """(q, k, v of this rank; output and their gradients)."""
    shape = case.shape
    local = (shape.batch_size, shape.seq_len // mesh.size())
    qkv = [
        torch.ones(*local, heads, shape.head_dim, dtype=torch.float64, requires_grad=True)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ]
    with methods.get(case.method.name).open(case.method, kernel, shape, mesh) as attention:
        out = attention(*qkv)
        with ledger.phase("backward"):
            return qkv, [out.detach(), *torch.autograd.grad(out, qkv, torch.ones_like(out))]


def check_arms(case: Case, mesh: DeviceMesh) -> None:
    with Ledger() as book, local_copies():
        (q, k, v), computed = step(case, kernels.get("math"), mesh)
    assert book.counts == {}, f"{case}: a message left"
    assert [t.shape for t in computed] == [t.shape for t in (q, q, k, v)], str(case)
    with Ledger() as book:
        (q, k, v), moved = step(case, NoKernel(), mesh)
    assert [t.shape for t in moved] == [t.shape for t in (q, q, k, v)], str(case)
    counted = {key: size for key, (_, size) in book.counts.items() if size}
    assert counted == closed_forms.traffic(case.method.name)(case.method, case.shape, mesh.size()), str(case)


def check_no_zeros(case: Case, mesh: DeviceMesh) -> None:
    """Kernels are faster on zeros, so the arm without messages must compute on none: `math` here refuses them."""
    math, calls = kernels.get("math"), []

    def refusing(run: Any) -> Any:
        def on(*tensors: Tensor, **options: Any) -> Any:
            read = tensors[-3:] if run is math.forward else tensors[:4]  # q, k, v; dout, q, k, v
            assert all(x.ne(0).all() for x in read), f"{case}: the kernel reads zeros"
            calls.append(run)
            return run(*tensors, **options)

        return on

    kernel = SimpleNamespace(**{**vars(math), "forward": refusing(math.forward), "backward": refusing(math.backward)})
    with local_copies():
        step(case, cast(Any, kernel), mesh)
    assert {*calls} == {math.forward, math.backward}, str(case)


def check_any_inputs(case: Case, mesh: DeviceMesh) -> None:
    """Gradients of the output may be expanded, as in `out.sum().backward()`, or strided."""
    rank, shape = dist.get_rank(), case.shape
    positions = methods.get(case.method.name).layout(case.method, mesh.size()).global_positions(rank, shape.seq_len)
    qkv = [
        torch.randn(shape.batch_size, len(positions), heads, shape.head_dim, dtype=torch.float64).requires_grad_()
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ]
    with methods.get(case.method.name).open(case.method, kernels.get(case.kernel), shape, mesh) as attention:
        strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in qkv]  # D is not the innermost axis
        outs = [attention(*qkv), attention(*strided)]
        torch.testing.assert_close(outs[0], outs[1], msg=lambda text: f"{case}: {text}")
        ones = torch.ones_like(outs[0])
        douts = [ones, ones[:, :1, :1, :1].expand_as(ones), ones.transpose(1, 3).contiguous().transpose(1, 3)]
        found = [torch.autograd.grad(out, qkv, dout, retain_graph=True) for out in outs for dout in douts]
        for one, another in pairwise(found):
            torch.testing.assert_close(one, another, msg=lambda text: f"{case}: {text}")


def cases(shape: AttentionShape, sp_size: int, kernel: str = "math") -> Iterator[Case]:
    for method in method_configs(sp_size):
        if methods.get(method.name).unsupported_reason(method, kernel, shape, sp_size) is None:
            yield Case(method, shape, kernel)


def check_all(rank: int, size: int) -> None:
    check_primitives(rank, size)
    for case, mesh in on_meshes(cases(GQA, size)):
        check_arms(case, mesh)
        check_any_inputs(case, mesh)
    for case, mesh in on_meshes(cases(replace(GQA, window=7), size)):
        check_no_zeros(case, mesh)
    # heads that two ranks can share only by replication; a head size that is no multiple of 16 bytes; fp16
    uneven = [replace(GQA, num_kv_heads=3), replace(GQA, num_kv_heads=1, batch_size=3), replace(GQA, head_dim=7)]
    for shape in uneven:
        for case, mesh in on_meshes(cases(shape, size)):
            assert all(error < 1e-13 for error in relative_errors(case, mesh).values()), str(case)
    for case, mesh in on_meshes(cases(replace(GQA, dtype="float16"), size)):
        assert all(error < 4e-3 for error in relative_errors(case, mesh).values()), str(case)


def test_both_arms_keep_shapes_and_uncommon_inputs_give_right_results() -> None:
    chosen = list(cases(GQA, 3))
    assert {case.method.name for case in chosen} == {"ulysses", "upipe", "ring", "double_ring", "all_gather", "usp"}
    assert {case.method.head_chunks for case in chosen} >= {1, 2}
    run(3, check_all, 3)


def check_conditions(workload: WorkloadConfig) -> None:
    """One arm runs with the trial's kernel and without messages, the other with messages and without kernel."""
    seen: list[tuple[bool, bool]] = []
    kernel = kernels.get("math")

    def step(given: Any) -> None:
        seen.append((given is kernel, exchange._local["copies"]))

    samples = arms(cast(Any, nullcontext), kernel, step, Schedule(workload), torch.device("cpu"))
    warmed_up = 1 + workload.timed_steps
    assert seen == [(True, True)] * warmed_up + [(False, False)] * warmed_up
    assert {arm: len(ms) for arm, ms in samples.items()} == dict.fromkeys(
        ("compute_only", "comm_only"), workload.timed_steps
    )


def check_row(rank: int) -> None:
    check_conditions(replace(trial(ULYSSES, 2).workload, timed_steps=3))
    for method in (ULYSSES, MethodConfig("ulysses", head_chunks=2), ZIGZAG):
        config = trial(method, 2)
        plain = row(config)
        of_arms = ("compute_only_step_ms", "comm_only_step_ms", "exposed_comm_ms", "overlap_efficiency")
        assert {plain.get(name) for name in of_arms} == {None}
        workload = replace(config.workload, attribution=True, timed_steps=3)
        for pass_kind in ("forward", "forward_backward"):
            columns = row(replace(config, workload=replace(workload, pass_kind=pass_kind)))
            compute_only, comm_only = columns["compute_only_step_ms"], columns["comm_only_step_ms"]
            assert len(columns["step_ms"]) == len(compute_only) == len(comm_only) == 3
            assert min(*compute_only, *comm_only) > 0
            ranks = columns["compute_only_rank_ms"]
            assert len(ranks) == 2
            assert columns["imbalance_ms"] == statistics.median(compute_only) - statistics.mean(ranks)
            exposed_ms = columns["median_step_ms"] - statistics.median(compute_only)
            assert columns["exposed_comm_ms"] == exposed_ms
            assert columns["overlap_efficiency"] == 1 - exposed_ms / statistics.median(comm_only)
            assert columns["comm_counted_bytes"] == columns["comm_predicted_bytes"] > 0


def test_a_row_says_how_long_the_step_takes_without_messages_and_without_kernels() -> None:
    run(2, check_row)
