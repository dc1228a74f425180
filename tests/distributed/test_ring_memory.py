"""What the ring holds while a kernel runs, where memory peaks: nothing of the blocks that it has merged."""

import gc
from types import SimpleNamespace
from typing import Any, cast

import torch
from oracle import mesh_of
from ranks import run

from sp_bench import kernels, methods
from sp_bench.config import AttentionShape, MethodConfig

SHAPE = AttentionShape(1, 1024, 8, 2, 64, True, "bfloat16")
QUERY_BYTES = 256 * 8 * 64 * 2  # of one of 4 ranks


def held_bytes() -> int:
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_held(rank: int) -> None:
    method, math = methods.get("ring"), kernels.get("math")
    config = MethodConfig("ring", "zigzag", dkv_dtype="input", merge_dtype="float32")
    held: dict[str, list[int]] = {"forward": [], "backward": []}

    def watched(pass_kind: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            held[pass_kind].append(held_bytes())
            return getattr(math, pass_kind)(*args, **kwargs)

        return call

    watching = SimpleNamespace(CUDA_KERNELS=None, unsupported_reason=math.unsupported_reason)
    watching.forward, watching.backward = watched("forward"), watched("backward")
    qkv = [torch.randn(1, 256, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)]
    mesh = mesh_of(method.layout(config, 4))
    with method.open(config, cast("kernels.Kernel", watching), SHAPE, mesh) as attention:
        before = held_bytes()
        out = attention(*qkv)
        torch.autograd.grad(out, qkv, torch.ones_like(out))
    queries = {name: [(size - before) / QUERY_BYTES for size in sizes] for name, sizes in held.items()}
    assert [len(sizes) for sizes in queries.values()] == [4, 5]
    # two shards of KV, the one at hand and the one under way, are one of queries; partial sums in float32 are two
    assert max(queries["forward"]) < 1 + 2 + 0.6, queries
    assert max(queries["backward"]) < queries["backward"][0] + 1 + 2 + 1 + 0.1, queries  # and dK/dV: at home, under way


def test_while_a_kernel_runs_the_ring_holds_no_result_that_it_has_merged() -> None:
    run(4, check_held)
