"""Options of a training step, with every method of ours: each takes the same step as one process, and sends what is
predicted."""

import functools
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run
from test_train_step import check_counted_bytes, check_parameters_after_a_step
from trials import TINY, TRAIN, assembled, trial

from sp_bench.config.engine import EngineConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory
from sp_bench.driver.derived import TIMES
from sp_bench.training.model_code import compiling
from sp_bench.training.offload import ALIGNMENT

SIX = replace(TINY, num_heads=6, num_kv_heads=3)  # heads that three ranks can split
CHECKPOINTING = ("selective", "selective_output", "selective_mlp")
METHODS: dict[int, list[tuple[MethodConfig, dict[str, Any]]]] = {
    1: [(MethodConfig("single"), {})],
    2: [
        (MethodConfig("ulysses"), {}),
        (MethodConfig("ulysses", head_chunks=4), {}),  # two chunks share each KV head
        (MethodConfig("ring", "zigzag", dkv_dtype="input"), {}),
        (MethodConfig("all_gather", "zigzag", dkv_dtype="input", head_stride=1), {}),
    ],
    3: [
        (MethodConfig("ulysses"), {"model": SIX}),
        (MethodConfig("ring", "striped", dkv_dtype="float32"), {}),
        (MethodConfig("all_gather", dkv_dtype="input"), {}),
    ],
    4: [
        (MethodConfig("ulysses"), {}),  # KV heads are replicated
        (MethodConfig("usp", "zigzag", None, 2, "ulysses_inner", "input"), {}),
    ],
}

SENDS_NOTHING_AGAIN = {  # where the output is kept
    2: [MethodConfig("upipe")],
    4: [MethodConfig("double_ring", "striped", dkv_dtype="input", inner_ring_degree=2)],
}


def trials(world_size: int, **options: Any) -> Iterator[TrialConfig]:
    """A trial of each method with these options of the workload, at a length that must be padded."""
    for method, fields in METHODS[world_size]:
        workload = replace(TRAIN, **{"timed_steps": 1} | options)
        yield trial(method, world_size, seq_len=45, workload=workload, **fields)


def check(config: TrialConfig) -> None:
    """The trial's own proof compares each gradient with one process, in fp32; of two methods it is done in fp64 too."""
    check_counted_bytes(config)
    if config.world_size == 2 and config.method.name in ("ulysses", "ring") and not config.method.head_chunks:
        check_parameters_after_a_step(config)


def check_tiles(rank: int, world_size: int) -> None:
    """Attention knows nothing of the tiles: a contiguous layout and another are enough."""
    checkpointing = "full" if world_size == 2 else "selective_output"
    for config in trials(world_size, activation_checkpointing=checkpointing, mlp_tile_tokens=7):
        if config.method.name in ("ulysses", "ring") and not config.method.head_chunks:
            check(config)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.faults)])
def test_tiles_of_an_mlp_change_no_step(world_size: int) -> None:
    run(world_size, check_tiles, world_size)


def check_checkpointing(rank: int, world_size: int) -> None:
    """Whole layers are recomputed in other tests. Ways of sharding have `selective` with each method on two ranks."""
    for checkpointing in CHECKPOINTING if world_size < 3 else ("selective_output",):
        configs = list(trials(world_size, activation_checkpointing=checkpointing))
        for config in configs if checkpointing == "selective_output" else configs[:1]:  # it alone runs a method again
            check(config)
    keeps_output = replace(TRAIN, activation_checkpointing="selective_output")
    for method in SENDS_NOTHING_AGAIN.get(world_size, []):
        check_counted_bytes(trial(method, world_size, seq_len=45, workload=keeps_output))


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.faults), 4])
def test_what_is_recomputed_changes_no_step(world_size: int) -> None:
    run(world_size, check_checkpointing, world_size)


def check_offload(rank: int, world_size: int) -> None:
    """Of each method, with one of what is kept; two layers, of which the first is offloaded."""
    kept = itertools.cycle(("selective_output", "selective", "full", "selective_mlp"))
    for config in trials(world_size, micro_batches=2):
        workload = replace(config.workload, activation_checkpointing=next(kept), checkpoint_offload=True)
        measurement = check_counted_bytes(replace(config, workload=workload))
        at_least = memory.offloaded_bytes(replace(config, workload=workload))
        # with padding, and KV heads that are replicated
        assert at_least <= measurement.columns["pinned_host_bytes"] <= 1.3 * at_least + 12 * ALIGNMENT
    workload = replace(TRAIN, activation_checkpointing="full", checkpoint_offload=True, single_step=True, timed_steps=1)
    deep = replace(TINY, num_layers=4)
    ring = MethodConfig("ring", dkv_dtype="input")
    single = trial(ring, world_size, seq_len=54, workload=workload, model=deep)
    tokens = 54 // world_size  # of a rank; 4 bytes an element; the last of four layers stays on the device
    assert check_counted_bytes(single).columns["pinned_host_bytes"] == 3 * aligned(tokens * TINY.hidden_size * 4)


def check_optimizer_on_host(rank: int, world_size: int) -> None:
    """The proof of losses, gradients and updates holds, and the same bytes are sent. Sums of shards and replicas."""
    offloaded = EngineConfig(optimizer_offload="torch_adamw")
    for method, fields in METHODS[world_size][:1]:
        workload = replace(TRAIN, micro_batches=2, activation_checkpointing="full")
        measurement = check_counted_bytes(
            trial(method, world_size, seq_len=45, engine=offloaded, workload=workload, **fields)
        )
        assert measurement.columns["optimizer_ms"] > 0
    single, sizes = MethodConfig("single"), {"dp_replicate_size": world_size}
    check_counted_bytes(trial(single, 1, engine=offloaded, **sizes))


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.faults)])
def test_an_optimizer_in_host_memory_takes_the_same_step(world_size: int) -> None:
    run(world_size, check_optimizer_on_host, world_size)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@pytest.mark.faults  # half a minute; tests/distributed/test_offload.py compares bits on two ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.faults)])
def test_offloaded_checkpoints_change_no_step(world_size: int) -> None:
    run(world_size, check_offload, world_size)


def check_compiled(rank: int, world_size: int, backend: str | None = None) -> None:
    """Of one model and two lengths, so that all methods share what is compiled. The single step comes first: on two
    ranks or more its length is compiled in its warm-up. One rank has one length: g++ takes a second for each file."""
    if backend is not None:
        torch.compile = functools.partial(torch.compile, backend=backend)
    single = replace(TRAIN, model_code="compiled", single_step=True, timed_steps=1)
    single = replace(single, correctness_seq_len=36 if world_size > 1 else 48)
    single = replace(single, loss_tile_tokens=6)  # divides what a rank has in the proof and in the step
    model = SIX if world_size == 3 else TINY
    method = MethodConfig("ring", dkv_dtype="input") if world_size > 1 else METHODS[1][0][0]
    config = trial(method, world_size, seq_len=48, workload=single, model=model)
    assert check_counted_bytes(config).columns["compile_s"] > 0
    configs = trials(world_size, model_code="compiled", warmup_steps=1)
    configs = (config for config in configs if not config.method.head_chunks)
    several = ("selective_output", "full", "selective") if world_size == 3 else ("selective_output",)
    for config, checkpointing in zip(configs, several, strict=False):
        workload = replace(config.workload, activation_checkpointing=checkpointing)
        measurement = check_counted_bytes(replace(config, seq_len=48, model=model, workload=workload))
        assert measurement.columns["compile_s"] >= 0
    # torch.compile itself fails at the ninth shape, whoever makes code of what it has traced
    part = torch.compile(torch.exp, backend="eager", dynamic=False, fullgraph=True)
    assert all(part(torch.ones(tokens)).numel() == tokens for tokens in range(2, 18))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize("world_size", [1, *(pytest.param(size, marks=pytest.mark.faults) for size in (2, 3))])
def test_a_compiled_model_takes_the_same_step(world_size: int) -> None:
    """A rank compiles for half a minute."""
    run(world_size, check_compiled, world_size)


def test_a_traced_model_takes_the_same_step() -> None:
    """torch.compile cuts each part into graphs, forward and backward, and two ranks run them as they are."""
    run(2, check_compiled, 2, "aot_eager_decomp_partition")


def check_compiled_gradients(rank: int) -> None:
    """Of one layer of each shape something is compiled: the second one finds it."""
    workload = replace(TRAIN, model_code="compiled", warmup_steps=1, activation_checkpointing="selective_mlp")
    before = compiling.seconds
    check_parameters_after_a_step(trial(MethodConfig("ulysses"), 2, seq_len=45, workload=workload))
    assert compiling.seconds > before


@pytest.mark.faults  # compiles for half a minute; the counted step above proves its gradients in fp32
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_a_compiled_model_has_the_same_gradients() -> None:
    run(2, check_compiled_gradients)


# Options of the engine and of the workload.
WITH_EACH_METHOD: dict[str, tuple[EngineConfig, dict[str, Any]]] = {
    "optimizer_offload": (EngineConfig(optimizer_offload="torch_adamw"), {}),
    "compiled": (EngineConfig(), {"model_code": "compiled", "warmup_steps": 1}),
    "checkpoint_offload": (EngineConfig(), {"checkpoint_offload": True}),
}


def check_each_method(rank: int, world_size: int, option: str) -> None:
    engine, options = WITH_EACH_METHOD[option]
    upipe_or_double_ring = [(method, {}) for method in SENDS_NOTHING_AGAIN[world_size]]
    for method, fields in METHODS[world_size] + upipe_or_double_ring:
        workload = replace(TRAIN, timed_steps=1, activation_checkpointing="selective", **options)
        check_counted_bytes(trial(method, world_size, seq_len=45, engine=engine, workload=workload, **fields))


@pytest.mark.faults  # the usual tests have one or two methods with each option
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("option", WITH_EACH_METHOD)
def test_each_method_takes_the_same_step_with_an_option(option: str, world_size: int) -> None:
    run(world_size, check_each_method, world_size, option)


def check_single_step(rank: int) -> None:
    """The timed step is the counted one, and the first of the training: its loss is that of untrained parameters."""
    several = next(trials(2, warmup_steps=0, timed_steps=2))
    single = replace(several, workload=replace(several.workload, single_step=True, timed_steps=1))
    measurement, expected = check_counted_bytes(single), check_counted_bytes(several)
    assert measurement.columns["loss"] == expected.columns["loss"][:1]
    assert len(measurement.rank_step_ms) == 1
    columns = assembled(single, measurement)
    assert columns["flags"][-1:] == ["single_step"]
    assert columns["comm_counted_bytes"] == columns["comm_predicted_bytes"] > 0


def test_a_single_step_is_timed_and_counted_at_once() -> None:
    run(2, check_single_step)


def check_fit(rank: int) -> None:
    """Attention is computed in three layers of four, and all else is sent and updated as ever. Each method with one of
    what is recomputed."""
    recomputed = itertools.cycle(("full", "selective", "selective_output"))
    for several in trials(2, warmup_steps=0, timed_steps=1, single_step=True):
        workload = replace(several.workload, activation_checkpointing=next(recomputed))
        four = replace(several, model=replace(several.model, num_layers=4))
        config, fit = (replace(four, workload=replace(workload, fit=asked)) for asked in (False, True))
        fits = check_counted_bytes(fit)  # and its work
        if config.method.head_chunks or config.method.name == "all_gather":
            continue
        real = check_counted_bytes(config)
        assert fits.counts == real.counts
        assert fits.work.attention_flops * 4 == real.work.attention_flops * 3
    columns = assembled(fit, fits)
    assert columns["flags"][-2:] == ["single_step", "fit"]
    assert {name for name in TIMES if columns.get(name) is not None} == set()
    assert columns["comm_counted_bytes"] == columns["comm_predicted_bytes"] > 0


def test_what_asks_only_whether_a_step_fits_sends_all_of_it_and_has_no_time() -> None:
    run(2, check_fit)


def check_sharding_options(rank: int, world_size: int) -> None:
    """Parameters that are kept are gathered once, and gradients that are kept are reduced once."""
    kept = EngineConfig(reshard_after_forward=False, reduce_gradients="last_micro_batch", forward_prefetch=1)
    ahead = EngineConfig(forward_prefetch=2, backward_prefetch=3)
    all_trials = trials(world_size, micro_batches=2, activation_checkpointing="selective")
    for number, several in enumerate(config for config in all_trials if not config.method.head_chunks):
        once, prefetched = (replace(several, engine=engine) for engine in (kept, ahead))
        found, expected = (check_counted_bytes(each).counts for each in (once, prefetched))
        if number == 0:  # bytes are those predicted with each; here calls too are
            assert check_counted_bytes(several).counts == expected
        gradients = ("gradients", "reduce_scatter")
        assert 2 * found[gradients][0] == expected[gradients][0]
        assert found["parameters", "all_gather"][1] < expected["parameters", "all_gather"][1]
        if world_size == 2:
            check_parameters_after_a_step((once, prefetched)[number % 2])
    if world_size == 2:  # replicas too are reduced once
        replicated = trial(
            METHODS[1][0][0], 1, dp_replicate_size=2, workload=replace(TRAIN, micro_batches=2), engine=kept
        )
        check_counted_bytes(replicated)
        check_parameters_after_a_step(replicated)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.faults)])
def test_ways_of_sharding_change_no_step(world_size: int) -> None:
    run(world_size, check_sharding_options, world_size)
