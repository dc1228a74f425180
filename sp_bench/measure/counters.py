"""What the device itself counts and reports, read by NVML before and after the timed window and never inside it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml
import torch

T = TypeVar("T")

# KiB of payload that left the device, over all links. Ten all-to-alls of 256 MiB on two GPUs add 1,310,802 KiB, where
# theory says 1,310,720.
NVLINK_SENT = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
ALL_LINKS = 0xFFFFFFFF
THROTTLE_REASONS = {  # bits of nvmlDeviceGetCurrentClocksEventReasons that mean that a busy device is slowed down
    pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal_slowdown",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
}


@dataclass(frozen=True)
class Reading:
    """Totals since the GPU's driver was loaded. None: the device does not count it."""

    energy_mj: int | None
    nvlink_sent_kib: int | None

    def energy_j_until(self, end: "Reading", num_steps: int) -> float | None:
        """J a step, if `num_steps` steps ran between the two readings; None if the device does not count."""
        if self.energy_mj is None or end.energy_mj is None:
            return None
        return (end.energy_mj - self.energy_mj) / 1e3 / num_steps

    def sent_bytes_until(self, end: "Reading", num_steps: int) -> float | None:
        """Bytes a step that left the device over NVLink; None if the device does not count."""
        if self.nvlink_sent_kib is None or end.nvlink_sent_kib is None:
            return None
        return (end.nvlink_sent_kib - self.nvlink_sent_kib) * 1024 / num_steps


class DeviceCounters:
    """NVML's view of one CUDA device. It is found by UUID, because CUDA_VISIBLE_DEVICES changes torch's device numbers
    but not NVML's."""

    def __init__(self, device: torch.device) -> None:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self) -> Reading:
        """The totals up to now."""
        (field,) = pynvml.nvmlDeviceGetFieldValues(self._handle, [(NVLINK_SENT, ALL_LINKS)])
        sent = int(field.value.ullVal) if field.nvmlReturn == pynvml.NVML_SUCCESS else None
        return Reading(_supported(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)), sent)

    def limits(self) -> tuple[float | None, int | None]:
        """The enforced power limit in W, and the clock of the device's processors that was set for applications in
        MHz. None: the driver does not say; newer ones call the second question obsolete."""
        milliwatts = _supported(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle))
        clock_mhz = _supported(lambda: pynvml.nvmlDeviceGetApplicationsClock(self._handle, pynvml.NVML_CLOCK_SM))
        return (None if milliwatts is None else milliwatts / 1e3), clock_mhz

    def usual_power_limit_w(self) -> float | None:
        """The power limit that the device has if nobody sets another one; None: the driver does not say."""
        milliwatts = _supported(lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle))
        return None if milliwatts is None else milliwatts / 1e3

    def state(self) -> dict[str, Any]:
        """Clocks (MHz), power (W), temperature (C) and throttle reasons right now: this rank's `device_state`."""
        handle = self._handle
        reasons = _supported(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        milliwatts = _supported(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
        return {
            "sm_clock_mhz": _supported(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": _supported(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            "power_w": None if milliwatts is None else milliwatts / 1e3,
            "temperature_c": _supported(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            "throttle_reasons": None
            if reasons is None
            else [name for bit, name in THROTTLE_REASONS.items() if reasons & bit],
        }


_UNANSWERED = tuple(
    pynvml.nvmlExceptionClass(code)
    for code in (
        *(pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_DEPRECATED),
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # an older driver
    )
)


def _supported(query: Callable[[], T]) -> T | None:
    """The answer to `query`, or None if the driver does not support it, denies it, lacks it or calls it obsolete.
    Other errors are raised."""
    try:
        return query()
    except _UNANSWERED:
        return None
