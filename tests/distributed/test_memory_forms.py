"""What costs/memory says a step holds, against the tensors of real steps of a tiny decoder, counted as they live.

A count has what operations return, and nothing that a kernel allocates for itself. The forms are of GPUs, whose norm is
one operation; a CPU's is several, of which each returns a tensor. So `one_operation` takes its place.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trials import TINY, TRAIN, job, trial

from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import LinkConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory
from sp_bench.engines import fsdp2
from sp_bench.kernels import chunked
from sp_bench.measure import one_rank
from sp_bench.training import text, train

CPU_FLASH = KernelConfig("cpu_flash")  # keeps what GPU kernels keep; `math` would hold all scores
RING = MethodConfig("ring", "zigzag", dkv_dtype="input", merge_dtype="float32")
ALL_GATHER = MethodConfig("all_gather", "zigzag", dkv_dtype="input")
METHODS = {
    1: [MethodConfig("single")],
    2: [MethodConfig("ulysses"), MethodConfig("ulysses", head_chunks=2), RING, ALL_GATHER, MethodConfig("upipe")],
}


WAYS = ("full", "selective", "selective_output", "selective_mlp")


class Living(TorchDispatchMode):
    """Counts the memory of tensors that were made inside, from when an operation returns it until nothing holds it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.watches_peak = False
        self.most = 0  # bytes, at the end of any operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:  # takes no memory, and is half of all operations
            return out
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.device.type != "meta":
                self._storages[storage._cdata] = storage
        if self.watches_peak and self.num_bytes > self.most:
            time.sleep(0.001)  # see `becomes_true`
            self.most = max(self.most, self.num_bytes)
        return out

    @property
    def num_bytes(self) -> int:
        """Of all that live now. FSDP gives the memory of whole parameters back, and takes it again, in place."""
        return sum(map(torch.UntypedStorage.nbytes, self._storages.values()))


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Soon: a thread of gloo may let go of a message later than it arrives."""
    deadline = time.monotonic() + 5
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def one_operation(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Holds what a GPU's RMSNorm holds: this one has two statistics of a row in the dtype of x, that one in fp32."""
    return F.layer_norm(x, shape, weight, None, eps or 0.0)


class AsFla(torch.autograd.Function):
    """Keeps what the gated delta rule of fla-core 0.6.0 keeps on a GPU, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, scale: float, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, state = (each if each is None else each.contiguous() for each in inputs)
        assert k is not None
        assert v is not None
        assert g is not None
        of_chunks = k.new_zeros(*v.shape[:3], 64)
        ctx.save_for_backward(q, k, v, torch.empty_like(g), beta, of_chunks, state)
        final = k.new_zeros(k.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        return torch.empty_like(v), final


def as_fla(*inputs: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return AsFla.apply(scale, *inputs)


def kept_in_forward(config: TrialConfig) -> Callable[[], int]:
    """Runs a forward. Returns what tells the bytes that are there since then, and holds them."""
    mine, sequences = job(config), text.sequences(0, config.num_sequences, config.seq_len)
    with (
        train.open_attention(config, config.seq_len, mine.mesh, config.model.kinds[0]) as attention,
        Living() as living,
    ):
        training = fsdp2.start(config, attention, mine.mesh, mine.device)
        [[batch]] = train.shard_batches(config, [sequences], attention.layout, mine.mesh, mine.device)
        before = living.num_bytes
        held = training, batch, training.decoder(batch.tokens, batch.positions)
    return lambda: living.num_bytes - before if held[-1].requires_grad else 0


def check_kept(rank: int, world_size: int) -> None:
    """Of a layer: what a decoder of two layers keeps beyond one of a single layer."""
    for method, (index, checkpointing) in product(METHODS[world_size], enumerate(WAYS)):
        # each way with either, by turns over the methods
        kv_heads, dtype = ((2, "float32"), (8, "bfloat16"))[(index + METHODS[world_size].index(method)) % 2]
        one, two = (
            trial(
                *(method, world_size),
                kernel=CPU_FLASH,
                model=replace(TINY, num_layers=layers, num_kv_heads=kv_heads),
                workload=replace(TRAIN, activation_checkpointing=checkpointing),
                dtype=dtype,
            )
            for layers in (1, 2)
        )
        of_one, of_two, expected = kept_in_forward(one), kept_in_forward(two), memory.kept_bytes(two)
        if not becomes_true(lambda a=of_one, b=of_two, kept=expected: b() - a() == kept):
            raise AssertionError((method, kv_heads, checkpointing, of_two() - of_one(), expected))


def check_kept_with_nothing_recomputed(rank: int, world_size: int) -> None:
    """A row of a norm has two statistics here, and one in the form: of a layer's two norms, and of each head's."""
    for method in METHODS[world_size]:
        workload = replace(TRAIN, activation_checkpointing="none")
        config = trial(
            method, world_size, kernel=CPU_FLASH, workload=workload, model=replace(TINY, intermediate_size=304)
        )
        with mock.patch.object(F, "rms_norm", one_operation):
            one = kept_in_forward(replace(config, model=replace(config.model, num_layers=1)))
            two = kept_in_forward(config)
        heads = config.model.num_heads + config.model.num_kv_heads
        expected = memory.kept_bytes(config) + 4 * (2 + heads) * config.seq_len / world_size
        if not becomes_true(lambda a=one, b=two, kept=expected: b() - a() == kept):
            raise AssertionError((method, two() - one(), expected))


def check_kept_with_states(rank: int) -> None:
    """Layers of kind delta, by heads and by states. The last rank makes the states of all before it."""
    sizes = {"layers": "delta", "delta_heads": 8, "delta_kv_heads": 4, "delta_head_dim": 16}
    for states, way in (None, "selective"), (None, "selective_mlp"), ("gather", "selective"), ("chain", "selective"):
        one, two = (
            trial(
                MethodConfig("ulysses", states=states),
                2,
                kernel=KernelConfig("cpu_flash", delta="chunked"),
                model=replace(TINY, num_layers=layers, **sizes),
                workload=replace(TRAIN, activation_checkpointing=way),
                seq_len=256,
                dtype="bfloat16",
            )
            for layers in (1, 2)
        )
        with mock.patch.object(chunked, "attend", as_fla):
            of_one, of_two = kept_in_forward(one), kept_in_forward(two)
        not_made = 4 * 16 * 16 * 8 * (1 - rank) if states == "gather" else 0
        identity = 4 * 16 * 32 if states else 0  # of one head, which the form leaves out
        expected = memory.kept_bytes(two, "delta") - not_made + identity
        if not becomes_true(lambda a=of_one, b=of_two, kept=expected: b() - a() == kept):
            raise AssertionError((states, way, of_two() - of_one(), expected))


class Counted(NamedTuple):
    """Bytes of one step."""

    peak: int
    before_update: int  # when all gradients are there, and no activation
    after: int


def counted_step(config: TrialConfig, at_update: float) -> Counted:
    """The second step, as each later one. at_update: bytes to wait for before the update."""
    mine, sequences = job(config), text.sequences(0, config.num_sequences, config.seq_len)
    living, ends, updates = Living(), [], []

    def watch(_: Any) -> None:
        becomes_true(lambda: living.num_bytes < at_update)
        updates.append(living.num_bytes)

    def tick() -> None:
        ends.append(living.num_bytes)
        living.watches_peak = len(ends) == 2

    with mock.patch.object(F, "rms_norm", one_operation), living:
        fsdp2.run(config, [sequences] * 2, mine.mesh, mine.device, tick, token_losses=0, watch=watch)
    return Counted(living.most, updates[-1], ends[-1])


SMALL = replace(TINY, num_layers=4)
WIDE = replace(TINY, num_layers=4, hidden_size=256, intermediate_size=512)
# Kernels allocate for themselves, and a CPU merges attention by other operations. With few heads, and with an MLP as
# wide as these, that is not where the peak is.
FEW_HEADS = replace(SMALL, num_layers=2, hidden_size=256, intermediate_size=512, num_heads=2)
WIDE_MLP = replace(SMALL, intermediate_size=512)
TILES = {"mlp_tile_tokens": 256, "loss_tile_tokens": 128}
MANY = {"batch_size": 8}  # tokens of few scores
Cell = tuple[str, ModelConfig, int, dict[str, Any]]
# (the largest moment, model, tokens of a sequence, options). The update is never the largest: before it there is more.
PEAKS: list[Cell] = [
    ("loss", replace(SMALL, num_layers=2, vocab_size=8192), 256, {"loss_tile_tokens": 128}),
    ("loss", replace(SMALL, num_layers=2, vocab_size=8192), 256, {"dtype": "float32"}),
    ("first_layer", SMALL, 256, MANY),
    ("last_layer", WIDE_MLP, 1024, {"activation_checkpointing": "selective_mlp"}),
    ("first_layer", WIDE, 128, {}),
    ("first_layer", FEW_HEADS, 512, TILES),
    ("reduce", replace(SMALL, num_layers=2, vocab_size=16384), 64, {"loss_tile_tokens": 16}),
]
MORE: list[Cell] = [
    ("loss", replace(SMALL, vocab_size=8192), 1024, {}),
    ("loss", SMALL, 2048, {"activation_checkpointing": "selective"}),
    ("last_layer", WIDE_MLP, 2048, {"activation_checkpointing": "selective"}),
    ("first_layer", WIDE_MLP, 2048, {"activation_checkpointing": "selective_output"}),
]
# gloo's reduce-scatter copies all that it sends, so not where gradients matter
ON_TWO_RANKS = [PEAKS[0], ("first_layer", replace(WIDE_MLP, num_layers=2), 2048, {})]
# A ring merges its blocks on a CPU by more operations than on a GPU.
BY_HEADS: list[Cell] = [("first_layer", replace(SMALL, num_layers=2), 2048, {})]


def peaking(method: MethodConfig, model: ModelConfig, seq_len: int, options: dict[str, Any]) -> TrialConfig:
    single = {"activation_checkpointing": "full", "single_step": True, "timed_steps": 1} | options
    dtype, batch_size = single.pop("dtype", "bfloat16"), single.pop("batch_size", 1)
    fields = {"kernel": CPU_FLASH, "dtype": dtype, "batch_size": batch_size, "workload": replace(TRAIN, **single)}
    return trial(method, dist.get_world_size(), model=model, seq_len=seq_len, **fields)


def check_peaks(rank: int, world_size: int, cells: Sequence[Cell], methods: Sequence[MethodConfig]) -> None:
    """Of so few tokens a layer may hold a little more at another moment than those of the estimate."""
    for moment, model, seq_len, options in cells:
        # of methods, the loss has what layers keep, which `check_kept` proves of all; one is enough
        for method in methods[:1] if moment == "loss" else methods:
            config = peaking(method, model, seq_len, options)
            estimate = memory.peak(config)
            # beside parameters, gradients and moments: tokens, labels and losses, and the angles, 64 bytes a token
            small = 64 * config.batch_size * config.seq_len / world_size
            counted = counted_step(config, estimate.update + small)
            assert max(estimate) == getattr(estimate, moment), (model, options, estimate)
            assert 0.97 < estimate.bytes / counted.peak < 1.05, (method, model, options, estimate, counted)
            assert 0 < counted.before_update - estimate.update < small
            assert 0 < counted.after - 3 / 4 * estimate.update < small  # the update frees the gradients


def check_all(rank: int, world_size: int) -> None:
    check_kept(rank, world_size)
    check_kept_with_nothing_recomputed(rank, world_size)
    if world_size == 1:
        check_peaks(rank, 1, PEAKS, METHODS[1])
    else:  # no attention peaks here, so that methods differ by what layers keep
        check_kept_with_states(rank)
        check_peaks(rank, 2, ON_TWO_RANKS, [MethodConfig("ulysses"), RING])
        check_peaks(rank, 2, BY_HEADS, [MethodConfig("ulysses")])


@pytest.mark.parametrize("world_size", METHODS)
def test_layers_keep_what_their_forms_say_and_steps_peak_and_update_as_estimated(world_size: int) -> None:
    """In one group of processes. Layers keep it to the byte."""
    run(world_size, check_all, world_size)


@pytest.mark.faults  # half a minute each
@pytest.mark.parametrize(("world_size", "cells"), [(1, MORE), (2, ON_TWO_RANKS[1:])])
def test_other_steps_peak_as_estimated(world_size: int, cells: Sequence[Cell]) -> None:
    run(world_size, check_peaks, world_size, cells, METHODS[world_size])


def check_fit_peaks(rank: int) -> None:
    """By a kernel whose scores are counted. Gradients are large beside what layers keep, and in the last case small. So
    the largest moment is that of the first layer; where checkpoints wait in host memory it may be the second's."""
    narrow = replace(SMALL, intermediate_size=32, num_heads=2)
    for offload, model, seq_len in ((False, WIDE, 256), (True, WIDE, 256), (True, narrow, 512)):
        options = {"activation_checkpointing": "full", "checkpoint_offload": offload}
        workload = replace(TRAIN, single_step=True, timed_steps=1, **options)
        real = trial(MethodConfig("single"), 1, model=model, seq_len=seq_len, workload=workload)
        fits = replace(real, workload=replace(workload, fit=True))
        expected, found = (counted_step(config, math.inf).peak for config in (real, fits))
        assert found == pytest.approx(expected, rel=0.001), (offload, model)


def test_a_step_that_asks_if_it_fits_peaks_as_a_real_one() -> None:
    run(1, check_fit_peaks)


def check_fit_peaks_of_methods(rank: int) -> None:
    """The second layer's backward is the largest moment: FSDP has gathered the first one by then."""
    peaks = {}
    for method, kept in zip(METHODS[2], ("full", "selective_output", "selective", "full", "selective"), strict=True):
        workload = replace(TRAIN, single_step=True, timed_steps=1, activation_checkpointing=kept)
        real = trial(method, 2, model=WIDE, seq_len=256, workload=workload)
        fits = replace(real, workload=replace(workload, fit=True))
        peaks[method.name, method.head_chunks, kept] = [counted_step(config, math.inf).peak for config in (real, fits)]
    apart = [each for each in peaks.items() if each[1][1] != pytest.approx(each[1][0], rel=0.001)]
    assert not apart, apart


def test_a_step_of_each_method_that_asks_if_it_fits_peaks_as_a_real_one() -> None:
    run(2, check_fit_peaks_of_methods)


def peaks_of(config: TrialConfig) -> list[int]:
    """Of a rank's steps with everything recomputed and with nothing: of attention and of what layers keep."""
    ways = (replace(config.workload, activation_checkpointing=way) for way in ("full", "none"))
    return [counted_step(replace(config, workload=way), math.inf).peak for way in ways]


def check_one_rank_peaks(rank: int, world_size: int) -> None:
    """Each real rank counts, and then counts alone, as one rank of a world of as many."""
    model = replace(TINY, num_heads=12, num_kv_heads=12, intermediate_size=512)
    workload = replace(TRAIN, single_step=True, timed_steps=1)
    dtype = "bfloat16" if world_size == 2 else "float32"  # many CPUs take 10 times as long for bf16
    configs = [
        trial(method, world_size, model=model, seq_len=1536, kernel=CPU_FLASH, dtype=dtype, workload=workload)
        for method in (MethodConfig("ulysses"), RING, ALL_GATHER)
    ]
    there = [peaks_of(config) for config in configs]
    dist.destroy_process_group()
    fsdp2.sharding_mesh.cache_clear()
    one_rank.join(rank, world_size, world_size, LinkConfig(), torch.device("cpu"))
    alone = [peaks_of(config) for config in configs]
    for config, one, all_there in zip(configs, alone, there, strict=True):
        assert one == pytest.approx(all_there, rel=0.005), config.method


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_rank_peaks_as_ranks_that_are_all_there(world_size: int) -> None:
    run(world_size, check_one_rank_peaks, world_size)
