"""From ranks' samples to a row: reductions, flags, and what makes a finished measurement incorrect."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest

from sp_bench.config.kernel import KernelConfig
from sp_bench.config.machine import FabricConfig, HardwareConfig
from sp_bench.config.method import MethodConfig
from sp_bench.config.model import ModelConfig
from sp_bench.config.trial import TrialConfig
from sp_bench.config.workload import WorkloadConfig
from sp_bench.costs.work import ExpectedWork, KernelCalls
from sp_bench.driver.derived import derived
from sp_bench.measure.incorrect import Incorrect
from sp_bench.measure.record import assemble
from sp_bench.measure.timing import Measurement, RankColumns
from sp_bench.measure.work import Work
from sp_bench.rows.schema import SCHEMA

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
    counts = {("forward", "send"): (1, Fraction(100)), ("other", "all_reduce"): (1, Fraction(8))}
    whole = Measurement(list(step_ms), window_ms or sum(step_ms), 10, 20, 30, 40, 0, counts=counts, predicted=SENT)
    return replace(whole, **changes)


def row_of(config: TrialConfig, measurements: list[Measurement], device: str = H100) -> dict[str, Any]:
    """What the ranks hand over and what the driver makes of it."""
    record = {"kernel_launches": {"cudnn": 1}} | assemble(config, measurements)
    return record | derived(config, config.seq_len, record, device)


def test_a_row_whose_kernel_nobody_counted_is_flagged() -> None:
    record = assemble(CONFIG, [measurement(100, 100, 100)] * 2)
    assert derived(CONFIG, CONFIG.seq_len, record, H100)["flags"] == ["kernel_uncounted"]
    assert row_of(CONFIG, [measurement(100, 100, 100)] * 2)["flags"] == []


def test_a_step_takes_as_long_as_its_slowest_rank_and_rates_come_from_the_median() -> None:
    row = row_of(CONFIG, [measurement(100, 300, 90), measurement(80, 110, 120)])
    assert row["step_ms"] == [100, 300, 120]
    assert row["rank_step_ms"] == [[100, 300, 90], [80, 110, 120]]
    assert row["median_step_ms"] == 120
    assert row["tokens_per_s"] == pytest.approx(2 * 1000 / 0.120)
    assert row["tokens_per_s_per_gpu"] == pytest.approx(row["tokens_per_s"] / 2)
    assert row["window_tokens_per_s"] == pytest.approx(3 * 2 * 1000 / 0.490)
    forward = 4 * 2 * 1000 * 1001 / 2 * 8 * 16
    assert (row["model_flops"], row["hardware_flops"]) == (3 * forward, 3.5 * forward)
    assert row["hfu"] == pytest.approx(3.5 * forward / 0.120 / 2 / 989.4e12)
    assert row["mfu"] == pytest.approx(3 * forward / 0.120 / 2 / 989.4e12)
    assert row["attention_flops_per_s"] == pytest.approx(3.5 * forward / 0.120)  # of all ranks
    assert row["flags"] == ["transient", "window_disagrees"]


def test_a_step_that_the_host_takes_as_long_to_issue_is_flagged() -> None:
    def flags(host_step_ms: float | None) -> list[str]:
        ranks = [measurement(300, host_step_ms=each) for each in (1.0, host_step_ms)]
        return row_of(CONFIG, ranks)["flags"]

    assert flags(271.0) == ["host_bound"]
    assert flags(269.0) == flags(None) == []


def test_exposed_communication_is_what_the_step_takes_longer_than_without_messages() -> None:
    arms = {"compute_only": [90.0, 80.0, 85.0], "comm_only": [10.0, 40.0, 45.0]}
    slower = {"compute_only": [70.0, 95.0, 80.0], "comm_only": [20.0, 30.0, 30.0]}
    ranks = [measurement(100, 120, 110, arms_ms=arms), measurement(90, 90, 90, arms_ms=slower)]
    row = row_of(CONFIG, ranks)
    assert row["compute_only_step_ms"] == [90, 95, 85]
    assert row["compute_only_rank_ms"] == [85, 80]
    assert row["imbalance_ms"] == 90 - 82.5
    assert row["comm_only_step_ms"] == [20, 40, 45]
    assert row["exposed_comm_ms"] == 110 - 90
    assert row["overlap_efficiency"] == pytest.approx(1 - 20 / 40)


def test_without_arms_nothing_is_said_of_overlap() -> None:
    row = row_of(CONFIG, [measurement(300)] * 2)
    assert (row["imbalance_ms"], row["exposed_comm_ms"], row["overlap_efficiency"]) == (None, None, None)


CUDNN = ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "cudnn_sdpa_sm90_flash_bprop_wgmma"]
SDPA, FMHA = {"void pytorch_flash::flash_fwd_kernel<>": 1}, {"fmha_cutlassF": 7}
ELEMENTWISE = {"void at::native::elementwise_kernel<128>": 9}


def launches(forward: int, backward: int) -> dict[str, int]:
    return {name: number for name, number in zip(CUDNN, (forward, backward), strict=True) if number}


def test_launched_kernels_are_those_of_attention() -> None:
    row = assemble(CONFIG, [measurement(300, cuda_kernels=launches(2, 3) | ELEMENTWISE)] * 2)
    assert row["launched_kernels"] == CUDNN
    assert row["kernel_launches"] == dict(zip(CUDNN, (4, 6), strict=True))


@pytest.mark.parametrize(
    ("launched", "message"),
    [
        (launches(1, 1) | SDPA, "cudnn was asked for, and sdpa_flash was launched"),
        (launches(1, 1) | FMHA, "which look like attention: 7 x fmha_cutlassF; .* add them to CUDA_HELPERS"),
        (launches(1, 0), "no CUDA kernel of cudnn's backward was launched: 1 x cudnn_generated"),
        ({}, "no CUDA kernel of cudnn's forward was launched: nothing"),
        (ELEMENTWISE, "no CUDA kernel of cudnn's forward was launched: 9 x void at::native"),
    ],
)
def test_another_kernel_than_asked_for_is_incorrect(launched: Mapping[str, int], message: str) -> None:
    with pytest.raises(Incorrect, match=message):
        assemble(CONFIG, [measurement(300, cuda_kernels=launched)] * 2)


def called(forward: int, backward: int) -> dict[str, Any]:
    """A measurement's fields for a rank that made as many calls of the kernel as its method's blocks make it."""
    work = Work(calls=Counter(forward=forward, backward=backward), attention_dtypes={"bfloat16"})
    return {"work": work, "expected": ExpectedWork(kernel_calls=KernelCalls(forward, backward), attention_flops=0)}


def test_each_call_of_the_kernel_launches_its_own_once() -> None:
    right = measurement(300, cuda_kernels=launches(3, 4), **called(3, 4))
    ranks = [measurement(300, cuda_kernels=launches(2, 3), **called(2, 3)), right]
    assert list(assemble(CONFIG, ranks)["kernel_launches"].values()) == [5, 7]
    for launched in (launches(2, 4), launches(3, 5), launches(6, 8), launches(3, 0)):
        with pytest.raises(Incorrect, match=r"rank 1 launched the CUDA kernels of cudnn .* called it 3 and 4 times; l"):
            assemble(CONFIG, [ranks[0], replace(right, cuda_kernels=launched)])


def test_a_recorded_replay_launches_as_often_as_the_counted_eager_step() -> None:
    both = measurement(300, cuda_kernels=launches(6, 8), profiled_steps=2, **called(3, 4))
    assert list(assemble(CONFIG, [both] * 2)["kernel_launches"].values()) == [12, 16]
    with pytest.raises(Incorrect, match="3 times forward and 4 backward, and called it 6 and 8 times"):
        assemble(CONFIG, [replace(both, cuda_kernels=launches(3, 4))] * 2)


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def test_without_a_gpu_the_operations_inside_the_kernel_are_its_launches() -> None:
    config = replace(CONFIG, kernel=KernelConfig("cpu_flash"))
    fields = called(2, 3)
    right = replace(fields["work"], kernel_ops=Counter({FLASH: 2, f"{FLASH}_backward": 3, "aten::transpose": 40}))
    row = assemble(config, [measurement(300, **fields | {"work": right})] * 2)
    assert row["kernel_launches"] == {FLASH: 4, f"{FLASH}_backward": 6}
    fallback = Counter({FLASH: 1, f"{FLASH}_backward": 3, "aten::bmm": 2})
    with pytest.raises(Incorrect, match=rf"2 x {FLASH}, 3 x .*; what ran: 1 x {FLASH}, 3 x .*, 2 x aten::bmm"):
        assemble(config, [measurement(300, **fields | {"work": replace(right, kernel_ops=fallback)})] * 2)


def test_without_a_gpu_a_library_may_run_no_other_attention_than_the_kernels() -> None:
    config, work = replace(CONFIG, kernel=KernelConfig("cpu_flash")), Work(other_ops=Counter({FLASH: 2}))
    assert assemble(config, [measurement(300, work=work)] * 2)["kernel_launches"] == {FLASH: 4}
    on_math = replace(CONFIG, kernel=KernelConfig("math"))
    with pytest.raises(Incorrect, match=rf"kernel math was asked for, and rank 1 ran 2 x {FLASH}$"):
        assemble(on_math, [measurement(300), measurement(300, work=work)])


CUDNN_OP, FLASH_OP = (f"aten::_scaled_dot_product_{name}_attention" for name in ("cudnn", "flash"))


@pytest.mark.parametrize("name", ["cudnn", "flash_attn"])
def test_in_a_single_step_on_a_gpu_torchs_sdpa_may_pick_no_other_kernel(name: str) -> None:
    """It has no profile. Of flash-attn's own operations nothing is declared."""
    config, own = replace(CONFIG, kernel=KernelConfig(name)), {"cudnn": CUDNN_OP, "flash_attn": "flash_attn::_forward"}
    right = Work(
        other_ops=Counter(
            {own[name]: 4, "flash_attn::_backward" if name == "flash_attn" else f"{CUDNN_OP}_backward": 2}
        )
    )
    assert assemble(config, [measurement(300, work=right)] * 2)["kernel_launches"][own[name]] == 8
    other = replace(right, other_ops=right.other_ops + Counter({FLASH_OP: 1}))
    with pytest.raises(Incorrect, match=rf"kernel {name} was asked for, and rank 1 ran .*1 x {FLASH_OP}"):
        assemble(config, [measurement(300, work=right), measurement(300, work=other)])


def test_in_a_single_step_on_a_gpu_each_call_of_our_kernel_is_its_own() -> None:
    fields = called(2, 3)
    right = replace(fields["work"], kernel_ops=Counter({CUDNN_OP: 2, f"{CUDNN_OP}_backward": 3}))
    assert assemble(CONFIG, [measurement(300, **fields | {"work": right})] * 2)["kernel_launches"][CUDNN_OP] == 4
    fallback = replace(right, kernel_ops=right.kernel_ops - Counter({CUDNN_OP: 1}) + Counter({FLASH_OP: 1}))
    with pytest.raises(Incorrect, match=rf"what ran: 1 x {CUDNN_OP}, 3 x {CUDNN_OP}_backward, 1 x {FLASH_OP}"):
        assemble(CONFIG, [measurement(300, **fields | {"work": fallback})] * 2)


def test_a_row_without_closed_forms_shows_that_nothing_was_counted() -> None:
    row = assemble(CONFIG, [measurement(300)] * 2)
    assert {row[name] for name in ("counted_matmul_flops", "counted_attention_flops", "counted_parameters")} == {None}
    assert not row.keys() & {"launched_kernels", "kernel_launches"}


def test_wire_bytes_are_of_the_rank_that_sends_most_and_null_where_nvlink_is_not_used() -> None:
    ranks = [measurement(300, wire_bytes=100.0), measurement(300, wire_bytes=104.0)]
    assert row_of(CONFIG, ranks)["comm_wire_bytes"] == 104
    through_host = replace(CONFIG, fabric=FabricConfig("shm", "nccl", {"NCCL_P2P_DISABLE": "1"}))
    assert row_of(through_host, ranks)["comm_wire_bytes"] is None
    assert row_of(CONFIG, [ranks[0], measurement(300)])["comm_wire_bytes"] is None


def test_memory_headline_is_the_largest_rank() -> None:
    row = row_of(CONFIG, [measurement(300), measurement(300, peak_allocated_bytes=99)])
    assert row["peak_allocated_bytes"] == [10, 99]
    assert row["max_peak_allocated_bytes"] == 99


def test_a_short_window_and_disagreeing_clocks_are_flagged() -> None:
    row = row_of(CONFIG, [measurement(100), measurement(100, window_ms=150)])
    assert row["flags"] == ["short_window", "clock_mismatch", "window_disagrees"]


def test_one_short_window_is_enough_for_the_flag() -> None:
    assert row_of(CONFIG, [measurement(150), measurement(300)])["flags"] == ["short_window"]
    assert row_of(CONFIG, [measurement(200), measurement(300)])["flags"] == []


@pytest.mark.parametrize(("percent", "flagged"), [(-3, True), (-1, False), (1, False), (3, True)])
def test_steps_may_differ_from_their_window_by_2_percent(percent: float, flagged: bool) -> None:
    off = measurement(300 * (1 + percent / 100), window_ms=300)
    assert ("clock_mismatch" in row_of(CONFIG, [measurement(300), off])["flags"]) == flagged


@pytest.mark.parametrize(
    ("step_ms", "flags"),
    [
        ([5545, 3192], ["unsettled"]),
        ([390, 391, 396, 376, 379], ["unsettled"]),
        ([308, 300, 300], []),
        ([380, 377, 376, 379, 377], []),
        ([300, 300, 400, 400], ["unsettled", "transient"]),
        ([191, 192, 192, 201, 203], ["unsettled", "transient"]),
        ([310, 300], []),
        ([500, 500], []),
        ([500], []),
    ],
)
def test_a_median_of_steps_that_become_shorter_or_longer_is_flagged(step_ms: list[float], flags: list[str]) -> None:
    settling = replace(measurement(300), rank_step_ms=step_ms, window_ms=sum(step_ms))
    row = row_of(CONFIG, [settling, replace(settling, rank_step_ms=[ms - 1 for ms in step_ms])])
    assert row["flags"] == flags


def test_steps_in_which_the_allocator_had_to_try_again_are_flagged() -> None:
    calm, retried = measurement(300, allocator_retries=0), measurement(300, allocator_retries=3)
    assert row_of(CONFIG, [calm, calm])["flags"] == []
    row = row_of(CONFIG, [calm, retried])
    assert row["flags"] == ["allocator_retried"]
    assert row["allocator_retries"] == [0, 3]


def test_a_peak_with_leftovers_of_other_work_in_it_is_flagged() -> None:
    clean = measurement(300, leftover_bytes=2**20, peak_allocated_bytes=91 * 2**30)
    leftover = measurement(300, leftover_bytes=23 * 2**30, peak_allocated_bytes=114 * 2**30)
    assert row_of(CONFIG, [clean, clean])["flags"] == []
    row = row_of(CONFIG, [clean, leftover])
    assert row["flags"] == ["leftover_memory"]
    assert row["leftover_bytes"] == [2**20, 23 * 2**30]


@pytest.mark.parametrize(("cap_gib", "flags"), [(None, []), (80, []), (79, ["above_device_memory"])])
def test_a_step_that_held_more_than_the_emulated_device_is_flagged(cap_gib: float | None, flags: list[str]) -> None:
    config = replace(CONFIG, hardware=replace(CONFIG.hardware, device_memory_gib=cap_gib))
    ranks = [measurement(300, device_used_bytes=size * 2**30) for size in (70, 80)]
    assert row_of(config, ranks)["flags"] == flags


def test_an_unknown_device_has_no_utilisation() -> None:
    row = row_of(CONFIG, [measurement(300), measurement(300)], "Some New GPU")
    assert row["mfu"] is None
    assert row["hfu"] is None


def sent(num_bytes: int, phase: str = "forward") -> Measurement:
    return measurement(300, counts={(phase, "send"): (2, Fraction(num_bytes))})


def test_bytes_beside_the_closed_form_are_incorrect() -> None:
    with pytest.raises(Incorrect, match=r"rank 1 differ.*forward send: counted 200.0, predicted 100.0$"):
        assemble(CONFIG, [measurement(300), sent(200)])


def test_where_the_closed_form_is_a_mean_the_mean_must_equal_it() -> None:
    row = assemble(CONFIG, [sent(60), sent(140)], traffic_is_mean=True)
    assert (row["comm"][0]["predicted_bytes"], row["comm_counted_bytes"]) == (100, 140)
    with pytest.raises(Incorrect, match=r"the ranks in the mean differ.*forward send: counted 130.0, predicted 100.0"):
        assemble(CONFIG, [sent(60), sent(200)], traffic_is_mean=True)


def test_collectives_that_are_not_marked_as_the_method_s_say_how_to_mark_them() -> None:
    with pytest.raises(Incorrect, match=r"gradients send: counted 100.0.*with ledger.attention\(\):.*traffic = None"):
        assemble(CONFIG, [sent(100, "gradients")] * 2)


def test_bytes_without_a_closed_form_are_counted_only() -> None:
    unpredicted = measurement(300, predicted={}, unpredicted=("forward", "backward"))
    row = row_of(CONFIG, [unpredicted] * 2)
    assert row["comm_counted_bytes"] == 100
    assert {entry["predicted_bytes"] for entry in row["comm"]} == {None}


def test_other_traffic_is_shown_and_not_compared() -> None:
    row = row_of(CONFIG, [measurement(300), measurement(300)])
    assert row["comm_counted_bytes"] == 100
    other = {"phase": "other", "op": "all_reduce", "calls": 1, "predicted_bytes": None, "counted_bytes": 8.0}
    assert other in row["comm"]


def test_messages_are_neither_tokens_nor_flops() -> None:
    workload = WorkloadConfig("collective", "exchange", False, 0, 3, 1, max_message_bytes=2**20)
    curve = [{"message_bytes": size, "ms": 1e-3 * (5 + size / 1000)} for size in (65536, 262144, 1048576)]
    samples = [measurement(300, columns={"curve": curve}), measurement(400)]
    row = row_of(replace(CONFIG, workload=workload), samples)
    assert (row["median_step_ms"], row["latency_us"]) == (400, pytest.approx(5.0))
    assert row["bandwidth_bytes_per_s"] == pytest.approx(1e9)
    of_tokens = ("tokens_per_s", "tokens_per_s_per_gpu", "window_tokens_per_s", "model_flops", "hardware_flops")
    assert {row[name] for name in (*of_tokens, "mfu", "hfu", "attention_flops_per_s")} == {None}


def test_each_column_of_a_rank_is_a_list_in_the_row() -> None:
    for each in fields(RankColumns):
        assert pa.types.is_list(SCHEMA.field(each.name).type), each.name
