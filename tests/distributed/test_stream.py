"""The stream workload: one training whose length changes from stage to stage, and what is refused."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import fmean, median
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import here, run
from trials import PARITY, TINY, job, row, trial

from sp_bench.config.engine import EngineConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.engines import fsdp2, fsdp2_groups
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.ledger import Ledger
from sp_bench.training.cross_entropy import IGNORED
from sp_bench.workloads import arms, drawn, stream

STAGES = replace(PARITY, name="stream", stages="24x8,72x3")  # longer, then shorter again
RING = MethodConfig("ring", "zigzag", dkv_dtype="input")
SHORT = replace(STAGES, stages="24x2", timed_steps=3)
HALF = replace(STAGES, stages="24x2,72x2", timed_steps=6, optimizer="adamw", learning_rate=1e-3, max_grad_norm=1.0)


LOGNORMAL = {"packing": "lognormal", "document_len": 32, "document_sigma": 1.0}
DRAWN = replace(PARITY, name="stream", timed_steps=12, policy="dynamic", **LOGNORMAL)
POLICIES = [
    replace(DRAWN, policy="static", filling="first_fit"),
    replace(DRAWN, policy="static", filling="balanced", activation_checkpointing="full"),
    replace(DRAWN, policy="per_document", loss_tile_tokens=20),
    replace(DRAWN, attribution=True),
]


def cases(world_size: int) -> list[TrialConfig]:
    if world_size == 1:
        return [trial(MethodConfig("single"), 1, workload=STAGES)]
    if world_size == 2:
        uneven = replace(STAGES, stages="24x9,45x2", micro_batches=2, loss_tile_tokens=7)
        return [
            trial(
                MethodConfig("ulysses"),
                2,
                workload=replace(STAGES, activation_checkpointing="full", attribution=True),
            ),
            trial(RING, 2, workload=uneven, seq_len=47),
            trial(RING, 2, workload=replace(STAGES, stages="24x8:sp_size=1:micro_batches=2,72x3:micro_batches=3")),
        ]
    return [
        trial(RING, 3, workload=STAGES),
        trial(MethodConfig("all_gather", "zigzag", dkv_dtype="input"), 3, workload=replace(STAGES, stages="25x9")),
    ]


def check_world(rank: int, world_size: int) -> None:
    for config in cases(world_size):
        found = row(config)
        stages = config.stages
        assert found["max_nll_difference"] <= 1e-5, config
        if config.sp_size > 1:  # sums are in another order, so exactly 0 would be a training compared with itself
            assert found["max_nll_difference"] > 0, config
        assert [(each["seq_len"], each["num_steps"]) for each in found["stage_ends"]] == stages
        assert all(each["compiled"] == 0 and each["reserved_bytes"] is None for each in found["stage_ends"])
        assert len(found["loss"]) == len(found["step_ms"]) == sum(steps for _, steps in stages)
        assert found["tokens_per_s"] is found["window_tokens_per_s"] is found["mfu"] is found["exposed_comm_ms"] is None
        assert len(found.get("compute_only_step_ms") or ()) == 20 * config.workload.attribution
        for stage, (seq_len, steps), times in zip(config.of_stages, stages, found["stage_times"], strict=True):
            tokens = stage.num_sequences * seq_len
            assert times["first_step_ms"] in found["step_ms"], steps
            assert times["tokens_per_s"] == pytest.approx(1e3 * tokens / times["median_step_ms"])
    if world_size == 1:
        check_compilations_are_counted_with_their_seconds()
    if world_size == 2:
        check_half_precision()
        check_each_stage_recomputes_what_it_says()
        check_a_training_that_does_not_go_on_is_refused()
        check_a_stage_that_computes_at_another_length_is_refused()


def check_compilations_are_counted_with_their_seconds() -> None:
    """A stage that begins at a new length compiles in its first step; the last one is as long as the first."""
    workload = replace(STAGES, model_code="compiled", stages="24x8,72x3")
    found = row(trial(MethodConfig("single"), 1, workload=workload, seq_len=24))
    first, second, last = found["stage_ends"]
    assert first["compiled"] > 0
    assert second["compiled"] > 0
    assert (last["compiled"], last["compile_s"]) == (0, 0.0)
    for stage, times in zip(found["stage_ends"], found["stage_times"], strict=True):
        over = (times["first_step_ms"] - times["median_step_ms"]) / 1e3
        assert stage["compile_s"] <= times["first_step_ms"] / 1e3
        assert stage["compile_s"] >= 0.8 * over or not stage["compiled"]


def check_each_stage_recomputes_what_it_says() -> None:
    step, found = fsdp2.Training.step, []

    def spied(training, *others):
        found.append({block.checkpointing for block in training.decoder.blocks})
        return step(training, *others)

    stages = "24x8:activation_checkpointing=none,72x3:activation_checkpointing=selective"
    config = trial(RING, 2, workload=replace(STAGES, stages=stages, activation_checkpointing="full"))
    with patch.object(fsdp2.Training, "step", spied):
        row(config)
    assert found == [{"none"}] * 8 + [{"selective"}] * 3 + [{"full"}] * 10  # the last is the step whose bytes count
    half = replace(HALF, stages="24x2:activation_checkpointing=selective_output,72x2", activation_checkpointing="full")
    assert len(row(trial(MethodConfig("ulysses"), 2, workload=half, dtype="bfloat16"))["stage_loss_errors"]) == 2


def check_half_precision() -> None:
    """Stages that become longer, and then shorter, are proven where they meet."""
    config = trial(RING, 2, workload=replace(HALF, micro_batches=2, loss_tile_tokens=7), dtype="bfloat16")
    found = row(config)
    assert [(each["seq_len"], each["num_steps"]) for each in found["stage_ends"]] == config.stages
    assert len(found["loss"]) == len(found["step_ms"]) == 6  # without the steps between stages
    assert len(found["stage_loss_errors"]) == 2
    assert 0 < max(found["stage_loss_errors"]) < 0.01
    assert 0 < found["max_nll_difference"] <= 1e-5
    assert found["energy_j"] is None
    assert not {"clock_mismatch", "window_disagrees", "loss_not_falling"} & set(found["flags"])
    options = "24x2:sp_size=1:micro_batches=3,72x2:micro_batches=2"
    found = row(trial(MethodConfig("ulysses"), 2, workload=replace(HALF, stages=options), dtype="bfloat16"))
    assert max(found["stage_loss_errors"]) < 0.01  # the math kernel may round both lengths alike
    check_a_fault_of_one_length_is_refused()
    check_a_step_between_stages_that_trains_is_refused()
    check_moments_that_are_lost_are_refused()


def check_a_fault_of_one_length_is_refused() -> None:
    """Labels are of the token itself in the second stage alone, whose length no proof has."""
    shift = fsdp2.train.shift_and_pad

    def of_itself(sequences, padded_len):
        tokens, labels = shift(sequences, padded_len)
        return tokens, tokens if sequences.shape[1] == 73 else labels

    config = trial(MethodConfig("ulysses"), 2, workload=HALF, dtype="bfloat16")
    with (
        patch.object(fsdp2.train, "shift_and_pad", of_itself),
        pytest.raises(Incorrect, match="changes from 24 to 72 tokens the losses of the first 24 tokens change by"),
    ):
        stream.run(job(config))


def check_a_step_between_stages_that_trains_is_refused() -> None:
    config = trial(MethodConfig("ulysses"), 2, workload=HALF, dtype="bfloat16")
    with (
        patch.object(stream, "_standing_still", lambda is_still: nullcontext()),
        pytest.raises(Incorrect, match=r"as the length changes from 24|the optimizer took 9 of 7 steps"),
    ):
        stream.run(job(config))


def check_moments_that_are_lost_are_refused() -> None:
    """As the length changes, in the rehearsal too."""
    config = trial(MethodConfig("ulysses"), 2, workload=HALF, dtype="bfloat16")
    with forgetting(), pytest.raises(Incorrect, match="step 3 of a rehearsal in float32 differs from one process"):
        stream.run(job(config))


@contextmanager
def forgetting() -> Iterator[None]:
    """The optimizer forgets its moments as the length changes."""
    attend, lengths = fsdp2.Training.attend, {}

    def forgets(training, layers):
        if lengths.setdefault(id(training), layers) is not layers:
            training.optimizer.state.clear()
        lengths[id(training)] = layers
        attend(training, layers)

    with patch.object(fsdp2.Training, "attend", forgets):
        yield


def check_a_training_that_does_not_go_on_is_refused() -> None:
    """A stage's first step is right, its second is not. The first stage has two steps, so that momentum is there."""
    config = trial(MethodConfig("ulysses"), 2, workload=replace(SHORT, stages="24x2", timed_steps=4))
    with forgetting(), pytest.raises(Incorrect, match="step 3 differs from one"):
        stream.run(job(config))


def check_a_stage_that_computes_at_another_length_is_refused() -> None:
    """The ranks train on half of each sequence of the last stage."""
    shard, config = fsdp2.train.shard_batches, trial(MethodConfig("ulysses"), 2, workload=SHORT)

    def halves(config, texts, *others):
        return shard(config, [text[:, :25] for text in texts], *others)

    with patch.object(fsdp2.train, "shard_batches", halves), pytest.raises(Incorrect, match="step 2 differs from one"):
        stream.run(job(config))


def check_policies(rank: int, world_size: int) -> None:
    """A rank holds 64 tokens, and documents have up to 128. So short ones share a rank, and long ones need two."""
    found = {}
    for index, workload in enumerate(POLICIES):
        method = MethodConfig("ulysses") if index % 2 else RING
        config = trial(method, 2, workload=workload, dp_shard_size=world_size // 2, seq_len=128)
        found[workload.policy] = row(config)
        batches = found[workload.policy]["batches"]
        assert 0 < found[workload.policy]["max_nll_difference"] <= 1e-5, workload
        assert [each["documents"] for each in batches] == [each["documents"] for each in found["static"]["batches"]]
        assert all(each["imbalance"] >= 1 and each["passes"] >= 1 for each in batches)
        assert found[workload.policy]["tokens_per_s"] > 0
    static, timed = found["static"], found["dynamic"]
    assert static["exposed_comm_ms"] is static.get("compute_only_step_ms") is timed.get("comm_only_step_ms") is None
    compute_only = timed["compute_only_step_ms"]
    assert len(compute_only) == len(timed["step_ms"])
    assert timed["exposed_comm_ms"] == timed["median_step_ms"] - median(compute_only)
    assert timed["imbalance_ms"] == median(compute_only) - fmean(timed["compute_only_rank_ms"])
    groups = {policy: {size for each in of["batches"] for size in each["groups"]} for policy, of in found.items()}
    assert groups["static"] == {2}
    assert groups["per_document"] == {1, world_size}
    assert groups["dynamic"] > {1}
    check_steps_without_messages_send_nothing_and_compute_as_much()
    check_a_document_on_two_groups_is_refused()
    if world_size == 2:
        check_policies_in_half_precision()


def check_steps_without_messages_send_nothing_and_compute_as_much() -> None:
    config = trial(RING, 2, workload=DRAWN, dp_shard_size=dist.get_world_size() // 2, seq_len=128)
    on = (job(config).mesh, here())
    with fsdp2_groups.opened(config, drawn.of_trial(config), *on) as steps:
        with Ledger(here()) as with_messages:
            fsdp2.run_passes(config, steps[:1], *on, lambda: None)
        with Ledger(here()) as alone:
            arms.compute_only(config, steps[:1], *on)  # the step is taken twice
    sent = [sum(size for _, size in book.counts.values()) for book in (with_messages, alone)]
    assert sent[0] > 0 == sent[1]
    assert alone.work.calls == Counter({name: 2 * calls for name, calls in with_messages.work.calls.items()})
    assert alone.work.attention_flops == 2 * with_messages.work.attention_flops
    assert alone.work.matmul_flops["float32"] == 2 * with_messages.work.matmul_flops["float32"] > 0
    assert alone.work.updated_elements == 2 * with_messages.work.updated_elements > 0


def check_policies_in_half_precision() -> None:
    """Each batch is proven in fp32 as above, and is then off one process by what rounding explains."""
    for workload in POLICIES:
        config = trial(MethodConfig("ulysses"), 2, workload=workload, seq_len=128, dtype="bfloat16")
        found = row(config)
        assert 0 < found["max_nll_difference"] <= 1e-5, workload
        assert 1e-5 < found["rel_error_loss"] < 0.01, workload
        assert 1e-5 < found["rel_error_grad_norm"] < 0.05, workload
        assert len(found["batches"]) == len(found["loss"]) == 12
    check_a_fault_of_half_precision_alone_is_refused()


def check_a_fault_of_half_precision_alone_is_refused() -> None:
    """Rank 0 has no label in the first pass of each step in half precision. In fp32 all are there."""
    run_passes = fsdp2.run_passes

    def unlabelled(each):
        return each._replace(batch=replace(each.batch, labels=torch.full_like(each.batch.labels, IGNORED)))

    def forgets(config, steps, *others):
        if config.dtype == "bfloat16" and dist.get_rank() == 0:
            steps = [[unlabelled(first), *rest] for first, *rest in steps]
        return run_passes(config, steps, *others)

    config = trial(MethodConfig("ulysses"), 2, workload=POLICIES[3], seq_len=128, dtype="bfloat16")
    with patch.object(fsdp2, "run_passes", forgets), pytest.raises(Incorrect, match=r"^step 0 differs from one"):
        stream.run(job(config))


def check_a_document_on_two_groups_is_refused() -> None:
    """The text of the last document of a pass comes twice, and that of the first not at all."""
    of_batch = fsdp2_groups._Passes.of_batch

    def twice(passes, batch):
        text, first = batch.text.clone(), batch.lengths[0]
        text[:, :first] = text[:, -1 - first : -1].clone()
        return of_batch(passes, batch._replace(text=text))

    config = trial(MethodConfig("ulysses"), 2, workload=POLICIES[3], seq_len=128)
    config = replace(config, dp_shard_size=dist.get_world_size() // 2)
    lie = patch.object(fsdp2_groups._Passes, "of_batch", twice)
    with lie, pytest.raises(Incorrect, match="step 0 differs from one"):
        stream.run(job(config))


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_batches_of_drawn_documents_agree_with_one_process_under_each_policy(world_size: int) -> None:
    run(world_size, check_policies, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_steps_of_all_stages_agree_with_one_process(world_size: int) -> None:
    run(world_size, check_world, world_size)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": None}, "give stages such as 8192x20,32768x20 or a policy to workload=stream"),
        ({"policy": "dynamic"}, "give stages such as 8192x20,32768x20 or a policy to workload=stream"),
        ({"stages": None, "policy": "static"}, "give first_fit or balanced to policy=static"),
        ({"stages": None, "policy": "dynamic"}, "use packing=fixed, lognormal or file, whose documents are drawn"),
        ({"stages": "24"}, "write tokens of a sequence x steps of each stage"),
        ({"stages": "24x2:activation_checkpointing=some,72x2"}, "write tokens of a sequence x steps of each stage"),
        ({"stages": "24x2:sp=1"}, "write tokens of a sequence x steps of each stage"),
        ({"stages": "24x0,48x2"}, "write tokens of a sequence x steps of each stage"),
        ({"stages": "24x8,72x12"}, "20 of workload.stages=24x8,72x12 and the last; use 21 or more"),
        ({"warmup_steps": 1}, "workload.warmup_steps=1: all steps are timed, 11 of"),
    ],
)
def test_stages_that_cannot_be_run_are_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(STAGES, **fields)


def test_trials_whose_length_cannot_change_are_refused() -> None:
    with pytest.raises(ConfigError, match="use 2 to 1073741824 tokens in each stage"):
        trial(RING, 2, workload=replace(STAGES, stages="1x3"))
    with pytest.raises(ConfigError, match="lengths change on engine=fsdp2, or with policy=dynamic on engine=megatron"):
        trial(RING, 2, workload=STAGES, engine=EngineConfig("deepspeed"))
    with pytest.raises(ConfigError, match="a model without windows"):
        trial(RING, 2, workload=STAGES, model=replace(TINY, layers="window+full", window=8))
    with pytest.raises(ConfigError, match=r"stream in float32 .* needs sgd, .* use sgd, or stages with dtype=bfloat16"):
        trial(RING, 2, workload=replace(STAGES, optimizer="adamw"))
    with pytest.raises(ConfigError, match=r"masked_label_share=0\.5: stages in bfloat16 .* use 0, or dtype=float32"):
        trial(RING, 2, workload=replace(STAGES, masked_label_share=0.5), dtype="bfloat16")
    for fields, message in (
        ({"workload": replace(STAGES, stages="24x8:sp_size=3")}, "sp_size=3 of a stage, and sp_size=2 of the last"),
        ({"dtype": "bfloat16", "workload": replace(DRAWN, optimizer="adamw")}, "stream in bfloat16 .* needs sgd"),
        ({"dp_replicate_size": 2, "workload": replace(STAGES, attribution=True)}, "has one replica and no FP8"),
        ({"dp_shard_size": 3}, "groups are of 1, 2, 4 ... of 6 ranks"),
        ({"method": MethodConfig("usp", "zigzag", ulysses_degree=1)}, "method=usp has one size"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(trial(RING, 2, workload=POLICIES[3], seq_len=128), **fields)
    with pytest.raises(ConfigError, match="to no other"):
        replace(PARITY, stages="24x20")


def test_a_stage_may_compile_in_its_first_step_which_is_timed_and_counted() -> None:
    assert trial(RING, 2, workload=replace(STAGES, model_code="compiled")).stages == [(24, 8), (72, 3), (48, 9)]
    with pytest.raises(ConfigError, match="the first of them compiles the model's code"):
        replace(PARITY, model_code="compiled")
