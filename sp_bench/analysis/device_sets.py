"""Which rows ran on the same devices. Machines of one type are not equally fast, above all if a step waits for the
host. So a page names comparisons across separate devices."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from pandas.api.extensions import ExtensionArray

from sp_bench.formats import counted


def numbered(environments: Iterable[Any]) -> ExtensionArray:
    """The number of each row's set of devices, from 1 in order of the UUIDs; missing if unknown, as on CPUs. Rows that
    share a device are in one set, directly or through other rows."""
    used = [_uuids(environment) for environment in environments]
    sets: list[frozenset[str]] = []
    for devices in dict.fromkeys(filter(None, used)):
        touching = [each for each in sets if each & devices]
        sets = [each for each in sets if not each & devices] + [devices.union(*touching)]
    numbers = {uuid: number for number, each in enumerate(sorted(sets, key=min), start=1) for uuid in each}
    return pd.array([numbers[min(devices)] if devices else None for devices in used], dtype="Int64")


def are_several(numbers: Iterable[int | None]) -> bool:
    """Whether there are several sets. Their samples differ by machine too, so they have no interval."""
    return len(set(numbers) - {None}) > 1


def several(numbers: Iterable[int | None]) -> str:
    """`2 separate sets of devices`; empty if there is one or none is known."""
    sets = set(numbers) - {None}
    return f"{counted(len(sets), 'separate set')} of devices" if are_several(sets) else ""


def _uuids(environment: Any) -> frozenset[str]:
    """NVML's spelling begins with GPU-, torch's does not."""
    recorded = environment.get("device_uuids") if isinstance(environment, Mapping) else None
    return frozenset(str(uuid).removeprefix("GPU-") for uuid in ([] if recorded is None else recorded) if uuid)
