"""What a method holds while a kernel runs, where memory peaks: nothing that it has already merged or sent away."""

import gc
import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from oracle import mesh_of
from ranks import run

from sp_bench import kernels, methods
from sp_bench.config.method import MethodConfig
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import memory


def held_bytes() -> int:
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_queries(config: MethodConfig, shape: AttentionShape) -> dict[str, list[float]]:
    """The memory that a step holds beside its inputs as each of its kernels begins, in units of a rank's queries.

    On a busy machine a thread of gloo lets go of a message later than it arrives. So each count waits for it, and is
    the least of three steps. What a method itself keeps is there in each of them.
    """
    method, math, size = methods.get(config.name), kernels.get("math"), dist.get_world_size()
    local = (shape.batch_size, shape.seq_len // size)
    qkv = [
        torch.randn(*local, heads, shape.head_dim, dtype=torch.bfloat16, requires_grad=True)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ]

    def step() -> dict[str, list[int]]:
        held: dict[str, list[int]] = {"before": [], "forward": [], "backward": []}

        def watched(pass_kind: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                time.sleep(0.005)
                held[pass_kind].append(held_bytes())
                return getattr(math, pass_kind)(*args, **kwargs)

            return call

        watching = SimpleNamespace(CUDA_KERNELS=None, unsupported_reason=math.unsupported_reason)
        watching.forward, watching.backward = watched("forward"), watched("backward")
        mesh = mesh_of(method.layout(config, size))
        with method.open(config, cast("kernels.Kernel", watching), shape, mesh) as attention:
            held["before"].append(held_bytes())
            out = attention(*qkv)
            torch.autograd.grad(out, qkv, torch.ones_like(out))
        return held

    steps = [step() for _ in range(3)]
    least = {kind: [min(sizes) for sizes in zip(*(held[kind] for held in steps), strict=True)] for kind in steps[0]}
    (before,) = least.pop("before")
    return {kind: [(size - before) / qkv[0].nbytes for size in sizes] for kind, sizes in least.items()}


def check_ring(rank: int, more_queries: float) -> None:
    config = MethodConfig("ring", "zigzag", dkv_dtype="input", merge_dtype="float32")
    queries = held_queries(config, AttentionShape(1, 1024, 8, 2, 64, True, "bfloat16"))
    size = dist.get_world_size()
    assert [len(sizes) for sizes in queries.values()] == [size, size + 1]
    # two KV shards, one at hand and one under way, are 1 unit; what is not merged yet is below 3 units
    assert max(queries["forward"]) < 1 + 2 + 0.6, queries
    assert max(queries["backward"]) < queries["backward"][0] + more_queries, queries  # and dK/dV: at home, under way


def check_ring_as_modelled(rank: int) -> None:
    """On the two ranks whose steps are all of one kind. Beside what the model of the ring has are the output, its
    gradient and the lse."""
    size, shape = dist.get_world_size(), AttentionShape(1, 768, 8, 2, 64, True, "bfloat16")
    for num_kv_heads, layout in itertools.product((2, 4), ("zigzag", "contiguous")):
        config = MethodConfig("ring", layout, dkv_dtype="input", merge_dtype="float32")
        held = held_queries(config, replace(shape, num_kv_heads=num_kv_heads))["backward"]
        queries = {(size - 1, "zigzag"): 1.0, (0, "zigzag"): 0.5, (size - 1, "contiguous"): 1.0}.get((rank, layout))
        if queries is not None:
            kv = num_kv_heads * shape.head_dim
            q = shape.num_heads * shape.head_dim
            expected = [each / q for each in memory.ring_held_elements(q, kv, size, queries)]
            assert [each - 2 - 2 / shape.head_dim for each in held] == pytest.approx(expected, abs=0.01), layout


@pytest.mark.parametrize("size", [2, 3, 4])
def test_as_a_kernel_begins_a_ring_holds_what_the_memory_model_says(size: int) -> None:
    run(size, check_ring_as_modelled)


@pytest.mark.parametrize(("size", "more_queries"), [(4, 1 + 2 + 1), (8, 1 + 2.5 + 1)])
def test_while_a_kernel_runs_the_ring_holds_no_result_that_it_has_merged(size: int, more_queries: float) -> None:
    run(size, check_ring, more_queries)


def check_all_gather(rank: int) -> None:
    shape = AttentionShape(1, 1024, 8, 8, 64, True, "bfloat16")
    stride = {"layout": "zigzag", "dkv_dtype": "input"}
    whole, groups = (held_queries(MethodConfig("all_gather", **stride, head_stride=n), shape) for n in (None, 2))
    assert [len(sizes) for sizes in groups.values()] == [4 * 4 - (rank == 0) * 4] * 2
    # later groups hold the output too, which is one; whole, its only kernels run before there is one
    assert max(groups["forward"]) < (max(whole["forward"]) + 1) / 1.5, (whole, groups)
    assert max(groups["backward"]) < max(whole["backward"]) - 2, (whole, groups)
    kernels_a_group = len(groups["backward"]) // 4
    as_groups_begin = groups["backward"][kernels_a_group::kernels_a_group]
    assert len({*as_groups_begin}) == 1, f"more with some groups: {as_groups_begin}"


def test_an_all_gather_in_groups_of_heads_holds_less_and_no_more_with_each_group() -> None:
    run(4, check_all_gather)


def check_ulysses(rank: int) -> None:
    shape = AttentionShape(1, 512, 32, 16, 64, True, "bfloat16")
    whole, chunks = (held_queries(MethodConfig("ulysses", "contiguous", head_chunks=n), shape) for n in (1, 4))
    assert [len(sizes) for sizes in chunks.values()] == [4, 4]
    # of one chunk: Q, K and V that arrive and the output that leaves, each both as sent and as received
    assert max(chunks["forward"]) < max(whole["forward"]) + 6 / 4 + 0.1, (whole, chunks)
    assert max(chunks["backward"]) < max(whole["backward"]) + 6 / 4, (whole, chunks)


def check_upipe(rank: int) -> None:
    """In units of a rank's queries: K and V are 1 of them, and a stage of 4 has a quarter of each tensor."""
    shape = AttentionShape(1, 512, 32, 16, 64, True, "bfloat16")
    plain = held_queries(MethodConfig("ulysses"), shape)
    staged = held_queries(MethodConfig("upipe", head_stages=4), shape)
    assert [len(sizes) for sizes in staged.values()] == [4, 4]
    # Whole are the output, and in the backward its gradient, dQ, dK and dV. A stage has Q, K and V, and in the backward
    # its output and the gradient of that too. The rest is lse.
    assert max(staged["forward"]) < 1 + 2 / 4 + 0.1, staged
    assert max(staged["backward"]) < 1 + 1 + 2 + 4 / 4 + 0.1, staged
    assert len({*staged["backward"]}) == 1, "more with each stage"
    assert max(staged["forward"]) < max(plain["forward"]) - 0.4, (plain, staged)
    assert max(staged["backward"]) < max(plain["backward"]) - 0.9, (plain, staged)
    # Two of 8 stages read each KV head: K and V are a quarter as before. Sums of their gradients, in fp32, are twice
    # that as the second one begins.
    sharing = held_queries(MethodConfig("upipe", head_stages=8), shape)["backward"]
    first, second = 4 + 3 / 8 + 1 / 4, 4 + 3 / 8 + 1 / 4 + 1 / 2
    assert [each - 2 / 64 for each in sharing] == pytest.approx([first, second] * 4, abs=0.05), sharing


def test_upipe_holds_one_stage_by_heads_and_nothing_of_the_others() -> None:
    run(4, check_upipe)


def check_double_ring(rank: int) -> None:
    config = MethodConfig("double_ring", "zigzag", inner_ring_degree=2, dkv_dtype="input", merge_dtype="float32")
    queries = held_queries(config, AttentionShape(1, 1024, 8, 2, 64, True, "bfloat16"))
    assert [len(sizes) for sizes in queries.values()] == [4, 5]
    # as for one ring, and the shard that goes to the next window
    assert max(queries["forward"]) < 1.5 + 2 + 0.6, queries
    assert max(queries["backward"]) < queries["backward"][0] + 1.5 + 2.5 + 1.5, queries
    q, kv = 8 * 64, 2 * 64
    if rank == 3:
        of_ring = max(memory.ring_held_elements(q, kv, 4, 1.0)) / q
        assert max(queries["backward"]) - 2 - 2 / 64 == pytest.approx(of_ring + 4 * kv / q, abs=0.01), queries


def test_a_double_ring_holds_one_shard_more_than_a_ring() -> None:
    run(4, check_double_ring)


def test_chunked_ulysses_holds_what_two_chunks_have_under_way_and_no_more() -> None:
    run(4, check_ulysses)
