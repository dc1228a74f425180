"""The exchanges between two ranks: this process is rank 0, a spawned one answers as rank 1 the same number of times."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sp_bench import kernels
from sp_bench.attention import gather as gathers
from sp_bench.attention import head_exchange as collectives
from sp_bench.attention.exchange import Collectives
from sp_bench.attention.layouts import SequenceLayout

ROUNDS, WARMUP = 5, 1
SHAPE = (1, 1024, 8, 64)  # [B, S/P, H, D]


def world() -> Collectives:
    return Collectives(dist.distributed_c10d._get_default_group())


def head_exchange() -> torch.Tensor:
    qkv = [collectives.by_rank(torch.ones(SHAPE), 2) for _ in range(3)]
    return collectives.exchange_heads(qkv, [], world()).arrive()[0][0]


def ring_hop() -> torch.Tensor:
    return world().shift([torch.ones(2, *SHAPE)]).wait()


def kv_gather() -> torch.Tensor:
    layout = SequenceLayout(ring_degree=2)
    gather = gathers.Gather(kernels.get("math"), world(), layout, SHAPE[2], torch.float32)
    return gather.start(torch.ones(2, *SHAPE))()


def answer(_: int, store: str, exchange: Callable[[], torch.Tensor], times: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    for _ in range(times):
        exchange()
    dist.destroy_process_group()


@pytest.fixture(params=[head_exchange, ring_hop, kv_gather], ids=lambda f: f.__name__)
def exchange(request, benchmark, tmp_path, monkeypatch) -> Iterator[Callable[[], torch.Tensor]]:
    monkeypatch.syspath_prepend(str(request.path.parent))
    store = str(tmp_path / "store")
    times = 1 if benchmark.disabled else WARMUP + ROUNDS
    peer = mp.spawn(answer, (store, request.param, times), join=False)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
    yield request.param
    dist.destroy_process_group()
    assert peer is not None
    peer.join()


def test_exchange(benchmark, exchange: Callable[[], torch.Tensor]) -> None:
    result = benchmark.pedantic(exchange, rounds=ROUNDS, warmup_rounds=WARMUP)
    assert result.eq(1).all()
