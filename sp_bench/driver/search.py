"""seq_len=max: searches for the longest sequence that fits, by trials at lengths that nobody has listed.

The search is a function of what is known so far, so it goes on wherever the rows of an earlier run stop. It starts from
a guess, steps away from it until one length fits and a longer one does not, and halves that bracket down to the
resolution. Then it tries both ends of the bracket once more, each in fresh processes, and one length above: memory need
not be monotone in the length. Pure; no files, no processes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from sp_bench import methods
from sp_bench.config.trial import TrialConfig
from sp_bench.costs import memory
from sp_bench.driver.settings import SearchConfig

LONGEST = 2**28  # tokens; beyond, a search has lost its way
# How far the next length is, in resolutions, after one and after two on one side of the edge; then 1.5 times, then
# twice. Lengths are rounded to an eighth of a resolution: where the first step crosses the edge, no bisection is left.
FIRST_STEPS = (0.87, 3.0)
# of a device's memory, which contexts and NCCL hold: 4 to 10 GiB in 238 ranks' rows; and of the host's, a rank
OUTSIDE_BYTES = 4 * 2**30
# of what torch may hold, what tensors take where memory runs out; the rest lies between them. 0.78 to 0.95 in five
# searches with torch's own allocator, 0.97 to 0.99 in four with expandable_segments
TENSORS_SHARE = 0.85
STARTS_FROM = 4096  # tokens a rank, where nothing tells better
# how a whole step may end that says nothing of memory -> what that leaves of a bracket
UNCONFIRMED = {
    "unsupported": "fit only: the whole step cannot run here",
    "timeout": "fit only: the whole step did not end in time",
}
EXPECTED_PROBES = 5  # from a good guess: it, one beside it, both ends again, one above


@dataclass(frozen=True)
class Search:
    """A cell whose length is searched for."""

    config: TrialConfig  # at any length

    def at(self, seq_len: int, *, confirming: bool = False) -> TrialConfig:
        """The trial at a length. Where lengths are tried with `workload.fit`, a whole step confirms the longest."""
        workload = replace(self.config.workload, fit=self.config.workload.fit and not confirming)
        return replace(self.config, seq_len=seq_len, workload=workload)

    @property
    def multiple(self) -> int:
        """Lengths that the method can cut without padding are multiples of it."""
        return methods.get(self.config.method.name).layout(self.config.method, self.config.sp_size).multiple

    def guess(self, device_bytes: int | None, host_bytes: int | None, start: int | None) -> int:
        """Where the search starts: where the user says, or where the memory model puts the edge of a step that it
        knows, or STARTS_FROM. device_bytes: of the smallest GPU. host_bytes: of its machine."""
        config = self.config
        cap = config.hardware.device_memory_gib
        own = device_bytes and device_bytes / config.hardware.ranks_per_gpu
        known = [size for size in (own, None if cap is None else cap * 2**30) if size is not None]
        modelled = memory.unmodelled_reason(config) is None and config.hardware.device != "cpu"
        if start is not None or not (known and modelled):
            return start or STARTS_FROM * config.sp_size
        room = (min(known) - OUTSIDE_BYTES) * (1 if config.hardware.allocator else TENSORS_SHARE)
        host = (host_bytes or math.inf) - config.ranks_per_node * OUTSIDE_BYTES
        longest = self._longest(lambda tried: memory.peak(tried).bytes <= room and _on_host_bytes(tried) <= host)
        return max(longest, 1)

    def longest_on_host(self, host_bytes: int | None) -> int | None:
        """The longest length that the memory of a host holds, as `plan` refuses beyond it; None: any."""
        longest = self._longest(lambda tried: _on_host_bytes(tried) <= (host_bytes or math.inf))
        return longest if longest < LONGEST else None

    def _longest(self, fits: Callable[[TrialConfig], bool]) -> int:
        """The longest length that fits, of those up to LONGEST; 0: none does."""
        low, high = 0, LONGEST
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(self.at(middle)) else (low, middle - 1)
        return low


def _on_host_bytes(config: TrialConfig) -> int:
    """Of one host."""
    return memory.held_on_host_bytes(config) // config.num_nodes


class Probe(NamedTuple):
    seq_len: int
    replicate: int
    confirming: bool = False  # the longest that fits


@dataclass(frozen=True)
class Edge:
    """Where memory runs out, as far as is known. None: no such length was tried."""

    fits: int | None  # the longest that ran, each time that it was tried
    fails: int | None  # the shortest above it that was out of memory
    note: str = ""
    ended: bool = True  # False: it stopped before both ends were tried twice

    @property
    def words(self) -> str:
        nothing = "nothing fits" if self.fails is not None else "nothing that fits was tried"
        fits = nothing if self.fits is None else f"{self.fits:,} tokens fit"
        fails = "nothing ran out of memory" if self.fails is None else f"{self.fails:,} do not"
        return f"[{fits}, {fails}]{f'; {self.note}' if self.note else ''}"


def next_step(found: Mapping[Probe, str], guess: int, multiple: int, settings: SearchConfig) -> Probe | Edge:
    """What to try next, or the end of the search. found: the status of each probe so far."""
    resolution = settings.resolution
    longest = max((settings.longest or LONGEST) // multiple * multiple, multiple)
    tried: dict[int, list[str]] = {}
    for probe, status in found.items():
        tried.setdefault(probe.seq_len, []).append(status)
    failed = sorted(length for length, statuses in tried.items() if "oom" in statuses)
    ran = sorted(length for length in tried if length not in failed and "ok" in tried[length])
    low = max(ran, default=None)
    high = min((length for length in failed if low is None or length > low), default=None)
    for probe, status in found.items():
        if status not in ("ok", "oom") and not (probe.confirming and status in UNCONFIRMED):
            return Edge(low, high, f"{probe.seq_len:,} tokens ended as {status}")
    if not found:
        return Probe(min(_rounded(guess, multiple, resolution), longest), 0)
    if len(found) >= settings.max_probes:
        return Edge(low, high, f"stopped after search.max_probes={settings.max_probes}", ended=False)
    if high is None:
        assert low is not None
        longer = max(_rounded(low * _factor(len(ran), resolution), multiple, resolution), low + multiple)
        longer = min(longer, longest)
        return Probe(longer, 0) if longer > low else Edge(low, None, f"nothing beyond {longest:,} was tried")
    if low is None:
        shorter = min(_rounded(high / _factor(len(failed), resolution), multiple, resolution), high - multiple)
        return Probe(shorter, 0) if shorter >= multiple else Edge(None, high)
    middle = _rounded((low + high) / 2, multiple, resolution)
    middle = middle if low < middle < high else low + (high - low) // (2 * multiple) * multiple
    if high > low * (1 + resolution) and low < middle < high:
        return Probe(middle, 0)
    whole_step_failed = found.get(Probe(high, 1, confirming=True)) == "oom"
    for end in (Probe(low, 1, confirming=True), *(() if whole_step_failed else (Probe(high, 1),))):
        if end not in found:
            return end
    above = max(_rounded(high * (1 + 4 * resolution), multiple, resolution), high + multiple)
    if max(tried) < above <= longest:
        return Probe(above, 0)
    return Edge(low, high, _doubts(found, tried, low, high))


def _doubts(found: Mapping[Probe, str], tried: Mapping[int, list[str]], low: int, high: int) -> str:
    told = [UNCONFIRMED[status]] if (status := found[Probe(low, 1, confirming=True)]) in UNCONFIRMED else []
    if "ok" in tried[high]:
        whole = found.get(Probe(high, 1, confirming=True)) == "oom"
        told.append(f"{high:,} {'fits without attention, and a whole step does not' if whole else 'ran at times'}")
    told += [f"{length:,} was out of memory" for length in sorted(tried) if length < low and "oom" in tried[length]]
    return ", ".join(told)


def _factor(number: int, resolution: float) -> float:
    """How far the next length is, after `number` of lengths on one side of the edge."""
    factors = (*(1 + step * resolution for step in FIRST_STEPS), 1.5, 2.0)
    return factors[min(number, len(factors)) - 1]


def _rounded(length: float, multiple: int, resolution: float) -> int:
    """The nearest of the method's lengths, as round as the resolution allows; at least one."""
    unit = multiple
    while 2 * unit <= length * resolution / 4:
        unit *= 2
    return max(round(length / unit) * unit, multiple)
