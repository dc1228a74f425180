"""From ranks' samples to a row: reductions, flags, and what makes a finished measurement incorrect."""

from dataclasses import replace
from fractions import Fraction

import pytest

from sp_bench.config.trial import (
    FabricConfig,
    HardwareConfig,
    KernelConfig,
    MethodConfig,
    ModelConfig,
    TrialConfig,
    WorkloadConfig,
)
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.record import assemble
from sp_bench.measure.timing import Measurement

H100 = "NVIDIA H100 80GB HBM3"
CONFIG = TrialConfig(
    MethodConfig("ring", dkv_dtype="input"),
    KernelConfig("cudnn"),
    ModelConfig("tiny", 1, 64, 64, 8, 2, 16, 256, 1e4, 1e-5, False, False, True),
    WorkloadConfig("attention", "forward_backward", True, 0, 3, 64),
    FabricConfig("nvlink", "nccl"),
    HardwareConfig("h100", "cuda"),
    batch_size=2,
    seq_len=1000,
    sp_size=2,
    dp_replicate_size=1,
    dp_shard_size=1,
    dtype="bfloat16",
    seed=0,
)
SENT = {("forward", "send"): Fraction(100)}


def measurement(*step_ms: float, window_ms: float | None = None, **changes) -> Measurement:
    columns = {"model_flops": 3e12, "hardware_flops": 3.5e12}
    counts = {("forward", "send"): (1, Fraction(100)), ("other", "all_reduce"): (1, Fraction(8))}
    whole = Measurement(
        list(step_ms), window_ms or sum(step_ms), 10, 20, 30, 40, 0, counts=counts, predicted=SENT, columns=columns
    )
    return replace(whole, **changes)


def test_a_step_takes_as_long_as_its_slowest_rank_and_rates_come_from_the_median() -> None:
    row = assemble(CONFIG, [measurement(100, 300, 90), measurement(80, 110, 120)], H100)
    assert row["step_ms"] == [100, 300, 120]
    assert row["rank_step_ms"] == [[100, 300, 90], [80, 110, 120]]
    assert row["median_step_ms"] == 120
    assert row["tokens_per_s"] == pytest.approx(2 * 1000 / 0.120)
    assert row["tokens_per_s_per_gpu"] == pytest.approx(row["tokens_per_s"] / 2)
    assert row["hfu"] == pytest.approx(3.5e12 / 0.120 / 2 / 989.4e12)
    assert row["mfu"] == pytest.approx(3e12 / 0.120 / 2 / 989.4e12)
    assert row["attention_flops_per_s"] == pytest.approx(3.5e12 / 0.120)  # of all ranks
    assert row["flags"] == []


def test_a_step_that_the_host_takes_as_long_to_issue_is_flagged() -> None:
    def flags(host_step_ms: float | None) -> list[str]:
        ranks = [measurement(300, host_step_ms=each) for each in (1.0, host_step_ms)]
        return assemble(CONFIG, ranks, H100)["flags"]

    assert flags(271.0) == ["host_bound"]
    assert flags(269.0) == flags(None) == []


def test_exposed_communication_is_what_the_step_takes_longer_than_without_messages() -> None:
    arms = {"compute_only": [90.0, 80.0, 85.0], "comm_only": [10.0, 40.0, 45.0]}
    slower = {"compute_only": [70.0, 95.0, 80.0], "comm_only": [20.0, 30.0, 30.0]}
    ranks = [measurement(100, 120, 110, arms_ms=arms), measurement(90, 90, 90, arms_ms=slower)]
    row = assemble(CONFIG, ranks, H100)
    assert row["compute_only_step_ms"] == [90, 95, 85]
    assert row["compute_only_rank_ms"] == [85, 80]
    assert row["imbalance_ms"] == 90 - 82.5
    assert row["comm_only_step_ms"] == [20, 40, 45]
    assert row["exposed_comm_ms"] == 110 - 90
    assert row["overlap_efficiency"] == pytest.approx(1 - 20 / 40)


def test_without_arms_nothing_is_said_of_overlap() -> None:
    assert not assemble(CONFIG, [measurement(300)] * 2, H100).keys() & {"exposed_comm_ms"}


CUDNN = ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "cudnn_sdpa_sm90_flash_bprop_wgmma"]


def test_launched_kernels_are_those_of_attention() -> None:
    ranks = [measurement(300, cuda_kernels=[*CUDNN, "void at::native::elementwise_kernel<128>"])] * 2
    assert assemble(CONFIG, ranks, H100)["launched_kernels"] == CUDNN


@pytest.mark.parametrize(
    ("launched", "message"),
    [
        (["void pytorch_flash::flash_fwd_kernel<>", *CUDNN], "cudnn was asked for, and sdpa_flash was launched"),
        (CUDNN[:1], "no CUDA kernel of cudnn's backward was launched"),
        ([], "no CUDA kernel of cudnn's forward was launched"),
        (["void at::native::elementwise_kernel<128>"], "no CUDA kernel of cudnn's forward was launched"),
    ],
)
def test_another_kernel_than_asked_for_is_incorrect(launched: list[str], message: str) -> None:
    with pytest.raises(Incorrect, match=message):
        assemble(CONFIG, [measurement(300, cuda_kernels=launched)] * 2, H100)


def test_wire_bytes_are_of_the_rank_that_sends_most_and_null_where_nvlink_is_not_used() -> None:
    ranks = [measurement(300, wire_bytes=100.0), measurement(300, wire_bytes=104.0)]
    assert assemble(CONFIG, ranks, H100)["comm_wire_bytes"] == 104
    through_host = replace(CONFIG, fabric=FabricConfig("shm", "nccl", {"NCCL_P2P_DISABLE": "1"}))
    assert assemble(through_host, ranks, H100)["comm_wire_bytes"] is None
    assert assemble(CONFIG, [ranks[0], measurement(300)], H100)["comm_wire_bytes"] is None


def test_memory_headline_is_the_largest_rank() -> None:
    row = assemble(CONFIG, [measurement(300), measurement(300, peak_allocated_bytes=99)], H100)
    assert row["peak_allocated_bytes"] == [10, 99]
    assert row["max_peak_allocated_bytes"] == 99


def test_a_short_window_and_disagreeing_clocks_are_flagged() -> None:
    row = assemble(CONFIG, [measurement(100), measurement(100, window_ms=150)], H100)
    assert row["flags"] == ["short_window", "clock_mismatch"]


def test_one_short_window_is_enough_for_the_flag() -> None:
    assert assemble(CONFIG, [measurement(150), measurement(300)], H100)["flags"] == ["short_window"]
    assert assemble(CONFIG, [measurement(200), measurement(300)], H100)["flags"] == []


@pytest.mark.parametrize(("percent", "flags"), [(-3, ["clock_mismatch"]), (-1, []), (1, []), (3, ["clock_mismatch"])])
def test_steps_may_differ_from_their_window_by_2_percent(percent: float, flags: list[str]) -> None:
    off = measurement(300 * (1 + percent / 100), window_ms=300)
    assert assemble(CONFIG, [measurement(300), off], H100)["flags"] == flags


@pytest.mark.parametrize(
    ("step_ms", "flags"),
    [
        ([5545, 3192], ["unsettled"]),
        ([390, 391, 396, 376, 379], ["unsettled"]),
        ([400, 300, 300], []),
        ([380, 377, 376, 379, 377], []),
        ([300, 300, 400, 400], ["unsettled"]),
        ([191, 192, 192, 201, 203], ["unsettled"]),
        ([310, 300], []),
        ([500, 500], []),
        ([500], []),
    ],
)
def test_a_median_of_steps_that_become_shorter_or_longer_is_flagged(step_ms: list[float], flags: list[str]) -> None:
    settling = replace(measurement(300), step_ms=step_ms, window_ms=sum(step_ms))
    row = assemble(CONFIG, [settling, replace(settling, step_ms=[ms - 1 for ms in step_ms])], H100)
    assert row["flags"] == flags


def test_steps_in_which_the_allocator_had_to_try_again_are_flagged() -> None:
    calm, retried = measurement(300, allocator_retries=0), measurement(300, allocator_retries=3)
    assert assemble(CONFIG, [calm, calm], H100)["flags"] == []
    row = assemble(CONFIG, [calm, retried], H100)
    assert row["flags"] == ["allocator_retried"]
    assert row["allocator_retries"] == [0, 3]


@pytest.mark.parametrize(("cap_gib", "flags"), [(None, []), (80, []), (79, ["above_device_memory"])])
def test_a_step_that_held_more_than_the_emulated_device_is_flagged(cap_gib: float | None, flags: list[str]) -> None:
    config = replace(CONFIG, hardware=replace(CONFIG.hardware, device_memory_gib=cap_gib))
    ranks = [measurement(300, device_used_bytes=size * 2**30) for size in (70, 80)]
    assert assemble(config, ranks, H100)["flags"] == flags


def test_an_unknown_device_has_no_utilisation() -> None:
    row = assemble(CONFIG, [measurement(300), measurement(300)], "Some New GPU")
    assert row["mfu"] is None
    assert row["hfu"] is None


def test_a_rate_above_the_peak_is_incorrect() -> None:
    with pytest.raises(Incorrect, match="above its peak of 989"):
        assemble(CONFIG, [measurement(1.0), measurement(1.0)], H100)


def sent(num_bytes: int, phase: str = "forward") -> Measurement:
    return measurement(300, counts={(phase, "send"): (2, Fraction(num_bytes))})


def test_bytes_beside_the_closed_form_are_incorrect() -> None:
    with pytest.raises(Incorrect, match=r"rank 1 differ.*forward send: counted 200.0, predicted 100.0$"):
        assemble(CONFIG, [measurement(300), sent(200)], H100)


def test_where_the_closed_form_is_a_mean_the_mean_must_equal_it() -> None:
    row = assemble(CONFIG, [sent(60), sent(140)], H100, traffic_is_mean=True)
    assert (row["comm_predicted_bytes"], row["comm_counted_bytes"]) == (100, 140)
    with pytest.raises(Incorrect, match=r"the ranks in the mean differ.*forward send: counted 130.0, predicted 100.0"):
        assemble(CONFIG, [sent(60), sent(200)], H100, traffic_is_mean=True)


def test_collectives_that_are_not_marked_as_the_method_s_say_how_to_mark_them() -> None:
    with pytest.raises(Incorrect, match=r"gradients send: counted 100.0.*with ledger.attention\(\):.*traffic = None"):
        assemble(CONFIG, [sent(100, "gradients")] * 2, H100)


def test_bytes_without_a_closed_form_are_counted_only() -> None:
    unpredicted = measurement(300, predicted={}, unpredicted=("forward", "backward"))
    row = assemble(CONFIG, [unpredicted] * 2, H100)
    assert (row["comm_predicted_bytes"], row["comm_counted_bytes"]) == (None, 100)
    assert {entry["predicted_bytes"] for entry in row["comm"]} == {None}


def test_other_traffic_is_shown_and_not_compared() -> None:
    row = assemble(CONFIG, [measurement(300), measurement(300)], H100)
    assert row["comm_counted_bytes"] == row["comm_predicted_bytes"] == 100
    other = {"phase": "other", "op": "all_reduce", "calls": 1, "predicted_bytes": None, "counted_bytes": 8.0}
    assert other in row["comm"]


def test_messages_are_neither_tokens_nor_flops() -> None:
    workload = WorkloadConfig("collective", "exchange", False, 0, 3, 1, max_message_bytes=2**20)
    samples = [measurement(300, columns={"latency_us": 5.0}), measurement(400, columns={})]
    row = assemble(replace(CONFIG, workload=workload), samples, H100)
    assert (row["median_step_ms"], row["latency_us"]) == (400, 5.0)
    assert row["comm_predicted_bytes"] == row["comm_counted_bytes"] == 100
    assert (row["tokens_per_s"], row["tokens_per_s_per_gpu"]) == (None, None)
    assert not {"mfu", "hfu", "attention_flops_per_s"} & row.keys()
