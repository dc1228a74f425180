"""Whole training steps of layers of several kinds on real gloo ranks: full ones and ones with a window, with sinks."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
from ranks import run
from test_train_step import check_counted_bytes, check_parameters_after_a_step
from trials import ODD, TINY, TRAIN, job, trial

from sp_bench.config.method import MethodConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.measure.incorrect import Incorrect
from sp_bench.oracle import decoder
from sp_bench.training import train
from sp_bench.workloads import train_step

HYBRID = replace(TINY, num_layers=3, layers="window+full", window=12, sinks=True)
LATE = replace(
    ODD, num_layers=4, layers="window+window+window+full", window=17
)  # no proof of two layers has the full one
WINDOWS = replace(TINY, layers="window", window=9)
FULL = replace(TRAIN, activation_checkpointing="full", micro_batches=2)
KEPT = replace(TRAIN, activation_checkpointing="selective_output", checkpoint_offload=True)
PACKED = replace(TRAIN, packing="fixed", document_len=32, masked_label_share=0.25)
RING, ZIGZAG = (MethodConfig("ring", layout, dkv_dtype="input") for layout in ("contiguous", "zigzag"))
BY_KIND = MethodConfig("ring", "zigzag_by_kind", dkv_dtype="input")
GATHER = MethodConfig("all_gather", "zigzag", dkv_dtype="input")


def cases(world_size: int) -> list[TrialConfig]:
    """Each method that has windows, in one layout for all layers, and the ring in a layout for each kind."""
    bf16 = {"dtype": "bfloat16"}
    return {
        1: [trial(MethodConfig("single"), 1, model=HYBRID)],
        2: [
            trial(MethodConfig("ulysses"), 2, seq_len=45, model=HYBRID, workload=FULL),
            trial(RING, 2, seq_len=45, model=LATE),
            trial(BY_KIND, 2, seq_len=45, model=HYBRID, workload=FULL),
            trial(ZIGZAG, 2, seq_len=45, model=HYBRID, workload=KEPT, **bf16),
            trial(MethodConfig("upipe"), 2, model=replace(HYBRID, num_layers=2)),
            trial(BY_KIND, 2, seq_len=96, model=HYBRID, workload=PACKED),
            trial(MethodConfig("ulysses"), 2, seq_len=96, model=LATE, workload=PACKED, **bf16),
        ],
        3: [
            trial(RING, 3, seq_len=43, model=WINDOWS),  # the first, the middle and the last rank send different numbers
            trial(GATHER, 3, seq_len=43, model=HYBRID),
            trial(RING, 3, seq_len=96, model=WINDOWS, workload=PACKED),
            trial(GATHER, 3, seq_len=96, model=HYBRID, workload=PACKED),
        ],
        4: [trial(MethodConfig("usp", "zigzag", None, 2, "ulysses_inner", "input"), 4, seq_len=45, model=HYBRID)],
    }[world_size]


def check_world(rank: int, world_size: int) -> None:
    """`check_counted_bytes` proves each of them: attention of each kind, the step of few layers, all layers."""
    for number, config in enumerate(cases(world_size)):
        check_counted_bytes(config)
        if number == 0:
            check_parameters_after_a_step(config)
    if world_size == 2:
        check_wrong_layers_are_refused()


def check_wrong_layers_are_refused() -> None:
    """The reference numbers layers by itself. Refused: layers that change places, a window one token too wide, and
    sinks that nothing trains."""
    config = trial(RING, 2, model=HYBRID)
    opened = train.open_layers

    def turned(*arguments):
        with opened(*arguments) as layers:
            yield [*layers[1:], layers[0]]

    with mock.patch.object(train, "open_layers", contextmanager(turned)), pytest.raises(Incorrect):
        train_step.run(job(config))
    of_layer = decoder.window_of
    wider = mock.patch.object(decoder, "window_of", lambda *at: (of_layer(*at) or 0) + 1 if of_layer(*at) else None)
    with wider, pytest.raises(Incorrect, match="differ"):
        train_step.run(job(config))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_steps_of_layers_of_several_kinds_are_proven_and_send_the_closed_form(world_size: int) -> None:
    run(world_size, check_world, world_size)
