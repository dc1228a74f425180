"""From NVML's totals to what one step took of them."""

import pynvml
import pytest

from sp_bench.measure.counters import DeviceCounters, Reading


def test_a_step_has_its_share_of_what_the_totals_grew_by_in_joules_and_bytes() -> None:
    before, after = Reading(energy_mj=1000, nvlink_sent_kib=10), Reading(energy_mj=9000, nvlink_sent_kib=30)
    assert before.energy_j_until(after, 4) == 2.0
    assert before.sent_bytes_until(after, 4) == 20 * 1024 / 4


@pytest.mark.parametrize(("before", "after"), [(None, 5), (5, None), (None, None)])
def test_what_a_device_does_not_count_is_not_known(before: int | None, after: int | None) -> None:
    assert Reading(before, 1).energy_j_until(Reading(after, 2), 1) is None
    assert Reading(1, before).sent_bytes_until(Reading(2, after), 1) is None
    assert Reading(0, 0).energy_j_until(Reading(0, 0), 1) == 0.0
    assert Reading(0, 0).sent_bytes_until(Reading(0, 0), 1) == 0.0


def test_the_limits_are_what_the_driver_says_of_them(monkeypatch) -> None:
    device = object.__new__(DeviceCounters)
    device._handle = None
    monkeypatch.setattr(pynvml, "nvmlDeviceGetEnforcedPowerLimit", lambda handle: 500_000)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetApplicationsClock", lambda handle, kind: 1200)
    assert device.limits() == (500.0, 1200)

    def obsolete(*given) -> None:
        raise pynvml.NVMLError(26)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetApplicationsClock", obsolete)
    assert device.limits() == (500.0, None)
