"""The flag `foreign_load` of a row: other programs worked on the machine while the trial was measured.

The lock of `devices` keeps our own runs apart. This file looks for others: a notebook on the same GPU, a build on the
same processors. It looks before the measured window and after it, and never inside it."""

import os
from pathlib import Path
from typing import NamedTuple

import psutil

from sp_bench import handover, hardware
from sp_bench.config.trial import TrialConfig

FLAG = "foreign_load"
MAX_FOREIGN_SHARE = 0.1  # of the processors that this process may use, busy with others' work in the window
BEFORE = handover.PHASES.index("warmup")  # the last look before the window is made here
AFTER = handover.PHASES.index("ledger")


class Look(NamedTuple):
    """The machine at a moment. Seconds count from a moment that is the same for all looks."""

    busy_s: float  # of the processors that this process may use, whoever works on them
    own_s: float  # of them, of this process and all that it started
    possible_s: float  # what they could have worked
    processes: int  # of others, on the GPUs of the trial


class Neighbours:
    """Looks at the machine as a trial passes its phases."""

    def __init__(self, config: TrialConfig) -> None:
        self._num_gpus = config.gpus_per_node
        self._before: Look | None = None
        self._after: Look | None = None

    def on_phase(self, phase: str) -> None:
        """To be called often, with the phase of the rank that is furthest behind."""
        place = handover.PHASES.index(phase)
        if self._before is None and place >= BEFORE:
            self._before = _look(self._num_gpus)
        if self._after is None and place >= AFTER:
            self._after = _look(self._num_gpus)

    def flags(self) -> list[str]:
        """[FLAG] if others worked here during the window; empty if not, or if that could not be seen."""
        if self._before is None:
            return []
        after = self._after or _look(self._num_gpus)
        return [FLAG] if foreign(self._before, after) else []


def foreign(before: Look, after: Look) -> bool:
    """Whether others had processes on the GPUs at either look, or used more than MAX_FOREIGN_SHARE of the processors
    between."""
    possible_s = after.possible_s - before.possible_s
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return bool(before.processes or after.processes) or others_s > MAX_FOREIGN_SHARE * possible_s > 0


def _look(num_gpus: int) -> Look:
    usable = os.sched_getaffinity(0)
    busy_s = possible_s = 0.0
    for name, *ticks in map(str.split, Path("/proc/stat").read_text().splitlines()):
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in usable:
            # user nice system idle iowait irq softirq steal; guests are counted in user already
            seconds = [int(tick) / os.sysconf("SC_CLK_TCK") for tick in ticks[:8]]
            busy_s += sum(seconds) - seconds[3] - seconds[4]
            possible_s += sum(seconds)
    own, own_s = _own()
    processes = sum(_others(pids, own) for pids in hardware.processes_on_gpus(num_gpus)) if num_gpus else 0
    return Look(busy_s, own_s, possible_s, processes)


def _own() -> tuple[set[int], float]:
    """This process and all that it started: their ids, and the seconds that they worked, ended ones included."""
    this = psutil.Process()
    ids, seconds = {this.pid}, sum(this.cpu_times()[:4])
    for process in this.children(recursive=True):
        try:
            seconds += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # ended meanwhile: its parent has its seconds
        ids.add(process.pid)
    return ids, seconds


def _others(pids: set[int], own: set[int]) -> int:
    """How many of the processes on a GPU are not ours. In a container the NVIDIA driver may number processes
    differently; then one of them is our rank."""
    return len(pids - own) if pids & own else max(0, len(pids) - 1)
