"""Doubts about the times of a row, from its steps and its window; and what the committed rows are flagged with."""

import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.costs.flags import (
    flags_of_devices,
    flags_of_full_depth,
    flags_of_loss,
)
from sp_bench.costs.slow_devices import COLUMNS, slow_devices
from sp_bench.costs.step_flags import flags_of_times, is_bimodal, is_transient, window_disagrees
from sp_bench.rows import store

RESULTS = Path(__file__).parents[2] / "results"
FAST, SLOW = [100.0, 101.0, 99.0, 100.5], [110.0, 111.0, 109.0, 110.5]


@pytest.mark.parametrize(
    ("step_ms", "bimodal"),
    [
        (FAST + SLOW, True),
        ([*FAST, *FAST, *FAST, *SLOW], True),  # a quarter of the steps
        ([*FAST, *FAST, *FAST, *FAST, *SLOW], False),  # less than a quarter
        (FAST[:3] + SLOW, False),  # three steps are no mode
        ([*FAST, *SLOW, 500.0], False),  # a step far outside: most of the spread is its own
        ([*FAST, *SLOW] * 50, True),
        ([*FAST, *(ms - 6 for ms in SLOW)], False),  # 4% apart
        ([100.0 + i for i in range(40)], False),  # no gap anywhere
        ([100.0] * 8, False),
        ([], False),
    ],
)
def test_two_modes_are_two_tight_groups_over_5_percent_apart(step_ms: list[float], bimodal: bool) -> None:
    assert is_bimodal(step_ms) == bimodal


@pytest.mark.parametrize(
    ("step_ms", "transient"),
    [
        ([200.0, 212.0, 201.0, 200.0, 201.0], True),  # the second of five, as in the headline campaign
        ([200.0, 209.0, 201.0, 200.0, 201.0], False),  # less than 5%
        ([200.0, 188.0, 201.0, 200.0, 201.0], True),  # a fast step is one too
        ([100.0 + 0.6 * i for i in range(10)], True),  # a trend
        ([100.0 + 0.4 * i for i in range(10)], False),
        ([100.0] * 99 + [200.0], False),  # one in a hundred: the median does not notice
        ([100.0] * 19 + [200.0], True),
        ([100.0, 200.0], False),  # nothing to tell which is off
    ],
)
def test_a_step_off_its_neighbours_or_a_trend_is_a_transient(step_ms: list[float], transient: bool) -> None:
    assert is_transient(step_ms) == transient


@given(st.lists(st.floats(1.0, 1e4), min_size=8, max_size=30))
def test_modes_are_found_where_trying_every_split_finds_them(step_ms: list[float]) -> None:
    def deviation(steps: list[float]) -> float:
        return sum(abs(ms - statistics.median(steps)) for ms in steps)

    ordered, smallest = sorted(step_ms), max(4, -(-len(step_ms) // 4))
    cuts = range(smallest, len(ordered) - smallest + 1)
    spread, at = min((deviation(ordered[:i]) + deviation(ordered[i:]), i) for i in cuts)
    apart = statistics.median(ordered[at:]) / statistics.median(ordered[:at]) - 1
    limit = deviation(ordered) / 3
    if abs(spread - limit) > 1e-6 * limit and abs(apart - 0.05) > 1e-6:  # else rounding decides
        close = [i for i in cuts if deviation(ordered[:i]) + deviation(ordered[i:]) < spread * (1 + 1e-9) + 1e-9]
        if len(close) == 1:
            assert is_bimodal(step_ms) == (spread < limit and apart > 0.05)


def test_ranks_that_are_late_in_turn_make_the_slowest_ranks_steps_longer_than_their_window() -> None:
    """Each of two ranks waits in every other step: the window has 75 ms a step, and the max over ranks 100."""
    late = [[100.0, 50.0] * 4, [50.0, 100.0] * 4]
    step_ms, window_ms = [max(step) for step in zip(*late, strict=True)], [sum(steps) for steps in late]
    assert window_disagrees(step_ms, max(window_ms))
    assert flags_of_times(step_ms, window_ms) == ["window_disagrees"]


@pytest.mark.parametrize(("longest_ms", "disagrees"), [(1000, False), (1019, False), (1021, True), (979, True)])
def test_the_longest_window_counts_within_2_percent(longest_ms: float, disagrees: bool) -> None:
    assert flags_of_times([100.0] * 10, [900.0, longest_ms]) == ["window_disagrees"] * disagrees


def test_a_few_slow_steps_that_the_median_does_not_see_are_flagged() -> None:
    step_ms = [100.0] * 18 + [150.0] * 2
    assert flags_of_times(step_ms, [sum(step_ms)]) == ["transient", "window_disagrees"]


def test_committed_rows_whose_steps_add_up_to_more_than_their_window_are_flagged() -> None:
    """28 of GPUs, by 2 to 6.5%, when the flag came."""
    columns = ("status", "step_ms", "window_ms", "environment")
    above = Counter()
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for row in store.read(folder, columns)[0].to_pylist():
            if row["status"] != "ok" or row["step_ms"] is None:  # what only fits has no times
                continue
            device = "GPU" if row["environment"]["device_names"] else "CPU"
            if sum(row["step_ms"]) > 1.02 * max(row["window_ms"]):
                above[device] += 1
                assert "window_disagrees" in flags_of_times(row["step_ms"], row["window_ms"])
    assert above["GPU"] >= 28


@pytest.mark.parametrize(
    ("loss", "flags"),
    [
        ([5.5, 5.4, 5.3], []),
        ([5.5, 5.6, 5.4], []),
        ([17.7, 8.2, 19.5, 18.1], ["loss_not_falling"]),
        ([5.5, 5.5], ["loss_not_falling"]),
        ([5.5], []),
        ([], []),
    ],
)
def test_a_loss_that_does_not_fall_from_the_first_timed_step_to_the_last_is_flagged(loss, flags):
    assert flags_of_loss(loss) == flags


@pytest.mark.parametrize(
    ("reasons", "flags"),
    [
        ([["sw_power_cap"], []], []),
        ([["sw_power_cap"], ["sw_thermal_slowdown"]], ["thermal_slowdown"]),
        ([["hw_thermal_slowdown", "sw_power_cap"], None], ["thermal_slowdown"]),
        ([None, None], []),
        ([], []),
    ],
)
def test_a_device_in_thermal_slowdown_is_flagged_and_one_at_its_power_limit_is_not(reasons, flags):
    assert flags_of_devices([*({"throttle_reasons": each} for each in reasons), None], None) == flags


@pytest.mark.parametrize(
    ("limit_ms", "flags"),
    [
        ([895.2, 745.0, 731.0, 748.4], ["uneven_devices"]),
        ([810.0, 745.0, 731.0, 748.4], []),  # less than 10%
        ([700.0, 745.0, 731.0, 748.4], []),
        ([112.0, 100.0], ["uneven_devices"]),
        ([1.2, 1.0], []),  # too short to tell
        ([895.2], []),
        ([None, None], []),
        ([], []),
    ],
)
def test_a_device_whose_kernels_alone_take_longer_is_flagged(limit_ms, flags):
    assert flags_of_devices(None, limit_ms) == flags


def test_committed_rows_with_a_slow_device_are_those_of_one_machine() -> None:
    slow, columns = Counter(), ("status", "hardware", "device_state", "limit_ms")
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for row in store.read(folder, columns)[0].to_pylist():
            if row["status"] == "ok" and row["hardware"] != "cpu":
                flags = flags_of_devices(row["device_state"], row["limit_ms"])
                slow.update((folder.name, flag) for flag in flags)
    assert slow == {
        ("h200x4_step_methods", "thermal_slowdown"): 9,
        ("h200x4_step_methods", "uneven_devices"): 13,
        ("h200x4_two_rings", "thermal_slowdown"): 14,
    }


def test_the_slow_device_of_committed_rows_is_named_in_both_campaigns_and_no_other_is() -> None:
    named = {
        folder.name: [line.split(":")[1] for line in lines]
        for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir())
        if (lines := slow_devices(store.read(folder, COLUMNS)[0].to_pylist()))
    }
    gpu = [" GPU-c6489789 of vm"]
    assert named == {"h200x4_step_methods": gpu, "h200x4_two_rings": gpu}


@pytest.mark.parametrize(
    ("fall_error", "fall_budget", "update", "is_flagged"),
    [
        (None, None, None, False),  # an old row
        (1e-4, 1e-3, 1.0, False),
        (2e-3, 1e-3, 1.0, True),
        (1e-3, 0.02, 1.0, True),
        (1e-4, 1e-3, 4.1, True),
    ],
)
def test_a_row_of_which_all_layers_are_not_proven_is_flagged(fall_error, fall_budget, update, is_flagged):
    update_error = update and {"parameter": "norm.weight", "error": update, "budget": 4.0}
    row = {"fall_error": fall_error, "fall_budget": fall_budget, "last_update_error": update_error}
    assert flags_of_full_depth(row) == ["full_depth_unproven"] * is_flagged


def test_stages_of_a_stream_are_judged_one_by_one_without_their_first_steps() -> None:
    stages = [{"num_steps": 5}, {"num_steps": 9}]
    quiet = [900.0] + [100.0] * 4 + [2000.0] + [400.0] * 8
    assert flags_of_times(quiet, [1.0], stages) == []
    assert {"transient", "window_disagrees"} <= set(flags_of_times(quiet, [1.0]))
    assert flags_of_times(quiet[:-4] + [450.0] * 4, [1.0], stages) == ["bimodal", "transient", "unsettled"]
    assert flags_of_loss([3.0, 4.0], stages) == []
    assert flags_of_loss([3.0, 4.0]) == ["loss_not_falling"]
