"""What moves the tensors, without ranks: copies, chunks of heads, runs of tokens, and copy engines on a stand-in for
symmetric memory."""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_bench import kernels
from sp_bench.attention import copy_engines
from sp_bench.attention.copy_engines import CopyEngines
from sp_bench.attention.exchange import Message, Transport
from sp_bench.attention.gather import Gather
from sp_bench.attention.head_chunks import ChunkedAttention, HeadChunks
from sp_bench.attention.head_exchange import by_rank, copy_rows, exchange_heads, replicate_kv_heads
from sp_bench.attention.layouts import SequenceLayout
from sp_bench.attention.ring import Ring
from sp_bench.config.shape import AttentionShape
from sp_bench.costs import attention as attention_costs
from sp_bench.measure import ledger

DTYPES = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
KINDS: list[Any] = ["contiguous", "zigzag"]


def transport_of(rank: int, size: int) -> Transport:
    """For what only asks who I am."""
    return cast(Transport, SimpleNamespace(group=SimpleNamespace(rank=lambda: rank, size=lambda: size)))


@st.composite
def cut_tensors(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of `shape` somewhere inside a larger one: any order of the axes, any offset and gaps, or expanded."""
    if draw(st.booleans(), label="expanded"):
        return torch.ones((), dtype=dtype).expand(shape)
    order = draw(st.permutations(range(len(shape))), label="order")
    gaps = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)), label="gaps")
    starts = [draw(st.integers(0, gap)) for gap in gaps]
    whole = torch.arange(torch.Size(n + gap for n, gap in zip(shape, gaps, strict=True)).numel()).to(dtype)
    whole = whole.view([shape[axis] + gaps[axis] for axis in order])
    whole = whole.permute([order.index(axis) for axis in range(len(shape))])
    return whole[tuple(slice(first, first + n) for first, n in zip(starts, shape, strict=True))]


@settings(max_examples=300)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), same=st.booleans())
def test_copying_rows_is_copying(data: st.DataObject, dtype: torch.dtype, same: bool) -> None:
    dims = st.one_of(st.integers(1, 9), st.sampled_from([16, 24, 64]))
    shape = tuple(data.draw(st.lists(dims, min_size=1, max_size=4), label="shape"))
    source = data.draw(cut_tensors(dtype if same else torch.float32, shape))
    to = data.draw(cut_tensors(dtype, shape).filter(lambda t: t.numel() == 1 or 0 not in t.stride()))
    want = torch.empty(shape, dtype=dtype).copy_(source)
    beside = to._base.clone() if to._base is not None else None
    copy_rows(to, source)
    assert torch.equal(to, want)
    if to._base is not None and beside is not None:  # and nothing beside it was written
        to.copy_(torch.zeros_like(to))
        torch.as_strided(beside, to.shape, to.stride(), to.storage_offset()).zero_()
        assert torch.equal(to._base, beside)


@pytest.mark.parametrize(("size", "of_ranks"), [(1, [0, 1]), (2, [0, 1]), (4, [0, 0, 1, 1]), (6, [0, 0, 0, 1, 1, 1])])
def test_ranks_side_by_side_share_a_kv_head(size: int, of_ranks: list[int]) -> None:
    k = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    replicas = replicate_kv_heads(k, k + 10, size)
    assert [t.flatten().tolist() for t in replicas] == [of_ranks, [10 + head for head in of_ranks]]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_while_a_chunk_is_computed_one_message_brings_the_next_and_takes_the_last_home(count: int) -> None:
    log: list[str] = []

    def all_to_all(sent: Sequence[Tensor]) -> Message:
        names = [f"{'qk'[int(t.flatten()[0]) // 10]}{int(t.flatten()[0]) % 10}" for t in sent]
        log.append(f"send {' '.join(names)}")
        return LoggedMessage(sent, sent, [SimpleNamespace(wait=lambda: log.append(f"wait {' '.join(names)}"))])

    class LoggedMessage(Message):
        def go_first(self) -> None:
            log.append("head start")

    def compute(arrived: list[Tensor]) -> list[Tensor]:
        log.append(f"compute {int(arrived[0].flatten()[0])}")
        return [arrived[0] + 10]

    transport = SimpleNamespace(group=SimpleNamespace(rank=lambda: 0, size=lambda: 1), all_to_all=all_to_all)
    chunks = HeadChunks(kernels.get("math"), cast(Transport, transport), True, 1.0, count)
    to_heads = [[torch.full((1, 1, 1, 1, 1), chunk)] for chunk in range(count)]
    home = [int(result) - 10 for (result,) in chunks.computed(to_heads, compute)]
    assert home == list(range(count))
    expected = ["send q0"]
    for chunk in range(count):
        beside = " ".join([f"q{chunk + 1}"] * (chunk + 1 < count) + [f"k{chunk - 1}"] * (chunk > 0))
        before = " ".join([f"q{chunk}"] + [f"k{chunk - 2}"] * (chunk > 1))
        expected += [f"send {beside}"] * bool(beside) + [f"wait {before}"]
        expected += ["head start"] * bool(beside) + [f"compute {chunk}"]
    last = f"k{count - 1}"
    assert log == [*expected, f"send {last}", *[f"wait k{count - 2}"] * (count > 1), f"wait {last}"]


@pytest.mark.parametrize("attention", ["ring", "all_gather"])
def test_a_kernel_starts_behind_the_message_that_was_sent_before_it(attention: str) -> None:
    log: list[str] = []

    class LoggedMessage(Message):
        def go_first(self) -> None:
            log.append("head start")

    class Loopback:
        group = SimpleNamespace(rank=lambda: 1, size=lambda: 3)

        def shift(self, sent: Sequence[Tensor], hops: int = 1) -> Message:
            log.append(f"send {len(sent)}")
            return LoggedMessage(sent, [t.clone() for t in sent], [])

        def all_gather(self, tensor: Tensor) -> Message:
            log.append("send 1")
            return LoggedMessage([tensor], [torch.cat([tensor] * 3)], [])

        def reduce_scatter(self, tensor: Tensor) -> Message:
            log.append("send 1")
            return LoggedMessage([tensor], [tensor.chunk(3)[0].clone()], [])

    class Logged:
        @staticmethod
        def forward(*args: Any, **kwargs: Any) -> Any:
            log.append("kernel")
            return kernels.get("math").forward(*args, **kwargs)

        @staticmethod
        def backward(*args: Any, **kwargs: Any) -> Any:
            log.append("kernel")
            return kernels.get("math").backward(*args, **kwargs)

    kernel, transport = cast(Any, Logged), cast(Transport, Loopback())
    layout = SequenceLayout("zigzag", ring_degree=3)
    made: Any = {
        "ring": Ring(kernel, transport, "zigzag", torch.float32, torch.float32),
        "all_gather": Gather(kernel, transport, layout, 2, torch.float32),
    }[attention]
    q, k, v = (torch.randn(1, 4, heads, 8) for heads in (4, 2, 2))
    out, lse = made.forward(q, k, v, causal=True, scale=1.0)
    forward, log[:] = list(log), []
    made.backward(out, q, k, v, out, lse, causal=True, scale=1.0)
    behind, alone = ["send 1", "head start", "kernel"], ["kernel"]
    if attention == "ring":
        assert forward == [*behind * 2, *alone]
        assert log == behind * 4
    else:
        assert forward == [*behind, *alone * 3]
        assert log == [*behind, *alone * 2, *behind]


def test_a_message_that_has_arrived_holds_no_memory() -> None:
    """A loop holds its last message while the next kernel runs: packed Q, K and V, or all ranks' KV in rank order."""
    alive: list[weakref.ref[Tensor]] = []

    class Loopback:
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)

        @staticmethod
        def carry(sent: Sequence[Tensor], received: list[Tensor]) -> Message:
            alive.extend(weakref.ref(t) for t in (*sent, *received))
            return Message(sent, received, [])

        def all_to_all(self, sent: Sequence[Tensor]) -> Message:
            return self.carry(sent, [t.clone() for t in sent])

        def all_gather(self, tensor: Tensor) -> Message:
            return self.carry([tensor], [torch.cat([tensor, tensor])])

    transport = cast(Transport, Loopback())
    grouped = by_rank(torch.randn(2, 4, 6, 8), 2)  # two sequences, so that what arrives is put in another order
    exchange = exchange_heads([grouped, grouped], [], transport)
    gather = Gather(kernels.get("math"), transport, SequenceLayout("zigzag", ring_degree=2), 1, torch.float32)
    gathering = gather.start(torch.randn(2, 2, 4, 3, 8)[:, :, :, 1:])
    assert all(ref() is not None for ref in alive)
    arrived = [exchange.arrive(), gathering()]
    assert [ref() for ref in alive] == [None] * 4
    assert arrived


@st.composite
def heads_and_chunks(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, KV heads, chunks) of one rank, of the numbers that costs.head_chunks_reason lets through."""
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    heads = kv_heads * group
    shape = AttentionShape(1, 8, heads, kv_heads, 8, True, "float32")
    fitting = [n for n in range(1, heads + 1) if not attention_costs.head_chunks_reason(shape, 1, n, may_share_kv=True)]
    return heads, kv_heads, draw(st.sampled_from(fitting))


@given(heads_and_chunks())
def test_chunks_take_every_head_once_and_the_kv_heads_that_their_queries_read(sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, num_chunks = sizes
    chunks = HeadChunks(kernels.get("math"), transport_of(0, 2), True, 1.0, num_chunks)
    parts = chunks.parts(heads, kv_heads)
    assert len(parts) == num_chunks
    queries, keys = range(heads), range(kv_heads)
    assert [head for part in parts for head in queries[part.queries]] == list(queries)
    assert [head for part in parts if part.brings_kv for head in keys[part.kv]] == list(keys)
    held = parts[0].kv
    for part in parts:
        held = part.kv if part.brings_kv else held
        mine, group = queries[part.queries], heads // kv_heads
        # the kernel groups a part's queries by its own numbers of heads: each must find its KV head there
        inside = len(mine) // len(keys[held])
        assert [keys[held][i // inside] for i in range(len(mine))] == [head // group for head in mine]


def test_what_chunks_find_for_a_kv_head_that_they_share_is_summed_before_it_is_rounded() -> None:
    """bfloat16 has 8 bits: 256 + 1 is 256, and 256 + 1 + 1 + 2 is 260."""
    shares = {"dk": iter([256.0, 1.0, 1.0, 2.0]), "dv": iter([512.0, 2.0, 2.0, 4.0])}

    class Shares:
        @staticmethod
        def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            return q.clone(), q.new_zeros(q.shape[:3])

        @staticmethod
        def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor, **options: Any) -> list[Tensor]:
            return [dout, *(torch.full_like(t, next(shares[name])) for name, t in (("dk", k), ("dv", v)))]

    transport = SimpleNamespace(
        group=SimpleNamespace(rank=lambda: 0, size=lambda: 1), all_to_all=lambda sent: Message(sent, sent, [])
    )
    chunks = HeadChunks(cast(Any, Shares), cast(Transport, transport), True, 1.0, 4)
    q, k, v = (torch.ones(1, 2, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 1, 1))
    cast(Tensor, ChunkedAttention.apply(chunks, None, q, k, v, None)).sum().backward()
    for leaf, total in ((q, 1.0), (k, 260.0), (v, 520.0)):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.full_like(leaf, total))


@given(st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 6), st.booleans())
def test_a_gather_places_every_token_once_and_its_runs_see_what_the_mask_says(
    kind: Any, size: int, tokens: int, causal: bool
) -> None:
    layout = SequenceLayout(kind, ring_degree=size)
    seq_len = layout.multiple * tokens
    everything, local = range(seq_len), range(seq_len // size)
    for rank in range(size):
        gather = Gather(kernels.get("math"), transport_of(rank, size), layout, 1, torch.float32)
        held: dict[int, list[int]] = {r: layout.global_positions(r, seq_len) for r in range(size)}
        places = gather.places(seq_len)
        assert sorted(t for place in places for t in everything[place.tokens]) == list(everything)
        for place in places:
            assert list(everything[place.tokens]) == held[place.rank][place.rows]
        runs = gather.runs(seq_len, causal)
        assert [row for run in runs for row in local[run.rows]] == list(local)
        for run in runs:
            positions = held[rank][run.rows]
            whole = list(everything[run.gathered]) if run.gathered else []
            for index, position in enumerate(positions):
                seen = whole + (positions[: index + 1] if run.diagonal else [])
                assert seen == (list(everything[: position + 1]) if causal else list(everything))


class Host:
    """A stand-in for one host: a thread a rank, whose stream is the thread, and symmetric memory that all can read.

    The ranks meet at barriers. Rank `slow` goes on from each only when all others are at the next one or at their end,
    with everything written that they may write by then.
    """

    def __init__(self, size: int, slow: int) -> None:
        self.size, self.slow = size, slow
        self.buffers: list[list[Tensor]] = [[] for _ in range(size)]  # of each rank, in the order in which it made them
        self._arrived: list[float] = [0] * size
        self._changed = threading.Condition()

    def meet(self, rank: int) -> None:
        with self._changed:
            self._arrived[rank] += 1
            mine = self._arrived[rank]
            self._changed.notify_all()
            self._until(lambda: min(self._arrived) >= mine)
            if rank == self.slow:
                self._until(lambda: all(n > mine for r, n in enumerate(self._arrived) if r != rank))

    def _until(self, happened: Callable[[], bool]) -> None:
        assert self._changed.wait_for(happened, timeout=60), "the ranks wait for each other for ever"

    def rendezvous(self, buffer: Tensor, group: Any) -> "Handle":
        self.buffers[group.rank()].append(buffer)
        handle = Handle(self, group.rank(), len(self.buffers[group.rank()]) - 1)
        self.meet(group.rank())
        return handle

    def run(self, of_rank: Callable[[int, CopyEngines], list[Tensor]]) -> list[list[Tensor]]:
        """What each rank received."""

        def live(rank: int) -> list[Tensor]:
            group = SimpleNamespace(rank=lambda: rank, size=lambda: self.size)
            try:
                return of_rank(rank, CopyEngines(cast(Any, group)))
            finally:
                with self._changed:
                    self._arrived[rank] = math.inf
                    self._changed.notify_all()

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(live, range(self.size)))


@dataclass(frozen=True)
class Handle:
    host: Host
    rank: int
    index: int

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor:
        typed = self.host.buffers[rank][self.index].view(dtype)
        return typed[storage_offset : storage_offset + math.prod(sizes)].view(sizes)

    def barrier(self) -> None:
        self.host.meet(self.rank)


@pytest.fixture
def make_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Host]:
    import torch.distributed._symmetric_memory as symmetric_memory

    def make(size: int, slow: int) -> Host:
        host, finished = Host(size, slow), SimpleNamespace(wait=lambda: None)
        monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
        monkeypatch.setattr(symmetric_memory, "rendezvous", host.rendezvous)
        for name in ("current_stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(copy_engines, "side_stream", lambda device, lane: stream)
        monkeypatch.setattr(copy_engines, "StreamEvent", SimpleNamespace(record=lambda: finished))
        monkeypatch.setattr(ledger, "attention", nullcontext)  # its mark is the process's, not the thread's
        return host

    return make


STEPS = 4


def stamp(step: int, sender: int, receiver: int) -> Tensor:
    """[3, 5], by whom for whom."""
    return torch.arange(15.0).view(3, 5) + 1000 * step + 100 * sender + 20 * receiver


def exchanges(rank: int, transport: CopyEngines) -> list[Tensor]:
    """All primitives in turn; some messages have the same number of bytes, so that they share slots."""
    received: list[Tensor] = []
    for step in range(STEPS):
        mine = torch.stack([stamp(step, rank, to) for to in range(transport.group.size())])
        received += transport.all_to_all([mine, mine[:, 1:].contiguous()]).wait_all()
        received.append(transport.all_to_all([mine]).wait())
        received.append(transport.shift([-mine]).wait())
        received += transport.shift([mine[:1, :1, :3].contiguous(), mine.double()]).wait_all()
        received.append(transport.all_gather(mine[0]).wait())
    return received


def expected(rank: int, size: int) -> list[Tensor]:
    tensors: list[Tensor] = []
    for step in range(STEPS):
        from_all = torch.stack([stamp(step, sender, rank) for sender in range(size)])
        from_previous = -torch.stack([stamp(step, (rank - 1) % size, to) for to in range(size)])
        gathered = torch.cat([stamp(step, sender, 0) for sender in range(size)])
        of_two_dtypes = [-from_previous[:1, :1, :3], -from_previous.double()]
        tensors += [from_all, from_all[:, 1:], from_all, from_previous, *of_two_dtypes, gathered]
    return tensors


@pytest.mark.parametrize(("size", "slow"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
def test_copy_engines_bring_what_peers_sent_however_far_these_are_ahead(make_host, size: int, slow: int) -> None:
    for rank, received in enumerate(make_host(size, slow).run(exchanges)):
        for got, want in zip(received, expected(rank, size), strict=True):
            assert torch.equal(got, want)


def test_with_one_slot_a_fast_peer_would_overwrite_what_a_slow_rank_still_pulls(make_host, monkeypatch) -> None:
    monkeypatch.setattr(copy_engines, "SLOTS", 1)
    received = make_host(2, 0).run(exchanges)
    assert not all(torch.equal(got, want) for got, want in zip(received[0], expected(0, 2), strict=True))


def test_slots_are_made_once_and_then_take_turns(make_host) -> None:
    host = make_host(2, 0)

    def many(rank: int, transport: CopyEngines) -> list[Tensor]:
        return [transport.shift([torch.ones(n)]).wait() for n in (8, 8, 8, 8, 8, 12)]

    host.run(many)
    assert [[len(buffer) for buffer in made] for made in host.buffers] == [[32, 32, 48]] * 2


def test_a_kernel_starts_behind_a_messages_own_copies_but_not_behind_its_pulls(make_host, monkeypatch) -> None:
    host, log, sent, received = make_host(1, 0), [], torch.full((1, 3), 2.0), torch.zeros(1, 3)

    def record() -> SimpleNamespace:
        in_slot = any(torch.equal(buffer.view(torch.float32)[:3], sent[0]) for buffer in host.buffers[0])
        log.append("done" if in_slot and torch.equal(received, sent) else "not done")
        number = len(log)
        return SimpleNamespace(wait=lambda: log.append(f"waited for {number}"))

    def one(rank: int, transport: CopyEngines) -> list[Tensor]:
        for _ in range(copy_engines.SLOTS):  # are made behind barriers of their own
            transport.all_to_all([torch.zeros(1, 3)]).wait()
        monkeypatch.setattr(torch, "empty_like", lambda tensor: received)
        monkeypatch.setattr(copy_engines, "StreamEvent", SimpleNamespace(record=record))
        monkeypatch.setattr(Handle, "barrier", lambda self: log.append("barrier"))
        monkeypatch.setattr(CopyEngines, "_peers", lambda self: log.append("pulls") or [])
        message = transport.all_to_all([sent])
        message.go_first()
        return [message.wait()]

    host.run(one)
    assert log == ["done", "barrier", "pulls", "done", "waited for 1", "waited for 4"]


def test_groups_of_copy_engines_do_not_wait_for_each_other() -> None:
    groups: list[Any] = ["ulysses", "ring"]
    for _ in range(2):  # trials of a warm process
        copy_engines.transport.cache_clear()
        opened = [cast(CopyEngines, copy_engines.transport("copy_engines", group)) for group in groups * 2]
        assert [engines.lane for engines in opened] == [0, 1, 0, 1]
    copy_engines.transport.cache_clear()


def test_a_head_start_begins_when_the_messages_own_copies_are_done(monkeypatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("head start"))
    on_device = cast(Tensor, SimpleNamespace(is_cuda=True))
    Message([on_device], [], [], SimpleNamespace(wait=lambda: log.append("copied"))).go_first()
    assert log == ["copied", "head start"]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_no_two_ranks_pull_from_one_at_a_time_and_none_from_itself(size: int) -> None:
    orders = [CopyEngines(transport_of(rank, size).group)._peers() for rank in range(size)]
    for rank, order in enumerate(orders):
        assert sorted([rank, *order]) == list(range(size))
    for at_once in zip(*orders, strict=True):
        assert sorted(at_once) == list(range(size))
