"""Undoes what one trial does to its process, so that the next trial in the same process is not affected."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sp_bench.measure import ledger


class Setting(NamedTuple):
    """A setting of the whole process that any library may change."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


SETTINGS = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    # restored to None and not to the device that was read: setting any device slows down every call of torch
    Setting("default device", torch.get_default_device, lambda device: torch.set_default_device(None)),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting("deterministic mode", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    Setting("ledger attribution", lambda: dict(ledger._current), ledger._current.update),
)


@contextmanager
def of_one_trial(device: torch.device) -> Iterator[None]:
    """Restores the random states and SETTINGS. A setting that the trial had changed is named in the rank's log.

    The allocator's statistics are not restored here; each trial resets them before its timed steps.
    """
    before = [(setting, setting.read()) for setting in SETTINGS]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for setting, value in before:
        if (left := setting.read()) != value:
            print(f"the trial left the {setting.name} at {left}; restored to {value}", flush=True)
            setting.write(value)
