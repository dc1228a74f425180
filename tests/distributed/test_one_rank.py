"""A world of one rank, without a GPU: what it sends is counted, takes its time, and is what real ranks would send."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import flash_attn_stand_in
import pytest
import ranks
import sdpa_stand_in
import torch
import torch.distributed as dist
from oracle import Case, mesh_of
from test_hf_fsdp2 import as_on_devices
from test_ledger import check
from test_libraries import needs
from torch import Tensor

from sp_bench import methods, workloads
from sp_bench.attention import meshes
from sp_bench.config.machine import LinkConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.config.trial import TrialConfig
from sp_bench.engines import fsdp2
from sp_bench.hardware import package_versions
from sp_bench.measure import ledger, one_rank, record
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.link_clock import HostClock
from sp_bench.measure.timing import Measurement
from sp_bench.methods import real_rank, refusals

CPU = torch.device("cpu")
MS_A_MB = "0:0 1000000:1000"  # us of bytes: 1 ms for each megabyte


def link(curve: str = MS_A_MB) -> LinkConfig:
    names = ("all_to_all", "send", "all_gather")
    return LinkConfig("test", {f"{name} 2": curve for name in names}, {f"{name} 2": curve for name in names})


@pytest.fixture
def join() -> Iterator[Callable[..., dist.ProcessGroup]]:
    def make(size: int, rank: int = 0, per_node: int | None = None, of: LinkConfig | None = None) -> dist.ProcessGroup:
        one_rank.join(rank, size, per_node or size, of or LinkConfig(), CPU)
        return dist.distributed_c10d._get_default_group()

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
    meshes.cached.cache_clear()
    fsdp2.sharding_mesh.cache_clear()


@pytest.fixture
def run(join, tmp_path) -> Callable[[TrialConfig], tuple[Measurement, dict[str, Any]]]:
    def measure(config: TrialConfig) -> tuple[Measurement, dict[str, Any]]:
        if dist.is_initialized():
            dist.destroy_process_group()
            meshes.cached.cache_clear()
        join(config.world_size, real_rank.real_place(config), config.ranks_per_node, config.link)
        mesh = methods.mesh_of(config)
        job = workloads.Job(config, mesh, CPU, lambda phase: None, tmp_path)
        measurement = workloads.get(config.workload.name).run(job)
        return measurement, record.assemble(config, [measurement])  # refuses bytes and work that are not expected

    return measure


@pytest.fixture
def one(make_config) -> Callable[..., TrialConfig]:
    """A trial of one rank, as short as can be."""

    def make(method: str, sp_size: int, workload: str = "attention", **changes: Any) -> TrialConfig:
        short = {"workload__warmup_steps": 1, "workload__timed_steps": 2, "seq_len": max(2 * sp_size, 64)}
        return make_config(method=method, sp_size=sp_size, workload=workload, world="one_rank", **{**short, **changes})

    return make


@pytest.mark.parametrize("sp_size", [2, 3, 4, 8, 64, 4096])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_counted_bytes_and_work_of_attention_are_the_closed_form(run, one, method, sp_size):
    measurement, columns = run(one(method, sp_size, seq_len=-(-64 // (2 * sp_size)) * 2 * sp_size))
    assert columns["comm_counted_bytes"] == float(sum(measurement.predicted.values())) > 0
    assert len(columns["rank_step_ms"]) == 1


@pytest.mark.parametrize("sp_size", [2, 4, 8, 64])
@pytest.mark.parametrize("method", ["ulysses", "upipe", "usp", "double_ring"])
def test_methods_that_exchange_heads_or_have_two_rings_run_as_they_are(run, one, method, sp_size):
    heads = {"model__num_heads": 64, "model__num_kv_heads": 64, "model__head_dim": 4}
    usp = {"method__ulysses_degree": 2} if method == "usp" else {}
    measurement, columns = run(one(method, sp_size, **heads, **usp))
    assert columns["comm_counted_bytes"] == float(sum(measurement.predicted.values())) > 0


@pytest.mark.parametrize(("sp_size", "replicas"), [(2, 1), (3, 1), (4, 2), (64, 1)])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_training_step_sends_what_is_predicted_in_each_phase(run, one, sp_size, replicas, checkpointing):
    options = {"workload__activation_checkpointing": checkpointing, "dp_replicate_size": replicas}
    measurement, columns = run(one("ring", sp_size, "train_step", seq_len=32 * sp_size, **options))
    phases = {phase for (phase, _), (_, size) in measurement.counts.items() if size}
    expected = {"forward", "backward", "parameters", "gradients", "loss"}
    assert phases - {"other"} == expected | ({"recompute"} if checkpointing == "full" else set())
    assert columns["counted_parameters"] == measurement.expected.updated_elements


LATENTS = {
    "kernel": "math", "method__sends": "latent", "model__num_kv_heads": 8, "model__v_head_dim": 8,
    "model__kv_lora_rank": 12, "model__qk_rope_head_dim": 4, "model__qk_norm": False,
}  # fmt: skip


@pytest.mark.parametrize("real_rank", [0, 3])
def test_a_training_step_projects_up_as_often_as_its_rank_does(run, one, real_rank):
    options = {"seq_len": 128, "real_rank": real_rank, "workload__activation_checkpointing": "full"}
    measurement, columns = run(one("ring", 4, "train_step", **LATENTS, **options))
    assert columns["counted_matmul_flops"] == sum(measurement.expected.matmul_flops.values())
    assert columns["comm_counted_bytes"] == float(sum(measurement.predicted.values())) > 0


PACKED = {"kernel": "math", "workload__packing": "fixed", "workload__document_len": 192, "seq_len": 1024}


@pytest.mark.parametrize("workload", ["attention", "train_step"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ring", {"method__layout": "contiguous"}),
        ("ring", {"method__layout": "striped"}),
        ("all_gather", {"method__layout": "contiguous"}),
        ("ring", PACKED),
        ("all_gather", PACKED),
        ("ring", PACKED | {"workload__window": 100, "method__layout": "contiguous"}),
    ],
)
def test_the_busiest_of_uneven_ranks_runs_and_computes_its_own_part(run, one, method, options, workload):
    if workload == "train_step" and "workload__window" in options:
        options = {**options, "model__layers": "window", "model__window": options["workload__window"]}
        del options["workload__window"]
    measurement, columns = run(one(method, 4, workload, **({"seq_len": 512} | options)))
    assert columns["comm_counted_bytes"] == float(sum(measurement.predicted.values())) > 0
    assert columns["counted_attention_flops"] == measurement.expected.attention_flops > 0


def test_4096_ranks_train_a_step(run, one):
    _, columns = run(one("all_gather", 4096, "train_step", seq_len=8192))
    assert columns["comm_counted_bytes"] > 0


def test_another_rank_can_be_the_real_one(run, one):
    _, first = run(one("ring", 4, "train_step", seq_len=256))
    _, last = run(one("ring", 4, "train_step", seq_len=256, real_rank=3))
    assert last["comm_counted_bytes"] == first["comm_counted_bytes"]


def test_bytes_between_nodes_are_counted_for_the_real_rank(run, one):
    config = one("ring", 8, num_nodes=2, real_rank=3)  # the last of its node: its hops cross
    _, columns = run(config)
    assert columns["internode_counted_bytes"] == [columns["comm_counted_bytes"]]
    _, columns = run(replace(config, real_rank=2))
    assert columns["internode_counted_bytes"] == [0.0]


# what is received


def gathered(group: dist.ProcessGroup, own: Tensor) -> Tensor:
    out = torch.full((group.size() * len(own),), float("nan"))
    group._allgather_base(out, own).wait()
    return out


def test_what_is_received_are_copies_of_the_ranks_own_values(join):
    group = join(3, rank=1)
    own = torch.tensor([1.0, 2.0])
    assert gathered(group, own).tolist() == [1.0, 2.0] * 3
    whole, mine = torch.arange(6.0), torch.empty(2)
    group._reduce_scatter_base(mine, whole).wait()
    assert mine.tolist() == [2.0, 3.0]
    received = torch.empty(6)
    group.alltoall_base(received, whole, [], []).wait()
    assert received.tolist() == whole.tolist()
    few = torch.empty(5)
    group.alltoall_base(few, whole[:2], [0, 2, 3], [1, 1, 0]).wait()
    assert few.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]  # never what memory happened to hold
    parts = [torch.empty(2) for _ in range(3)]
    group.allgather([parts], [own]).wait()
    assert [part.tolist() for part in parts] == [[1.0, 2.0]] * 3


def test_a_gather_into_its_own_place_keeps_it(join):
    group = join(3, rank=1)
    out = torch.arange(6.0)
    group._allgather_base(out, out[2:4]).wait()
    assert out.tolist() == [2.0, 3.0] * 3


def test_pairs_of_send_and_receive_carry_what_was_sent(join):
    group = join(4)
    sent, received = torch.arange(3.0), [torch.empty(3), torch.empty(3)]
    ops = [dist.P2POp(dist.isend, sent, 1), dist.P2POp(dist.irecv, received[0], 3)]
    for order in (ops, [dist.P2POp(dist.irecv, received[1], 3), ops[0]]):
        for work in dist.batch_isend_irecv(order):
            work.wait()
    assert [each.tolist() for each in received] == [[0.0, 1.0, 2.0]] * 2
    with pytest.raises(RuntimeError, match="a receive from rank 3 without a send"):
        group.recv([torch.empty(1)], 3, 0).wait()


def test_objects_barriers_and_groups_work_and_a_broadcast_from_nobody_does_not(join):
    join(3, rank=1)
    found: list[Any] = [None] * 3
    dist.all_gather_object(found, {"rank": 1})
    assert found == [{"rank": 1}] * 3
    dist.barrier()
    pair = dist.new_group([1, 2])
    assert (pair.rank(), pair.size(), record.of_all_ranks("mine")) == (0, 2, ["mine"])
    dist.broadcast(torch.ones(1), 1)
    with pytest.raises(NotImplementedError, match="real_rank=null"):
        dist.broadcast(torch.ones(1), 0)


def test_a_collective_of_the_dispatcher_is_counted_once(join):
    from torch.distributed import _functional_collectives as functional

    group = join(4)
    with ledger.Ledger() as book, ledger.phase("loss"):
        functional.wait_tensor(functional.all_reduce(torch.ones(10), "sum", group))
        dist.all_reduce(torch.ones(10))
    assert book.counts[("loss", "all_reduce")] == (2, 2 * 2 * 40 * 3 / 4)


# how long it takes

PART = torch.zeros(100_000)  # of 2 ranks: an exchange sends half of it, 0.2 MB


def waited_ms(*works: Any) -> float:
    start = perf_counter()
    for work in works:
        work.wait()
    return 1e3 * (perf_counter() - start)


def exchange(group: dist.ProcessGroup, times: int = 1) -> Any:
    part = PART.repeat(times)
    return group.alltoall_base(torch.empty_like(part), part, [], [])


def test_two_equal_messages_at_once_take_twice_the_time_of_one(join):
    join(2, of=link("0:0 1000000:100000"))
    a, b = (dist.new_group([0, 1]) for _ in range(2))  # each with a lane of its own, and one link
    one_ms = min(waited_ms(exchange(a)) for _ in range(5))  # the least of some: another job's load delays them
    two_ms = min(waited_ms(exchange(a), exchange(b)) for _ in range(5))
    assert one_ms == pytest.approx(20, rel=0.3)
    assert two_ms == pytest.approx(2 * one_ms, rel=0.3)


def test_work_beside_a_message_hides_it_and_whoever_waits_waits_for_the_rest(join):
    group = join(2, of=link("0:0 1000000:100000"))
    message = exchange(group, 2)
    while not message.is_completed():
        pass
    assert waited_ms(message) < 5


def test_links_inside_and_between_nodes_serve_side_by_side(join):
    clock = HostClock()
    near, far = one_rank.MessageTime(1.0, 0.0, 0.0), one_rank.MessageTime(0.0, 1.0, 0.0)
    ends = [clock.reserve(each, 0.0) for each in (near, far, near)]
    assert ends[1] - ends[0] == pytest.approx(0.0, abs=0.1)
    assert ends[2] - ends[0] == pytest.approx(1.0, abs=0.1)


def test_a_step_takes_as_long_as_a_slow_link_needs_where_nothing_is_hidden(run, one):
    config, waits_ms = one("ulysses", 2, seq_len=1024, workload__timed_steps=3), []
    for us in (40_000, 80_000):  # a megabyte
        slow, _ = run(replace(config, link=link(f"0:0 1000000:{us}")))
        waits_ms.append(one_rank.require_waits(slow.window_ms, 3))
        assert 0 < waits_ms[-1] <= min(slow.rank_step_ms)
    assert waits_ms[1] == pytest.approx(2 * waits_ms[0])


def test_messages_that_return_at_once_under_a_slow_link_are_incorrect(run, one, monkeypatch):
    monkeypatch.setattr(HostClock, "reserve", lambda self, message, earliest: 0.0)  # the lie
    config = replace(one("ulysses", 2, seq_len=1024), link=link("0:0 1000000:1000000"))
    measurement, _ = run(config)
    with pytest.raises(Incorrect, match="they did not take their time"):
        one_rank.require_waits(measurement.window_ms, 2)


def test_a_share_of_the_work_that_is_not_the_ranks_is_incorrect(run, one, monkeypatch):
    from sp_bench.attention import layouts, ring

    real = layouts.visible_block
    less = lambda *a, **k: (block := real(*a, **k)) and (replace(block, causal=True) if not block.causal else block)  # noqa: E731
    monkeypatch.setattr(ring, "visible_block", less)
    with pytest.raises((Incorrect, AssertionError, ValueError, RuntimeError)):
        run(one("ring", 4))


# libraries


def check_library(rank: int, method: MethodConfig, kernel: str) -> None:
    """It sends what its closed form says, and waits for it."""
    dist.destroy_process_group()
    flash_attn_stand_in.install()
    sdpa_stand_in.install()
    one_rank.join(0, 4, 4, link("0:0 1000000:100000"), CPU)
    dtype = "float32" if kernel in ("math", "sdpa_flash") else "float16"  # yunchang's casts
    mesh = mesh_of(methods.get(method.name).layout(method, 4))
    for hkv, documents in ((8, ()), (4, ()), (8, (160, 96, 256))):
        shape = AttentionShape(1, 512, 8, hkv, 16, True, dtype, documents)
        if documents and refusals.packing_reason(method, shape):
            continue
        start = perf_counter()
        check(Case(method, shape, kernel), mesh)
        passed_s, busy_s = perf_counter() - start, max(one_rank._worlds[0].busy_s)
        assert passed_s > busy_s > 0.01
        one_rank._worlds[0].busy_s[:] = 0.0, 0.0


USP = {"variant": "usp", "ulysses_degree": 2}


@pytest.mark.parametrize(
    ("package", "method", "kernel"),
    [
        pytest.param(package, method, kernel, marks=needs(package) if package != "torch" else ())
        for package, method, kernel in (
            ("deepspeed", MethodConfig("deepspeed_ulysses"), "math"),
            ("yunchang", MethodConfig("yunchang", "contiguous", "ulysses"), "flash_attn"),
            ("yunchang", MethodConfig("yunchang", "zigzag", **USP), "flash_attn"),
            ("ring-flash-attn", MethodConfig("ring_flash_attn", "zigzag"), "flash_attn"),
            ("ring-flash-attn", MethodConfig("ring_flash_attn", "contiguous"), "flash_attn"),
            ("ring-flash-attn", MethodConfig("ring_flash_attn_llama3"), "flash_attn"),
            ("torch", MethodConfig("torch_context_parallel", "zigzag", "allgather"), "sdpa_flash"),
            ("torch", MethodConfig("torch_context_parallel", "zigzag", "alltoall"), "sdpa_flash"),
        )
    ],
)
def test_libraries_run_as_they_are(package, method, kernel):
    ranks.run(1, check_library, method, kernel)


def check_step(rank: int, config: TrialConfig, tmp_path: Path) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config.world_size)}
    if config.engine.name == "hf_fsdp2":
        as_on_devices(rank, config.world_size)
    dist.destroy_process_group()
    one_rank.join(0, config.world_size, config.ranks_per_node, config.link, CPU)
    mesh = methods.mesh_of(config)
    job = workloads.Job(config, mesh, CPU, lambda phase: None, tmp_path)
    columns = record.assemble(config, [workloads.get(config.workload.name).run(job)])
    assert columns["comm_counted_bytes"] > 0


@pytest.mark.parametrize(
    ("package", "engine", "method", "options"),
    [
        pytest.param(package, engine, method, options, marks=needs(package))
        for package, engine, method, options in (
            ("deepspeed", "deepspeed", "ring", {}),
            ("deepspeed", "fsdp2", "deepspeed_ulysses", {}),
            ("accelerate", "hf_fsdp2", "torch_context_parallel", {"kernel": "sdpa_flash"}),
            ("accelerate", "hf_deepspeed", "deepspeed_ulysses_hf", {"workload__micro_batches": 2}),
            ("accelerate", "hf_trainer", "deepspeed_ulysses_hf", {}),
            ("trl", "trl_sft", "deepspeed_ulysses_hf", {}),
        )
    ],
)
def test_engines_train_a_step_as_they_are(one, package, engine, method, options, tmp_path):
    config = one(method, 4, "train_step", seq_len=256, engine=engine, model__num_kv_heads=4, **options)
    ranks.run(1, check_step, config, tmp_path)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
def test_on_a_device_messages_take_their_time_share_the_link_and_hide_behind_kernels(join):
    device = torch.device("cuda", 0)
    one_rank.join(0, 2, 2, link("0:0 1000000:100000"), device)
    a, b = (dist.new_group([0, 1]) for _ in range(2))
    part = PART.to(device)  # 0.2 MB: 20 ms

    def device_ms(step: Callable[[], object]) -> float:
        times = []
        for _ in range(2):  # the first compiles
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return times[-1]

    def exchange(*groups: dist.ProcessGroup, beside: Callable[[], object] = lambda: None) -> None:
        works = [group.alltoall_base(torch.empty_like(part), part, [], []) for group in groups]
        beside()
        for work in works:
            work.wait()

    kernel = lambda: torch.cuda._sleep(20_000_000)  # noqa: E731 - about 11 to 20 ms
    alone_ms, one_ms, two_ms = device_ms(kernel), device_ms(lambda: exchange(a)), device_ms(lambda: exchange(a, b))
    assert one_ms == pytest.approx(20, rel=0.05)
    assert two_ms == pytest.approx(40, rel=0.05)
    assert device_ms(lambda: exchange(a, beside=kernel)) == pytest.approx(max(alone_ms, one_ms), rel=0.1)
    gathered_part = torch.full((2 * len(part),), float("nan"), device=device)
    a._allgather_base(gathered_part, part + 1).wait()
    assert gathered_part.eq(1).all()


@pytest.mark.skipif("torchao" not in package_versions(), reason="torchao is not installed")
@pytest.mark.parametrize("kind", ["float8_rowwise", "float8_tensorwise"])
def test_a_step_in_fp8_sends_what_its_ranks_would(run, one, kind):
    """By tensor the layers' matrices are gathered in FP8, at an all_reduce of their scales."""
    config = one("ring", 8, "train_step", workload__linear_dtype=kind, dtype="bfloat16", seq_len=256)
    measurement, columns = run(config)
    assert columns["comm_counted_bytes"] == float(sum(measurement.predicted.values())) > 0
