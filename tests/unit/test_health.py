"""Which device `doctor --gpus` names, from planted numbers."""

import itertools
from dataclasses import replace

import pytest

from sp_bench.config.trial import TrialConfig
from sp_bench.costs.device_rates import DeviceRates
from sp_bench.look import health
from sp_bench.look.health import Device, Health
from sp_bench.planning import overrides, sweep
from sp_bench.predict import fitted

STATE = {
    "sm_clock_mhz": 1500,
    "power_limit_w": 700.0,
    "usual_power_limit_w": 700.0,
    "throttle_reasons": ["sw_power_cap"],
}
NAMES = [f"GPU {i} of node7" for i in range(4)]
EXPECTED = DeviceRates(700e12, 550e12, 300e9, 310e9, "expected: rows")


def complaints(found: Health, expected: DeviceRates) -> list[str]:
    return list(health.complaints(found, expected))


def machine(num: int = 4, *, slow_pairs: frozenset[tuple[int, int]] = frozenset(), **of_gpu_2) -> Health:
    """A machine as expected, but for the pairs, and for what GPU 2 is given."""
    devices = [Device(name, 700e12, 550e12, STATE, "node7") for name in NAMES[:num]]
    if of_gpu_2:
        devices[2] = replace(devices[2], **of_gpu_2)
    pairs = {
        (NAMES[i], NAMES[j]): 150e9 if (i, j) in slow_pairs else 300e9 for i, j in itertools.combinations(range(num), 2)
    }
    return Health("node7", tuple(devices), pairs, 310e9 if num > 1 else None)


@pytest.mark.parametrize("expected", [EXPECTED, DeviceRates()])
def test_a_machine_that_reaches_what_is_expected_passes(expected):
    assert complaints(machine(), expected) == []
    assert complaints(machine(1), expected) == []


@pytest.mark.parametrize("expected", [EXPECTED, DeviceRates()])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"products_flops_per_s": 560e12}, "560 TFLOP/s, 20% below 700 in matrix products"),
        ({"attention_flops_per_s": 440e12}, "440 TFLOP/s, 20% below 550 in attention"),
        ({"state": STATE | {"power_limit_w": 500.0}}, "its power limit is 500 W, and 700 W is usual"),
        (
            {"state": STATE | {"throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"]}},
            "slowed down under load (hw_thermal_slowdown)",
        ),
    ],
)
def test_a_slow_gpu_is_named_with_its_host_with_and_without_rows_of_its_kind(expected, given, words):
    assert complaints(machine(**given), expected) == [f"GPU 2 of node7: {words}"]


def test_a_gpu_that_is_slow_with_all_others_is_named_and_else_the_pair():
    link = complaints(machine(slow_pairs=frozenset({(1, 3)})), DeviceRates())
    assert link == ["GPU 1 of node7 and GPU 3 of node7: 140 GiB/s, 50% below 279 between them"]
    card = complaints(machine(slow_pairs=frozenset({(0, 2), (1, 2), (2, 3)})), DeviceRates())
    assert card == ["GPU 2 of node7: 140 GiB/s, 50% below 279 with each other one, at best"]


def test_a_whole_machine_below_the_rows_of_its_kind_is_named_and_not_one_that_no_rows_know():
    slow = replace(
        machine(), devices=tuple(Device(name, 600e12, 550e12, STATE, "node7") for name in NAMES), all_bytes_per_s=200e9
    )
    assert [words.partition(":")[0] for words in complaints(slow, EXPECTED)] == [*NAMES, "all of node7"]
    assert complaints(slow, DeviceRates()) == []


def test_a_difference_that_healthy_machines_have_is_no_complaint():
    assert complaints(machine(products_flops_per_s=700e12 * 0.93), EXPECTED) == []


def test_rates_come_from_times_and_of_a_pair_the_slower_counts():
    ranks = [
        {"products_flops_per_s": 1.0, "attention_flops_per_s": 2.0, "state": {}, "all_ms": ms, "pair_ms": [ms]}
        for ms in (1.0, 2.0)
    ]
    found = health.of_record(["here", "here"], ["a", "b"], {"message_bytes": 10, "ranks": ranks})
    assert found.pair_bytes_per_s == {("a", "b"): 5000.0}
    assert found.all_bytes_per_s == 5000.0


def hosts(num: int, slow: dict[tuple[int, int], float]) -> Health:
    """Hosts with two GPUs each: 300 GB/s inside a host, 50 between two of them, or what `slow` says of two GPUs."""
    devices = [Device(f"GPU {i % 2} of node {i // 2}", 700e12, 550e12, STATE, f"node {i // 2}") for i in range(2 * num)]
    pairs = {
        (devices[i].name, devices[j].name): slow.get((i, j), 300e9 if i // 2 == j // 2 else 50e9)
        for i, j in itertools.combinations(range(2 * num), 2)
    }
    return Health("all", tuple(devices), pairs, 40e9)


def test_links_between_hosts_are_compared_with_one_another():
    assert complaints(hosts(2, {}), EXPECTED) == []
    assert complaints(hosts(2, {(1, 2): 25e9}), EXPECTED) == [
        "GPU 1 of node 0 and GPU 0 of node 1: 23.3 GiB/s, 50% below 46.6 between them"
    ]
    found = complaints(hosts(3, {(i, j): 25e9 for i in range(4) for j in (4, 5)}), EXPECTED)
    assert found == [
        f"GPU {i} of node 2: 23.3 GiB/s, 50% below 46.6 with each one of other hosts, at best" for i in (0, 1)
    ]


def config(*words: str) -> TrialConfig:
    (found,), _ = sweep.configs(overrides.read_arguments(words))
    return found


def test_what_is_expected_comes_with_the_package_for_devices_that_have_rows():
    words = ("kernel=cudnn", "dtype=bfloat16", "sp_size=2")
    expected = fitted.rates_of(config("hardware=h200", "fabric=nvlink", *words))
    assert 600e12 < expected.products_flops_per_s < 800e12
    assert 500e12 < expected.attention_flops_per_s < 600e12
    assert 250e9 < expected.pair_bytes_per_s < 450e9
    assert "committed rows of h200" in expected.source
    assert fitted.rates_of(config("hardware=h200", "fabric=network", "num_nodes=2", *words)) == expected
    assert fitted.rates_of(config("hardware=h100", "fabric=nvlink", *words)) == DeviceRates()
    assert fitted.rates_of(config("hardware=h200", "fabric=shm", *words)) == DeviceRates()
