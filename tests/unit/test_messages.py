"""Sizes of messages, and the line through their times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.config.parsing import ConfigError
from sp_bench.config.workload import MIN_MESSAGE_BYTES
from sp_bench.costs import message_sizes
from sp_bench.costs.attention import AttentionShape, all_gather_traffic, ring_traffic, ulysses_traffic
from sp_bench.planning import plan

SIZES = [MIN_MESSAGE_BYTES * 4**power for power in range(7)]


def times_ms(latency_us: float, bandwidth: float) -> list[float]:
    return [latency_us / 1e3 + 1e3 * size / bandwidth for size in SIZES]


@given(latency_us=st.floats(1, 1e4), bandwidth=st.floats(1e8, 1e12))
def test_the_fit_recovers_the_line_that_times_lie_on(latency_us, bandwidth):
    line = message_sizes.fit_line(SIZES, times_ms(latency_us, bandwidth))
    assert line.latency_us == pytest.approx(latency_us, rel=1e-4)
    assert line.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-4)


@given(
    latency_us=st.floats(5, 500),
    bandwidth=st.floats(1e9, 5e11),
    noise=st.lists(st.floats(0.95, 1.05), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_small_messages_keep_their_say_when_all_times_are_off_by_five_percent(latency_us, bandwidth, noise):
    line = message_sizes.fit_line(SIZES, [t * n for t, n in zip(times_ms(latency_us, bandwidth), noise, strict=True)])
    predicted = [(line.latency_us or 0) / 1e3 + 1e3 * s / (line.bandwidth_bytes_per_s or 0) for s in SIZES]
    assert predicted == pytest.approx(times_ms(latency_us, bandwidth), rel=0.25)


def test_times_that_begin_below_zero_have_a_bandwidth_but_no_latency():
    line = message_sizes.fit_line(SIZES, [1e3 * size / 1e10 * (0.5 + 0.1 * i) for i, size in enumerate(SIZES)])
    assert line.latency_us is None
    assert line.bandwidth_bytes_per_s is not None
    assert 0.9e10 < line.bandwidth_bytes_per_s < 2e10


def test_times_that_do_not_grow_with_the_size_have_neither():
    assert message_sizes.fit_line(SIZES, [5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0]) == message_sizes.Line(None, None)


@given(
    method=st.sampled_from(["ulysses", "ring", "all_gather"]),
    sp_size=st.integers(2, 64),
    max_message_bytes=st.integers(4 * MIN_MESSAGE_BYTES, 2**30),
)
def test_sizes_grow_fourfold_up_to_the_maximum_in_whole_slices(make_config, method, sp_size, max_message_bytes):
    config = make_config(
        workload="collective", method=method, sp_size=sp_size, workload__max_message_bytes=max_message_bytes
    )
    sizes = message_sizes.message_sizes(config)
    wanted = MIN_MESSAGE_BYTES
    for size in sizes:
        assert 0 <= wanted - size.sent_bytes < message_sizes.GRAIN_BYTES * (sp_size - 1 or 1)
        assert size.slice_bytes % message_sizes.GRAIN_BYTES == 0
        assert message_sizes.traffic(config, size) == {("forward", message_sizes.OPS[method]): size.sent_bytes}
        wanted *= 4
    assert wanted > max_message_bytes


def test_a_message_of_the_methods_own_size_takes_the_slices_that_the_method_sends(make_config):
    """The definition of a message is that of the closed forms: their forward bytes are such a message."""
    shape = AttentionShape(1, 2**16, 32, 8, 128, True, "bfloat16")
    for method, traffic in (
        ("ulysses", ulysses_traffic(shape, 4, 4)),
        ("all_gather", all_gather_traffic(shape, 4, None)),
        ("ring", ring_traffic(shape, 4, 1, None)),
    ):
        sent = traffic["forward", message_sizes.OPS[method]]
        num_sent = message_sizes.message_sizes(make_config(workload="collective", method=method, sp_size=4))[0].num_sent
        assert (sent / num_sent) % message_sizes.GRAIN_BYTES == 0


@pytest.mark.parametrize("max_message_bytes", [None, 0, 65536, 262143])
def test_a_curve_of_less_than_two_sizes_is_refused_with_the_smallest_that_works(make_config, max_message_bytes):
    with pytest.raises(ConfigError, match=rf"max_message_bytes={max_message_bytes}: .* use 262144 or more"):
        make_config(workload="collective", workload__max_message_bytes=max_message_bytes)


def test_collective_has_a_pass_kind_of_its_own_and_no_data_parallelism(make_config):
    with pytest.raises(ConfigError, match="pass_kind=forward does not fit workload collective; use exchange"):
        make_config(workload="collective", workload__pass_kind="forward")
    with pytest.raises(ConfigError, match="pass_kind=exchange does not fit workload attention"):
        make_config(workload__pass_kind="exchange")
    with pytest.raises(ConfigError, match="the collective workload has no data parallelism"):
        make_config(workload="collective", dp_shard_size=2)


def test_heads_lengths_and_kernels_do_not_keep_a_fabric_from_being_measured(make_config):
    odd = {"sp_size": 3, "seq_len": 1000, "kernel": "cudnn"}  # 8 heads over 3 ranks, no CUDA for cudnn
    assert plan.unsupported_reason(make_config(**odd), None) is not None
    for method in message_sizes.OPS:
        config = make_config(workload="collective", method=method, **odd)
        assert plan.unsupported_reason(config, None) is None


@pytest.mark.parametrize("method", ["usp", "single"])
def test_a_method_without_one_primitive_is_told_which_have_one(make_config, method):
    sp_size = 1 if method == "single" else 2
    reason = plan.unsupported_reason(make_config(workload="collective", method=method, sp_size=sp_size), None)
    assert reason is not None
    for name in (f"method={method}", "ulysses (all_to_all)", "ring (send_recv)", "all_gather (all_gather)"):
        assert name in reason


def test_one_rank_has_nothing_to_measure(make_config):
    reason = plan.unsupported_reason(make_config(workload="collective", sp_size=1), None)
    assert reason == "sp_size=1: one rank sends nothing off-rank; use sp_size=2 or more"


def test_copy_engines_are_measured_over_nvlink_only(make_config):
    engines = {"workload": "collective", "method__exchange": "copy_engines", "hardware": "h200"}
    assert plan.unsupported_reason(make_config(fabric="nvlink", **engines), 2) is None
    for fabric in ("gloo", "shm", "channels_1"):
        reason = plan.unsupported_reason(make_config(fabric=fabric, **engines), 2)
        assert f"not over fabric={fabric}; use fabric=nvlink" in str(reason)


def test_a_fabric_of_gpus_that_are_not_here_is_unsupported(make_config):
    config = make_config(workload="collective", fabric="socket", hardware="h200", sp_size=4)
    assert "needs 4 CUDA devices" in str(plan.unsupported_reason(config, None))
    assert "4 ranks" in str(plan.unsupported_reason(config, 2))
    assert plan.unsupported_reason(config, 4) is None


def test_ranks_of_other_threads_are_other_processes(make_config):
    configs = [make_config(isolation="group", hardware__threads_per_rank=n) for n in (None, 1, 16)]
    assert len({plan.process_key(config) for config in configs}) == len(configs)
    assert plan.process_key(configs[0]) == plan.process_key(
        make_config(isolation="group", seq_len=96, hardware__threads_per_rank=None)
    )


def test_a_world_of_one_rank_shares_processes_with_trials_of_that_rank_alone(make_config):
    """Under a window another rank is there, and without one rank 0, which a process is started as."""
    common = {"world": "one_rank", "link": "nvlink", "method": "ring", "method__layout": "contiguous", "sp_size": 4}
    whole, window, same = (make_config(isolation="group", workload__window=w, **common) for w in (None, 64, 32))
    assert plan.process_key(whole) != plan.process_key(window) == plan.process_key(same)


def test_each_fabric_has_processes_of_its_own_and_no_multicast(make_config):
    names = ("nvlink", "channels_2", "channels_1", "shm", "socket")
    configs = [make_config(workload="collective", fabric=f, hardware="h200", isolation="group") for f in names]
    assert len({plan.process_key(config) for config in configs}) == len(names)
    assert len({tuple(config.fabric.env.items()) for config in configs}) == len(names)
    assert all(config.fabric.env["NCCL_NVLS_ENABLE"] == "0" for config in configs)
